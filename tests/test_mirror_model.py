"""The mirror against a model: random logs, cuts, outages, lost answers, crashes and restarts.

The model is a list of rows. After faults stop and one more delivery, the tracker holds every row that the log ever showed
the mirror, once, in order, and every row of the log as it is now.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from runmirror.exceptions import Retry
from runmirror.log.index import LineIndex
from runmirror.log.rows import Row
from runmirror.log.runlog import RunLog
from runmirror.mirror import Mirror
from runmirror.sinks.base import Rejected
from runmirror.storage import LocalStorage
from runmirror.testing import MemoryOptions, MemorySink


class Crash(BaseException):
    """The process dies here."""


class FaultySink(MemorySink):
    """Fails as ``plan`` says: per call of put or flush "ok", "fail", "late" (applied, then failed), "crash"."""

    plan: list[str]

    def _next(self) -> str:
        return type(self).plan.pop(0) if type(self).plan else "ok"

    def put(self, rows: Sequence[Row]) -> list[Rejected]:
        fault = self._next()
        if fault == "fail":
            raise Retry("down")
        if fault == "crash":
            raise Crash
        super().put(rows)
        if fault == "late":
            raise Retry("answer lost")
        if fault == "late crash":
            raise Crash
        return []

    def flush(self, deadline: float) -> int:
        fault = self._next()
        if fault != "ok":
            raise Crash if "crash" in fault else Retry("down")
        return super().flush(deadline)


FAULTS = st.lists(st.sampled_from(["ok", "ok", "fail", "late", "crash", "late crash"]), max_size=6)


class LogAndTracker(RuleBasedStateMachine):
    """log, cut, torn line, deliver with faults, crash, restart, lose the state, import again."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.metrics = self.folder / "run" / "metrics.jsonl"
        self.metrics.parent.mkdir()
        self.tracker = self.folder.name
        self.lines: list[bytes] = []
        self.value = 0
        self.delivered_to: list[bytes] = []  # the log as the tracker knew it at the last complete delivery
        self.mirror: Mirror | None = None

    @initialize()
    def start(self) -> None:
        FaultySink.plan = []

    def _open(self) -> Mirror:
        if self.mirror is None:
            source = RunLog(LocalStorage(self.metrics.parent), "run", LineIndex(self.folder / "state"))
            sink = FaultySink(MemoryOptions(tracker=self.tracker))
            self.mirror = Mirror(source, sink, self.folder / "state", batch_rows=3)
        return self.mirror

    def _crash(self) -> None:
        """The process is gone: its locks are free, nothing was tidied up."""
        if self.mirror is not None:
            self.mirror.state.close()
            self.mirror._fence.close()
            self.mirror = None

    @rule(count=st.integers(1, 8))
    def log(self, count: int) -> None:
        for _ in range(count):
            row: dict[str, Any] = {"step": len(self.lines), "_timestamp": 1e9 + self.value, "loss": self.value}
            self.lines.append(json.dumps(row).encode() + b"\n")
            self.value += 1
        self.metrics.write_bytes(b"".join(self.lines))

    @rule(bytes_kept=st.integers(1, 20))
    def torn_line_appears(self, bytes_kept: int) -> None:
        line = json.dumps({"step": len(self.lines), "_timestamp": 1e9 + self.value, "loss": self.value}).encode()
        with self.metrics.open("ab") as file:
            file.write(line[:bytes_kept])

    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        """A resume from an older checkpoint rewrites the log with its first rows."""
        if self.lines:
            self.lines = self.lines[: data.draw(st.integers(0, len(self.lines) - 1))]
            self.metrics.write_bytes(b"".join(self.lines))

    @rule(faults=FAULTS)
    def deliver(self, faults: list[str]) -> None:
        FaultySink.plan = faults
        try:
            self._open().deliver(patience=0)
        except Retry:
            pass
        except Crash:
            self._crash()

    @rule()
    def restart(self) -> None:
        if self.mirror is not None:
            self.mirror.close(end=False)
            self.mirror = None

    @rule()
    def kill(self) -> None:
        self._crash()

    @rule()
    def lose_the_cursor(self) -> None:
        """The state file is gone (not the line index): the tracker tells the position."""
        self._crash()
        for path in (self.folder / "state").glob("memory-*.json"):
            path.unlink()

    @rule()
    def faults_stop(self) -> None:
        """Conservation and liveness: after one good delivery the tracker holds each current row, and each once."""
        FaultySink.plan = []
        self._open().deliver(patience=0)
        run = next(iter(MemorySink.trackers[self.tracker].values()))
        held = [points["loss"] for *_, points in run.rows if points]
        assert len(held) == len(set(held)), "a row arrived twice"
        assert held == sorted(held), "rows arrived out of order"
        current = [json.loads(line)["loss"] for line in self.lines]
        assert set(current) <= set(held), "a row is missing"

    @invariant()
    def ordinals_are_dense(self) -> None:
        for run in MemorySink.trackers.get(self.tracker, {}).values():
            assert [ordinal for ordinal, *_ in run.rows] == list(range(len(run.rows)))

    def teardown(self) -> None:
        if self.metrics.exists():
            self.faults_stop()
        self._crash()
        MemorySink.trackers.pop(self.tracker, None)
        shutil.rmtree(self.folder)


LogAndTracker.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestLogAndTracker = LogAndTracker.TestCase
