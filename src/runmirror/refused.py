"""What a tracker refused, as it is put aside; also what it refused while the process that should have done that was killed.

A tracker that tells its own position is asked no row twice, so what it refused then is told by nobody: it is worked out again
from the log. Guarantees: nothing is listed twice, one batch is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from runmirror.log.rows import Position, Row
from runmirror.log.sources import Source
from runmirror.prepare import Preparer
from runmirror.sinks.base import RefusesKeys, Rejected, Sink
from runmirror.state import MirrorState

BATCH = 1000


def as_line(one: Rejected, row: Row | None) -> dict[str, object]:
    """What is put aside of a refusal: where, why, and the values, when the row is known."""
    line: dict[str, object] = {"ordinal": one.ordinal, "key": one.key, "reason": one.reason}
    if row is not None:
        line |= {"step": row.step, "data": row.data if one.key is None else {one.key: row.data.get(one.key)}}
    return line


def refused_unseen(
    source: Source, sink: Sink, state: MirrorState, preparer: Preparer, until: Position
) -> Iterator[tuple[list[Rejected], dict[int, Row]]]:
    """What the sink refuses of the rows from the cursor up to ``until`` and that is not put aside yet, with those rows."""
    if not isinstance(sink, RefusesKeys):
        return
    listed = state.last_rejected()
    rows = source.rows(state.record.position)
    reasons: dict[str, str | None] = {}
    while batch := list(islice(rows, BATCH)):
        found: list[Rejected] = []
        for row in preparer.prepare(batch):
            if not listed < row.ordinal < until.ordinal:
                continue
            for key in row.scalars():
                if key not in reasons:
                    reasons[key] = sink.refuses(key)
                if reason := reasons[key]:
                    found.append(Rejected(row.ordinal, key, reason))
        if found:
            yield found, {row.ordinal: row for row in batch}
        if batch[-1].ordinal + 1 >= until.ordinal:
            return
