"""Listed: one run in a cloud as of the last listing, read at the least cost.

Guarantees:

- What is there, how large and which version, is answered from the listing: no request. Bytes behind the listed size are not
  read, so nothing is ever asked for past the end.
- A range is read together with what follows it, and near the end with the last rows before it: to go on reading a log
  that grew takes one request, which also shows whether the last line read is still there.
- What was read is kept until the listing shows another version, at most :data:`KEPT` files of a run.
- While this machine writes the run (``live``), everything is read through its spool instead: rows at once, no request.
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NamedTuple, Self

from runmirror.log.status import TAIL
from runmirror.storage import Entry, Stat, Storage

AHEAD = 1 << 18
"""Bytes read at once at least; four times that when a file is read on."""
KEPT = 8


class _Range(NamedTuple):
    version: str
    start: int
    data: bytes


class Listed:
    """A :class:`~runmirror.storage.Storage` for readers.

    Args:
        root: the folder that was listed.
        below: the run's path below it; "" for the root itself.
        entries: path below the run -> :class:`~runmirror.storage.Stat`.
        relist: lists the run anew, for :meth:`refresh`.

    Attributes:
        live: what to read through while this machine writes the run, else None.
    """

    def __init__(
        self, root: Storage, below: str, entries: dict[str, Stat], relist: Callable[[], object] | None = None
    ) -> None:
        self._root = root
        self._below = below
        self._relist = relist
        self.live: Storage | None = None
        self.update(entries)

    def update(self, entries: dict[str, Stat]) -> None:
        """Take the listing that holds from now on."""
        self._entries = entries
        self._folders: dict[str, set[str]] | None = None
        if not hasattr(self, "_kept"):
            self._kept: OrderedDict[str, _Range] = OrderedDict()

    def refresh(self) -> None:
        """List the run again, unless it is read through the spool."""
        if self._relist is not None and self.live is None:
            self._relist()

    def forget(self) -> None:
        """Give back the memory of what was read."""
        self._kept.clear()

    def __getstate__(self) -> tuple[object, ...]:
        return self._root, self._below, self._entries, self.live

    def __setstate__(self, state: tuple[Storage, str, dict[str, Stat], Storage | None]) -> None:
        root, below, entries, live = state
        self.__init__(root, below, entries)  # type: ignore[misc]
        self.live = live

    def __repr__(self) -> str:
        return f"Listed({self.url()!r})"

    @property
    def options(self) -> dict[str, Any]:
        """Those of the file system."""
        return dict(getattr(self._root, "options", {}))

    def changed(self) -> float:
        """Unix seconds of the newest file."""
        return max((stat.mtime for stat in self._entries.values()), default=0.0)

    def url(self, path: str = "") -> str:
        return self._root.url(self._full(path))

    def _full(self, path: str) -> str:
        return "/".join(part for part in (self._below, path) if part)

    # -- reading

    def stat(self, path: str) -> Stat | None:
        return self.live.stat(path) if self.live is not None else self._entries.get(path)

    def exists(self, path: str) -> bool:
        return self.stat(path) is not None or bool(self.list_dir(path))

    def list_dir(self, prefix: str) -> list[str]:
        if self.live is not None:
            return self.live.list_dir(prefix)
        folders = self._folders
        if folders is None:
            folders = {}
            for path in self._entries:
                while path:
                    path, _, name = path.rpartition("/")
                    names = folders.setdefault(path, set())
                    if name in names:
                        break
                    names.add(name)
            self._folders = folders
        return sorted(folders.get(prefix, ()))

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        if self.live is not None:
            yield from self.live.scan(prefix)
            return
        inside = f"{prefix}/" if prefix else ""
        yield from (Entry(path, stat) for path, stat in sorted(self._entries.items()) if path.startswith(inside))

    def read(self, path: str) -> bytes:
        return self.live.read(path) if self.live is not None else self._range(path, 0, None)

    def read_range(self, path: str, offset: int, length: int | None = None) -> bytes:
        if self.live is not None:
            return self.live.read_range(path, offset, length)
        return self._range(path, offset, length)

    def _range(self, path: str, offset: int, length: int | None) -> bytes:
        stat = self._entries.get(path)
        if stat is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", self.url(path))
        end = stat.size if length is None else min(stat.size, offset + length)
        if offset >= end:
            return b""
        kept = self._kept.get(path)
        current = kept if kept is not None and kept.version == stat.version else None
        if current is None or not current.start <= offset <= end <= current.start + len(current.data):
            start = offset if stat.size - offset > TAIL else max(0, stat.size - TAIL)
            ahead = AHEAD if current is None else 4 * AHEAD
            stop = max(end, min(stat.size, start + ahead))
            current = _Range(stat.version, start, self._root.read_range(self._full(path), start, stop - start))
            if len(current.data) <= 4 * AHEAD:
                self._kept[path] = current
                self._kept.move_to_end(path)
                while len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
        return current.data[offset - current.start : end - current.start]

    # -- the rest of a Storage

    def write(self, path: str, data: bytes, *, content_type: str | None = None) -> None:
        """A file of a mirror's own, such as a copy of its state."""
        self._root.write(self._full(path), data, content_type=content_type)

    def append(self, path: str, data: bytes) -> None:
        raise PermissionError(f"{self.url(path)}: this view of the run is for readers; runmirror.start() writes")

    def remove(self, path: str) -> None:
        self.append(path, b"")

    def remove_dir(self, path: str) -> None:
        self.append(path, b"")

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
