"""A tracker that is a file, with the faults of real ones: for rehearsing an outage, and for tests across processes.

Guarantees:

- What it accepted is in ``<folder>/<run id>.jsonl``, a line each, written before the call returns. The file is the
  position: a row is in it once, whatever happened to the process, and a line that a crash tore is taken away by ``open``.
- A gap in the ordinals is an error: a mirror never leaves one.
- What is refused depends on the seed, the row and the key alone, so it is refused again when it comes again. All other
  faults are drawn from the seed, the run and how often the run was opened, so a restart meets other ones.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from runmirror.exceptions import Retry, Throttled
from runmirror.log.rows import Row
from runmirror.sinks.base import Capabilities, Check, LogFile, Opened, Point, Rejected, RunInfo, SinkOptions, env_field
from runmirror.sinks.checks import check_folder

Verb = Literal["open", "put", "put_file", "flush", "close"]
CRASHED = 70
"""Exit code of a process that the option ``crash`` ended."""


def _probability(description: str) -> Any:
    return Field(default=0.0, ge=0, le=1, description=f"{description}; 0 to 1")


class DummyOptions(SinkOptions):
    """Options of :class:`DummySink`: a folder, and how often which fault happens."""

    folder: str = env_field(
        "./runmirror-dummy", "RUNMIRROR_DUMMY_FOLDER", "folder of the files that stand for the runs"
    )
    seed: int = Field(default=0, description="of all chances: the same seed, the same faults")
    transient: float = _probability("chance that a call fails and does nothing")
    late: float = _probability("chance that a call fails after it was applied, as when the answer is lost")
    reject_row: float = _probability("share of rows that are refused for good")
    reject_key: float = _probability("share of keys that are refused for good")
    hang: float = _probability("chance that a call hangs for hang_seconds")
    hang_seconds: float = Field(default=600.0, ge=0, description="how long a call hangs")
    crash: float = _probability("chance that a call ends the process, before or after it was applied")
    calls: frozenset[Verb] = Field(
        default=frozenset({"open", "put", "put_file", "flush"}), description="the calls that fail, hang or crash"
    )
    plain: bool = Field(
        default=False, description="fail with a plain ConnectionError, which explains nothing, instead of Retry"
    )
    throttled: bool = Field(default=False, description="fail with Throttled: all mirrors to this folder hold back")
    retry_after: float | None = Field(default=None, ge=0, description="seconds that a Retry asks to wait")


@dataclass
class DummyRun:
    """What a file of the dummy holds: rows as (ordinal, step, time, points), files as (path, version) in the order they
    came, the statuses it was closed with, how often it was opened, and its name."""

    name: str = ""
    rows: list[tuple[int, int, float, dict[str, float]]] = field(default_factory=list)
    files: list[tuple[str, str]] = field(default_factory=list)
    statuses: list[str] = field(default_factory=list)
    opened: int = 0


def read_dummy_run(path: Path) -> DummyRun:
    """A run back from its file; a torn last line is left out."""
    run = DummyRun()
    for line in path.read_bytes().split(b"\n")[:-1]:
        entry = json.loads(line)
        kind = entry["kind"]
        if kind == "row":
            run.rows.append((entry["ordinal"], entry["step"], entry["time"], entry["points"]))
        elif kind == "file":
            run.files.append((entry["path"], entry["digest"]))
        elif kind == "closed":
            run.statuses.append(entry["status"])
        else:
            run.name = entry["name"]
            run.opened += 1
    return run


def read_dummy(folder: str | os.PathLike[str]) -> dict[str, DummyRun]:
    """Every run in a folder of the dummy, by the name it was last opened with."""
    runs = (read_dummy_run(path) for path in sorted(Path(folder).glob("*.jsonl")))
    return {run.name: run for run in runs}


class DummySink:
    """Writes what it accepts to a file, and fails as often as its options say."""

    name: ClassVar[str] = "dummy"
    Options: ClassVar[type[SinkOptions]] = DummyOptions
    capabilities: ClassVar[Capabilities] = Capabilities(
        records=frozenset({"config", "code", "checkpoints"}),
        default_records=frozenset({"config", "code", "checkpoints"}),
        test_only=True,
    )

    def __init__(self, options: DummyOptions | None = None) -> None:
        self.options = options or DummyOptions()
        self._folder = Path(self.options.folder).expanduser().absolute()
        self._path: Path | None = None
        self._rows = 0
        self._files: dict[str, str] = {}
        self._status = ""
        self._chance = random.Random()

    def destination(self) -> str:
        """The folder, as ``dummy://<folder>``."""
        return f"dummy://{self._folder}"

    def check(self) -> list[Check]:
        """Whether the folder can be written."""
        return [check_folder("folder", self._folder, "another one: -o folder=DIR")]

    def open(self, run: RunInfo, tracker_run_id: str | None) -> Opened:
        """Find or make the run's file and count the rows in it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{_file_name(run.run_id)}.jsonl"
        _drop_torn_line(path)
        held = read_dummy_run(path) if path.exists() else DummyRun()
        self._rows, self._files = len(held.rows), dict(held.files)
        self._status = held.statuses[-1] if held.statuses else ""
        self._chance = random.Random(f"{self.options.seed} {run.run_id} {held.opened}")
        self._path = path
        self._append([{"kind": "opened", "name": run.name, "run_id": run.run_id}])
        with self._faulty("open"):
            return Opened(str(path), path.stem, self._rows)

    def put(self, rows: Sequence[Row]) -> list[Rejected]:
        """Append the rows that are not there yet, without what is refused."""
        rejected: list[Rejected] = []
        with self._faulty("put"):
            entries: list[dict[str, Any]] = []
            for row in rows:
                if row.ordinal < self._rows:
                    continue
                if row.ordinal > self._rows + len(entries):
                    raise ValueError(f"row {row.ordinal} came where {self._rows + len(entries)} was due")
                points, refused = self._judge(row)
                rejected += refused
                entries.append(
                    {"kind": "row", "ordinal": row.ordinal, "step": row.step, "time": row.time, "points": points}
                )
            self._append(entries)
            self._rows += len(entries)
        return rejected

    def _judge(self, row: Row) -> tuple[dict[str, float], list[Rejected]]:
        points = row.scalars()
        if points and self._is_refused(self.options.reject_row, f"row {row.ordinal}"):
            return {}, [Rejected(row.ordinal, None, "the dummy refuses this row")]
        if not self.options.reject_key:
            return points, []
        bad = [key for key in points if self._is_refused(self.options.reject_key, f"key {key}")]
        kept = {key: value for key, value in points.items() if key not in bad}
        return kept, [Rejected(row.ordinal, key, "the dummy refuses this key") for key in bad]

    def put_file(self, file: LogFile) -> None:
        """Note the file's path, version and digest, once per content."""
        content = file.read()
        with self._faulty("put_file"):
            digest = hashlib.sha256(content).hexdigest()[:16]
            if self._files.get(file.path) != digest:
                self._append([{"kind": "file", "path": file.path, "file_kind": file.kind, "digest": digest}])
                self._files[file.path] = digest

    def flush(self, deadline: float) -> int:
        """Every row that was put."""
        with self._faulty("flush"):
            self._opened()
            return self._rows

    def close(self, run: RunInfo | None, deadline: float) -> None:
        """Note how the run ended, unless that is the last thing that was noted."""
        try:
            if run is not None:
                with self._faulty("close"):
                    if run.status != self._status:
                        self._append([{"kind": "closed", "status": run.status}])
        finally:
            self._path = None

    def read_back(self, run: RunInfo, tracker_run_id: str | None) -> Iterator[Point] | None:
        """Every point in the run's file; None when it has none."""
        path = self._folder / f"{_file_name(run.run_id)}.jsonl"
        return _points(read_dummy_run(path)) if path.exists() else None

    def _opened(self) -> Path:
        if self._path is None:
            raise RuntimeError("open comes first")
        return self._path

    def _append(self, entries: list[dict[str, Any]]) -> None:
        path = self._opened()
        if entries:
            with open(path, "ab", buffering=0) as file:
                file.write("".join(json.dumps(entry) + "\n" for entry in entries).encode())

    def _is_refused(self, share: float, what: str) -> bool:
        return share > 0 and random.Random(f"{self.options.seed} {what}").random() < share

    @contextmanager
    def _faulty(self, verb: Verb) -> Iterator[None]:
        """The faults around a call that does its work inside."""
        options, chance = self.options, self._chance.random
        if verb not in options.calls:
            yield
            return
        crash_before, crash_after = chance() < options.crash / 2, chance() < options.crash / 2
        if crash_before:
            os._exit(CRASHED)
        if chance() < options.hang:
            time.sleep(options.hang_seconds)
        if chance() < options.transient:
            raise self._error(f"{verb} failed")
        late = chance() < options.late
        yield
        if crash_after:
            os._exit(CRASHED)
        if late:
            raise self._error(f"the answer to {verb} was lost")

    def _error(self, what: str) -> Exception:
        if self.options.plain:
            return ConnectionError(what)
        return (Throttled if self.options.throttled else Retry)(what, self.options.retry_after)


def _points(run: DummyRun) -> Iterator[Point]:
    for _, step, when, points in run.rows:
        for key, value in points.items():
            yield Point(key, step, when, value)


def _file_name(run_id: str) -> str:
    """A run id as the name of a file; one that isn't one, by its hash."""
    return (
        run_id if re.fullmatch(r"[\w-]{1,64}", run_id, re.ASCII) else hashlib.sha256(run_id.encode()).hexdigest()[:32]
    )


def _drop_torn_line(path: Path) -> None:
    if path.exists():
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(path, whole)
