"""Which rows of an event file survive, and what has to be written again so that TensorBoard shows exactly those.

TensorBoard's default loader lets a new point take away every earlier point of its tag at the same or a later step, and
nothing else; its other loader only goes by ``SessionLog.START``. Hence, for the default one:

- After a rewind to r, a tag that isn't logged again would keep its abandoned points: its last surviving point (step < r)
  is written once more.
- A row that comes late (an evaluation whose step is below a point its tag already has) would take the later points away:
  they are written once more.

Guarantees: what is written again is a function of the records before it, so a resumed run writes the same. Memory is 18
bytes a row; values are read back from the file when they are needed. Nothing here writes.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from runmirror.sinks.event_file import RowShapes, event_pb2

_ALLOWANCE = 1 << 20
_POINT = 12


@dataclass(frozen=True, slots=True)
class Again:
    """Points of one row to be written again, unchanged."""

    step: int
    wall_time: float
    points: list[tuple[str, float]]


class History:
    """The surviving rows of a run: sorted by step, and by their order in the file where steps are equal."""

    def __init__(self, shapes: RowShapes, read: Callable[[int], bytes]) -> None:
        self._shapes = shapes
        self._read = read
        self._steps = array("q")
        self._places = array("q")
        self._kinds = array("H")
        self._last: dict[int, int] = {}
        self.row_bytes = 0
        self.again_bytes = 0

    @property
    def top(self) -> int | None:
        """The highest surviving step."""
        return self._steps[-1] if self._steps else None

    def add(self, step: int, place: int, shape: int) -> None:
        """A row was written at ``place``; ``shape`` is the number of its shape."""
        steps = self._steps
        if not steps or step >= steps[-1]:
            steps.append(step)
            self._places.append(place)
            self._kinds.append(shape)
            self._last[shape] = step
        else:
            at = bisect_right(steps, step)
            steps.insert(at, step)
            self._places.insert(at, place)
            self._kinds.insert(at, shape)
            self._last[shape] = max(step, self._last.get(shape, step))

    def rewind(self, step: int) -> None:
        """Every row at ``step`` or later was abandoned."""
        first = bisect_left(self._steps, step)
        del self._steps[first:], self._places[first:], self._kinds[first:]
        gone = {shape for shape, last in self._last.items() if last >= step}
        for shape in gone:
            del self._last[shape]
        at = first
        while gone and at:
            at -= 1
            shape = self._kinds[at]
            if shape in gone:
                self._last[shape] = self._steps[at]
                gone.discard(shape)

    def abandoned(self, step: int) -> set[str]:
        """Tags that have a point at ``step`` or later."""
        tags: set[str] = set()
        for shape, last in self._last.items():
            if last >= step and shape:
                tags.update(self._shapes.numbered[shape].tags)
        if self._last.get(0, step - 1) >= step:
            for at in range(bisect_left(self._steps, step), len(self._steps)):
                if not self._kinds[at]:
                    tags.update(tag for tag, _ in self._row(at).points)
        return tags

    def survivors(self, step: int, tags: set[str]) -> list[Again]:
        """The last point before ``step`` of each of ``tags`` that has one, oldest first."""
        wanted = set(tags)
        holders = self._holders(wanted)
        found: list[Again] = []
        at = bisect_left(self._steps, step)
        while wanted and at:
            at -= 1
            if self._kinds[at] in holders:
                row = self._row(at, wanted)
                if row.points:
                    found.append(row)
                    wanted.difference_update(tag for tag, _ in row.points)
                    holders = self._holders(wanted)
        return found[::-1]

    def late(self, step: int, tags: Iterable[str]) -> set[str]:
        """Those of ``tags`` that may have a point after ``step``."""
        if not self._steps or step >= self._steps[-1]:
            return set()
        own = set(tags)
        late: set[str] = set()
        for shape, last in self._last.items():
            if last > step and shape:
                late.update(own.intersection(self._shapes.numbered[shape].tags))
        if self._last.get(0, step) > step and late != own:
            for at in range(bisect_right(self._steps, step), len(self._steps)):
                if not self._kinds[at]:
                    late.update(tag for tag, _ in self._row(at, own).points)
        return late

    def affordable(self, step: int, tags: set[str]) -> bool:
        """Whether writing the points of ``tags`` after ``step`` again keeps the file within twice its rows and 1 MB: a
        log that jumps back and forth in every row would make it grow without end."""
        rows = len(self._steps) - bisect_right(self._steps, step)
        return self.again_bytes + rows * len(tags) * _POINT <= _ALLOWANCE + self.row_bytes

    def later(self, step: int, tags: set[str]) -> list[Again]:
        """Every point of ``tags`` after ``step``, the last of each step only, oldest first."""
        holders = self._holders(tags)
        rows: list[Again] = []
        seen: set[tuple[str, int]] = set()
        for at in range(len(self._steps) - 1, bisect_right(self._steps, step) - 1, -1):
            if self._kinds[at] in holders:
                row = self._row(at, tags)
                points = [point for point in row.points if (point[0], row.step) not in seen]
                seen.update((tag, row.step) for tag, _ in points)
                if points:
                    rows.append(Again(row.step, row.wall_time, points))
        return rows[::-1]

    def _holders(self, tags: set[str]) -> set[int]:
        return {shape for shape in self._last if not shape or not tags.isdisjoint(self._shapes.numbered[shape].tags)}

    def _row(self, at: int, tags: set[str] | None = None) -> Again:
        event: Any = event_pb2.Event.FromString(self._read(self._places[at]))
        values = [value for value in event.summary.value if value.HasField("simple_value")]
        points = [(value.tag, value.simple_value) for value in values if tags is None or value.tag in tags]
        return Again(event.step, event.wall_time, points)
