"""CloudStorage: a log_path on gs://, s3:// or any other scheme of fsspec.

Guarantees, besides those of every Storage:

- ``append`` and, for the claimed writer, ``write`` touch the local disk only: the network can't slow, stop or fail training.
  One thread uploads (:mod:`runmirror.storage.uploader`).
- What was written outlives the process, in the spool (:mod:`runmirror.storage.spool`): the next writer of this log_path on
  this machine uploads it first, or :func:`push_spool` does.
- Every process on the writer's machine reads the spool, so it sees a row at once; others see it after the next upload.
- One writer: a second process on this machine is refused, one on another machine takes over and fences the first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from runmirror.exceptions import LogBusyError, LogError
from runmirror.log.locks import Lock, acquire
from runmirror.storage.kinds import kind_of
from runmirror.storage.local import Entry, Stat, check_path
from runmirror.storage.remote import ABSENT, Bytes, Object, Remote, connect
from runmirror.storage.spool import (
    Grown,
    Known,
    Spool,
    SpoolInfo,
    SpoolRecord,
    describe,
    is_alive,
    public,
    spool_folder,
)
from runmirror.storage.upload import TakenError, Uploads, crc_of
from runmirror.storage.uploader import Uploader

logger = logging.getLogger("runmirror")
FLUSH_TIMEOUT = 30.0
CLOSE_TIMEOUT = 60.0
EXIT_TIMEOUT = 10.0
SPOOL_CAP = 2 << 30
"""Bytes of whole files that may wait; what comes then is dropped and counted. Rows are never dropped."""


@dataclass(frozen=True, slots=True)
class CloudStatus:
    """How the uploads are doing.

    Attributes:
        unsynced: bytes that are on this machine only.
        pending_files: whole files among them.
        last_upload: Unix seconds, None before the first.
        error: what the store said last, "" since the last success.
        dropped: whole files that were not kept because too much waited.
        fenced: who took the log_path over, "" when nobody did.
    """

    unsynced: int
    pending_files: int
    last_upload: float | None
    error: str
    dropped: int
    fenced: str


def canonical_uri(uri: str) -> str:
    """The URI of a root, without a final slash, checked. ``gcs://`` is ``gs://``.

    Raises:
        ValueError: no bucket, a path that could leave the root, or credentials in the text.
    """
    scheme, _, rest = uri.partition("://")
    rest = rest.strip("/")
    bucket = rest.split("/", 1)[0]
    if not bucket:
        raise ValueError(f"{uri!r} names no bucket: write {scheme}://bucket/folder")
    if "@" in bucket:
        raise ValueError(
            f"{scheme}://{bucket.rpartition('@')[2]}: credentials in the URI would end up in logs; give them by "
            "storage_options or fsspec's configuration"
        )
    check_path(rest)
    return f"{'gs' if scheme == 'gcs' else scheme}://{rest}"


class CloudStorage:
    """Files below a cloud URI.

    Args:
        uri: the root, such as ``gs://bucket/experiments/7``.
        options: for the fsspec file system: credentials, endpoint. They travel in pickles and are written nowhere. One is
            ours: ``upload_interval``, seconds between uploads (default: 10 to 60, growing with the log).
        local: False to read the objects only, past a spool on this machine.
    """

    def __init__(self, uri: str, options: dict[str, Any] | None = None, *, local: bool = True) -> None:
        self._uri = canonical_uri(uri)
        self._options = dict(options or {})
        self._local = local
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a signal handler may log while its own thread is in here
        self._remote: Remote | None = None
        self._spool: Spool | None = None
        self._trusted: tuple[str, int] | None = None  # the writer whose spool was found to be the newest
        self._distrusted: tuple[str, int] | None = None
        self._file_lock: Lock | None = None
        self._uploads: Uploads | None = None  # while claimed
        self._uploader: Uploader | None = None
        self._claimed_paths: tuple[str, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {"uri": self._uri, "options": self._options, "local": self._local}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._uri, self._options, self._local = state["uri"], state["options"], state["local"]
        self._reset()

    def __repr__(self) -> str:
        return f"CloudStorage({self._uri!r})"

    def _check_fork(self) -> None:
        if os.getpid() != self._pid:  # the parent's connections, thread and spool are not ours
            self._reset()

    @property
    def remote(self) -> Remote:
        """The objects themselves, past the spool; connected at first use, once per process."""
        self._check_fork()
        with self._lock:
            if self._remote is None:
                options = {key: value for key, value in self._options.items() if key != "upload_interval"}
                self._remote = connect(self._uri, options)
            return self._remote

    @property
    def claimed(self) -> bool:
        """Whether this instance is the writer."""
        return self._uploads is not None and os.getpid() == self._pid

    # -- reading

    def _view(self) -> Spool | None:
        """The spool of this log_path on this machine, when it knows better than the store."""
        if not self._local:
            return None
        self._check_fork()
        if self._spool is None:
            self._spool = Spool(spool_folder(self._uri))
        spool = self._spool
        if not spool.refresh() or spool.record is None:
            return None
        record = spool.record
        mark = (record.writer, record.pid)
        if self._uploads is not None or mark == self._trusted:
            return spool
        if mark == self._distrusted or record.taken_by:
            return None
        if not is_alive(record) and record.enlisted and not self._is_latest(record):
            self._distrusted = mark
            return None
        self._trusted = mark
        return spool

    def _is_latest(self, record: SpoolRecord) -> bool:
        """Whether the store still knows the writer of a spool that a killed process left; True when it can't be asked."""
        try:
            Uploads(Spool(spool_folder(self._uri)), record, lambda: self.remote, self._lock, time.sleep).check_lease()
        except TakenError:
            return False
        except OSError:
            return True
        return True

    def url(self, path: str = "") -> str:
        return f"{self._uri}/{check_path(path)}" if path else self._uri

    def read(self, path: str) -> bytes:
        return self.read_range(path, 0)

    def read_range(self, path: str, offset: int, length: int | None = None) -> bytes:
        check_path(path)
        for _ in range(3):
            spool = self._view()
            grown = spool.grown(path) if spool is not None else None
            if spool is None or grown is None:
                break
            try:
                return self._read_grown(spool, path, grown, offset, length)
            except FileNotFoundError:
                continue  # it was uploaded, or begins elsewhere now
        known = spool.known.get(path) if spool is not None else None
        if spool is not None and known is not None and known.waiting:
            with contextlib.suppress(FileNotFoundError):
                return spool.whole.read_range(path, offset, length)
        if spool is not None and known is None and spool.record is not None and spool.record.enlisted:
            raise FileNotFoundError(2, "no such object", self.url(path))
        if offset == 0 and length is None:
            return self.remote.read(path)
        return self.remote.read_range(path, offset, length)

    def _read_grown(self, spool: Spool, path: str, grown: Grown, offset: int, length: int | None) -> bytes:
        head = b""
        if offset < grown.base:
            end = grown.base if length is None else min(grown.base, offset + length)
            head = self.remote.read_range(path, offset, end - offset)
            length = None if length is None else length - (end - offset)
            offset = grown.base
        if length == 0:
            return head
        try:
            return head + spool.rows.read_range(f"{grown.base}/{path}", offset - grown.base, length)
        except FileNotFoundError:
            if spool.refresh() and spool.grown(path) == grown:
                return head  # nothing was appended yet
            raise

    def exists(self, path: str) -> bool:
        """Whether the file is there; on the writer's machine also a folder."""
        return self.stat(path) is not None or ((spool := self._view()) is not None and bool(spool.paths(path)))

    def stat(self, path: str) -> Stat | None:
        check_path(path)
        spool = self._view()
        if spool is not None:
            found = spool.stat(path)
            if found is not None or (spool.record is not None and spool.record.enlisted):
                return found
            if self._uploads is not None:
                return None  # the store was never in reach: nothing is known of it
        stored = self.remote.stat(path)
        return None if stored is None else public(stored)

    def list_dir(self, prefix: str) -> list[str]:
        check_path(prefix)
        spool = self._view()
        if spool is None:
            return self.remote.list_dir(prefix)
        start = len(prefix) + 1 if prefix else 0
        return sorted({path[start:].split("/", 1)[0] for path in spool.paths(prefix)})

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        check_path(prefix)
        spool = self._view()
        if spool is None:
            for path, found in self.remote.scan(prefix):
                yield Entry(path, public(found))
            return
        for path in spool.paths(prefix):
            if (stat := spool.stat(path)) is not None:
                yield Entry(path, stat)

    # -- becoming the writer

    def claim(self, paths: Iterable[str] = (), *, take_over: bool = True) -> None:
        """Become the one writer: lock the spool on this machine, take up what a killed writer left in it, and take over from a
        writer on another machine. When the store is out of reach, that is said, and done later.

        Args:
            paths: files that will be appended to, so that another writer is kept from them at once.
            take_over: False to raise instead when another writer has the log_path.

        Raises:
            LogBusyError: another process on this machine writes it.
            TakenError: another writer has it, and ``take_over`` is False.
            PermissionError, FileNotFoundError: the store refuses, or there is no such bucket.
            StateError, OSError: there is no place for the spool.
        """
        self._check_fork()
        with self._lock:
            if self._uploads is not None:
                return
            folder = spool_folder(self._uri)
            lock = acquire(
                f"{folder}.lock",
                lambda holder: LogBusyError(
                    f"{self._uri} is being written by {holder}: end that process, or start with another log_path"
                ),
            )
            try:
                self._open_spool(folder, tuple(paths), take_over)
            except BaseException:
                self._uploads = None
                lock.release()
                raise
            self._file_lock = lock
            _at_exit(self)

    def _open_spool(self, folder: Any, paths: tuple[str, ...], take_over: bool) -> None:
        spool = self._spool = Spool(folder)
        record = spool.load()
        if record is not None and record.url != self._uri:
            raise LogError(f"{folder} is the spool of {record.url}: move it away")
        if record is None and folder.exists():
            logger.warning("the spool %s is damaged: it is kept as %s", folder, spool.set_aside("").name)
        if record is not None and record.taken_by:
            self._set_aside(spool, record.taken_by)
            record = None
        if record is not None:
            fresh = SpoolRecord(url=self._uri)
            record.host, record.pid, record.started, record.error = fresh.host, fresh.pid, fresh.started, ""
            spool.save(record)
            spool.refresh()
            spool.mend()
        for _ in range(2):
            if record is None:
                record = SpoolRecord(url=self._uri)
                spool.start_files({})
                spool.save(record)
            self._uploads = Uploads(spool, record, lambda: self.remote, self._lock, time.sleep)
            try:
                self._uploads.enlist(paths, take_over=take_over)
                break
            except TakenError as error:
                if not any(spool.unsynced()):
                    if not take_over:
                        raise
                    spool.discard()
                else:
                    self._set_aside(spool, str(error))
                    if not take_over:
                        raise
                record = None
            except (ConnectionError, TimeoutError) as error:
                logger.warning(
                    "%s is out of reach (%s): what is written is kept in %s and uploaded when it answers", self._uri, error, folder
                )  # fmt: skip
                break
        self._claimed_paths = paths
        self._trusted = None

    def _set_aside(self, spool: Spool, why: str) -> None:
        size, files = spool.unsynced() if spool.refresh() else (0, 0)
        to = spool.set_aside(why)
        logger.warning(
            "%s was taken over by %s: %d bytes (%d whole files) that an earlier run on this machine did not get uploaded are not "
            "part of it; they are kept in %s", self._uri, why, size, files, to
        )  # fmt: skip

    def _writer(self) -> Uploads:
        """The uploads of this writer; claims first when nobody did. Called under the lock."""
        if self._uploads is None:
            self.claim()
        assert self._uploads is not None  # noqa: S101  (claim raises otherwise)
        if self._uploader is None:
            interval = self._options.get("upload_interval")
            self._uploader = Uploader(self._uploads, None if interval is None else float(interval), self._claimed_paths)
        return self._uploads

    # -- writing

    def append(self, path: str, data: bytes) -> None:
        if os.getpid() != self._pid:
            self._reset()
        with self._lock:
            uploads = self._uploads
            if uploads is None or self._uploader is None:
                uploads = self._writer()
            grown = uploads.record.files.get(path)
            if grown is None:
                grown = self._begin(uploads, path)
            uploads.spool.rows.append(f"{grown.base}/{path}", data)
            uploads.ends[path] += len(data)
            self._uploader.touch()  # type: ignore[union-attr]  # made by _writer

    def _begin(self, uploads: Uploads, path: str) -> Grown:
        """Start the spool's copy of a file that grows."""
        spool = uploads.spool
        known = spool.known.get(check_path(path))
        if known is not None and known.waiting:  # a whole file that was just written
            data = spool.whole.read(path)
            spool.rows.write(f"0/{path}", data)
            grown = Grown(version=known.object.version, rewrite=True)
        else:
            grown = uploads.open_grown(path, known.object if known is not None else None)
        uploads.record.files[path] = grown
        uploads.ends[path] = spool.end(path, grown)
        spool.save(uploads.record)
        if known is not None:
            uploads.waiting.pop(path, None)
            spool.note(path, None)
            spool.whole.remove(path)
        return grown

    def write(self, path: str, data: bytes, *, content_type: str | None = None) -> None:
        """Replace a whole file: in the spool when this instance is the writer, else in the store, at once."""
        check_path(path)
        if not self.claimed:
            self.remote.put(path, Bytes(data), content_type or kind_of(path), "")
            return
        crc = crc_of(data)
        with self._lock:
            uploads = self._writer()
            spool = uploads.spool
            grown = uploads.record.files.get(path)
            if grown is not None:
                spool.rows.write(f"0/{path}", data)
                if grown.base:
                    spool.rows.remove(f"{grown.base}/{path}")
                uploads.record.files[path] = Grown(version=grown.version, rewrite=True)
                uploads.ends[path] = len(data)
                spool.save(uploads.record)
            elif self._is_full(uploads, path, len(data)):
                return
            else:
                spool.whole.write(path, data)
                old = spool.known.get(path)
                version = old.object.version if old is not None else ABSENT
                spool.note(path, Known(Object(len(data), time.time(), version, crc), waiting=True))
                uploads.waiting.pop(path, None)
                uploads.waiting[path] = object()
                if path in uploads.removed:
                    uploads.removed.remove(path)
            self._uploader.touch()  # type: ignore[union-attr]  # made by _writer

    def _is_full(self, uploads: Uploads, path: str, size: int) -> bool:
        waiting = sum(uploads.spool.known[name].object.size for name in uploads.waiting)
        if not uploads.waiting or waiting + size <= SPOOL_CAP:
            return False
        uploads.record.dropped += 1
        if uploads.record.dropped == 1:
            logger.warning(
                "%s: %s is not kept, nor are more files, while %d bytes wait to be uploaded (%s); rows still are",
                self._uri, path, waiting, self._uploader.error if self._uploader is not None else ""
            )  # fmt: skip
        return True

    def truncate(self, path: str, size: int) -> None:
        """Cut a file to its first ``size`` bytes."""
        self.write(path, self.read_range(path, 0, size))

    def remove(self, path: str) -> None:
        check_path(path)
        if not self.claimed:
            return self.remote.delete(path)
        with self._lock:
            uploads = self._writer()
            grown = uploads.record.files.pop(path, None)
            if grown is not None:
                del uploads.ends[path]
                uploads.spool.save(uploads.record)
                uploads.spool.rows.remove(f"{grown.base}/{path}")
            uploads.waiting.pop(path, None)
            uploads.spool.note(path, None)
            uploads.spool.whole.remove(path)
            uploads.removed.append(path)
            self._uploader.touch()  # type: ignore[union-attr]  # made by _writer
        return None

    def remove_dir(self, path: str) -> None:
        """Nothing: a store has no folders."""

    def flush(self, timeout: float = FLUSH_TIMEOUT) -> None:
        """Make everything appended so far durable on this disk, upload it, and wait for that.

        Args:
            timeout: seconds to wait at most. 0 asks for the upload and never raises.

        Raises:
            TimeoutError: it is not all uploaded yet; it will be.
            LogError: another writer took over.
        """
        if not self.claimed or self._uploads is None:
            return
        with contextlib.ExitStack() as stack:
            if timeout <= 0:
                stack.enter_context(contextlib.suppress(OSError))
            self._uploads.spool.rows.flush()
        with self._lock:
            busy = self._uploads.busy()
            if busy:
                self._writer()
            uploader = self._uploader
        if uploader is not None:
            uploader.flush(timeout)

    def status(self) -> CloudStatus | None:
        """How the uploads of this log_path are doing, by its spool on this machine; None when there is none."""
        spool = self._view()
        info = describe(spool) if spool is not None else None
        if info is None:
            return None
        error = self._uploader.error if self._uploader is not None else info.error
        return CloudStatus(info.unsynced, info.pending_files, info.last_upload, error, info.dropped, info.taken_by)

    def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """Upload what waits, end the thread, let go of the log_path. Never raises for the store: what is left stays in the spool,
        with one warning that says so.

        Args:
            timeout: seconds to wait for the uploads at most.
        """
        if os.getpid() != self._pid:
            return
        if self._uploads is not None:
            self._end(timeout)
        with self._lock:
            remote, self._remote = self._remote, None
            spool, self._spool = self._spool, None
            lock, self._file_lock = self._file_lock, None
            self._uploads = self._uploader = None
        if spool is not None:
            spool.close()
        if lock is not None:
            lock.release()
        if remote is not None:
            remote.close()

    def _end(self, timeout: float) -> None:
        uploads = self._uploads
        assert uploads is not None  # noqa: S101  (the caller looked)
        why = ""
        try:
            self.flush(max(timeout, 0.001))
        except (OSError, LogError) as error:
            why = str(error)
        ended = self._uploader is None or self._uploader.stop()
        if uploads.record.taken_by:
            if ended:
                self._set_aside(uploads.spool, uploads.record.taken_by)
            return
        if not why and ended and not uploads.busy():
            try:
                uploads.leave()
            except OSError as error:
                logger.info("%s: %s", self._uri, error)
            uploads.spool.discard()
            return
        size, files = uploads.spool.unsynced()
        logger.warning(
            "%s: %d bytes (%d whole files) are not uploaded (%s); they are kept in %s: run `runmirror push` on this machine, or "
            "start the run again", self._uri, size, files, why or "still being sent", uploads.spool.folder
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def push_spool(info: SpoolInfo, options: dict[str, Any] | None = None, timeout: float = 600.0) -> SpoolInfo:
    """Upload what a killed writer left in its spool, and return how it stands then (``unsynced`` is 0 when all is there).

    Args:
        info: from :func:`spools`.
        options: as of :class:`CloudStorage`.
        timeout: seconds at most.

    Raises:
        LogBusyError: its writer is alive and uploads by itself.
        TakenError: another writer has the log_path; the spool is kept aside.
        OSError: the store is out of reach or refuses.
    """
    if info.taken_by:
        raise TakenError(
            f"{info.url} was taken over by {info.taken_by}: {info.folder} is kept for you, and never uploaded"
        )
    storage = CloudStorage(info.url, options)
    storage.claim(take_over=False)
    try:
        storage.flush(timeout)
    finally:
        storage.close(0.0)
    left = describe(Spool(info.folder))
    return left or SpoolInfo(
        info.url, info.folder, info.writer, info.host, info.pid, False, 0, 0, time.time(), "", "", info.dropped
    )


_claimed: weakref.WeakSet[CloudStorage] = weakref.WeakSet()
_hooked = False


def _at_exit(storage: CloudStorage) -> None:
    """Upload once more before the interpreter ends, if nobody closes the storage. Later than this, gcsfs can't connect."""
    global _hooked
    _claimed.add(storage)
    if not _hooked:
        _hooked = True
        register = getattr(threading, "_register_atexit", None)
        if register is not None:
            register(_flush_all)
        else:
            import atexit

            atexit.register(_flush_all)


def _flush_all() -> None:
    for storage in list(_claimed):
        uploader = storage._uploader
        if storage.claimed and uploader is not None and not uploader.error:
            with contextlib.suppress(OSError, LogError):
                storage.flush(EXIT_TIMEOUT)
