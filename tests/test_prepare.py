"""What of a row goes to a sink after rewinds, against the plain rule."""

from __future__ import annotations

import random

import pytest

from runmirror.log.rows import Row
from runmirror.prepare import Preparer
from runmirror.sinks.base import SinkOptions


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("foreseen", [True, False])
def test_exactly_what_a_later_rewind_supersedes_is_left_out(seed: int, foreseen: bool) -> None:
    """Told of all rows before, or of each batch as it comes: a row is empty when a rewind that is known then goes back to its
    step or below."""
    chance = random.Random(seed)
    rows = [
        Row(ordinal, {"loss": 1.0}, chance.randrange(30), 0.0, rewind=chance.choice([None, None, chance.randrange(30)]))
        for ordinal in range(60)
    ]
    preparer = Preparer(SinkOptions(), keeps_superseded=False)
    assert preparer.needs_rewinds
    if foreseen:
        preparer.foresee(iter(rows))
    for first in range(0, 60, 7):
        known = rows if foreseen else rows[: first + 7]
        for row, made in zip(rows[first : first + 7], preparer.prepare(rows[first : first + 7]), strict=True):
            gone = any(
                later.ordinal > row.ordinal and later.rewind is not None and row.step >= later.rewind for later in known
            )
            assert (made.fault == "superseded by a rewind") == gone
            assert bool(made.data) != gone
    assert not preparer.needs_rewinds


def test_a_sink_that_keeps_superseded_points_gets_them() -> None:
    """Nothing has to be foreseen."""
    preparer = Preparer(SinkOptions(), keeps_superseded=True)
    assert not preparer.needs_rewinds
    rows = [Row(0, {"a": 1}, 5, 0.0), Row(1, {"a": 2}, 0, 0.0, rewind=0)]
    assert preparer.prepare(rows) == rows
