"""The ``Storage`` protocol and its local implementation.

Guarantees of every Storage:

- ``append`` adds the bytes at the end or raises; a reader sees them at once (local) or at the next flush (cloud).
- ``write`` replaces a whole file atomically: a reader sees the old bytes or the new ones.
- ``read_range`` at or past the end is ``b""``, never an error; a missing file is ``FileNotFoundError``. What is no regular
  file, such as a pipe, which would keep its reader waiting, counts as missing.
- Paths are relative, with ``/``, and checked as text: nothing can leave the root.
- An instance can be pickled (only its configuration travels), shared between threads, and used after a fork.
- An append that fails leaves the file as it was: there is never half a row in it.

The protocol is a superset of tinker-cookbook's ``tinker_cookbook.stores.storage.Storage``, so a Storage of either side
serves the other.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat as modes
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable
from urllib.parse import unquote_to_bytes, urlsplit

from runmirror.notices import warn
from runmirror.openers import leads_out, open_regular
from runmirror.storage.replaced import is_replaced, lacking

_ODD = re.compile(r"[\x00-\x1f\x7f\\]")
_NO_SEGMENT = frozenset(("", ".", ".."))
MAX_OPEN_FILES = 16
"""Append descriptors one LocalStorage keeps open; the least recently used is closed first."""


@dataclass(frozen=True, slots=True)
class Stat:
    """What a Storage knows of a file: size in bytes, modification time (Unix seconds), and a version that changes
    whenever the content is replaced (local: inode and time in ns; cloud: generation or ETag)."""

    size: int
    mtime: float
    version: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of a :meth:`Storage.scan`: its path below the root, and its :class:`Stat`."""

    path: str
    stat: Stat


@runtime_checkable
class Storage(Protocol):
    """Files below one root, as bytes. Paths are relative and use ``/``."""

    def url(self, path: str = "") -> str:
        """A URI for people and other tools, such as ``file:///runs/7/metrics.jsonl``."""
        ...

    def read(self, path: str) -> bytes:
        """The whole file. Raises FileNotFoundError."""
        ...

    def write(self, path: str, data: bytes, *, content_type: str | None = None) -> None:
        """Replace the whole file atomically, creating folders. ``content_type`` matters in clouds only."""
        ...

    def append(self, path: str, data: bytes) -> None:
        """Add bytes at the end, creating the file and folders."""
        ...

    def exists(self, path: str) -> bool:
        """Whether the file (or, locally, folder) is there."""
        ...

    def stat(self, path: str) -> Stat | None:
        """Size, time and version, or None when missing."""
        ...

    def read_range(self, path: str, offset: int, length: int | None = None) -> bytes:
        """``length`` bytes (all when None) from ``offset``; b"" at or past the end. Raises FileNotFoundError."""
        ...

    def list_dir(self, prefix: str) -> list[str]:
        """Sorted names directly below ``prefix``; [] when there is no such folder."""
        ...

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        """All files below ``prefix``, in depth, sorted by path, in one listing."""
        ...

    def remove(self, path: str) -> None:
        """Delete a file; nothing happens when it is missing."""
        ...

    def remove_dir(self, path: str) -> None:
        """Delete an empty folder; nothing happens when it is missing or holds something."""
        ...

    def flush(self) -> None:
        """Make everything appended so far durable (local: fsync; cloud: uploaded)."""
        ...

    def close(self) -> None:
        """Flush and let go of descriptors and threads. The instance may be used again afterwards."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def check_path(path: str) -> str:
    """Return ``path`` when it stays below a root in every backend, else raise ValueError.

    Refused: absolute paths, empty, ``.`` or ``..`` segments, backslashes, control characters. ``""`` is the root.
    """
    if not path:
        return path
    bad = (
        path.startswith("/")
        or _ODD.search(path) is not None
        or not _NO_SEGMENT.isdisjoint(path.split("/"))
        or (os.name == "nt" and ":" in path)
    )
    if bad:
        raise ValueError(f"{path!r} is not a relative path below the log_path: use names joined by '/', without '..'")
    return path


class LocalStorage:
    """A folder on this machine.

    Appends go through kept ``O_APPEND`` descriptors, one ``os.write`` each, so a killed process loses nothing that
    returned. The folder is created by the first write.

    Args:
        root: the folder; relative paths are made absolute once, here.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = os.path.abspath(os.fspath(root))
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a signal handler may log while its own thread is in here
        self._open_files: OrderedDict[str, int] = OrderedDict()
        self._torn: dict[str, int] = {}  # path -> the size to go back to, where half an append could not be taken back
        self._told: set[str] = set()  # files that are no longer at their paths

    def __getstate__(self) -> dict[str, str]:
        return {"root": self._root}

    def __setstate__(self, state: dict[str, str]) -> None:
        self._root = state["root"]
        self._reset()

    def __repr__(self) -> str:
        return f"LocalStorage({self._root!r})"

    @property
    def root(self) -> Path:
        """The absolute folder."""
        return Path(self._root)

    def path(self, path: str = "") -> str:
        """The absolute local path of a file, checked."""
        return os.path.join(self._root, check_path(path)) if path else self._root

    def url(self, path: str = "") -> str:
        return Path(self.path(path)).as_uri()

    def read(self, path: str) -> bytes:
        with open_regular(self.path(path)) as file:
            return file.read()

    def write(self, path: str, data: bytes, *, content_type: str | None = None) -> None:
        full = self.path(path)
        self._check_fork()
        if path not in self._open_files:
            return write_atomic(full, data)  # outside the lock: a large file must not hold up appends
        with self._lock:
            write_atomic(full, data)
            self._forget(path)
        return None

    def append(self, path: str, data: bytes) -> None:
        self._check_fork()
        with self._lock:
            descriptor = self._open_files.get(path)
            if descriptor is None:
                descriptor = self._open(path)
            else:
                self._open_files.move_to_end(path)
            if self._torn and path in self._torn:
                os.ftruncate(descriptor, self._torn[path])
                del self._torn[path]
            written = os.write(descriptor, data)
            if written != len(data):
                self._finish(path, descriptor, data, written)

    def _finish(self, path: str, descriptor: int, data: bytes, written: int) -> None:
        """Write the rest of an append that the disk took in part, or take the part back and raise the disk's error."""
        size = os.fstat(descriptor).st_size - written
        try:
            while written < len(data):
                written += os.write(descriptor, data[written:])
        except OSError:
            try:
                os.ftruncate(descriptor, size)
            except OSError:
                self._torn[path] = size
            raise

    def _open(self, path: str) -> int:
        full = self.path(path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        try:
            descriptor = os.open(full, flags, 0o666)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(full), exist_ok=True)
            descriptor = os.open(full, flags, 0o666)
        self._open_files[path] = descriptor
        if len(self._open_files) > MAX_OPEN_FILES:
            _, oldest = self._open_files.popitem(last=False)
            with contextlib.suppress(OSError):
                os.fsync(oldest)  # flush can't reach it any more
            os.close(oldest)
        return descriptor

    def _forget(self, path: str) -> None:
        """Close the kept descriptor of a file that was replaced or removed: it leads to the old one."""
        self._torn.pop(path, None)
        descriptor = self._open_files.pop(path, None)
        if descriptor is not None:
            os.close(descriptor)

    def reopen(self) -> None:
        """Go on in the files that are at their paths now, where they were replaced since the first append: what they lack
        is appended, with a warning. Where another log or nothing is there, only a warning. :meth:`flush` does this too."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            for path, descriptor in list(self._open_files.items()):
                full = self.path(path)
                if path in self._torn or full in self._told or not is_replaced(descriptor, full):
                    continue
                rest = lacking(descriptor, full)
                if rest is None:
                    self._told.add(full)
                    warn(
                        f"{full} was removed, or is another file now: what is appended goes into the old one and is lost"
                    )
                    continue
                del self._open_files[path]
                try:
                    self.append(path, rest)
                except OSError as error:
                    self._forget(path)
                    self._open_files[path] = descriptor
                    warn(f"{full} was replaced while it was written, and what it lacks can't be added yet: {error}")
                    continue
                os.close(descriptor)
                if lines := rest.strip().splitlines():
                    warn(f"{full} was replaced while it was written: {len(lines)} lines that it lacked are added")

    def _check_fork(self) -> None:
        """In a forked child, start anew: the lock may be held by a thread that isn't there."""
        if os.getpid() == self._pid:
            return
        for descriptor in self._open_files.values():
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._reset()

    def exists(self, path: str) -> bool:
        return os.path.exists(self.path(path))

    def stat(self, path: str) -> Stat | None:
        try:
            found = os.stat(self.path(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return _stat(found) if modes.S_ISREG(found.st_mode) or modes.S_ISDIR(found.st_mode) else None

    def leads_out(self, path: str) -> bool:
        """Whether the file is reached by a symbolic link that leads out of the root."""
        return leads_out(self._root, check_path(path))

    def read_range(self, path: str, offset: int, length: int | None = None) -> bytes:
        with open_regular(self.path(path)) as file:
            file.seek(offset)
            return (file.read() if length is None else file.read(length)) or b""

    def list_dir(self, prefix: str) -> list[str]:
        try:
            return sorted(os.listdir(self.path(prefix)))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        try:
            with os.scandir(self.path(prefix)) as listing:
                found = sorted((entry.name + "/" if entry.is_dir() else entry.name, entry) for entry in listing)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return
        for name, entry in found:
            path = f"{prefix}/{entry.name}" if prefix else entry.name
            try:
                check_path(path)
                stat = entry.stat()
            except (OSError, ValueError):  # gone meanwhile, a dangling link, a name that no Storage can have
                continue
            if not name.endswith("/"):
                if modes.S_ISREG(stat.st_mode):
                    yield Entry(path, _stat(stat))
            elif not entry.is_symlink():  # a link to a parent would never end
                yield from self.scan(path)

    def remove(self, path: str) -> None:
        full = self.path(path)
        self._check_fork()
        with self._lock:
            self._forget(path)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(full)

    def remove_dir(self, path: str) -> None:
        with contextlib.suppress(OSError):
            os.rmdir(self.path(path))

    def flush(self) -> None:
        if os.getpid() != self._pid:
            return
        self.reopen()
        with self._lock:
            copies = [os.dup(descriptor) for descriptor in self._open_files.values()]
        try:  # outside the lock: a slow disk must not hold up the appends of other threads
            for descriptor in copies:
                os.fsync(descriptor)
        finally:
            for descriptor in copies:
                os.close(descriptor)

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        try:
            self.flush()
        finally:
            with self._lock:
                while self._open_files:
                    os.close(self._open_files.popitem()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def write_atomic(path: str | os.PathLike[str], data: bytes, *, sync: bool = False) -> None:
    """Write ``data`` to a temporary name beside ``path`` and rename it over ``path``.

    ``sync`` also fsyncs the file before the rename, for content that must survive a power cut.
    """
    path = os.fspath(path)
    folder = os.path.dirname(path) or "."
    os.makedirs(folder, exist_ok=True)
    temporary = os.path.join(folder, f".tmp-{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as file:  # not tempfile: its files are for their owner alone, whatever the umask
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _stat(found: os.stat_result) -> Stat:
    return Stat(found.st_size, found.st_mtime, f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}")


def local_root(uri: str | os.PathLike[str]) -> str | None:
    """The absolute local folder that ``uri`` names, or None when it has another scheme than ``file``.

    Raises:
        ValueError: a ``file`` URI that names a host, as ``file://runs/7`` does by mistake.
    """
    text = os.fspath(uri)
    if "://" not in text:
        return os.path.abspath(os.path.expanduser(text))
    parts = urlsplit(text)
    if parts.scheme != "file":
        return None
    if parts.netloc not in ("", "localhost"):
        raise ValueError(
            f"{text!r} names the host {parts.netloc!r}: write file:///absolute/path, or a path without file://"
        )
    return os.path.abspath(os.fsdecode(unquote_to_bytes(parts.path)))  # a path need not be UTF-8


def storage_from_uri(uri: str | os.PathLike[str], **options: Any) -> Storage:
    """The Storage for a local folder, given as a path or a ``file://`` URI, or for a cloud URI (``gs://bucket/folder``,
    ``s3://...``, any scheme that fsspec knows). Nothing is connected yet.

    Args:
        options: for the fsspec file system of a cloud URI, such as ``endpoint_url``; a local folder has none and takes
            any.

    Raises:
        ValueError: an empty text, a cloud URI without a bucket or with credentials in it, or a ``file`` URI with a host.
    """
    if not os.fspath(uri):
        raise ValueError("the log_path is empty: name a folder, such as runs/1")
    root = local_root(uri)
    if root is not None:
        return LocalStorage(root)
    from runmirror.storage.cloud import CloudStorage

    return CloudStorage(os.fspath(uri), options)
