"""What of a row goes to a sink: chosen keys, and nothing of rows that were refused or that a rewind superseded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from runmirror.log.rows import Row
from runmirror.sinks.base import SinkOptions


class Preparer:
    """Makes rows ready for one sink.

    Args:
        options: ``include`` and ``exclude``.
        keeps_superseded: whether the sink gets superseded points: it takes them back itself, or the policy is "all".
    """

    def __init__(self, options: SinkOptions, keeps_superseded: bool) -> None:
        self._options = options
        self._rewinds: list[tuple[int, int]] | None = None if not keeps_superseded else []
        self._keeps_superseded = keeps_superseded
        self._refused: dict[int, str] = {}

    @property
    def needs_rewinds(self) -> bool:
        """Whether :meth:`foresee` wants all rows of the log, once, before the first are prepared."""
        return self._rewinds is None

    def foresee(self, rows: Iterable[Row]) -> None:
        """Take up the rewinds among rows that are prepared next: what they supersede of the rows before them is left out."""
        if self._keeps_superseded:
            return
        known = self._rewinds or []
        last = known[-1][0] if known else -1
        self._rewinds = known + [
            (row.ordinal, row.rewind) for row in rows if row.rewind is not None and row.ordinal > last
        ]

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
        if self._rewinds and any(row.ordinal < at and row.step >= step for at, step in self._rewinds):
            return row.emptied("superseded by a rewind")
        include, exclude = self._options.include, self._options.exclude
        if not include and not exclude:
            return row
        kept = {
            key: value
            for key, value in row.data.items()
            if key[:1] == "_" or ((not include or _matches(key, include)) and not _matches(key, exclude))
        }
        return replace(row, data=kept)


def _matches(key: str, globs: tuple[str, ...]) -> bool:
    return any(fnmatchcase(key, glob) for glob in globs)
