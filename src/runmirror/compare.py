"""The points of a log and those of a tracker, side by side.

Guarantees: touches no file and no tracker. Every due point is counted once, as matching, missing, different or kept
otherwise for a known reason; every point of the tracker that no due point explains is known or extra. One run is in memory.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from runmirror.log.rows import Row
from runmirror.log.runlog import CUT
from runmirror.mirror import Policy
from runmirror.sinks.base import Capabilities, RefusesKeys, Sink, SinkOptions

KNOWN = ("rounded", "superseded", "rejected", "left_out", "repeated", "once", "nonfinite", "tombstones", "orphaned")
"""Reasons for which a point is other than in the log with nothing being wrong: ``rounded`` and ``once`` ones also match."""
State = Literal["equal", "different", "absent", "broken"]
DifferenceKind = Literal["missing", "extra", "value", "time"]
_FLOAT = struct.Struct("<f")
Entry = tuple[float, float, int]
"""Value, time, and the ordinal of the row it is from."""
Table = dict[str, dict[int, list[Entry]]]
"""key -> step -> points there."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A point that is not as it should be: "missing", "extra", another "value" or another "time". ``expected`` and
    ``found`` are values, or Unix seconds for a time; None where there is none."""

    kind: DifferenceKind
    key: str
    step: int
    expected: float | None
    found: float | None


@dataclass(slots=True)
class VerifiedRun:
    """What was found of a run.

    ``state``: equal, different, absent (the tracker has no such run; ``mirrored`` says whether it ever had), broken (the log
    or the tracker can't be read). ``points`` are those the tracker has to show; ``not_sent`` of the missing ones are in rows
    behind the cursor; ``known`` is reason -> count (``KNOWN``); ``examples`` are the first few differences.
    """

    path: str
    name: str
    state: State = "equal"
    mirrored: bool = False
    url: str | None = None
    points: int = 0
    matching: int = 0
    missing: int = 0
    not_sent: int = 0
    extra: int = 0
    different: int = 0
    known: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KNOWN, 0))
    examples: list[Difference] = field(default_factory=list)
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing is missing, extra or different."""
        return self.error is None and not (self.missing or self.extra or self.different)


class Due:
    """What the tracker has to show, gathered row by row: ``points``; ``gone`` are those that were superseded and that it may
    show all the same, ``refused`` those it never took, ``left_out`` those of keys that the options leave out. With
    ``taken_over``, ``orphans`` are (step, time): points from that step on, written before, may be of rows that never reached
    the log."""

    def __init__(
        self, sink: Sink, options: SinkOptions, policy: Policy, sent: float, rejected: set[tuple[int, str | None]]
    ) -> None:
        self.points: Table = {}
        self.gone: Table = {}
        self.refused: Table = {}
        self.left_out: Table = {}
        self.rewinds: set[int] = set()
        self.taken_over = False
        self.orphans: list[tuple[int, float]] = []
        self._cut = False
        self.sent = sent
        self._sink, self._options, self._last, self._rejected = sink, options, policy == "last", rejected
        self._keeps = sink.capabilities.rewinds == "append"
        self._homes: dict[str, tuple[str, Table]] = {}

    def wants(self, key: str) -> bool:
        """Whether ``include`` and ``exclude`` let a key through."""
        include, exclude = self._options.include, self._options.exclude
        return (not include or _matches(key, include)) and not _matches(key, exclude)

    def _home(self, key: str) -> tuple[str, Table]:
        """The key as a tracker can spell it, and the table its points belong to."""
        refused = isinstance(self._sink, RefusesKeys) and self._sink.refuses(key) is not None
        table = self.left_out if not self.wants(key) else self.refused if refused else self.points
        self._homes[key] = key.encode("utf-8", "replace").decode(), table
        return self._homes[key]

    def add(self, row: Row) -> None:
        """Take up the next row."""
        if self._cut and row.rewind is not None and self.taken_over:
            self.orphans.append((row.rewind, row.time))
        self._cut = row.fault == CUT
        if row.rewind is not None and self._last:
            self._go_back(row.rewind, row.ordinal)
        if row.fault:
            return
        points = row.scalars()
        whole = (row.ordinal, None) in self._rejected
        spelt: set[str] = set()
        for key, value in points.items():
            name, table = self._homes.get(key) or self._home(key)
            clash = name != key and (name in points or name in spelt)
            if table is self.points and (whole or clash or (row.ordinal, key) in self._rejected):
                table = self.refused
            spelt.add(name)
            entries = table.setdefault(name, {}).setdefault(row.step, [])
            if self._last and entries:
                if table is self.points and (self._keeps or row.ordinal >= self.sent):
                    self._excuse(name, row.step, entries)
                entries.clear()
            entries.append((value, row.time, row.ordinal))

    def _go_back(self, step: int, ordinal: int) -> None:
        self.rewinds.add(step)
        for table in (self.points, self.refused, self.left_out):
            for key, steps in table.items():
                taken = {at: steps.pop(at) for at in [at for at in steps if at >= step]}
                # A tracker that takes points back can't when a key keeps none, and doesn't before it has the row.
                if table is self.points and (self._keeps or ordinal >= self.sent or not steps):
                    for at, entries in taken.items():
                        self._excuse(key, at, entries)

    def _excuse(self, key: str, step: int, entries: list[Entry]) -> None:
        self.gone.setdefault(key, {}).setdefault(step, []).extend(entries)


class Comparison:
    """Compares one run, and counts into ``run``."""

    def __init__(self, run: VerifiedRun, due: Due, capabilities: Capabilities, examples: int) -> None:
        self._run, self._due, self._can, self._examples = run, due, capabilities, examples
        self._precision, self._narrow = capabilities.time_precision, capabilities.precision == "float32"

    def compare(self, held: Table) -> None:
        """``held`` is what the tracker shows."""
        run, due = self._run, self._due
        run.points = _size(due.points)
        run.known["left_out"] = _size(due.left_out)
        for key in dict.fromkeys([*due.points, *held]):
            expected, found = due.points.get(key, {}), held.get(key, {})
            if expected or due.wants(key):
                for step in sorted({**expected, **found}):
                    one, other = expected.get(step, []), found.get(step, [])
                    if len(one) == len(other) == 1 and self._same(one[0], other[0]):  # nearly always
                        self._match(one[0][0], other[0][0])
                    else:
                        self._compare_step(key, step, one, other)
        run.known["rejected"] = _size(due.refused)  # less those that were found

    def _compare_step(self, key: str, step: int, expected: list[Entry], found: list[Entry]) -> None:
        run, known = self._run, self._run.known
        matched: list[Entry] = []
        unmatched: list[Entry] = []
        found = list(found)
        for entry in expected:
            at = next((at for at, other in enumerate(found) if self._same(entry, other)), -1)
            if at >= 0:
                self._match(entry[0], found.pop(at)[0])
            elif self._can.equal_points == "once" and any(self._same(entry, other) for other in matched):
                self._match(entry[0], entry[0])
                known["once"] += 1
                continue
            (matched if at >= 0 else unmatched).append(entry)
        rest = [entry for entry in unmatched if self._is_kept(entry[0])]
        lost = len(unmatched) - len(rest)
        known["nonfinite"] += lost
        del found[:lost]  # what the tracker made of them
        gone, refused = (table.get(key, {}).get(step, []) for table in (self._due.gone, self._due.refused))
        for other in found:
            if any(self._same(entry, other) for entry in gone):
                known["superseded"] += 1
            elif late := next((entry for entry in refused if self._same(entry, other)), None):
                refused.remove(late)
                self._match(late[0], other[0])
            elif any(self._same(entry, other) for entry in matched):
                known["repeated"] += 1
            elif rest:
                value, when, _ = rest.pop(0)
                run.different += 1
                if self._equal(value, other[0]):
                    self._tell("time", key, step, when, other[1])
                else:
                    self._tell("value", key, step, value, other[0])
            elif any(step >= first and other[1] <= time for first, time in self._due.orphans):
                known["orphaned"] += 1
            elif math.isnan(other[0]) and step in self._due.rewinds and key in self._due.gone:
                known["tombstones"] += 1
            else:
                run.extra += 1
                self._tell("extra", key, step, None, other[0])
        for value, _, ordinal in rest:
            run.missing += 1
            run.not_sent += ordinal >= self._due.sent
            self._tell("missing", key, step, value, None)

    def _match(self, value: float, found: float) -> None:
        self._run.matching += 1
        if value != found and found == found:
            self._run.known["rounded"] += 1

    def _same(self, entry: Entry, other: Entry) -> bool:
        return abs(entry[1] - other[1]) <= self._precision and self._equal(entry[0], other[0])

    def _equal(self, value: float, found: float) -> bool:
        """Whether ``found`` is ``value`` as the tracker keeps it."""
        return value == found or self._as_kept(value) == found or (math.isnan(value) and math.isnan(found))

    def _as_kept(self, value: float) -> float:
        if not self._narrow:
            return float(value)
        try:
            return _FLOAT.unpack(_FLOAT.pack(value))[0]  # type: ignore[no-any-return]
        except OverflowError:
            return math.copysign(math.inf, value)

    def _is_kept(self, value: float) -> bool:
        rule = self._can.nonfinite
        return rule == "all" or math.isfinite(value) or (rule == "nan" and math.isnan(value))

    def _tell(self, kind: DifferenceKind, key: str, step: int, expected: float | None, found: float | None) -> None:
        if len(self._run.examples) < self._examples:
            self._run.examples.append(Difference(kind, key, step, expected, found))


def _size(table: Table) -> int:
    return sum(len(entries) for steps in table.values() for entries in steps.values())


def _matches(key: str, globs: tuple[str, ...]) -> bool:
    return any(fnmatchcase(key, glob) for glob in globs)
