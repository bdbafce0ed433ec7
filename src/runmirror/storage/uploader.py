"""The thread that uploads a spool: when, how often it tries again, and what it says about it.

Guarantees:

- Nothing here runs in the training thread but taking a lock; no error leaves the thread.
- The first upload is a second after the first write, later ones every ``clamp(10 s, 5 s x MiB, 60 s)`` of the growing
  files (``upload_interval`` overrides), and whenever somebody asks.
- A store out of reach is tried again for ever, with pauses of 1 to 60 s; it is said once when it begins, and when it ends.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import random
import threading
import time

from runmirror.exceptions import LogError
from runmirror.storage.lease import TakenError
from runmirror.storage.upload import Uploads

logger = logging.getLogger("runmirror")
SHORTEST, LONGEST = 10.0, 60.0
PER_MIB = 5.0
"""Seconds between uploads: at least, at most, and per MiB of the growing files."""
LONGEST_WHOLE, PER_MIB_WHOLE = 300.0, 20.0
"""The same for stores to which a growing file is sent whole each time."""
FIRST = 1.0
"""Seconds from the first write to the first upload: what is written together goes together."""
LONGEST_PAUSE = 60.0
HURRY = 2.0
"""Longest pause after an error while somebody waits."""


class Uploader:
    """One daemon thread over one :class:`Uploads`.

    Args:
        uploads: whose ``lock`` is used throughout.
        interval: seconds between uploads instead of the usual.
        paths: growing files to take over when the store is reached for the first time.

    Attributes:
        dirty: whether something was written since the last round began.
        error: what the store said last, "" since the last success.
    """

    def __init__(self, uploads: Uploads, interval: float | None, paths: tuple[str, ...]) -> None:
        self.uploads = uploads
        self.error = ""
        self.stopped = False
        self._interval, self._paths = interval, paths
        self._changed = threading.Condition(uploads.lock)  # over an RLock: a signal handler may come in between
        self.dirty = uploads.busy()
        self._asked = 0
        self._done = 0
        self._final = ""  # why nothing will ever be uploaded again
        self._failures = 0
        self._waiting = 0
        first = FIRST if interval is None else min(FIRST, interval)
        self._last = time.monotonic() - self._spacing() + first
        self._thread = threading.Thread(target=self._run, name="runmirror-upload", daemon=True)
        self._thread.start()

    def touch(self) -> None:
        """Something was written. Called under the lock."""
        if not self.dirty:
            self.dirty = True
            self._changed.notify_all()

    def flush(self, timeout: float) -> None:
        """Upload everything written before this call; wait for at most ``timeout`` seconds (0: don't wait).

        Raises:
            TimeoutError: it is not all there yet.
            LogError: it never will be: another writer took over.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            self._asked += 1
            mine = self._asked
            self._changed.notify_all()
            if timeout <= 0:
                return
            self._waiting += 1
            try:
                while self._done < mine and not self._final:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise TimeoutError(errno.ETIMEDOUT, self._late(timeout))
                    self._changed.wait(min(left, 1.0))
                    if not self._thread.is_alive() and not self._final:
                        raise TimeoutError(errno.ETIMEDOUT, "the upload thread has ended; " + self._late(timeout))
            finally:
                self._waiting -= 1
            if self._done < mine:
                raise LogError(self._final)

    def _late(self, timeout: float) -> str:
        size, files = self.uploads.spool.unsynced()
        why = f": {self.error}" if self.error else ""
        return (
            f"{self.uploads.record.url}: {size} bytes ({files} whole files) are not uploaded after {timeout:g} s{why}; they "
            "are safe on this machine and uploaded when the store answers"
        )

    def stop(self, timeout: float = 5.0) -> bool:
        """End the thread after the request it is in. Whether it has ended."""
        with self._changed:
            self.stopped = True
            self._changed.notify_all()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # -- in the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self.stopped and not self._due():
                    self._changed.wait(self._pause())
                if self.stopped or self._final:
                    return
                asked, self.dirty = self._asked, False
                self._last = time.monotonic()
            self._try(asked)

    def _due(self) -> bool:
        return self._pause() == 0.0

    def _pause(self) -> float | None:
        """Seconds until the next round, None when there is nothing to do."""
        since = time.monotonic() - self._last
        if self._failures:
            longest = HURRY if self._waiting else LONGEST_PAUSE
            return max(0.0, min(longest, 2.0 ** min(self._failures - 1, 8)) * self._jitter - since)
        if self._asked > self._done:
            return 0.0
        return max(0.0, self._spacing() - since) if self.dirty else None

    def _spacing(self) -> float:
        if self._interval is not None:
            return self._interval
        size = sum(self.uploads.ends.values()) / (1 << 20)
        if self.uploads.extends:
            return min(max(SHORTEST, PER_MIB * size), LONGEST)
        return min(max(SHORTEST, PER_MIB_WHOLE * size), LONGEST_WHOLE)

    _jitter = 1.0

    def _try(self, asked: int) -> None:
        uploads = self.uploads
        try:
            if not uploads.record.enlisted:
                uploads.enlist(self._paths)
            uploads.round()
        except LogError as error:
            self._give_up(error)
        except Exception as error:  # whatever a store or its client raises: the rows are safe, the thread must go on
            with self._changed:
                self._failures += 1
                self._jitter = 0.5 + random.random()
                self.dirty = True
                first = not self.error
                self.error = uploads.record.error = str(error) or type(error).__name__
                self._changed.notify_all()
            if first:
                logger.warning(
                    "%s can't be uploaded now (%s): training goes on, what it writes is kept in %s and uploaded later",
                    uploads.record.url, self.error, uploads.spool.folder
                )  # fmt: skip
            with contextlib.suppress(OSError):
                uploads.save()
        else:
            with self._changed:
                if self.error:
                    logger.warning("%s is uploaded again", uploads.record.url)
                self.error = ""
                if uploads.record.error:
                    uploads.record.error = ""
                    uploads.save()
                self._failures = 0
                self._done = max(self._done, asked)
                self._changed.notify_all()

    def _give_up(self, error: LogError) -> None:
        uploads = self.uploads
        with self._changed:
            if isinstance(error, TakenError):
                uploads.record.taken_by = str(error)
                self._final = (
                    f"{uploads.record.url} was taken over by {error}: nothing more is uploaded from here; what was not "
                    f"uploaded stays in {uploads.spool.folder}"
                )
            else:
                self._final = str(error)
            self.error = uploads.record.error = self._final
            self._changed.notify_all()
        logger.error("%s", self._final)
        uploads.save()
