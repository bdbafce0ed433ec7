"""The tests behind the checks of a catalogue: each watches one metric of one run, value by value.

Guarantees: memory is bounded, one value costs a few microseconds at most, and only finite values are looked at.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, Protocol

from runmirror.catalogue import models

Level = Literal["warn", "fail"]
START = 10
"""Values that make up the start of a run, and a stretch of it."""
LONG = 20
"""Values of a longer stretch."""
NOISE = 50
"""Differences from which noise is told."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A test holds: since which step, with which value, and what that is compared with (None: nothing)."""

    step: int
    value: float
    level: Level = "warn"
    other: float | None = None


class Watcher(Protocol):
    """A test of one metric. ``number`` counts training rows, so that a row without the metric shows."""

    def add(self, number: int, step: int, value: float) -> Hit | None:
        """Take the next value; whether the test holds now."""
        ...


class Streak:
    """Holds when so many values in a row are bad; since the first of them."""

    def __init__(self, rows: int, level: Level = "warn", other: float | None = None) -> None:
        self._rows, self._level, self._other = rows, level, other
        self._count = 0
        self._first = (0, 0.0)

    def add(self, bad: bool, step: int, value: float) -> Hit | None:
        if not bad:
            self._count = 0
            return None
        self._count += 1
        if self._count == 1:
            self._first = step, value
        return Hit(*self._first, self._level, self._other) if self._count >= self._rows else None


class Above:
    def __init__(self, check: models.Above) -> None:
        self._check = check
        self._warn, self._fail = Streak(check.rows), Streak(check.rows, "fail")

    def add(self, number: int, step: int, value: float) -> Hit | None:
        check = self._check
        height = abs(value) if check.absolute else value
        warned = self._warn.add(height > check.warn, step, value)
        failed = self._fail.add(check.fail is not None and height > check.fail, step, value)
        return failed or warned


class Below:
    def __init__(self, check: models.Below) -> None:
        self._warn = check.warn
        self._streak = Streak(check.rows)

    def add(self, number: int, step: int, value: float) -> Hit | None:
        return self._streak.add(value <= self._warn, step, value)


class Band:
    def __init__(self, check: models.Band) -> None:
        self._low, self._high = check.warn
        self._lowest, self._highest = check.fail or (-math.inf, math.inf)
        self._streak = Streak(check.rows)

    def add(self, number: int, step: int, value: float) -> Hit | None:
        warned = self._streak.add(not self._low <= value <= self._high, step, value)
        return warned if self._lowest < value < self._highest else Hit(step, value, "fail")


class Recent:
    """The last values of a metric, and how noisy it is."""

    def __init__(self, size: int) -> None:
        self.points: deque[tuple[int, float]] = deque(maxlen=size)
        self._jumps: deque[float] = deque(maxlen=NOISE)

    def add(self, step: int, value: float) -> None:
        if self.points:
            self._jumps.append(abs(value - self.points[-1][1]))
        self.points.append((step, value))

    def last(self, count: int) -> list[float]:
        """The last ``count`` values, or as many as there are."""
        return [value for _, value in list(self.points)[-count:]]

    def noise(self) -> float:
        """The standard deviation that explains the steps from value to value (of noise, their mean is 1.13 of it)."""
        return 0.886 * sum(self._jumps) / len(self._jumps) if self._jumps else 0.0

    def since(self, bad: Callable[[float], bool], count: int = 3) -> tuple[int, float]:
        """The first of the last ``count`` points that is bad."""
        late = list(self.points)[-count:]
        return next((point for point in late if bad(point[1])), late[-1])


class Negative:
    def __init__(self, check: models.Negative) -> None:
        self._scale = check.scale
        self._recent = Recent(NOISE)
        self._quick, self._long = Streak(3), Streak(LONG)

    def add(self, number: int, step: int, value: float) -> Hit | None:
        recent = self._recent
        if value >= 0:
            recent.add(step, value)
            self._quick.add(False, step, value)
            return self._long.add(False, step, value)
        earlier, noise = recent.last(NOISE), recent.noise()
        recent.add(step, value)
        limit = 0.01 * max(self._scale, median(map(abs, earlier)) if earlier else 0.0)
        hit = self._long.add(value < -limit, step, value)
        if len(earlier) < START:
            return hit
        usual = median(earlier[-START:])
        far = limit if usual > 3 * noise else max(limit, 4 * noise)  # around 0 it is negative at times
        return self._quick.add(value < -far, step, value) or hit


class Explodes:
    def __init__(self, check: models.Explodes) -> None:
        self._check = check
        self._before: deque[float] = deque(maxlen=LONG)
        self._high: list[tuple[int, float]] = []

    def add(self, number: int, step: int, value: float) -> Hit | None:
        check, before = self._check, self._before
        if len(before) >= START:
            top = max(before)
            if top <= 0 < value and not check.floor:  # it was switched off until now
                top = value
            if value > 3 * top and value > check.floor and value > check.times * median(before):
                self._high.append((step, value))
                if len(self._high) < check.rows:
                    return None
                (first, height), other = self._high[0], median(before)
                self._settle()
                return Hit(first, height, "warn", other)
        self._settle()
        before.append(value)
        return None

    def _settle(self) -> None:
        """What was high for a while is part of the course now."""
        self._before.extend(value for _, value in self._high)
        self._high.clear()


class Collapse:
    def __init__(self, check: models.Collapse) -> None:
        self._share = check.share
        self._first: list[float] = []
        self._recent = Recent(3)
        self._start = 0.0

    def add(self, number: int, step: int, value: float) -> Hit | None:
        self._recent.add(step, value)
        if len(self._first) < START:
            self._first.append(value)
            self._start = median(self._first)
            return None
        limit = self._share * self._start
        if self._start > 0 and median(self._recent.last(3)) < limit:
            return Hit(*self._recent.since(lambda one: one < limit), "warn", self._start)
        return None


class Falling:
    """Compares medians of three with the best median of ten, and means of twenty with the best of these."""

    def __init__(self, check: models.Falling) -> None:
        self._recent = Recent(LONG)
        self._peak = self._best_mean = -math.inf
        self._lowest = math.inf
        self._count = 0

    def add(self, number: int, step: int, value: float) -> Hit | None:
        recent = self._recent
        recent.add(step, value)
        self._count += 1
        if self._count < START:
            return None
        points = recent.last(LONG)
        peak, noise = self._peak, recent.noise()
        middle = median(points[-START:])
        self._peak, self._lowest = max(peak, middle), min(self._lowest, middle)
        if math.isinf(peak):
            return None
        least = 0.2 * max(abs(peak), peak - self._lowest)
        limit = peak - max(6 * noise, least)
        if median(points[-3:]) < limit:
            return Hit(*recent.since(lambda one: one < limit), "warn", peak)
        if len(points) < LONG:
            return None
        mean = math.fsum(points) / LONG
        best, self._best_mean = self._best_mean, max(self._best_mean, mean)
        if mean < best - max(2 * noise, least):
            return Hit(step, value, "warn", peak)
        return None


class Monotone:
    def __init__(self, check: models.Monotone) -> None:
        self._last = -math.inf

    def add(self, number: int, step: int, value: float) -> Hit | None:
        last, self._last = self._last, value
        return Hit(step, value, "warn", last) if value < last else None


class Grows:
    def __init__(self, check: models.Grows) -> None:
        self._streak = Streak(check.rows)
        self._last, self._number = 0.0, -1

    def add(self, number: int, step: int, value: float) -> Hit | None:
        if number > self._number + 1:
            self._streak.add(False, step, value)
        grown = value > self._last
        self._last, self._number = value, number
        return self._streak.add(grown, step, value)


class Present:
    def __init__(self, check: models.Present) -> None:
        self._streak = Streak(check.rows)
        self._number = -1

    def add(self, number: int, step: int, value: float) -> Hit | None:
        if number > self._number + 1:
            self._streak.add(False, step, value)
        self._number = number
        return self._streak.add(value > 0, step, value)


class FromConfig:
    def __init__(self, check: models.FromConfig, limit: float) -> None:
        self._limit = limit * check.times
        self._streak = Streak(check.rows, other=limit)

    def add(self, number: int, step: int, value: float) -> Hit | None:
        return self._streak.add(value > self._limit, step, value)


_WATCHERS: dict[str, Callable[[Any], Watcher]] = {
    "above": Above,
    "below": Below,
    "band": Band,
    "negative": Negative,
    "explodes": Explodes,
    "collapse": Collapse,
    "falling": Falling,
    "monotone": Monotone,
    "grows": Grows,
    "present": Present,
}


def watcher(check: models.Check, config: Mapping[str, Any]) -> Watcher | None:
    """What carries out a check; None when it needs a number that the configuration doesn't have."""
    if not isinstance(check, models.FromConfig):
        return _WATCHERS[check.test](check)
    for key in check.keys:
        value: Any = config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf:
            return FromConfig(check, float(value))
    return None
