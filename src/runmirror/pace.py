"""How fast rows may go to one destination, for all mirrors on this machine together.

Guarantees:

- With a ``rate``, no more rows a second than that are sent, however many processes and runs share it.
- When a tracker tells one mirror to slow down (:class:`~runmirror.exceptions.Throttled`), all of them hold back.
- Nothing here can stop a delivery for good: a damaged file counts as none, and no wait is longer than :data:`LONGEST`.

Kept in two small files below RUNMIRROR_HOME, made only when there is something to share. On several machines (Dask) each has
its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from pathlib import Path

from runmirror.log.locks import locked
from runmirror.storage.home import home, homes
from runmirror.storage.local import write_atomic

LONGEST = 300.0
"""Seconds that one wait lasts at most; what a clock that was set back, or a tracker, may ask for."""


class Pace:
    """The pace of one destination.

    Args:
        sink, destination: where the rows go.
        rate: rows a second at most, over all who give one; None: as fast as the tracker takes them.
    """

    def __init__(self, sink: str, destination: str, rate: float | None = None) -> None:
        self.rate = rate
        self._name = f"{sink}-{hashlib.sha256(destination.encode()).hexdigest()[:12]}"
        self._folder: Path | None = None

    def wait(self, rows: int, stop: threading.Event) -> None:
        """Until these rows may go (or ``stop`` is set): take their share of the rate, and hold back as long as asked."""
        if self.rate:
            stop.wait(self._share(rows, self.rate))
        while (left := self._read("hold") - time.time()) > 0 and not stop.is_set():
            stop.wait(min(left, LONGEST))

    def hold(self, seconds: float) -> None:
        """Have everyone hold back for so long from now on."""
        with contextlib.suppress(OSError):
            until = time.time() + min(seconds, LONGEST)
            if until > self._read("hold"):
                self._write("hold", until)

    def _share(self, rows: int, rate: float) -> float:
        """Seconds until these rows may go; what comes next goes after them."""
        lock = self._path("lock")
        with contextlib.suppress(OSError):
            lock.parent.mkdir(exist_ok=True)
            with locked(str(lock)):
                return self._take(rows / rate)
        return rows / rate

    def _take(self, seconds: float) -> float:
        now = time.time()
        begin = max(now, self._read("next"))
        self._write("next", begin + seconds)
        return begin - now

    def _path(self, what: str) -> Path:
        if self._folder is None:  # nothing is made for those who only look
            self._folder = (home() if self.rate else homes()[0]) / "pace"
        return self._folder / f"{self._name}.{what}"

    def _read(self, what: str) -> float:
        """A time that was written, 0 when there is none or it is too far off to be true."""
        try:
            when = float(self._path(what).read_text())
        except (OSError, ValueError):
            return 0.0
        return when if when - time.time() <= LONGEST else 0.0

    def _write(self, what: str, when: float) -> None:
        write_atomic(self._path(what), repr(when).encode())
