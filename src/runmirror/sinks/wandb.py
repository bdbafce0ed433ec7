"""Weights & Biases: one row of the log is one row of a W&B run.

Guarantees:

- ``_step`` is the row's ordinal, the training step is the x axis (the column ``step``), ``_timestamp`` the row's time.
- wandb runs in a process of its own (:mod:`runmirror.sinks.wandb_worker`), one per open sink, which is ended with
  wandb's own process when the sink is closed, lost or killed. Nothing of it reaches this process, and no run that
  somebody else has open is touched.
- The position is what the server tells: ``starting_step`` at ``open``, and at ``flush`` what the public API shows. That
  wandb says it is done counts for nothing.
- The run's id comes from our run id, the base URL and the project, so a lost state finds the same run. A run that has a
  config keeps it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from runmirror.exceptions import OptionError, Refused, Retry
from runmirror.log.masking import MASK, is_secret_key, mask_text, mask_url
from runmirror.log.rows import Row, json_line
from runmirror.sinks.base import Capabilities, Check, LogFile, Opened, Point, Rejected, RunInfo, SinkOptions, env_field
from runmirror.state import home

MAX_ROW = 1_000_000
"""Bytes of one row at most."""
OPEN_SECONDS, CALL_SECONDS = 100.0, 90.0
SETTLE_SECONDS = 30.0
"""How long ``flush`` waits for rows to show while none does."""
_SHAPES_A_RUN = re.compile(
    r"WANDB_(RUN_ID|RESUME|NAME|RUN_GROUP|TAGS|NOTES|JOB_TYPE|MODE|SERVICE|PROJECT|ENTITY|DIR|SWEEP.*|LAUNCH.*|BASE_URL)$"
)
_CODES = {"finished": 0, "failed": 1, "killed": 255}
log = logging.getLogger("runmirror")


class WandbOptions(SinkOptions):
    """Options of the W&B sink."""

    project: str = env_field("runmirror", "WANDB_PROJECT", "W&B project")
    entity: str | None = env_field(None, "WANDB_ENTITY", "W&B user or team; default: that of the credentials")
    base_url: str = env_field("https://api.wandb.ai", "WANDB_BASE_URL", "the server")
    name: str | None = env_field(None, "WANDB_NAME", "name of the run; default: that of the log")
    group: str | None = env_field(None, "WANDB_RUN_GROUP", "group of the run")
    tags: tuple[str, ...] = env_field((), "WANDB_TAGS", "tags of the run")
    job_type: str | None = env_field(None, "WANDB_JOB_TYPE", "job type of the run")
    notes: str | None = env_field(None, "WANDB_NOTES", "notes of the run")
    mode: Literal["online", "offline", "disabled", "dryrun", "shared"] = env_field(
        "online", "WANDB_MODE", "online; offline leaves the run behind, disabled turns the sink off"
    )
    stats: bool = Field(False, description="also send statistics of the machine and its GPUs")


class WandbSink:
    """Mirrors one run into Weights & Biases."""

    name: ClassVar[str] = "wandb"
    Options: ClassVar[type[SinkOptions]] = WandbOptions
    requires: ClassVar[tuple[str, ...]] = ("wandb",)
    capabilities: ClassVar[Capabilities] = Capabilities(
        max_rows=500,
        keys="any text but the empty one",
        records=frozenset({"config", "code", "checkpoints"}),
        default_records=frozenset({"config", "checkpoints"}),
    )

    def __init__(self, options: WandbOptions) -> None:
        if not options.project or re.search(r"[/\\#?%:]", options.project) or len(options.project) > 128:
            raise OptionError(f"project {options.project!r}: W&B takes 1 to 128 characters without / \\ # ? % :")
        self._options = options
        self._off = options.mode == "disabled"
        self._worker: _Worker | None = None
        self._path = ""
        self._run: RunInfo | None = None
        self._new: dict[str, Any] = {}
        self._put = self._shown = 0

    def destination(self) -> str:
        """``<base URL>/<entity>/<project>``, without credentials."""
        if self._off:
            return "wandb: disabled"
        parts = [mask_url(self._options.base_url.rstrip("/")), self._options.entity, self._options.project]
        return "/".join(part for part in parts if part)

    def open(self, run: RunInfo, tracker_run_id: str | None) -> Opened:
        """Create or resume the run in a fresh process; its position is the server's."""
        self.close(None, 0)
        self._run = run
        if self._off:
            log.warning("W&B is turned off (WANDB_MODE=disabled): nothing is sent; the log has it all")
            return Opened(self.destination())
        if self._options.mode in ("offline", "dryrun"):
            raise Refused(
                "WANDB_MODE=offline: the run stays in its log; to deliver it: "
                "WANDB_MODE=online runmirror import LOG_PATH --to wandb --rewinds all"
            )
        options = self._options
        self._new = {}
        if tracker_run_id is None:
            given = {"group": options.group, "job_type": options.job_type, "notes": options.notes}
            self._new = {key: value for key, value in given.items() if value}
            self._new |= {"name": (options.name or run.name or run.run_id)[:128], "tags": list(options.tags)}
        opened = self._init()
        self._put = self._shown = opened["position"]
        self._path = opened["path"]
        return Opened(opened["url"], opened["id"], self._shown)

    def _init(self) -> dict[str, Any]:
        assert_run = self._run
        if assert_run is None:
            raise RuntimeError("the sink is not open")
        if self._worker is None:
            self._worker = _Worker(self._place())
        config = _config(assert_run)
        arguments = (self._run_id(assert_run), self._new, config, self._options.stats)
        found: dict[str, Any] = self._call("init", arguments, OPEN_SECONDS)
        return found

    def _place(self) -> dict[str, Any]:
        options = self._options
        return {"project": options.project, "entity": options.entity, "base_url": options.base_url}

    def _run_id(self, run: RunInfo) -> str:
        place = f"{run.run_id}\0{self._options.base_url.rstrip('/')}\0{self._options.project}"
        return "rm" + hashlib.sha256(place.encode("utf-8", "replace")).hexdigest()[:18]

    def _call(self, verb: str, arguments: tuple[Any, ...], seconds: float) -> Any:
        """Ask the worker; after a failure it is never used again."""
        if self._worker is None:
            raise Retry("wandb's process is gone")
        try:
            return self._worker.call(verb, arguments, seconds)
        except (Retry, Refused):
            self._drop()
            raise

    def _drop(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.end()

    def put(self, rows: Sequence[Row]) -> list[Rejected]:
        """Log rows that the server does not have."""
        rejected: list[Rejected] = []
        sent: list[tuple[int, dict[str, Any]]] = []
        texts: dict[str, str] = {}
        for row in rows:
            if row.ordinal >= self._put:
                data, refused = _row(row)
                rejected += refused
                sent.append((row.ordinal, data))
                texts |= {key: mask_text(text)[:2000] for key, text in row.text().items() if key}
        if sent and not self._off:
            self._call("put", (sent, texts), CALL_SECONDS)
        self._put = max([self._put, *(ordinal + 1 for ordinal, _ in sent)])
        return rejected

    def put_file(self, file: LogFile) -> None:
        """Upload a file of the run; it is there when this returns."""
        if self._off:
            return
        with tempfile.TemporaryDirectory(dir=_folder()) as root:
            place = Path(root, os.path.basename(file.path))
            place.write_bytes(file.read())
            self._call("upload", (self._path, str(place), root), CALL_SECONDS)

    def flush(self, deadline: float) -> int:
        """What the server shows, after waiting for the rest while more comes."""
        until = time.monotonic() + min(deadline * 0.7, SETTLE_SECONDS)
        while not self._off and self._shown < self._put:
            shown = min(self._put, self._call("held", (self._path,), CALL_SECONDS))
            if shown > self._shown:
                self._shown, until = shown, max(until, time.monotonic() + deadline * 0.2)
            elif time.monotonic() >= until:
                self._drop()
                raise Retry(f"W&B shows {self._shown:,} of {self._put:,} rows that wandb took; it is started again")
            else:
                time.sleep(0.1)
        return self._put if self._off else self._shown

    def close(self, run: RunInfo | None, deadline: float) -> None:
        """Finish the run with its status, or let go of it."""
        worker = self._worker
        try:
            if run is not None and worker is not None and not self._off:
                self._call("end", (_times(run), _CODES.get(run.status, 0)), max(1.0, deadline * 0.8))
        finally:
            self._put = self._shown = 0
            self._drop()

    def read_back(self, run: RunInfo, tracker_run_id: str | None) -> Iterator[Point] | None:
        """Every point of every row by ``wandb.Api()``; None when there is no such run."""
        worker = _Worker(self._place())
        try:
            rows = worker.call("history", (tracker_run_id or self._run_id(run), None), 600.0)
        finally:
            worker.end()
        return None if rows is None else _points(rows)

    def refuses(self, key: str) -> str | None:
        """Why W&B can't take a metric of this name; None when it can."""
        return None if key else "W&B has no metric without a name"

    def check(self) -> list[Check]:
        """Whether the server answers and takes the credentials."""
        worker = _Worker(self._place())
        try:
            who = worker.call("viewer", (), 25.0)
            return [Check("W&B", True, f"{self.destination()} answers {who}")]
        except (Retry, Refused) as error:
            fix = "see the network, WANDB_BASE_URL, and WANDB_API_KEY (or `wandb login`)"
            return [Check("W&B", False, str(error), fix)]
        finally:
            worker.end()


class _Worker:
    """A process with wandb in it."""

    def __init__(self, place: dict[str, Any]) -> None:
        self._root = tempfile.TemporaryDirectory(dir=_folder(), ignore_cleanup_errors=True)
        ours, theirs = socket.socketpair()
        environment = {name: value for name, value in os.environ.items() if not _SHAPES_A_RUN.match(name)}
        environment |= {"WANDB_ERROR_REPORTING": "false", "WANDB_BASE_URL": place["base_url"]}
        for name in ("WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
            environment.setdefault(name, self._root.name)
        package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), package]))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-W", "ignore", "-m", "runmirror.sinks.wandb_worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                cwd=self._root.name,
                env=environment,
            )
        self._peer = Connection(ours.detach())
        self._peer.send(place | {"folder": self._root.name})

    def call(self, verb: str, arguments: tuple[Any, ...], seconds: float) -> Any:
        """What the verb answers. Raises Retry or Refused."""
        try:
            self._peer.send((verb, arguments))
            if not self._peer.poll(seconds):
                raise Retry(f"wandb did not return from {verb} within {seconds:g} s")
            kind, answer = self._peer.recv()
        except (EOFError, OSError) as error:
            raise Retry(f"wandb's process ended during {verb}") from error
        if kind == "refused":
            raise Refused(f"W&B needs you: {mask_text(answer)}")
        if kind == "retry":
            raise Retry(f"W&B failed: {mask_text(answer)}")
        return answer

    def end(self) -> None:
        """End the process and wandb's own with it."""
        self._peer.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._root.cleanup()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.end()


def _folder() -> Path:
    folder = home() / "wandb"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _row(row: Row) -> tuple[dict[str, Any], list[Rejected]]:
    """A row as W&B gets it, and what it can't take."""
    data: dict[str, Any] = {"_timestamp": row.time}
    rejected: list[Rejected] = []
    points = row.scalars()
    if points:
        data["step"] = row.step
    for key, value in points.items():
        name = key.encode("utf-8", "replace").decode()
        if name and name not in data:
            data[name] = value
        else:
            rejected.append(Rejected(row.ordinal, key, "W&B has no metric without a name, and each name once"))
    if len(json_line(data)) > MAX_ROW:
        return {"_timestamp": row.time}, [Rejected(row.ordinal, None, f"the row is larger than {MAX_ROW:,} bytes")]
    return data, rejected


def _masked(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: MASK if is_secret_key(str(key)) else _masked(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_masked(inner) for inner in value]
    return mask_text(value) if isinstance(value, str) else value


def _times(run: RunInfo) -> dict[str, Any]:
    times = {"start": run.start, "end": run.end, "status": run.status, "time_source": run.time_source}
    if run.start is not None and run.end is not None:
        times["duration"] = run.end - run.start
    return {"runmirror": times | {"run_id": run.run_id, "source": run.source, "sent_at": time.time()}}


def _config(run: RunInfo) -> dict[str, Any]:
    config = {key: value for key, value in (run.config or {}).items() if key not in ("_wandb", "runmirror")}
    masked: dict[str, Any] = _masked(config)
    return masked | _times(run)


def _points(rows: list[dict[str, Any]]) -> Iterator[Point]:
    for row in rows:
        for key, value in row.items():
            if key == "step" or key[:1] == "_" or value is None or "step" not in row:
                continue
            number = _NONFINITE.get(value) if isinstance(value, str) else value
            if isinstance(number, (int, float)):
                yield Point(key, int(row["step"]), float(row["_timestamp"]), number)


_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
