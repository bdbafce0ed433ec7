"""The copy of a state file that lies in a cloud log_path, so that another machine goes on where this one stopped.

Guarantees: the local file is the one that counts here, and nothing ever waits long for the copy. It is written when a mirror
first opens a run after a start, about once a minute, by a thread of its own, and at the end. A log_path that can't be
written (an archive, a network that is down) is noted once and costs nothing else.
"""

from __future__ import annotations

import logging
import threading
import time

from runmirror.log.layout import OWN
from runmirror.storage import Storage

EVERY = 60.0
"""Seconds between two writes of the copy."""
PATIENCE = 5.0
"""Seconds that :meth:`StateCopy.close` and :meth:`StateCopy.wait` wait; one at the end when the last write failed."""
log = logging.getLogger("runmirror")


class StateCopy:
    """The copy of one state file.

    Args:
        storage: the log_path.
        name: the state file's name.
    """

    def __init__(self, storage: Storage, name: str) -> None:
        self._storage = storage
        self.path = f"{OWN}/mirror/{name}"
        self._newest: bytes | None = None
        self._written: bytes | None = None
        self._next = time.monotonic() + EVERY
        self._thread: threading.Thread | None = None
        self._warned = self._failed = False

    def load(self) -> bytes | None:
        """What is there; None when there is none, or when it can't be reached."""
        try:
            return self._storage.read(self.path)
        except FileNotFoundError:
            return None
        except OSError as error:
            log.debug("%s: %s", self._storage.url(self.path), error)
            return None

    def save(self, data: bytes, *, now: bool = False) -> None:
        """Have this written, soon or with the next write that is due."""
        self._newest = data
        if (now or time.monotonic() >= self._next) and (self._thread is None or not self._thread.is_alive()):
            self._next = time.monotonic() + EVERY
            self._thread = threading.Thread(target=self._write, name="runmirror-state-copy", daemon=True)
            self._thread.start()

    def _write(self) -> None:
        data = self._newest
        if data is None or data == self._written:
            return
        try:
            self._storage.write(self.path, data)
            self._written, self._failed = data, False
        except Exception as error:  # whatever the store's package raises: the local state is what counts
            level = logging.DEBUG if self._warned else logging.INFO
            self._warned = self._failed = True
            log.log(level, "%s: the copy of the state could not be written: %s", self._storage.url(self.path), error)

    def wait(self) -> None:
        """Until the write that was begun has ended."""
        if self._thread is not None:
            self._thread.join(PATIENCE)

    def close(self) -> None:
        """Write what is newest, and wait for it, but not for long."""
        until = time.monotonic() + (1.0 if self._failed else PATIENCE)
        if self._thread is not None:
            self._thread.join(max(0.0, until - time.monotonic()))
        if self._newest is not None and self._newest != self._written:
            self.save(self._newest, now=True)
            if self._thread is not None:
                self._thread.join(max(0.0, until - time.monotonic()))
