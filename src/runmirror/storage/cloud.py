"""CloudStorage: a log_path on gs://, s3:// or any other scheme of fsspec."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from runmirror.storage.local import Entry, Stat, check_path
from runmirror.storage.remote import Bytes, Object, Remote, connect


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
        options: for the fsspec file system: credentials, endpoint. They travel in pickles and are written nowhere.
    """

    def __init__(self, uri: str, options: dict[str, Any] | None = None) -> None:
        self._uri = canonical_uri(uri)
        self._options = dict(options or {})
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._remote: Remote | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"uri": self._uri, "options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._uri, self._options = state["uri"], state["options"]
        self._reset()

    def __repr__(self) -> str:
        return f"CloudStorage({self._uri!r})"

    @property
    def remote(self) -> Remote:
        """The objects themselves, past the spool; connected at first use, once per process."""
        if os.getpid() != self._pid:
            self._reset()
        with self._lock:
            if self._remote is None:
                self._remote = connect(self._uri, self._options)
            return self._remote

    def url(self, path: str = "") -> str:
        return f"{self._uri}/{check_path(path)}" if path else self._uri

    def read(self, path: str) -> bytes:
        return self.remote.read(check_path(path))

    def read_range(self, path: str, offset: int, length: int | None = None) -> bytes:
        return self.remote.read_range(check_path(path), offset, length)

    def exists(self, path: str) -> bool:
        return self.stat(path) is not None

    def stat(self, path: str) -> Stat | None:
        found = self.remote.stat(check_path(path))
        return None if found is None else public(found)

    def list_dir(self, prefix: str) -> list[str]:
        return self.remote.list_dir(check_path(prefix))

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        for path, found in self.remote.scan(check_path(prefix)):
            yield Entry(path, public(found))

    def write(self, path: str, data: bytes, *, content_type: str | None = None) -> None:
        self.remote.put(check_path(path), Bytes(data), content_type or kind_of(path), "")

    def append(self, path: str, data: bytes) -> None:
        raise NotImplementedError(f"{self.url(path)}: appending comes next")

    def remove(self, path: str) -> None:
        self.remote.delete(check_path(path))

    def remove_dir(self, path: str) -> None:
        """Nothing: a store has no folders."""

    def flush(self) -> None:
        pass

    def close(self) -> None:
        with self._lock:
            remote, self._remote = self._remote, None
        if remote is not None and os.getpid() == self._pid:
            remote.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def public(found: Object) -> Stat:
    """What a Storage says of an object: its version is its content's, where the store tells the CRC."""
    version = found.version if found.crc is None else f"{found.crc:08x}-{found.size:x}"
    return Stat(found.size, found.mtime, version)


_KINDS = {
    "html": "text/html; charset=utf-8",
    "json": "application/json",
    "jsonl": "application/x-ndjson",
    "diff": "text/plain; charset=utf-8",
    "txt": "text/plain; charset=utf-8",
}


def kind_of(path: str) -> str:
    """The content type of a file, by its name: what makes a browser show a report instead of saving it."""
    return _KINDS.get(path.rpartition(".")[2].lower(), "application/octet-stream")
