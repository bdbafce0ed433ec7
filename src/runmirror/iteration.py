"""One training iteration as one row: what is logged in it, and how long its parts took.

Nothing is written before the ``with`` block ends. Then it is one row, also when the block raised.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Protocol, Self


class Writer(Protocol):
    """What an Iteration needs of a Run."""

    total_iterations: int | None
    iterations: dict[int, Iteration]

    def _log(
        self,
        metrics: Mapping[str, Any],
        step: Any,
        *,
        rejected: dict[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None: ...


class Iteration:
    """What is logged within one training iteration, written as one row when its ``with`` block ends.

    The row has, besides what was logged, ``progress/batch`` (the step), ``time/total`` and ``time/<span>`` in seconds, and
    with ``start(total_iterations=N)`` also ``progress/done_frac`` = (step + 1) / N. A key logged by hand wins. When the
    block raises, the row is written with what there is, and names the exception's class in ``_error``.
    """

    def __init__(self, run: Writer, step: int, rejected: dict[str, str]) -> None:
        self.step = step
        self._run = run
        self._rejected = rejected
        self._metrics: dict[Any, Any] = {}
        self._suggested: dict[Any, Any] = {}
        self._spans: dict[str, float] = {}
        self._lock = threading.Lock()
        self._began = time.perf_counter()

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Add metrics to the row; the last value of a key wins. Never raises for a value."""
        try:
            self._metrics.update(dict(metrics.items()))
        except Exception:
            self._rejected["*"] = f"expected a mapping of key to value, found {type(metrics).__name__}"

    def suggest(self, metrics: Mapping[str, Any]) -> None:
        """Add metrics for keys that are not logged otherwise."""
        self._suggested.update(metrics)

    def __setitem__(self, key: str, value: Any) -> None:
        self.log({key: value})

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time a part: ``time/<name>`` is the sum of its spans' seconds. Spans may nest and run in several threads."""
        began = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - began
            with self._lock:
                self._spans[name] = self._spans.get(name, 0.0) + took

    def __enter__(self) -> Self:
        self._began = time.perf_counter()
        self._run.iterations[self.step] = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        row: dict[Any, Any] = {"progress/batch": self.step}
        total = self._run.total_iterations
        if total:
            row["progress/done_frac"] = (self.step + 1) / total
        row["time/total"] = time.perf_counter() - self._began
        with self._lock:  # a span of another thread may end now
            row.update({f"time/{name}": took for name, took in self._spans.items()})
        row.update(self._suggested)
        row.update(self._metrics)
        if self._run.iterations.get(self.step) is self:
            del self._run.iterations[self.step]
        extra = None if error is None else {"_error": type(error).__name__}
        try:
            self._run._log(row, self.step, rejected=self._rejected, extra=extra)
        except (TypeError, ValueError):  # strict
            if error is None:
                raise
