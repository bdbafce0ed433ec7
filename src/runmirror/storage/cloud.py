"""CloudStorage: a log_path on gs://, s3:// or any other scheme of fsspec.

Guarantees, besides those of every Storage:

- ``append`` and, for the claimed writer, ``write`` touch the local disk only: the network can't slow, stop or fail training.
  One thread uploads (:mod:`runmirror.storage.uploader`).
- What was written outlives the process, in the spool (:mod:`runmirror.storage.spool`): the next writer of this log_path on
  this machine uploads it first, or :func:`runmirror.storage.push.push_spool` does.
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
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from runmirror.exceptions import LogBusyError, LogError
from runmirror.log.locks import Lock, acquire
from runmirror.storage.kinds import JOURNAL, kind_of
from runmirror.storage.lease import TakenError
from runmirror.storage.local import check_path
from runmirror.storage.remote import ABSENT, Bytes, Object, crc_of
from runmirror.storage.spool import Grown, Known, Spool, SpoolRecord, spool_folder
from runmirror.storage.upload import Uploads
from runmirror.storage.uploader import Uploader
from runmirror.storage.view import CloudReader

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


class CloudStorage(CloudReader):
    """Files below a cloud URI.

    Args:
        uri: the root, such as ``gs://bucket/experiments/7``.
        options: for the fsspec file system: credentials, endpoint. They travel in pickles and are written nowhere. One is
            ours: ``upload_interval``, seconds between uploads (default: 10 to 60, growing with the log).
        local: False to read the objects only, past a spool on this machine.
    """

    def _reset(self) -> None:
        super()._reset()
        self._file_lock: Lock | None = None
        self._uploads: Uploads | None = None  # while claimed
        self._uploader: Uploader | None = None
        self._claimed_paths: tuple[str, ...] = ()

    @property
    def claimed(self) -> bool:
        """Whether this instance is the writer."""
        return self._uploads is not None and os.getpid() == self._pid

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

    def _open_spool(self, folder: Path, paths: tuple[str, ...], take_over: bool) -> None:
        spool = self._spool = Spool(folder)
        record = spool.load()
        if record is not None and record.url != self._uri:
            raise LogError(f"{folder} is the spool of {record.url}: move it away")
        if record is None and spool.holds_anything():
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
            uploads = self._uploads = Uploads(spool, record, lambda: self.remote, self._lock, time.sleep, take_over)
            try:
                uploads.enlist(paths)
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
                    "%s is out of reach (%s): what is written is kept in %s and uploaded when it answers",
                    self._uri, error, folder
                )  # fmt: skip
                break
        self._claimed_paths = paths
        self._trusted = None
        for path in paths:  # what can't be extended has to be downloaded: here, not at the first row
            if path in spool.known and path not in uploads.record.files:
                with contextlib.suppress(ConnectionError, TimeoutError):
                    self._begin(uploads, path)

    def _set_aside(self, spool: Spool, why: str) -> None:
        size, files = spool.unsynced() if spool.refresh() else (0, 0)
        to = spool.set_aside(why)
        logger.warning(
            "%s was taken over by %s: %d bytes (%d whole files) that an earlier run on this machine did not get uploaded are "
            "not part of it; they are kept in %s", self._uri, why, size, files, to
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
        with self._lock:
            uploads = self._uploads
            key = uploads.keys.get(path) if uploads is not None else None
            if key is None or uploads is None:
                uploads, key = self._ready(path)
                if path == JOURNAL:  # never in uploads.keys
                    uploads.barriers.append((uploads.ends[path] + len(data), dict(uploads.ends)))
            uploads.append(key, data)
            uploads.ends[path] += len(data)
            if not self._uploader.dirty:  # type: ignore[union-attr]  # made by _ready
                self._uploader.touch()  # type: ignore[union-attr]

    def _ready(self, path: str) -> tuple[Uploads, str]:
        """Everything that the first append to a file needs: the claim, the thread, the spool's copy."""
        self._check_fork()
        uploads = self._writer()
        grown = uploads.record.files.get(path) or self._begin(uploads, path)
        key = f"{grown.base}/{path}"
        if path != JOURNAL:
            uploads.keys[path] = key
        return uploads, key

    def _begin(self, uploads: Uploads, path: str) -> Grown:
        """Start the spool's copy of a file that grows."""
        spool = uploads.spool
        known = spool.known.get(check_path(path))
        if known is not None and known.waiting:  # a whole file that was just written
            data = spool.whole.read(path)
            spool.rows.write(f"0/{path}", data)
            grown = Grown(version=known.object.version, rewrite=True)
        elif path in spool.removed:
            grown = Grown(version=spool.removed[path], rewrite=True)
        else:
            grown = uploads.open_grown(path, known.object if known is not None else None)
        uploads.record.files[path] = grown
        uploads.ends[path] = spool.end(path, grown)
        spool.save(uploads.record)
        if known is not None or path in spool.removed:
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
                uploads.keys.pop(path, None)
                uploads.ends[path] = len(data)
                spool.save(uploads.record)
            elif self._is_full(uploads, path, len(data)):
                return
            else:
                spool.whole.write(path, data)
                old = spool.known.get(path)
                version = old.object.version if old is not None else spool.removed.get(path, ABSENT)
                spool.note(path, Known(Object(len(data), time.time(), version, crc), waiting=True))
                uploads.waiting.pop(path, None)
                uploads.waiting[path] = object()
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
            spool = uploads.spool
            grown, known = uploads.record.files.pop(path, None), spool.known.get(path)
            uploads.keys.pop(path, None)
            if grown is not None:
                del uploads.ends[path]
                spool.save(uploads.record)
                spool.rows.remove(f"{grown.base}/{path}")
            version = grown.version if grown is not None else known.object.version if known is not None else ABSENT
            to_delete = version if version != ABSENT or not uploads.record.enlisted else None
            if known is not None or grown is not None or to_delete is not None:
                uploads.waiting.pop(path, None)
                spool.note(path, None, to_delete)
                spool.whole.remove(path)
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
        with contextlib.suppress(OSError):  # the upload is what counts
            self.sync()
        with self._lock:
            busy = self._uploads.busy()
            if busy:
                self._writer()
            uploader = self._uploader
        if uploader is not None:
            uploader.flush(timeout)

    def sync(self) -> None:
        """Make everything appended so far durable on this disk (fsync). Raises OSError."""
        if self.claimed and self._uploads is not None:
            self._uploads.spool.rows.flush()

    def status(self) -> CloudStatus | None:
        """How the uploads of this log_path are doing, by its spool on this machine; None when there is none."""
        spool = self._view()
        if spool is None or (record := spool.record) is None:
            return None
        error = self._uploader.error if self._uploader is not None else record.error
        return CloudStatus(*spool.unsynced(), record.last_upload, error, record.dropped, record.taken_by)

    def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """Upload what waits, end the thread, let go of the log_path. Never raises for the store: what is left stays in
        the spool, with one warning that says so.

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
            if uploads.busy():
                self.flush(max(timeout, 0.001))
        except (OSError, LogError) as error:
            why = str(error)
        ended = self._uploader is None or self._uploader.stop()
        if not ended:
            with self._lock:
                uploads.abandoned = True
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
        uploads.record.pid = 0  # whoever pushes it need not wait for this process
        with contextlib.suppress(OSError):
            uploads.spool.save(uploads.record)
        size, files = uploads.spool.unsynced()
        logger.warning(
            "%s: %d bytes (%d whole files) are not uploaded (%s); they are kept in %s: run `runmirror push` on this machine, "
            "or start the run again", self._uri, size, files, why or "still being sent", uploads.spool.folder
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_claimed: weakref.WeakSet[CloudStorage] = weakref.WeakSet()
_hooked = False


def _at_exit(storage: CloudStorage) -> None:
    """Upload once more before the interpreter ends, if nobody closes the storage. Later than this, gcsfs can't connect."""
    global _hooked
    _claimed.add(storage)
    if not _hooked:
        _hooked = True
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_after_fork)
        register = getattr(threading, "_register_atexit", None)
        if register is not None:
            register(_flush_all)
        else:
            import atexit

            atexit.register(_flush_all)


def _after_fork() -> None:
    """In a forked child: the parent writes on, this copy of it doesn't."""
    for storage in list(_claimed):
        storage._reset()
    _claimed.clear()


def _flush_all() -> None:
    for storage in list(_claimed):
        uploader = storage._uploader
        if storage.claimed and uploader is not None and not uploader.error:
            with contextlib.suppress(OSError, LogError):
                storage.flush(EXIT_TIMEOUT)
