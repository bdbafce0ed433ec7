"""Weights & Biases: one row of the log is one row of a W&B run.

Guarantees:

- ``_step`` is the row's ordinal, the training step is the x axis (the column ``step``), ``_timestamp`` the row's time.
- wandb runs in a process of its own (:mod:`runmirror.sinks.wandb_process`). Nothing of it reaches this process, and no
  run that somebody else has open, or that ``WANDB_RUN_ID`` names, is touched.
- The position is what the server tells: ``starting_step`` when a run is resumed, else what the public API shows. That
  wandb says it is done counts for nothing.
- The run's id comes from our run id, the base URL, the project and the policy for rewinds, so a lost state finds the same
  run. A config that the run has stays as it is. A run that has everything is only looked at.
"""

from __future__ import annotations

import hashlib
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from runmirror.exceptions import OptionError, Refused, Retry
from runmirror.log.layout import Kind
from runmirror.log.masking import mask_url
from runmirror.log.rows import Row, decode
from runmirror.sinks.base import Capabilities, Check, LogFile, Opened, Point, Rejected, RunInfo, SinkOptions, env_field
from runmirror.sinks.texts import row_texts
from runmirror.sinks.wandb_process import WandbProcess, give_back, take
from runmirror.sinks.wandb_rows import config, points, row_data, times

OPEN_SECONDS, CALL_SECONDS = 75.0, 90.0
SETTLE_SECONDS = 30.0
"""How long ``flush`` waits for rows to show while none does."""
FIRST_LOOK = 0.6
"""Seconds from a row of a run that goes on to the first question whether it shows."""
ON_ITS_WAY = 10_000
"""Rows given to wandb that the server does not show yet, at most: more would pile up in memory."""
_CODES = {"finished": 0, "failed": 1, "killed": 255}
_ALL: frozenset[Kind] = frozenset({"config", "code", "checkpoints", "report", "logtree", "rollouts"})


class WandbOptions(SinkOptions):
    """Options of the W&B sink."""

    project: str = env_field("runmirror", "WANDB_PROJECT", "W&B project")
    entity: str | None = env_field(None, "WANDB_ENTITY", "W&B user or team; default: that of the credentials")
    base_url: str = env_field("https://api.wandb.ai", "WANDB_BASE_URL", "the server")
    name: str | None = env_field(None, "WANDB_NAME", "name of the run; default: that of the log")
    group: str | None = env_field(None, "WANDB_RUN_GROUP", "group of the run; default: the folder's name")
    tags: tuple[str, ...] = env_field((), "WANDB_TAGS", "tags of the run")
    job_type: str | None = env_field(None, "WANDB_JOB_TYPE", "job type of the run")
    notes: str | None = env_field(None, "WANDB_NOTES", "notes of the run")
    mode: Literal["online", "offline", "disabled", "dryrun", "run", "shared"] = env_field(
        "online", "WANDB_MODE", "online; offline leaves the run in its log, disabled turns the sink off"
    )
    best: bool = Field(
        False, description="for metrics the catalogue knows, the summary shows the best value beside the last"
    )
    stats: bool = Field(True, description="a live run also shows the machine's and its GPUs' statistics")
    stats_pid: int | None = Field(None, description="the process that these are about; a live run names its own")
    beside: str | None = env_field(
        None, "WANDB_RUN_ID", "id of a W&B run of your own beside: left alone, its group joined"
    )

    @model_validator(mode="before")
    @classmethod
    def _see_the_open_run(cls, given: Any) -> Any:
        """A run that is open in this process is one beside ours."""
        run: Any = getattr(sys.modules.get("wandb"), "run", None)
        if not isinstance(given, dict) or given.get("beside") or not isinstance(getattr(run, "id", None), str):
            return given
        group = getattr(run, "group", None)
        return {**({"group": group} if group else {}), **given, "beside": run.id}

    def to_deliver(self) -> dict[str, Any]:
        """The options, with which what was left behind is delivered whatever the mode was."""
        kept = super().to_deliver()
        kept.pop("beside", None)
        return kept | ({"mode": "online"} if self.mode in ("offline", "dryrun") else {})


class WandbSink:
    """Mirrors one run into Weights & Biases."""

    name: ClassVar[str] = "wandb"
    Options: ClassVar[type[SinkOptions]] = WandbOptions
    requires: ClassVar[tuple[str, ...]] = ("wandb",)
    capabilities: ClassVar[Capabilities] = Capabilities(
        max_rows=500,
        keys="any text but the empty one",
        records=_ALL,
        default_records=frozenset({"config", "checkpoints"}),
        process_per_run=True,
    )

    def __init__(self, options: WandbOptions) -> None:
        if not options.project or re.search(r"[/\\#?%:]", options.project) or len(options.project) > 128:
            raise OptionError(f"project {options.project!r}: W&B takes 1 to 128 characters without / \\ # ? % :")
        if wrong := [tag for tag in options.tags if not 1 <= len(tag) <= 64]:
            raise OptionError(f"tags: W&B takes 1 to 64 characters, not the {len(wrong[0])} of {wrong[0]!r}")
        self._options = options
        self._off = options.mode == "disabled"
        self._worker: WandbProcess | None = None
        self._run: RunInfo | None = None
        self._path = ""
        self._new: dict[str, Any] = {}
        self._begun = False  # wandb has the run open
        self._told: tuple[Any, ...] | None = None  # the end that W&B knows
        self._put = self._shown = 0
        self._seen: tuple[int, int | None] = 0, None
        self._defined: set[str] = set()  # keys whose summary W&B was told

    def destination(self) -> str:
        """``<base URL>/<entity>/<project>``, without credentials."""
        if self._off:
            return "wandb: disabled"
        parts = [mask_url(self._options.base_url.rstrip("/")), self._options.entity, self._options.project]
        return "/".join(part for part in parts if part)

    def open(self, run: RunInfo, tracker_run_id: str | None) -> Opened:
        """Find the run and what the server shows of it, or create it."""
        self.close(None, 0)
        self._run = run
        if self._off:
            return Opened(
                self.destination(), note="W&B is turned off (mode disabled): nothing is sent, the log has it all"
            )
        if self._options.mode in ("offline", "dryrun"):
            raise Refused(
                "the mode is offline (WANDB_MODE), so the run stays in its log; to deliver it: "
                "runmirror import LOG_PATH --to wandb -o mode=online --rewinds all"
            )
        found = self._look(run, tracker_run_id)
        self._path, self._new = found["path"], {}
        if found["exists"]:
            self._put = self._shown = self._whole(*found["held"])
            told = found["told"]
            if found["state"] not in ("running", "crashed", "preempted", "preempting"):
                self._told = told.get("status"), told.get("end")
        else:
            self._new = self._about(run)
            found |= self._begin()
        return Opened(found["url"], self._path, self._put, self._note())

    def _look(self, run: RunInfo, tracker_run_id: str | None) -> dict[str, Any]:
        self._worker = take(self._options.base_url)
        found: dict[str, Any] = self._call("look", self._where(run, tracker_run_id), OPEN_SECONDS)
        return found

    def _whole(self, held: int, count: int | None) -> int:
        """The position, when the server has every row below it."""
        until = time.monotonic() + SETTLE_SECONDS / 2
        while count is not None and count < held:
            if time.monotonic() > until:
                self._drop()
                raise Refused(
                    f"{self._path}: W&B shows row {held:,} but only {count:,} rows: some were lost on their way, and W&B takes "
                    "no earlier row any more. Remove that run, or import into another project"
                )
            time.sleep(1.0)
            held, count = self._call("held", (self._path,), CALL_SECONDS)
        return held

    def _about(self, run: RunInfo) -> dict[str, Any]:
        """What W&B is told of a run that is new there."""
        options = self._options
        given = {"group": options.group and options.group[:128], "job_type": options.job_type, "notes": options.notes}
        about: dict[str, Any] = {key: value for key, value in given.items() if value}
        return about | {"name": (options.name or run.name or run.run_id)[:128], "tags": list(options.tags)}

    def _note(self) -> str:
        beside = self._options.beside
        if not beside or beside == self._path.rpartition("/")[2]:
            return ""
        joined = f" and is in the group {self._options.group!r}" if self._options.group else ""
        return (
            f"your own W&B run {beside} is left alone; runmirror's is {self._path}{joined}. To have only one, leave out "
            "report_to='wandb' here or your own wandb.init (and WANDB_RUN_ID)"
        )

    def _begin(self) -> dict[str, Any]:
        """Have wandb open the run. Nothing is written into a run that has everything before there is something to say."""
        run, options = self._opened(), self._options
        live = options.stats and run.status == "running"
        configs = [config(given) for given in (run.config or {}, *run.resumes)]
        arguments = (self._path, self._new, configs, times(run), options.stats_pid if live else None)
        found: dict[str, Any] = self._call("init", arguments, OPEN_SECONDS)
        if found["position"] < self._put:
            self._drop()
            raise Retry(f"{self._path}: W&B shows {self._put:,} rows, but resumes at {found['position']:,}", after=2.0)
        self._put, self._new, self._begun, self._told = found["position"], {}, True, None
        self._defined.clear()
        self._shown = max(self._shown, self._put)
        return found

    def _opened(self) -> RunInfo:
        if self._run is None:
            raise RuntimeError("the sink is not open")
        return self._run

    def _where(self, run: RunInfo, tracker_run_id: str | None) -> tuple[str | None, str, str]:
        """Entity, project and id of the run; ``tracker_run_id`` is ``entity/project/id``, as an earlier ``open`` answered."""
        known = tracker_run_id.split("/")[0] if tracker_run_id and "/" in tracker_run_id else None
        return known or self._options.entity, self._options.project, self._run_id(run)

    def _run_id(self, run: RunInfo) -> str:
        place = "\0".join((run.run_id, self._options.base_url.rstrip("/"), self._options.project, run.policy))
        return "rm" + hashlib.sha256(place.encode("utf-8", "replace")).hexdigest()[:18]

    def _call(self, verb: str, arguments: tuple[Any, ...], seconds: float, *, wait: bool = True) -> Any:
        """Ask the worker; after a failure it is never used again."""
        if self._worker is None:
            raise Retry("wandb's process is gone")
        try:
            ask = self._worker.call if wait else self._worker.send
            return ask(verb, arguments, seconds)
        except (Retry, Refused):
            self._drop()
            raise

    def _drop(self) -> None:
        worker, self._worker = self._worker, None
        self._begun = False
        if worker is not None:
            worker.end()

    def put(self, rows: Sequence[Row]) -> list[Rejected]:
        """Log rows that the server does not have."""
        self._opened()
        if self._off:
            self._put = max([self._put, *(row.ordinal + 1 for row in rows)])
            return []
        if not self._begun and any(row.ordinal >= self._put for row in rows):
            self._begin()
        rejected: list[Rejected] = []
        sent: list[tuple[int, dict[str, Any]]] = []
        texts: dict[str, str] = {}
        for row in rows:
            if row.ordinal >= self._put:
                data, refused = row_data(row)
                rejected += refused
                sent.append((row.ordinal, data))
                texts |= row_texts(row)
        if sent:
            self._call("put", (sent, texts, self._summaries(sent)), CALL_SECONDS, wait=False)
            self._put = sent[-1][0] + 1
            if self._put - self._shown > ON_ITS_WAY:
                self._wait(self._put - ON_ITS_WAY // 2, SETTLE_SECONDS)
        return rejected

    def _summaries(self, sent: list[tuple[int, dict[str, Any]]]) -> dict[str, str]:
        """Which keys are new among these rows, of those whose best value is to be shown: key -> "min,last" or "max,last"."""
        if not self._options.best:
            return {}
        from runmirror.catalogue.entries import best  # only who asks for it waits for it

        fresh = {key for _, data in sent for key in data} - self._defined
        self._defined |= fresh
        known = {key: best(key) for key in fresh if "*" not in key}  # a star would be a pattern
        return {key: f"{how},last" for key, how in known.items() if how in ("min", "max")}

    def put_file(self, file: LogFile) -> None:
        """Upload a file of the run; it is there when this returns."""
        run = self._opened()
        if self._off:
            return
        if self._worker is None:
            raise Retry("wandb's process is gone")
        content = file.read()
        late = decode(content) if file.kind == "config" and self._begun else None
        if late is not None:  # log_config adds to it while a run goes on
            self._call("configure", ([config(given) for given in (late, *run.resumes)], times(run)), CALL_SECONDS)
        with tempfile.TemporaryDirectory(dir=self._worker.folder) as root:
            place = Path(root, file.path)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
            self._call("upload", (self._path, str(place), root), CALL_SECONDS)

    def flush(self, deadline: float) -> int:
        """What the server shows. With a deadline, after waiting for the rest while more comes; a run that has ended is
        finished for that."""
        run = self._opened()
        if self._off:
            return self._put
        if self._shown < self._put and deadline <= 0:
            self._shown = min(self._put, self._held()[0])
        elif self._shown < self._put:
            ended = run.status != "running" and self._begun
            if ended:
                self._end(run)
            self._wait(self._put, deadline * 0.6)
            self._whole(*self._seen)
            if ended:
                self._ended(run, deadline * 0.2)
        return self._shown

    def _held(self) -> tuple[int, int | None]:
        held: tuple[int, int | None] = self._call("held", (self._path,), CALL_SECONDS)
        self._seen = held
        return held

    def _wait(self, wanted: int, seconds: float) -> None:
        """Until the server shows so many rows: ``seconds`` at most, and not for long when none comes."""
        until = time.monotonic() + seconds
        shortest = FIRST_LOOK if self._begun else 0.1  # what goes on is sent every second, an end at once
        patience, pause = time.monotonic() + SETTLE_SECONDS, shortest
        if self._begun and self._shown < wanted:
            time.sleep(min(pause, seconds))
        while self._shown < wanted:
            shown = min(self._put, self._held()[0])
            if shown > self._shown:
                self._shown, pause = shown, shortest
                patience = time.monotonic() + SETTLE_SECONDS
                continue
            said = self._worker.said() if self._worker is not None else ""
            if time.monotonic() >= min(until, patience) or "Fatal error" in said:
                self._drop()
                raise Retry(
                    f"W&B shows {self._shown:,} of {self._put:,} rows that wandb took; it is started again{said}"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 2.0)

    def _end(self, run: RunInfo) -> None:
        self._begun = False
        arguments = (times(run), _CODES.get(run.status, 0), self._path, self._put)
        held: tuple[int, int | None] = self._call("end", arguments, CALL_SECONDS)
        self._seen = held
        self._shown = min(self._put, max(self._shown, held[0]))

    def _ended(self, run: RunInfo, seconds: float) -> None:
        self._call("ended", (seconds,), seconds + 10)
        self._told = run.status, run.end

    def close(self, run: RunInfo | None, deadline: float) -> None:
        """Finish the run with its status, or let go of it. W&B shows a run that was let go of as running, then as crashed,
        until it goes on."""
        try:
            if run is not None and self._worker is not None and self._told != (run.status, run.end):
                if not self._begun:
                    self._begin()
                self._end(run)
                self._ended(run, max(1.0, deadline * 0.5))
            if self._worker is not None and not self._begun:
                worker, self._worker = self._worker, None
                give_back(worker)
        finally:
            self._put = self._shown = 0
            self._told, self._run = None, None
            self._drop()

    def read_back(self, run: RunInfo, tracker_run_id: str | None) -> Iterator[Point] | None:
        """Every point of every row by ``wandb.Api()``; None when there is no such run."""
        if self._off:
            return None
        worker = take(self._options.base_url)
        try:
            there = worker.call("history", self._where(run, tracker_run_id), CALL_SECONDS)
        except BaseException:
            worker.end()
            raise
        if there:
            return _history(worker)
        give_back(worker)
        return None

    def refuses(self, key: str) -> str | None:
        """Why W&B can't take a metric of this name; None when it can."""
        return None if key else "W&B has no metric without a name"

    def check(self) -> list[Check]:
        """Whether the server answers and takes the credentials."""
        if self._off:
            return [Check("W&B", True, "turned off (mode disabled)")]
        worker = take(self._options.base_url)
        try:
            who = worker.call("viewer", (), 25.0)
            return [Check("W&B", True, f"{self.destination()} answers {who}")]
        except (Retry, Refused) as error:
            fix = "see the network, WANDB_BASE_URL, and WANDB_API_KEY (or `wandb login`)"
            return [Check("W&B", False, str(error), fix)]
        finally:
            worker.end()


def _history(worker: WandbProcess) -> Iterator[Point]:
    """The points of the run that the worker was asked about, a page in memory at a time."""
    done = False
    try:
        while rows := worker.call("more", (), CALL_SECONDS):
            yield from points(rows)
        done = True
    finally:
        (give_back if done else WandbProcess.end)(worker)
