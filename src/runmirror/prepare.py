"""What of a row goes to a sink: chosen keys, and nothing of rows that were refused or that a rewind superseded."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import accumulate

from runmirror.log.rows import Row
from runmirror.sinks.base import SinkOptions

_MAX_KEYS = 20_000


class Preparer:
    """Makes rows ready for one sink.

    Args:
        options: ``include`` and ``exclude``.
        keeps_superseded: whether the sink gets superseded points: it takes them back itself, or the policy is "all".
    """

    def __init__(self, options: SinkOptions, keeps_superseded: bool) -> None:
        self._options = options
        self._foreseen = keeps_superseded
        self._rewinds: list[int] = []  # ordinals of the rows that go back, in order
        self._steps: list[int] = []  # where each goes back to
        self._lowest: list[int] = []  # where it or a later one goes back to at the lowest
        self._keeps_superseded = keeps_superseded
        self._refused: dict[int, str] = {}
        self._wanted: dict[str, bool] = {}

    @property
    def needs_rewinds(self) -> bool:
        """Whether :meth:`foresee` wants all rows of the log, once, before the first are prepared."""
        return not self._foreseen

    def foresee(self, rows: Iterable[Row]) -> None:
        """Take up the rewinds among rows that are prepared next: what they supersede of the rows before them is left out."""
        if self._keeps_superseded:
            return
        self._foreseen, known = True, len(self._rewinds)
        for row in rows:
            if row.rewind is not None and (not self._rewinds or row.ordinal > self._rewinds[-1]):
                self._rewinds.append(row.ordinal)
                self._steps.append(row.rewind)
        if len(self._rewinds) > known:
            self._lowest = [*accumulate(reversed(self._steps), min)][::-1]

    def refuse(self, ordinal: int, reason: str) -> bool:
        """Send this row without values from now on; False when that was known."""
        if ordinal in self._refused:
            return False
        self._refused[ordinal] = reason
        return True

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        """The rows as the sink gets them."""
        self.foresee(rows)
        return [self._prepare(row) for row in rows]

    def _prepare(self, row: Row) -> Row:
        if row.ordinal in self._refused:
            return row.emptied(self._refused[row.ordinal])
        later = bisect_right(self._rewinds, row.ordinal)
        if later < len(self._rewinds) and row.step >= self._lowest[later]:
            return row.emptied("superseded by a rewind")
        if not self._options.include and not self._options.exclude:
            return row
        return replace(row, data={key: value for key, value in row.data.items() if self._wants(key)})

    def _wants(self, key: str) -> bool:
        """Whether the globs let a key through; looked up for keys that were seen before."""
        wanted = self._wanted.get(key)
        if wanted is None:
            include, exclude = self._options.include, self._options.exclude
            wanted = key[:1] == "_" or ((not include or _matches(key, include)) and not _matches(key, exclude))
            if len(self._wanted) >= _MAX_KEYS:
                self._wanted.clear()
            self._wanted[key] = wanted
        return wanted


def _matches(key: str, globs: tuple[str, ...]) -> bool:
    return any(fnmatchcase(key, glob) for glob in globs)
