"""The reading half of a CloudStorage: the spool of this machine where there is one, else the objects.

Guarantees: one request per call and none where the spool knows; an object is kept in memory only while
a spool says that it can't have changed; positions are those of the object,
whether the bytes come from the spool or from the store.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

from runmirror.storage.lease import lease_of
from runmirror.storage.local import Entry, Stat, check_path
from runmirror.storage.remote import Remote, connect
from runmirror.storage.spool import Grown, Spool, SpoolRecord, find_spool, is_alive, public

KEPT_FILES, KEPT_SIZE = 16, 1 << 20
"""How many small objects a reader beside a spool keeps in memory, and their largest size."""


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


class CloudReader:
    """Files below a cloud URI, as they are read. See :class:`~runmirror.storage.cloud.CloudStorage`."""

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
        self._kept: dict[tuple[str, str], bytes] = {}

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
    def uri(self) -> str:
        """The root, canonical."""
        return self._uri

    @property
    def options(self) -> dict[str, Any]:
        """What was given for the file system, credentials included: a copy."""
        return dict(self._options)

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
        return False

    # -- reading

    def _view(self) -> Spool | None:
        """The spool of this log_path on this machine, when it knows better than the store."""
        if not self._local:
            return None
        self._check_fork()
        spool = self._spool
        if spool is None or not spool.refresh():
            folder = find_spool(self._uri)
            if folder is None:
                return None
            spool = self._spool = Spool(folder)
            spool.refresh()
        if spool.record is None:
            return None
        record = spool.record
        mark = (record.writer, record.pid)
        if self.claimed or mark == self._trusted:
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
            return bool(lease_of(self.remote).get("id") == record.writer)
        except OSError:
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
        if spool is not None and known is None:
            raise FileNotFoundError(2, "no such object", self.url(path))
        if known is not None:
            return self._stored(path, known.object.version, known.object.size, offset, length)
        if offset == 0 and length is None:
            return self.remote.read(path)
        return self.remote.read_range(path, offset, length)

    def _stored(self, path: str, version: str, size: int, offset: int, length: int | None) -> bytes:
        """A range of what the store has of a file whose ``version`` the spool knows: small ones are fetched once."""
        if size > KEPT_SIZE:
            return self.remote.read_range(path, offset, length)
        with self._lock:
            data = b"" if size == 0 else self._kept.get((path, version))
        if data is None:
            data = self.remote.read_range(path, 0, size)
            if len(data) == size:  # else another program has replaced it
                with self._lock:
                    self._kept[path, version] = data
                    while len(self._kept) > KEPT_FILES:
                        del self._kept[next(iter(self._kept))]
        return data[offset:] if length is None else data[offset : offset + length]

    def _read_grown(self, spool: Spool, path: str, grown: Grown, offset: int, length: int | None) -> bytes:
        head = b""
        if offset < grown.base:
            end = grown.base if length is None else min(grown.base, offset + length)
            writer = spool.record.writer if spool.record is not None else ""
            head = self._stored(path, f"{writer} {grown.base}", grown.base, offset, end - offset)
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
            return spool.stat(path)
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
