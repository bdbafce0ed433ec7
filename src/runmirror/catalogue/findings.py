"""What is wrong with a run, as data: a :class:`Finding` per rule and key, however often it happened."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from runmirror.catalogue.checks import Level
from runmirror.catalogue.entries import rules

About = Literal["training", "log", "mirror"]
Value = float | str | None


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        level: "fail" when training is most likely lost, else "warn".
        about: training, the log, or a mirror of it.
        rule: which rule found it, such as "entropy-collapse".
        key: the metric, None when it is about none.
        step: since when.
        value: what was found there.
        says: what is wrong with the key, as text.
        means, tries: what that usually means, and what people try.
        row: the ordinal of the row at which it showed; None when it is about no row.
        last_step: the last step at which it was so.
        count: at how many rows it was so.
    """

    level: Level
    about: About
    rule: str
    key: str | None
    step: int | None
    value: Value
    says: str
    means: str
    tries: str
    row: int | None = None
    last_step: int | None = None
    count: int = 1

    def __str__(self) -> str:
        where = "" if self.step is None else f"step {self.step}: "
        more = f" (until step {self.last_step})" if self.last_step not in (None, self.step) else ""
        text = f"{where}{f'{self.key} ' if self.key else ''}{self.says}{more}"
        return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)

    def as_dict(self) -> dict[str, Any]:
        """The finding as data that is strict JSON: a number that is not finite is text."""
        value = self.value
        shown = str(value) if isinstance(value, float) and not math.isfinite(value) else value
        fields = ("level", "about", "rule", "key", "step", "last_step", "count", "says", "means", "tries")
        return {name: getattr(self, name) for name in fields} | {"value": shown}


def make(
    rule: str,
    key: str | None,
    step: int | None,
    value: Value,
    *,
    level: Level = "warn",
    about: About = "training",
    other: Value = None,
    row: int | None = None,
    last_step: int | None = None,
    count: int = 1,
) -> Finding:
    """A finding with the words of its rule."""
    words = rules()[rule]
    says = words.says.format(value=_shown(value), other=_shown(other), count=rows_text(count))
    return Finding(
        level, about, rule, key, step, value, says, words.means, words.tries, row, last_step, count
    )  # fmt: skip


class Findings:
    """The findings of a run, one per rule and key, in the order they were found."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str | None], Finding] = {}
        self._others: dict[tuple[str, str | None], Value] = {}

    def __iter__(self) -> Iterator[Finding]:
        return iter(list(self._found.values()))

    def add(
        self,
        rule: str,
        key: str | None,
        step: int,
        value: Value,
        *,
        level: Level = "warn",
        about: About = "training",
        other: Value = None,
        row: int,
        now: int,
        count: int = 1,
    ) -> None:
        """Note that a rule holds at a row whose step is ``now``. One that was found before only lasts longer, unless it got
        worse."""
        mark = (rule, key)
        old = self._found.get(mark)
        if old is None or (level == "fail" and old.level == "warn"):
            count += 0 if old is None else old.count
            self._others[mark] = other
            self._found[mark] = make(
                rule, key, step, value, level=level, about=about, other=other, row=row, last_step=now, count=count
            )
        else:
            count += old.count
            says = old.says
            if about == "log":  # its words count
                says = rules()[rule].says.format(
                    value=_shown(old.value), other=_shown(self._others[mark]), count=rows_text(count)
                )
            self._found[mark] = replace(old, last_step=now, count=count, says=says)


def rows_text(count: int) -> str:
    """``1 row``, ``2 rows``."""
    return f"{count:,} row{'' if count == 1 else 's'}"


def _shown(value: Value) -> str:
    if isinstance(value, float) and not (value.is_integer() and abs(value) < 1e15):
        return f"{value:.4g}"
    return f"{int(value):,}" if isinstance(value, (int, float)) else str(value)
