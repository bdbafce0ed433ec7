"""Our own sinks pass the suite that every sink inherits."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from runmirror.log.rows import Row
from runmirror.sinks.base import Opened, Point, Rejected, RunInfo, Sink
from runmirror.sinks.tensorboard import TensorBoardOptions, TensorBoardSink
from runmirror.testing import DummyOptions, DummySink, MemoryOptions, MemorySink
from runmirror.testing.conformance import SinkConformance


class TestMemorySink(SinkConformance):
    def make_sink(self, folder: Path) -> Sink:
        return MemorySink(MemoryOptions(tracker=str(folder)))

    def read_files(self, sink: Sink, run: RunInfo) -> dict[str, bytes] | None:
        assert isinstance(sink, MemorySink)
        return sink.runs[run.run_id].files


class TestDummySink(SinkConformance):
    def make_sink(self, folder: Path) -> Sink:
        return DummySink(DummyOptions(folder=str(folder)))


class TestTensorBoardSink(SinkConformance):
    def make_sink(self, folder: Path) -> Sink:
        return TensorBoardSink(TensorBoardOptions(logdir=str(folder)))


class LosesARow(MemorySink):
    """Acknowledges row 3, which it never kept."""

    def put(self, rows: Sequence[Row]) -> list[Rejected]:
        return super().put([row.emptied("lost") if row.ordinal == 3 else row for row in rows])


class DoublesAfterACrash(MemorySink):
    """Forgets what it holds when it is opened: every row comes again."""

    def open(self, run: RunInfo, tracker_run_id: str | None) -> Opened:
        opened = super().open(run, tracker_run_id)
        self.skip = self.held = len(self._opened().rows)
        return replace(opened, position=0)

    def put(self, rows: Sequence[Row]) -> list[Rejected]:
        return super().put([replace(row, ordinal=row.ordinal + self.held) for row in rows])

    def flush(self, deadline: float) -> int:
        return super().flush(deadline) - self.held


class CountsPoints(MemorySink):
    """Leaves rows without values out of its position."""

    def flush(self, deadline: float) -> int:
        return sum(bool(points) for *_, points in self._opened().rows)


class AcknowledgesTooMuch(MemorySink):
    """Tells one row more than it has."""

    def flush(self, deadline: float) -> int:
        return super().flush(deadline) + 1


class KnowsRunsByName(MemorySink):
    """Two runs of one name are one to it."""

    def open(self, run: RunInfo, tracker_run_id: str | None) -> Opened:
        return super().open(replace(run, run_id=run.name), tracker_run_id)

    def read_back(self, run: RunInfo, tracker_run_id: str | None) -> Iterator[Point] | None:
        return super().read_back(replace(run, run_id=run.name), tracker_run_id)


class StepsByOrdinal(MemorySink):
    """Shows a row's number as its step."""

    def put(self, rows: Sequence[Row]) -> list[Rejected]:
        return super().put([replace(row, step=row.ordinal) for row in rows])


class ShortKeys(MemorySink):
    """Cuts long keys in silence."""

    def put(self, rows: Sequence[Row]) -> list[Rejected]:
        return super().put([replace(row, data={key[:200]: row.data[key] for key in row.data}) for row in rows])


class StampsNow(MemorySink):
    """Gives every row the time it was sent."""

    def put(self, rows: Sequence[Row]) -> list[Rejected]:
        return super().put([replace(row, time=2e9) for row in rows])


class Talks(MemorySink):
    """Prints."""

    def flush(self, deadline: float) -> int:
        print("flushed")
        return super().flush(deadline)


class SetsEnvironment(MemorySink):
    """Leaves a variable behind."""

    def open(self, run: RunInfo, tracker_run_id: str | None) -> Opened:
        os.environ["RUNMIRROR_TEST_LEFT"] = run.run_id
        return super().open(run, tracker_run_id)


class TellsItsPassword(MemorySink):
    """Has credentials in its destination."""

    def destination(self) -> str:
        return "https://me:hunter2@tracker.example/project"


@pytest.mark.parametrize(
    ("kind", "caught_by"),
    [
        (LosesARow, "test_the_largest_batch_is_taken"),
        (DoublesAfterACrash, "test_goes_on_after_a_crash"),
        (CountsPoints, "test_rows_without_values_count"),
        (AcknowledgesTooMuch, "test_flush_never_goes_back_and_never_tells_too_much"),
        (KnowsRunsByName, "test_runs_of_one_name_stay_apart"),
        (StepsByOrdinal, "test_any_step_is_shown_as_it_is"),
        (ShortKeys, "test_any_key_arrives_or_is_refused_by_name"),
        (StampsNow, "test_times_are_those_of_the_rows"),
        (Talks, "test_leaves_the_process_as_it_was"),
        (SetsEnvironment, "test_leaves_the_process_as_it_was"),
        (TellsItsPassword, "test_destination_is_stable_and_holds_no_credentials"),
    ],
)
def test_a_mistake_is_caught(
    kind: type[MemorySink],
    caught_by: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The suite fails a sink with this mistake, and at the test that is about it."""
    monkeypatch.setenv("RUNMIRROR_TEST_LEFT", "")

    class Suite(SinkConformance):
        def make_sink(self, folder: Path) -> Sink:
            return kind(MemoryOptions(tracker=str(folder)))

    test = getattr(Suite(), caught_by)
    arguments = {"capfd": capfd} if "capfd" in inspect.signature(test).parameters else {}
    with pytest.raises(AssertionError):
        test(tmp_path, **arguments)
