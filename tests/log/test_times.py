"""When rows without timestamps were written, as well as the log tells."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runmirror.log import times
from runmirror.log.times import duration, infer_times, report_starts, row_time
from runmirror.storage import LocalStorage
from tests.logs import flat_log, nested_log

Times = list[tuple[int, float | None, float | None]]


IMPLAUSIBLE = [0, -1.0, 1e11, math.nan, math.inf, "5", True, None]


@pytest.mark.parametrize(("value", "time"), [(1.5, 1.5), (3, 3.0), *((value, None) for value in IMPLAUSIBLE)])
def test_a_row_carries_its_time_when_it_is_plausible(value: Any, time: float | None) -> None:
    """Positive Unix seconds, no milliseconds, no text, no bool."""
    assert row_time({"_timestamp": value}) == time


def test_a_row_without_a_time_has_none() -> None:
    """None; a metric named like a time is none."""
    assert row_time({"time/total": 3.0, "timestamp": 5.0}) is None


@pytest.mark.parametrize(
    ("row", "seconds"),
    [
        ({"time/total": 1.5, "step_time": 9.0}, 1.5),
        ({"step_time": 2}, 2.0),
        ({"timing_s/step": 0.0}, 0.0),
        ({"time/total": None, "step_time": 3.0}, 3.0),
        ({"time/total": -1.0}, None),
        ({"time/total": math.nan}, None),
        ({"time/total": math.inf}, None),
        ({"time/total": True}, None),
        ({}, None),
    ],
)
def test_a_rows_duration(row: dict[str, Any], seconds: float | None) -> None:
    """The first usable of the keys that frameworks write."""
    assert duration(row) == seconds


def seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def test_reports_tell_when_iterations_began(tmp_path: Path) -> None:
    """16:00 and 16:08 UTC of iterations 0 and 8 in the flat layout; 0, 8 and 11 in the nested one."""
    flat = report_starts(LocalStorage(flat_log(tmp_path / "flat")), UTC)
    assert flat == {step: seconds(f"2025-11-24T16:{step:02d}:00+00:00") for step in (0, 8)}
    nested = report_starts(LocalStorage(nested_log(tmp_path / "nested")), UTC)
    assert nested == {step: seconds(f"2025-11-24T16:{step:02d}:00+00:00") for step in (0, 8, 11)}


def test_report_times_are_read_in_the_zone_asked_for(tmp_path: Path) -> None:
    """Two hours earlier with UTC+2; a time that names its zone is left alone."""
    log = flat_log(tmp_path)
    found = report_starts(LocalStorage(log), timezone(timedelta(hours=2)))
    assert found[8] == seconds("2025-11-24T14:08:00+00:00")
    (log / "train_iteration_000008_logtree.json").write_text('{"started_at": "2025-11-24T16:08:00+05:00"}')
    assert report_starts(LocalStorage(log), UTC)[8] == seconds("2025-11-24T11:08:00+00:00")


@pytest.mark.parametrize("text", ["", "{}", '{"started_at": "soon"}', '{"started_at": "0001-01-01"}', "\0\0", "[1"])
def test_reports_that_tell_nothing_are_passed_over(tmp_path: Path, text: str) -> None:
    """No time, and no error, in any zone."""
    for step, zone in ((1, UTC), (2, timezone(timedelta(hours=14)))):
        (tmp_path / f"train_iteration_{step:06d}_logtree.json").write_text(text)
        assert report_starts(LocalStorage(tmp_path), zone) == {}


def test_evaluation_reports_do_not_count(tmp_path: Path) -> None:
    """Only training reports begin an iteration."""
    (tmp_path / "eval_x_iteration_000001_logtree.json").write_text('{"started_at": "2025-11-24T16:08:00"}')
    (tmp_path / "train_iteration_000001_logtree.json").mkdir()
    assert report_starts(LocalStorage(tmp_path), UTC) == {}


def test_a_long_run_is_read_from_some_of_its_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most MAX_REPORTS of them, spread over the run."""
    monkeypatch.setattr(times, "MAX_REPORTS", 4)
    for step in range(10):
        report = json.dumps({"started_at": f"2025-11-24T16:{step:02d}:00"})
        (tmp_path / f"train_iteration_{step:06d}_logtree.json").write_text(report)
    assert list(report_starts(LocalStorage(tmp_path), UTC)) == [0, 3, 6, 9]


def test_a_row_is_written_when_its_iteration_ends() -> None:
    """Start of the iteration plus its duration; durations are counted on from there, and back before it."""
    rows: Times = [(step, 2.0, None) for step in range(5)]
    assert infer_times(rows, {2: 100.0}, 999.0) == ([98.0, 100.0, 102.0, 104.0, 106.0], "logtree")


def test_of_a_step_that_came_twice_the_report_is_the_last_ones() -> None:
    """A resume writes the report anew: the first row of step 1 is not at 100."""
    rows: Times = [(0, 1.0, None), (1, 1.0, None), (1, 1.0, None), (2, 1.0, None)]
    assert infer_times(rows, {1: 100.0}, 999.0)[0] == [99.0, 100.0, 101.0, 102.0]


def test_without_reports_the_last_row_is_at_the_modification_time() -> None:
    """Durations are counted back from it; a row without one lies where the next does."""
    rows: Times = [(0, 1.0, None), (1, 2.0, None), (2, None, None), (3, 4.0, None)]
    assert infer_times(rows, {}, 1000.0) == ([994.0, 996.0, 996.0, 1000.0], "mtime")


def test_rows_that_carry_their_time_place_the_others() -> None:
    """A log continued by a writer of timestamps: its old rows end where that begins, not at the modification time."""
    rows: Times = [(0, 2.0, None), (1, 2.0, None), (2, 2.0, 500.0), (3, 2.0, None)]
    assert infer_times(rows, {}, 1e9)[0] == [496.0, 498.0, 500.0, 502.0]


def test_times_never_run_backwards() -> None:
    """A clock that was set back between two reports: the later row lies where the earlier does."""
    rows: Times = [(0, 1.0, None), (1, 1.0, None), (2, 1.0, None)]
    assert infer_times(rows, {0: 100.0, 2: 50.0}, 0.0)[0] == [101.0, 102.0, 102.0]


def test_no_rows_no_times() -> None:
    """[] for an empty log."""
    assert infer_times([], {1: 5.0}, 7.0) == ([], "mtime")


some_time = st.none() | st.floats(1.0, 1e10)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.none() | st.floats(0, 1e6), some_time), max_size=30),
    st.dictionaries(st.integers(0, 9), st.floats(1.0, 1e10), max_size=5),
    st.floats(1.0, 1e10),
)
def test_every_row_gets_a_time_and_none_runs_backwards(rows: Times, starts: dict[int, float], modified: float) -> None:
    """As many as rows, rising, whatever the log tells."""
    found, _ = infer_times(rows, starts, modified)
    assert len(found) == len(rows)
    assert found == sorted(found)
