"""The step of a row, and when a row goes back."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from runmirror.log.steps import HIGHEST, LOWEST, Rewinds, find_step, step_value
from tests.logs import async_rows, eval_row, resumed_rows, train_row


@pytest.mark.parametrize(
    ("value", "step"),
    [
        (7, 7),
        (-1, -1),
        (7.0, 7),
        (1e15, 10**15),
        (HIGHEST, HIGHEST),
        (LOWEST, LOWEST),
        (HIGHEST + 1, None),
        (LOWEST - 1, None),
        (10**400, None),
        (True, None),
        (False, None),
        (math.nan, None),
        (math.inf, None),
        (-math.inf, None),
        (1e19, None),
        ("7", None),
        (None, None),
        ([7], None),
    ],
)
def test_a_step_is_an_int64(value: Any, step: int | None) -> None:
    """A whole number within 64 bits, also as a float; nothing else."""
    assert step_value(value) == step


def test_the_first_usable_key_names_the_step() -> None:
    """step, else progress/batch, else global_step, else train/global_step; a key of no use is passed over."""
    row = {"train/global_step": 4, "global_step": 3, "progress/batch": 2, "step": 1}
    assert find_step(row) == 1
    assert find_step(row | {"step": None}) == 2
    assert find_step({"step": "x", "global_step": 3, "train/global_step": 4}) == 3
    assert find_step({"train/global_step": 4}) == 4
    assert find_step({"loss": 1.0}) is None
    assert find_step({"step": 1, "env/steps": 9}, ("env/steps",)) == 9


def rewinds_of(rows: list[dict[str, Any]], *, journal: bool = False, resumes: tuple[int, ...] = ()) -> dict[int, int]:
    """Row number -> step it goes back to."""
    current = 0

    def replay() -> Iterator[tuple[int, dict[str, Any]]]:
        yield from ((row["step"], row) for row in rows[:current])

    rewinds = Rewinds(replay, journal)
    found: dict[int, int] = {}
    for current, row in enumerate(rows):
        rewind = rewinds.observe(row["step"], row, current in resumes)
        if rewind is not None:
            found[current] = rewind
    return found


def test_a_resume_from_a_checkpoint_is_a_rewind() -> None:
    """Only the row at step 4 that follows step 5 goes back, to 4."""
    assert rewinds_of(resumed_rows()) == {6: 4}


def test_late_evaluations_are_no_rewind() -> None:
    """An asynchronous log has none, though its evaluation rows come with old steps."""
    assert rewinds_of(async_rows()) == {}


def test_a_second_row_of_a_step_is_no_rewind() -> None:
    """Repeated steps, with the same or other keys."""
    assert rewinds_of([train_row(0), train_row(1), train_row(1, 0.5), eval_row(1), train_row(2)]) == {}


def test_a_log_can_go_back_several_times() -> None:
    """Every resume is one, also to the start and to a step that was gone back to before."""
    steps = [0, 1, 2, 3, 2, 3, 1, 2, 3, 4, 0]
    assert rewinds_of([train_row(step) for step in steps]) == {4: 2, 6: 1, 10: 0}


def test_a_rewind_right_after_a_late_evaluation_is_found() -> None:
    """The late row's own keys do not hide it."""
    rows = [train_row(step) for step in range(6)]
    rows += [eval_row(3), train_row(4), train_row(5)]
    assert rewinds_of(rows) == {7: 4}


def test_a_row_of_new_keys_is_no_rewind() -> None:
    """Fewer than half of its keys were seen before."""
    rows: list[dict[str, Any]] = [{"step": n, "loss": 0.1} for n in range(4)]
    assert rewinds_of([*rows, {"step": 1, "loss": 0.2, "a": 1, "b": 2}]) == {}
    assert rewinds_of([*rows, {"step": 1, "loss": 0.2, "a": 1}]) == {4: 1}


def test_a_row_without_any_metric_is_no_rewind() -> None:
    """Only bookkeeping: nothing can go back."""
    assert rewinds_of([train_row(0), train_row(5), {"step": 1, "_timestamp": 3.0}]) == {}


def test_in_a_log_with_a_journal_only_resumes_count() -> None:
    """The first row after a resume, when its step is not above the highest; a backward step alone is none."""
    rows = [train_row(step) for step in (0, 1, 2, 3, 2, 3, 4)]
    assert rewinds_of(rows, journal=True) == {}
    assert rewinds_of(rows, journal=True, resumes=(4,)) == {4: 2}
    assert rewinds_of([train_row(n) for n in (0, 1, 1)], journal=True, resumes=(2,)) == {2: 1}
    assert rewinds_of([train_row(n) for n in (0, 1, 2)], journal=True, resumes=(2,)) == {}
