"""Health: tells from the rows of a run, as they come, what is wrong with it.

Guarantees:

- A healthy run gives no finding: what is missing is not zero, keys may come and go, one odd value is not a trend.
- Nothing raises for what a row holds, and memory does not grow with the rows.
- What a resume superseded does not count: give only the rows that are still valid, the first one after a resume with its
  ``rewind`` (:class:`runmirror.catalogue.runs.RunWatch` does that).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runmirror.catalogue.checks import Watcher, watcher
from runmirror.catalogue.entries import Catalogue
from runmirror.catalogue.findings import Findings
from runmirror.catalogue.models import Metric
from runmirror.log.rows import Row

STEADY = 10
"""Rows after which a stride, or a key that is always there, counts as usual."""
ABSENT = 3
"""A key vanished when it is missing in so many training rows, or so many times as long as it ever was."""
_MAX_KEYS = 20_000


@dataclass(slots=True)
class _Seen:
    """A key that training rows have: how often, in which last, and the longest way from one to the next."""

    count: int = 0
    number: int = -1
    gap: int = 1
    gone: bool = False


class Health:
    """The health of one run.

    Args:
        catalogue: what its metrics mean.
        config: its configuration, for checks that need a limit from there.
    """

    def __init__(self, catalogue: Catalogue, config: Mapping[str, Any] | None = None) -> None:
        self.findings = Findings()
        self._catalogue = catalogue
        self._config = config or {}
        self._known: set[str] = set()
        self._metrics: dict[str, Metric] = {}
        self._watchers: dict[str, list[tuple[str, Watcher]]] = {}
        self._doubtful: set[str] = set()  # keys whose NaN is no fault until they had a number, and that had none yet
        self._regular: dict[str, _Seen] = {}
        self._number = -1  # of the last training row
        self._steps: deque[int] = deque(maxlen=1000)  # of training rows
        self._timed: bool | None = None
        self._untimed: tuple[Row, int] | None = None  # the first of so many rows without a time
        self._top: int | None = None
        self._stride, self._strides = 0, 0
        self._hole: tuple[int, int] | None = None  # first and last step of a gap that the next row confirms
        self._broken = False  # a line that can't be read stands before this row

    def feed(self, row: Row, highest: int | None = None) -> None:
        """Take the next row. ``highest`` is the step that the run had come to when this row goes back."""
        if row.fault:
            self._note("broken-lines", row, row.step, row.fault)
            self._broken = True
            return
        data = row.data
        if not data.keys() <= self._known:
            for key in data.keys() - self._known:
                self._add(key)
        if row.rewind is not None:
            self._go_back(row, highest)
        self._check_time(row)
        points = row.scalars()
        if _any_nonfinite(points):
            self._check_nonfinite(row, points)
        if self._doubtful:
            self._doubtful -= {key for key in self._doubtful & points.keys() if points[key] - points[key] == 0}
        if row.summary or not points:
            return
        self._check_steps(row)
        self._check_keys(row)
        number, step = self._number, row.step
        for key, watchers in self._watchers.items():
            value = points.get(key)
            if value is None or value - value != 0:
                continue
            for rule, watch in watchers:
                hit = watch.add(number, step, value)
                if hit is not None:
                    self.findings.add(
                        rule, key, hit.step, hit.value, level=hit.level, other=hit.other, row=row.ordinal, now=step
                    )

    def _add(self, key: str) -> None:
        """A key that was not seen before."""
        if len(self._known) >= _MAX_KEYS:
            return
        self._known.add(key)
        if key[:1] == "_" or key == "step":
            return
        found = self._catalogue.describe(key)
        if found is None or found.metric.nonfinite == "if never finite":
            self._doubtful.add(key)
        if found is None:
            return
        metric = self._metrics[key] = found.metric
        made = [
            (check.rule, watcher(check, self._config))
            for check in metric.checks
            if not (found.evaluation and check.rule == "no-signal")  # it teaches nothing, with groups of one perhaps
        ]
        watchers = [(rule, watch) for rule, watch in made if watch is not None]
        if watchers:
            self._watchers[key] = watchers
        if not metric.sparse and not found.evaluation:
            self._regular[key] = _Seen()

    def _note(
        self, rule: str, row: Row, step: int, value: float | str, other: float | None = None, count: int = 1
    ) -> None:
        self.findings.add(rule, None, step, value, about="log", other=other, row=row.ordinal, now=row.step, count=count)

    # -- the log

    def _go_back(self, row: Row, highest: int | None) -> None:
        step = row.rewind if row.rewind is not None else row.step
        self._note("rewind", row, step, step, highest)
        self._stride = self._strides = 0
        self._top = self._hole = None
        self._regular = {name: _Seen() for name in self._regular}

    def _check_time(self, row: Row) -> None:
        timed = "_timestamp" in row.data
        if self._timed is None:
            self._timed = timed
        if not timed:
            first, _ = self._untimed or (row, 0)
            self._untimed = first, self._untimed[1] + 1 if self._untimed else 1
        if timed != self._timed:
            if timed:  # the first one with a time, behind some without
                self._timed = True
            if self._untimed is not None:
                (first, count), self._untimed = self._untimed, None
                self._note("no-time", first, first.step, first.step, count=count)
        elif timed:
            self._untimed = None

    def _check_steps(self, row: Row) -> None:
        step, top = row.step, self._top
        if top is None or step <= top:
            self._top = step if top is None else top
            return
        stride, self._top = step - top, step
        broken, self._broken = self._broken, False
        if broken and self._strides:  # that explains a missing step
            return
        if stride == self._stride:
            self._strides += 1
            if self._hole is not None:
                (first, last), self._hole = self._hole, None
                self._note("gap", row, first, last, first)
        elif self._strides >= STEADY and self._hole is None and stride % self._stride == 0:
            self._hole = top + self._stride, step - self._stride
        else:
            self._stride, self._strides, self._hole = stride, 1, None

    # -- keys

    def _check_nonfinite(self, row: Row, points: Mapping[str, float]) -> None:
        for key, value in points.items():
            if value - value == 0:
                continue
            metric = self._metrics.get(key)
            if key in self._doubtful or key not in self._known or (metric is not None and metric.nonfinite == "fine"):
                continue
            rule, other = "non-finite", None
            if metric is not None and metric.hidden_by is not None:
                hider = key[: len(key) - len(metric.key)] + metric.hidden_by  # with the same name in front
                shown = points.get(hider)
                if shown is not None and shown - shown == 0:
                    rule, other = "hidden-nan-step", hider
            self.findings.add(
                rule, key, row.step, float(value), level="fail", other=other, row=row.ordinal, now=row.step
            )

    def _check_keys(self, row: Row) -> None:
        """Count the training row, if it is one, and look for keys that it should have."""
        data, regular = row.data, self._regular
        here = regular.keys() & data.keys()
        if len(here) * 4 < len(regular):  # an evaluation, or another row beside training
            return
        self._number = number = self._number + 1
        self._steps.append(row.step)
        for key in here:
            seen = regular[key]
            if seen.count:
                seen.gap = max(seen.gap, number - seen.number)
            seen.count, seen.number, seen.gone = seen.count + 1, number, False
        for key in regular.keys() - here:
            seen = regular[key]
            away = number - seen.number
            if seen.count < STEADY or seen.gone or away < ABSENT * seen.gap:
                continue
            seen.gone = True
            step = self._steps[-away] if away <= len(self._steps) else self._steps[0]
            self.findings.add("vanished", key, step, None, row=row.ordinal, now=row.step)


def _any_nonfinite(points: Mapping[str, float]) -> bool:
    try:
        total = sum(points.values())
    except OverflowError:
        return True
    return total - total != 0
