"""Objects below one URI, through fsspec: one request per call, bounded in time, never a cached answer.

Guarantees of every :class:`Remote`:

- Names are exact: nothing is ever expanded as a pattern. Reading at or past the end is ``b""``.
- A missing object is FileNotFoundError (``stat``: None), a refused one PermissionError, a place that doesn't answer
  ConnectionError (TimeoutError when it is merely silent), anything else OSError.
- ``put`` with ``expect`` replaces exactly that version or raises :class:`ConflictError`, where the store can
  (``conditional``). It replaces the whole object at once.
- An instance belongs to one process; only what made it can be pickled (:class:`~runmirror.storage.cloud.CloudStorage`).

Credentials and endpoints are fsspec's business: its configuration files and variables, and the options given.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import random
import re
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol, TypeVar

from runmirror.exceptions import MissingPackageError
from runmirror.storage.local import Stat

T = TypeVar("T")
CONNECT_TIMEOUT = 10.0
SILENCE_TIMEOUT = 30.0
REQUEST_TIMEOUT = 300.0
"""Seconds one request may take: to connect, without a byte, in all."""
PAUSES = (0.3, 1.0, 2.0)
"""Seconds between the tries of one call, before jitter."""
WRITER = "runmirror-writer"
"""Metadata key of the writer's id, in stores that keep one with an object."""
COPY = 8 << 20
"""Bytes copied at a time."""
ANY = "*"
"""``expect`` of a put that replaces whatever is there."""
ABSENT = ""
"""``expect`` of a put that must make the object."""


class PastEndError(OSError):
    """A range that begins at or past the end of an object."""


class ConflictError(Exception):
    """The object is not the version that was expected: someone else wrote it, or an answer of ours was lost."""


@dataclass(frozen=True, slots=True)
class Object(Stat):
    """What a store says of an object.

    Attributes:
        crc: CRC32C of the content, None where the store doesn't say.
        writer: id of the runmirror writer that wrote this version, "" when nobody did, None when the answer doesn't say.
    """

    crc: int | None = None
    writer: str | None = None


class Content(Protocol):
    """Bytes to be uploaded."""

    size: int

    def read(self, start: int, length: int) -> bytes:
        """Exactly these bytes."""
        ...


class Bytes:
    """Content in memory."""

    def __init__(self, data: bytes) -> None:
        self.size = len(data)
        self._data = data

    def read(self, start: int, length: int) -> bytes:
        return self._data[start : start + length]


class LocalFile:
    """A part of a local file, as content of an upload. It stays what it was when the file is replaced meanwhile.

    Args:
        path: the file.
        start: where the content begins.
        size: of the content; up to the end of the file when None.
    """

    def __init__(self, path: str, start: int = 0, size: int | None = None) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115  (closed by close)
        self._path, self._start = path, start
        self.size = os.fstat(self._file.fileno()).st_size - start if size is None else size

    def read(self, start: int, length: int) -> bytes:
        self._file.seek(self._start + start)
        data = self._file.read(length)
        while len(data) < length and (more := self._file.read(length - len(data))):
            data += more
        if len(data) < length:
            raise FileNotFoundError(f"{self._path} ends at {self._start + start + len(data)} bytes: it was cut")
        return data

    def crc(self, before: int = 0) -> int:
        """CRC32C of the content, behind bytes whose CRC32C is ``before``."""
        for at in range(0, self.size, COPY):
            before = crc_of(self.read(at, min(COPY, self.size - at)), before)
        return before

    def close(self) -> None:
        self._file.close()


class Remote:
    """Objects of any fsspec file system.

    Args:
        uri: the root, such as ``memory://runs/7``.
        options: for the file system's constructor.

    Attributes:
        conditional: whether ``put`` honours ``expect``.
        extends: whether :meth:`extend` adds to an object without sending all of it.
        smallest_head: bytes an object must have for that.
        unique_versions: whether every write gives a new version, even one of the same content.
    """

    conditional = False
    extends = False
    smallest_head = 0
    unique_versions = False

    def __init__(self, uri: str, options: dict[str, Any]) -> None:
        self.uri = uri
        self._fs, self._root = self._connect(uri, options)

    def _connect(self, uri: str, options: dict[str, Any]) -> tuple[Any, str]:
        try:
            import fsspec
        except ImportError as error:
            raise MissingPackageError(
                f"{uri} needs fsspec and the package for its scheme: pip install 'runmirror[gcs]' or 'runmirror[s3]'"
            ) from error
        scheme = uri.split("://", 1)[0]
        try:
            kind = fsspec.get_filesystem_class(scheme)
        except ImportError as error:
            raise MissingPackageError(f"{uri}: {error}") from error
        except ValueError as error:
            raise ValueError(f"{uri}: fsspec knows no scheme {scheme}:// (is it spelled right?)") from error
        given = {"use_listings_cache": False, **options}
        if scheme != "memory":  # its objects are in the instance
            given["skip_instance_cache"] = True
        fs = kind(**given)
        return fs, str(fs._strip_protocol(uri)).rstrip("/")

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _object(self, info: dict[str, Any]) -> Object:
        size = int(info.get("size") or 0)
        mtime = 0.0
        for key in ("mtime", "LastModified", "last_modified", "updated", "created"):
            if (found := _moment(info.get(key))) is not None:
                mtime = found
                break
        version = info.get("generation") or info.get("ETag") or info.get("etag") or f"{size:x}-{mtime:.6f}"
        return Object(size, mtime, str(version).strip('"'))

    # -- reading

    def stat(self, path: str) -> Object | None:
        """Size, time and version; None when missing."""
        try:
            return self._stat(path)
        except FileNotFoundError:
            return None

    def _stat(self, path: str) -> Object | None:
        info = self._ask(path, lambda: self._fs.info(self._full(path)))
        return self._object(info) if info.get("type") != "directory" else None

    def read(self, path: str) -> bytes:
        """The whole object."""
        return bytes(self._ask(path, lambda: self._fs.cat_file(self._full(path))))

    def read_range(self, path: str, offset: int, length: int | None) -> bytes:
        """``length`` bytes (all when None) from ``offset``, fewer at the end."""
        if length == 0:
            return b""
        end = None if length is None else offset + length
        try:
            return bytes(self._ask(path, lambda: self._fs.cat_file(self._full(path), start=offset, end=end)))
        except PastEndError:
            return b""

    def list_dir(self, prefix: str) -> list[str]:
        """Sorted names directly below ``prefix``."""
        full = self._full(prefix)
        try:
            found = self._ask(prefix, lambda: self._fs.ls(full, detail=True))
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = {_below(entry["name"], full) for entry in found}
        return sorted(name for name in names if name and "/" not in name)

    def scan(self, prefix: str = "") -> Iterator[tuple[str, Object]]:
        """(path, object) of everything below ``prefix``, sorted by path."""
        full = self._full(prefix)
        try:
            found = self._ask(prefix, lambda: self._fs.find(full, detail=True))
        except FileNotFoundError:
            return
        for name in sorted(found):
            path = _below(name, self._root) if self._root else name
            if path and name.lstrip("/") != full.lstrip("/"):
                yield path, self._object(found[name])

    # -- writing

    def put(self, path: str, content: Content, kind: str, writer: str, expect: str = ANY) -> Object:
        """Replace the whole object.

        Args:
            content: all of it.
            kind: content type.
            writer: id kept with the object, where the store can.
            expect: the version that is replaced, :data:`ABSENT` for none yet, :data:`ANY` for whatever is there.
        """

        def copy() -> None:
            full = self._full(path)
            self._fs.makedirs(self._fs._parent(full), exist_ok=True)  # nothing in stores that have no folders
            if content.size <= COPY:
                self._fs.pipe_file(full, content.read(0, content.size))
                return
            with self._fs.open(full, "wb") as file:
                for start in range(0, content.size, COPY):
                    file.write(content.read(start, min(COPY, content.size - start)))

        self._ask(path, copy)
        return self.stat(path) or Object(content.size, time.time(), "")

    def extend(self, path: str, head: Object, tail: Content, kind: str, writer: str) -> Object:
        """Add to the object ``head`` without sending it again, or raise ConflictError when it is no longer that. Only asked of
        stores that say ``extends``; this plain one sends whole objects."""
        raise TypeError(f"{type(self).__name__} can't add to an object: {path} has to be sent as a whole")

    def forget_parts(self, path: str, writer: str) -> None:
        """Remove what :meth:`extend` left beside an object."""

    def delete(self, path: str) -> None:
        """Remove the object; nothing happens when it is missing."""
        with contextlib.suppress(FileNotFoundError):
            self._ask(path, lambda: self._fs.rm_file(self._full(path)))

    def close(self) -> None:
        """Let go of connections."""

    def _ask(self, path: str, call: Callable[[], T]) -> T:
        """The answer, tried again where that can help, errors made our own."""
        for pause in (*PAUSES, None):
            try:
                return call()
            except Exception as error:
                found = self._explain(error, path)
                if pause is None or not isinstance(found, ConnectionError):
                    if found is error:
                        raise
                    raise found from error
            time.sleep(pause * (0.5 + random.random()))
        raise AssertionError("unreachable")

    def _explain(self, error: Exception, path: str) -> Exception:
        """The error that our callers know; ConnectionError when trying again may help."""
        where = f"{self.uri}/{path}" if path else self.uri
        if isinstance(error, FileNotFoundError):
            return FileNotFoundError(errno.ENOENT, "no such object", where)
        if isinstance(error, (ConflictError, PermissionError, NotADirectoryError, IsADirectoryError)):
            return error
        if isinstance(error, TimeoutError):
            return TimeoutError(errno.ETIMEDOUT, f"no answer in time ({error or type(error).__name__})", where)
        if _PAST_END.search(str(error)):
            return PastEndError(errno.EINVAL, "no such range", where)
        if isinstance(error, OSError) or "Connection" in type(error).__name__:
            return ConnectionError(errno.EIO, one_line(error), where)
        return OSError(errno.EIO, one_line(error), where)


def own_file_system(kind: Any, close: Callable[[Any], Coroutine[Any, Any, Any]], options: dict[str, Any]) -> Any:
    """A file system of this class for one Remote alone: no cached listings, and ``close`` for its sessions where
    :func:`closes_in_own_process` allows that."""
    own = type("FileSystem", (kind,), {"close_session": staticmethod(closes_in_own_process(close))})
    return own(**{"use_listings_cache": False, "skip_instance_cache": True, **options})


def closes_in_own_process(close: Callable[[Any], Coroutine[Any, Any, Any]]) -> Callable[..., None]:
    """A file system's ``close_session(loop, session, ...)``: in the process that made the file system, ``close(session)`` on
    its loop. In a forked child it does nothing: the connections are the parent's, and so is what watches them. Closing them
    there would leave the parent's next request without an answer, so the child keeps them until it ends."""
    pid = os.getpid()

    def close_session(loop: Any, session: Any, *more: Any, **named: Any) -> None:
        if session is None:
            return
        if os.getpid() != pid:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))
            return
        if loop is None or not loop.is_running():
            return
        try:
            inside = asyncio.get_running_loop() is loop
        except RuntimeError:
            inside = False
        closing = asyncio.run_coroutine_threadsafe(close(session), loop)
        if not inside:
            with contextlib.suppress(Exception):  # nothing depends on it
                closing.result(1.0)

    return close_session


_PAST_END = re.compile(r"range (specified )?(is )?(not satisfiable|invalid)|InvalidRange", re.IGNORECASE)
"""In the words of the stores. An error may name the object too, so single words say nothing."""


def one_line(error: Exception) -> str:
    """The type and first line of an error."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def _below(name: str, root: str) -> str:
    name, root = name.strip("/"), root.strip("/")
    return name[len(root) :].strip("/") if not root or name.startswith(root + "/") else ""


def _moment(value: Any) -> float | None:
    """Unix seconds of what file systems give as a time."""
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            return None
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    return None


def crc_of(data: bytes, before: int = 0) -> int:
    """CRC32C of ``data``, behind bytes whose CRC32C is ``before``."""
    try:
        import google_crc32c
    except ImportError as error:
        raise MissingPackageError("cloud log_paths need google-crc32c: pip install 'runmirror[gcs]'") from error
    return int(google_crc32c.extend(before, data))


def connect(uri: str, options: dict[str, Any]) -> Remote:
    """The Remote for a URI, by its scheme.

    Raises:
        MissingPackageError: the package for this scheme is not installed.
        ValueError: fsspec knows no such scheme, or an option is wrong.
    """
    scheme = uri.split("://", 1)[0]
    if scheme in ("gs", "gcs"):
        from runmirror.storage.gcs import GcsRemote

        return GcsRemote(uri, options)
    if scheme in ("s3", "s3a"):
        from runmirror.storage.s3 import S3Remote

        return S3Remote(uri, options)
    return Remote(uri, options)
