"""Work spread over processes, or over an Executor of someone else's: calls of one function that can be made again without harm.

Guarantees:

- Results come in the order of the work. Work whose process died is done again, in another process; when that happened
  three times, its result is what ``gave_up`` makes of it.
- The first piece of work is done alone: what all of them need (a database, an experiment) is made by one process, while
  the others start.
- Own processes (:func:`spread`): Ctrl-C reaches the work as a set ``stop`` event, at its next look, and is raised once all
  processes have let go. No process outlives this one, however this one ends. They are spawned, never forked, so a script
  that starts them needs its ``if __name__ == "__main__"``.
- Another's Executor (:func:`spread_over`), Dask's for example: Ctrl-C cancels what has not begun; what has begun ends where it
  runs. The Executor is not shut down.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import queue
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
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
    gave_up: Callable[[int, str], T],
) -> list[T]:
    """``function(*arguments, stop=..., tell=...)`` for each of ``work``, on so many processes.

    Args:
        function: importable by name. ``stop`` is an event to look at; ``tell(rows, points)`` tells progress.
        work: arguments, which can be pickled.
        processes: how many at most.
        tell: called here with the number of a piece of work and what it told.
        gave_up: the result of a piece whose processes died, or that raised, made from its number and what happened.
    """
    context = multiprocessing.get_context("spawn")
    results: dict[int, T] = {}
    deaths = dict.fromkeys(range(len(work)), 0)
    while len(results) < len(work):
        stop, told = context.Event(), context.SimpleQueue()
        due = [number for number in deaths if number not in results]
        suspects = [number for number in due if deaths[number]]
        due = suspects[:1] or due  # alone, to see which it is that kills
        pool = ProcessPoolExecutor(min(processes, len(due)), context, _begin, (stop, told))
        running: dict[Future[T], int] = {}
        ended: queue.SimpleQueue[Future[T]] = queue.SimpleQueue()
        started: set[int] = set()
        try:
            while due or running:
                if due and (results or not running):
                    given, due = (due, []) if results else (due[:1], due[1:])
                    for number in given:
                        future = pool.submit(_do, function, number, work[number])
                        running[future] = number
                        future.add_done_callback(ended.put)  # looking at all each time would take longer than the work
                    for _ in range(min(processes - 1, len(due))):
                        pool.submit(_ready, function)  # the other processes start while the first piece is done
                with contextlib.suppress(queue.Empty):
                    future = ended.get(timeout=LOOK_EVERY)
                    number = running[future]
                    results[number] = _result(future, number, gave_up)
                    del running[future]
                _listen(told, started, tell)
        except BrokenProcessPool:
            for future, number in running.items():  # those that came to an end before
                if future.done() and not isinstance(future.exception(), BrokenProcessPool):
                    results[number] = _result(future, number, gave_up)
            _listen(told, started, tell)
            for number in (started - results.keys()) or list(running.values()):
                deaths[number] += 1
                if deaths[number] >= TRIES:
                    results[number] = gave_up(number, f"the process that did it died {TRIES} times")
        except KeyboardInterrupt:
            stop.set()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            told.close()
    return [results[number] for number in range(len(work))]


def spread_over(
    executor: Executor,
    function: Callable[..., T],
    work: Sequence[tuple[Any, ...]],
    *,
    done: Callable[[int, T], None],
    gave_up: Callable[[int, str], T],
) -> list[T]:
    """As :func:`spread`, on an Executor: ``function(*arguments, stop=None, tell=...)``, whose ``tell`` does nothing.

    Args:
        executor: anything with ``submit``. Function, arguments and results must be what it can carry.
        done: called here with the number and the result of each piece, as they come.
        gave_up: the result of a piece that the executor could not bring to an end.
    """
    results: dict[int, T] = {}
    failures = dict.fromkeys(range(len(work)), 0)
    running: dict[Future[T], int] = {}
    ended: queue.SimpleQueue[Future[T]] = queue.SimpleQueue()

    def submit(number: int) -> None:
        call = partial(function, *work[number], stop=None, tell=_untold)
        try:
            future = executor.submit(call)
        except RuntimeError as error:  # it was shut down, or broke with a worker
            finish(number, gave_up(number, f"{type(error).__name__}: {error}"))
            return
        running[future] = number
        future.add_done_callback(ended.put)

    def finish(number: int, result: T) -> None:
        results[number] = result
        done(number, result)

    try:
        for batch in (range(min(1, len(work))), range(1, len(work))):
            for number in batch:
                submit(number)
            while running:
                future = ended.get()
                number = running.pop(future)
                try:
                    finish(number, future.result())
                except (Exception, CancelledError) as error:  # its worker died, or the work can't be carried there
                    failures[number] += 1
                    if failures[number] < TRIES:
                        submit(number)
                    else:
                        finish(number, gave_up(number, f"{type(error).__name__}: {error}"))
    finally:
        for future in running:
            future.cancel()
    return [results[number] for number in range(len(work))]


def _result(future: Future[T], number: int, gave_up: Callable[[int, str], T]) -> T:
    """What became of a piece that came to an end. Raises BrokenProcessPool when a process died."""
    error = future.exception()
    if isinstance(error, BrokenProcessPool):
        raise error
    if error is not None:  # it raised, or can't be carried to the process or back
        return gave_up(number, f"{type(error).__name__}: {error}")
    return future.result()


def _untold(rows: int, points: int) -> None:
    """Progress within a piece of work that runs elsewhere is not told."""


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


def _ready(function: Callable[..., Any]) -> None:
    """That it got here imported what the function needs."""


def _do(function: Callable[..., T], number: int, arguments: tuple[Any, ...]) -> T:
    _told.put((number, 0, 0))
    return function(*arguments, stop=_stop, tell=lambda rows, points: _told.put((number, rows, points)))
