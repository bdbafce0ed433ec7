"""Work that training does not wait for: one thread, jobs in order."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

logger = logging.getLogger("runmirror")

MAX_WAITING = 256 << 20
"""Bytes of jobs that may wait; the next one then waits for room, as it would if it were done at once."""


class Worker:
    """Does jobs one after the other. The thread starts with the first, and ends when there has been none for a while."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: deque[tuple[Callable[[], None], int]] = deque()
        self._waiting = 0
        self._busy = False
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition(threading.RLock())  # a signal handler may come while its thread is in here

    def submit(self, job: Callable[[], None], size: int) -> None:
        """Have a job done; ``size`` is about how many bytes it holds."""
        with self._changed:
            while self._waiting and self._waiting + size > MAX_WAITING:
                self._changed.wait()
            self._jobs.append((job, size))
            self._waiting += size
            self._changed.notify_all()
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            try:
                self._thread.start()
                return
            except RuntimeError:  # the interpreter is shutting down
                self._thread = None
        while self._jobs:
            self._do()

    def drain(self, seconds: float) -> bool:
        """Wait until every job is done; False when time ran out."""
        until = time.monotonic() + seconds
        with self._changed:
            while self._jobs or self._busy:
                left = until - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
            return True

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._jobs and not self._changed.wait_for(lambda: bool(self._jobs), 60.0):
                    self._thread = None
                    return
            self._do()

    def _do(self) -> None:
        with self._changed:
            job, size = self._jobs.popleft()
            self._busy = True
        try:
            job()
        except Exception:
            logger.warning("%s failed", self._name, exc_info=True)
        finally:
            with self._changed:
                self._busy = False
                self._waiting -= size
                self._changed.notify_all()
