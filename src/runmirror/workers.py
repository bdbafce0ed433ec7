"""Work spread over processes: calls of one function that can be made again without harm.

Guarantees:

- Results come in the order of the work. Work whose process died is done again, in another process; when that happened
  three times, its result is what ``gave_up`` makes of it.
- Ctrl-C reaches the work as a set ``stop`` event, at its next look, and is raised once all processes have let go.
- The first piece of work is done alone: what all of them need (a database, an experiment) is made by one process.
- No process outlives this one, however this one ends.

Processes are spawned, never forked, so a script that starts them needs its ``if __name__ == "__main__"``.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

T = TypeVar("T")
Tell = Callable[[int, int], None]
TRIES = 3
LOOK_EVERY = 0.1

_stop: Any = None
_told: Any = None


def spread(
    function: Callable[..., T],
    work: Sequence[tuple[Any, ...]],
    processes: int,
    *,
    tell: Callable[[int, int, int], None],
    gave_up: Callable[[int], T],
) -> list[T]:
    """``function(*arguments, stop=..., tell=...)`` for each of ``work``, on so many processes.

    Args:
        function: importable by name. ``stop`` is an event to look at; ``tell(rows, points)`` tells progress.
        work: arguments, which can be pickled.
        processes: how many at most.
        tell: called here with the number of a piece of work and what it told.
        gave_up: the result of a piece whose processes died.
    """
    context = multiprocessing.get_context("spawn")
    results: dict[int, T] = {}
    deaths = dict.fromkeys(range(len(work)), 0)
    while len(results) < len(work):
        stop, told = context.Event(), context.SimpleQueue()
        due = [number for number in deaths if number not in results]
        suspects = [number for number in due if deaths[number]]
        due = suspects[:1] or (due if results else due[:1])  # alone, to see which it is that kills; and the first one
        pool = ProcessPoolExecutor(min(processes, len(due)), context, _begin, (stop, told))
        running = {pool.submit(_do, function, number, work[number]): number for number in due}
        started: set[int] = set()
        try:
            while running:
                done, _ = wait(running, LOOK_EVERY, FIRST_COMPLETED)
                _listen(told, started, tell)
                for future in done:
                    _take(future, running.pop(future), results)
        except BrokenProcessPool:
            _listen(told, started, tell)
            for number in (started - results.keys()) or due:
                deaths[number] += 1
                if deaths[number] >= TRIES:
                    results[number] = gave_up(number)
        except KeyboardInterrupt:
            stop.set()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            told.close()
    return [results[number] for number in range(len(work))]


def _take(future: Future[T], number: int, results: dict[int, T]) -> None:
    results[number] = future.result()


def _listen(told: Any, started: set[int], tell: Callable[[int, int, int], None]) -> None:
    while not told.empty():
        number, rows, points = told.get()
        started.add(number)
        tell(number, rows, points)


def _begin(stop: Any, told: Any) -> None:
    """In a new process: leave Ctrl-C to the parent, and end with it."""
    global _stop, _told
    _stop, _told = stop, told
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _do(function: Callable[..., T], number: int, arguments: tuple[Any, ...]) -> T:
    _told.put((number, 0, 0))
    return function(*arguments, stop=_stop, tell=lambda rows, points: _told.put((number, rows, points)))
