"""Which reports and rollouts a tracker gets: not all of a long run, but some from its whole length.

Guarantees: at most :data:`REPORTS` (iteration, split) pairs and :data:`BYTES` bytes a run; what was sent once is sent again
when it changed; the same files give the same answer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from runmirror.log import layout
from runmirror.log.layout import Kind
from runmirror.log.sources import LogFile

REPORTS = 20
"""Pairs of iteration and split whose files a tracker gets."""
BYTES = 50_000_000
"""Bytes of all of them."""


class _Pair(NamedTuple):
    iteration: int
    split: str


def within_budget(
    files: Sequence[LogFile],
    sent: Collection[str],
    *,
    ended: bool,
    free: Collection[Kind] = (),
    reports: int = REPORTS,
    most_bytes: int = BYTES,
) -> list[LogFile]:
    """The files that a sink gets, of those given, in their order.

    While a run goes on these are its first pairs of iteration and split, then some at growing distances (the first four of
    those that have files, then the 6th, 9th, 13th, 19th, ...), so that there is room for what comes. Once it has ended, the
    rest of the budget is spread evenly over the whole run, its last pair included.

    Args:
        files: of a run, of any kinds; those that are no reports or rollouts cost nothing.
        sent: paths of those that the sink had before.
        ended: whether the run has ended.
        free: kinds that cost nothing for this sink.
        reports, most_bytes: the budget.
    """
    chosen: set[str] = set()
    pairs: dict[_Pair, list[LogFile]] = {}
    for file in files:
        name = layout.parse(file.path)
        if file.kind in free or name is None or name.iteration is None or name.split is None:
            chosen.add(file.path)
        else:
            pairs.setdefault(_Pair(name.iteration, name.split), []).append(file)
    order = sorted(pairs)
    had = [pair for pair in order if any(file.path in sent for file in pairs[pair])]
    room = reports - len(had)
    rest = [pair for pair in order if pair not in set(had)]
    if ended:
        picked = [rest[at] for at in _spread(len(rest), room)]
    else:
        early = set(_growing(len(order)))
        picked = [pair for at, pair in enumerate(order) if at in early and pair not in set(had)][: max(0, room)]
    left = most_bytes
    for pair in had + picked:
        for file in sorted(pairs[pair], key=lambda file: file.path):
            if file.size <= left:
                left -= file.size
                chosen.add(file.path)
    return [file for file in files if file.path in chosen]


def _spread(count: int, places: int) -> list[int]:
    """At most ``places`` of the numbers below ``count``, evenly spread, the last one first of all."""
    if places <= 0 or not count:
        return []
    if places >= count:
        return list(range(count))
    if places == 1:
        return [count - 1]
    return [round(at * (count - 1) / (places - 1)) for at in range(places)]


def _growing(count: int) -> list[int]:
    """0, 1, 2, 3, 5, 8, 12, 18, 27, ... below ``count``."""
    found, at = [], 0
    while at < count:
        found.append(at)
        at = max(at + 1, (3 * at + 1) // 2)
    return found
