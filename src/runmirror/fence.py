"""Calls with a deadline: what a tracker's package does in its own thread can't hold up anyone else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from queue import SimpleQueue
from typing import Any, TypeVar

from runmirror.exceptions import SinkError

T = TypeVar("T")
Task = tuple["Future[Any]", Callable[[], Any]]


_given_up: list[Fence] = []  # those with a call that did not return in time


class OverdueError(SinkError):
    """A sink did not return in time; its thread is given up."""


def hanging(name: str) -> int:
    """How many calls of sinks of this name were given up and still have not returned: each keeps a thread."""
    _given_up[:] = [fence for fence in _given_up if fence._thread is not None and fence._thread.is_alive()]
    return sum(fence._name == name for fence in _given_up)


class Fence:
    """One daemon thread in which all calls run, in order. After an overdue call it takes no more."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.overdue = False

    def call(self, what: str, deadline: float, function: Callable[[], T]) -> T:
        """Run ``function`` there and return what it returns or raise what it raises.

        Raises:
            OverdueError: it did not return within ``deadline`` seconds.
        """
        if self.overdue:
            raise OverdueError(f"{self._name}: an earlier call never returned")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"runmirror-{self._name}", daemon=True)
            self._thread.start()
        future: Future[T] = Future()
        self._tasks.put((future, function))
        try:
            return future.result(deadline)
        except FutureTimeout:
            if future.done():  # the function itself raised a TimeoutError
                raise
            self.overdue = True
            _given_up.append(self)
            raise OverdueError(f"{self._name}: {what} did not return within {deadline:g} s") from None

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, function = task
            try:
                future.set_result(function())
            except (SystemExit, KeyboardInterrupt) as error:  # a sink has no say in when the process ends
                future.set_exception(SinkError(f"{self._name} raised {error!r}"))
            except BaseException as error:
                future.set_exception(error)
            del task, future, function

    def close(self) -> None:
        """End the thread once its last call returned."""
        self._tasks.put(None)
