"""What the tests of a sink stand on: how it is made and read, rows, runs and logs, and the comparison."""

from __future__ import annotations

import gc
import json
import math
import struct
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from runmirror.delivered import Delivered
from runmirror.log.index import LineIndex
from runmirror.log.layout import Kind
from runmirror.log.rows import Row
from runmirror.log.runlog import RunLog
from runmirror.mirror import Mirror
from runmirror.sinks.base import LogFile, Point, ReadsBack, RunInfo, Sink
from runmirror.storage import LocalStorage

BEGAN = 1_700_000_000.0
DEADLINE = 30.0


class Harness(ABC):
    """How a sink is made and its tracker read, and what the tests do with that."""

    @abstractmethod
    def make_sink(self, folder: Path) -> Sink:
        """A new sink object for a tracker, or a part of one, that belongs to ``folder``: always the same for the same
        folder, empty for a new one."""

    def read(self, sink: Sink, run: RunInfo) -> list[Point]:
        """Every point the tracker shows of a run now, in any order, each as often as people see it. Default: what
        ``read_back`` tells; override it for a sink without. ``sink`` was made by :meth:`make_sink` and is not open."""
        if not isinstance(sink, ReadsBack):
            raise TypeError(f"{type(self).__name__} needs a read(): {sink.name} has no read_back()")
        return list(sink.read_back(run, None) or ())

    def read_files(self, sink: Sink, run: RunInfo) -> dict[str, bytes] | None:
        """path -> content of every file the tracker holds of a run, or None when that can't be read back."""
        return None

    def deliver(
        self, folder: Path, every: Sequence[Row], run: RunInfo | None = None, end: RunInfo | None = None
    ) -> Sink:
        """Open, put everything in one batch, flush, close."""
        sink = self.make_sink(folder)
        sink.open(run or a_run(), None)
        sink.put(every)
        assert sink.flush(DEADLINE) == len(every)
        sink.close(end, DEADLINE)
        return sink

    def holds(
        self, sink: Sink, every: Sequence[Row], run: RunInfo | None = None, among: Sequence[Row] | None = None
    ) -> None:
        """The tracker shows each point of these rows once, and no other (but those of ``among``)."""
        shown = Counter((point.key, point.step, _bits(sink, point.value)) for point in self.read(sink, run or a_run()))
        expected = self._points(sink, every)
        assert expected - shown == Counter(), "points are missing"
        assert shown - (expected if among is None else self._points(sink, among)) == Counter(), "points too many"

    def _points(self, sink: Sink, every: Iterable[Row]) -> Counter[tuple[str, int, float]]:
        return Counter((key, one.step, _bits(sink, value)) for one in every for key, value in one.scalars().items())

    def mirror(self, folder: Path, sink: Any = None, batch_rows: int | None = None) -> Delivered:
        """Deliver the log of :func:`write_log` to ``<folder>/tracker``, by a Mirror that is new, and let go."""
        sink = sink or self.make_sink(folder / "tracker")
        with Mirror(_source(folder), sink, folder / "state", batch_rows=batch_rows) as mirror:
            return mirror.deliver(patience=DEADLINE)

    def run_of(self, folder: Path) -> RunInfo:
        """The run of :func:`write_log` as the mirror tells it."""
        return _source(folder).info()


FILES: dict[str, Kind] = {
    "config.json": "config",
    "code.diff": "code",
    "checkpoints.jsonl": "checkpoints",
    "train_iteration_000000_logtree.json": "logtree",
}


def a_run(run_id: str = "0123456789abcdef") -> RunInfo:
    """A run of this id, named after it."""
    return RunInfo(run_id=run_id, name=f"run {run_id}", start=BEGAN, config={"lr": 4e-5, "model": {"name": "tiny"}})


def a_row(ordinal: int, metrics: dict[str, Any]) -> Row:
    """A row whose step is its ordinal."""
    return Row(ordinal, {"step": ordinal, **metrics}, ordinal, BEGAN + ordinal)


def rows(count: int) -> list[Row]:
    """Rows 0 to ``count`` - 1 with two metrics."""
    return [a_row(n, {"env/all/reward/total": n / 4, "entropy": 8 - n / 8}) for n in range(count)]


def a_file(path: str, kind: Kind, content: bytes) -> LogFile:
    """A file of a log with this content."""
    return LogFile(path, kind, str(len(content)), lambda: content)


def write_log(folder: Path, every: Sequence[Row]) -> None:
    """``<folder>/log`` with these rows and a config."""
    log = folder / "log"
    log.mkdir(exist_ok=True)
    (log / "config.json").write_text('{"lr": 4e-5}')
    lines = (json.dumps(one.data | {"_timestamp": one.time}) + "\n" for one in every)
    (log / "metrics.jsonl").write_text("".join(lines))


def lose(sink: Sink) -> None:
    """Let go of a sink's insides without ``close``, as a crash does: what it held is freed, nothing more is done."""
    getattr(sink, "__dict__", {}).clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def _source(folder: Path) -> RunLog:
    return RunLog(LocalStorage(folder / "log"), "log", LineIndex(folder / "state"))


def _bits(sink: Sink, value: float) -> float:
    """A value as the sink's precision keeps it."""
    if sink.capabilities.precision == "float64":
        return float(value)
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)
