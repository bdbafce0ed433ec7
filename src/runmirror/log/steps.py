"""The step of a row, and when a row goes back.

Rules (DESIGN "Steps, time, status, rewinds"; sources: tinker-cookbook, TRL, transformers logs as they are in the wild):

- step: the row's ``step``, else ``progress/batch``, else ``global_step`` or ``train/global_step``; a row that has none is
  a summary when earlier rows had one, else its step is its ordinal.
- rewind: a resume from an older checkpoint. In a log with a journal, the first row after a resume when its step is not
  above the highest so far. Elsewhere, a row below the highest step and not above the last step of more than half of its
  already seen keys, when these are at least half of its keys: a late evaluation row carries keys of its own and is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from runmirror.log.rows import coerce

OWN_STEP_KEYS = ("step",)
"""In a log that runmirror wrote no other key is the step: a row without it is a summary."""
STEP_KEYS = ("step", "progress/batch", "global_step", "train/global_step")
LOWEST = -(2**63)
HIGHEST = 2**63 - 1


def step_value(value: Any) -> int | None:
    """``value`` as a step: an int64, or None when it is none (bool, text, NaN, out of range)."""
    if type(value) is float and value == value and abs(value) < 2**63:
        value = int(value)
    if type(value) is int and LOWEST <= value <= HIGHEST:
        return value
    return None


def find_step(data: dict[str, Any], keys: tuple[str, ...] = STEP_KEYS) -> int | None:
    """The step a row names, or None."""
    for key in keys:
        if key in data:
            step = step_value(data[key])
            if step is not None:
                return step
    return None


class Rewinds:
    """Tells for each row in turn whether it goes back.

    Rows with rising steps cost one comparison; the last step of every key is only gathered, by ``replay``, once a row of
    a log without a journal does not rise.

    Args:
        replay: yields (step, data) of every row before the current one.
        journal: the log has one, so only its resumes count.
    """

    def __init__(self, replay: Callable[[], Iterator[tuple[int, dict[str, Any]]]], journal: bool) -> None:
        self.highest: int | None = None
        self.last: dict[str, int] | None = None
        self._replay = replay
        self._journal = journal

    def observe(self, step: int, data: dict[str, Any], after_resume: bool = False) -> int | None:
        """The step this row goes back to, or None. ``after_resume``: it is the first row after a resume."""
        rewind = None
        if self.highest is not None and step <= self.highest:
            guess = not self._journal and step < self.highest
            if after_resume or (guess and self._goes_back(step, data)):
                rewind = step
                self.back_to(step)
        if self.last is not None:
            self.last.update(dict.fromkeys(data, step))
        if self.highest is None or step > self.highest:
            self.highest = step
        return rewind

    def _goes_back(self, step: int, data: dict[str, Any]) -> bool:
        if self.last is None:
            self.last = {}
            for earlier, row in self._replay():
                self.last.update(dict.fromkeys(row, earlier))
        keys = [key for key in data if key != "step" and key[:1] != "_"]
        seen = [self.last[key] for key in keys if key in self.last]
        not_above = sum(1 for last in seen if step <= last)
        return not_above * 2 > len(seen) and len(seen) * 2 >= len(keys)

    def back_to(self, step: int) -> None:
        """Every point at or above ``step`` is superseded."""
        self.highest = step
        if self.last is not None:
            self.last = {key: min(last, step - 1) for key, last in self.last.items()}


def as_step(step: Any) -> tuple[int | None, str]:
    """What a training loop gives as a step: (the integer, ""), or (None, why it is none)."""
    value = step if type(step) is bool else coerce(step)
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is int and LOWEST <= value < HIGHEST:
        return value, ""
    shown = repr(value)[:60] if type(value) in (bool, float, str) else type(step).__name__
    return None, f"a step is an integer of 64 bits, not {shown}: the next one was taken"


def take_step(metrics: Any) -> tuple[int | None, Any]:
    """(the step that stands among the metrics, as in code written for other loggers, and the rest); else (None, metrics)."""
    try:
        if (type(metrics) is dict or isinstance(metrics, Mapping)) and "step" in metrics:
            step, _ = as_step(metrics["step"])
            if step is not None:
                return step, {key: value for key, value in metrics.items() if key != "step"}
    except Exception:  # a mapping that can't be read: told where the row is written
        pass
    return None, metrics
