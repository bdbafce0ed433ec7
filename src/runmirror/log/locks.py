"""A lock that one process holds on a local file, for as long as it lives.

Guarantees:

- The operating system lets go of it when the process ends, however it ends: a lock is never stale.
- Who holds it is written into the file: process id, host and since when, for the message to the one who comes second.
- A forked child neither holds it nor keeps it alive, and can't release it for its parent.
- On a file system without locks (some network mounts) it is taken without effect, with a warning.

:func:`locked` is the same for the time of a few writes: it waits for its turn.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from functools import lru_cache

from runmirror.openers import follow_no_link

logger = logging.getLogger("runmirror")

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
_BUSY = {errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK}
_PAUSES = (0.01, 0.04, 0.15)
"""Seconds between tries: a program that was just started has the lock for the instant before its exec."""
WAIT = 60.0
"""Seconds that :func:`locked` waits for its turn."""
_held: weakref.WeakSet[Lock] = weakref.WeakSet()
_hooked = False
_FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)
_TEXT = 400
"""Bytes of a lock file: a host's name has 255 at most."""

if sys.platform == "win32":
    import msvcrt

    _FAR = 1 << 30  # a locked byte can't be read there, so lock one behind the text

    def _lock(descriptor: int) -> None:
        os.lseek(descriptor, _FAR, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)

    def _unlock(descriptor: int) -> None:
        """Closing the file does it."""
else:
    import fcntl

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _unlock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


class Lock:
    """A lock held by this process; made by :func:`acquire`."""

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        """Let go. Safe to call again."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)  # never an explicit unlock: in a forked child that would free the parent's lock

    __del__ = release  # whoever lost the object can't release it any more

    @property
    def held(self) -> bool:
        """Whether this process still holds it."""
        return self._descriptor is not None


def acquire(path: str, busy: Callable[[str], Exception]) -> Lock:
    """Lock the file at ``path``, made when missing, or raise ``busy(holder)``.

    Args:
        path: a local path; its folder is made. The file stays when the lock is released.
        busy: makes the error from a description of the holder, such as
            "process 4711 on host gpu3, since 2026-01-31 12:00:00 UTC".

    Raises:
        OSError: the file can't be made, opened or locked, or is a symbolic link (its target would be written over).
    """
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    descriptor = follow_no_link(path, _FLAGS)  # never inherited by an exec
    for pause in (*_PAUSES, None):
        try:
            _lock(descriptor)
            break
        except OSError as error:
            if error.errno in _NO_LOCKS:
                logger.warning("%s: no locks on this file system (%s): a second holder goes unnoticed", path, error)
                break
            if error.errno not in _BUSY or pause is None:
                os.close(descriptor)
                if error.errno in _BUSY:
                    raise busy(holder(path)) from None
                raise OSError(error.errno, f"can't be locked: {error.strerror}", path) from None
        time.sleep(pause)
    lock = Lock(path, descriptor)
    _hook_fork()
    _held.add(lock)
    text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "started": time.time()}).encode()
    text = text.ljust(_TEXT)  # of one length: cutting a file costs milliseconds, a thousand runs are opened at a time
    with contextlib.suppress(OSError):  # a full disk: the lock holds, only its text is missing
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.write(descriptor, text)
        if os.fstat(descriptor).st_size > len(text):
            os.ftruncate(descriptor, len(text))
    return lock


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    """Alone among threads and processes, after waiting for whoever has the lock of the file at ``path``, made when missing.

    Raises:
        TimeoutError: somebody has it for more than :data:`WAIT` seconds.
        OSError: the file can't be made, opened or locked, or is a symbolic link.
    """
    descriptor = follow_no_link(path, _FLAGS)
    until, pause = time.monotonic() + WAIT, 0.001
    try:
        while True:
            try:
                _lock(descriptor)
                break
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    _warn(path, str(error))
                    break
                if error.errno not in _BUSY:
                    raise
            if time.monotonic() > until:
                raise TimeoutError(f"{path} is held by another process for more than {WAIT:g} s: end that one")
            time.sleep(pause)
            pause = min(0.05, 2 * pause)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                _unlock(descriptor)  # a process that was forked meanwhile has the file open too
    finally:
        os.close(descriptor)


@lru_cache(1024)
def _warn(path: str, why: str) -> None:
    logger.warning(
        "%s: no locks on this file system (%s): two mirrors of one run may get in each other's way", path, why
    )


def holder(path: str) -> str:
    """Who wrote the lock file last, for people; "another process" when it doesn't say."""
    try:
        with open(path, "rb") as file:
            found = json.loads(file.read(4096))
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(found["started"]))
        return f"process {found['pid']} on host {found['host']}, since {since}"
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return "another process"


def _hook_fork() -> None:
    global _hooked
    if not _hooked and hasattr(os, "register_at_fork"):
        _hooked = True
        os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    for lock in list(_held):
        lock.release()
    _held.clear()
