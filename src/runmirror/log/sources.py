"""What a mirror reads: the Source protocol, and what it tells of a run.

Two lanes, never mixed: rows, ordered, each with an ordinal; and files, unordered, each with a version.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Literal, Protocol

from runmirror.log import layout
from runmirror.log.layout import Kind
from runmirror.log.masking import mask_json, mask_text
from runmirror.log.records import Status
from runmirror.log.rows import Position, Row
from runmirror.storage import LocalStorage, Stat, Storage

logger = logging.getLogger("runmirror")


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a tracker is told of a run.

    Attributes:
        run_id: our own id of the run, opaque, the same wherever the run is mirrored.
        name: name in the tracker: the log_path relative to the root given on the command line, with ``/``.
        start, end: Unix seconds of the first and the last sign of life, or None when the log has none yet.
        status: by the journal, else by what the log tells.
        status_known: False when ``status`` was only inferred from the log's silence.
        config: the first config.json, or None. Secrets are masked in any log.
        source: the kind of log, such as "runmirror" or "tinker-cookbook".
        time_source: where row times come from, the worst one used: "row", "arrival", "logtree", "inferred" or "mtime".
        resumes: the configs of resumes that differ from the first one, in order.
        policy: what of superseded points this tracker gets, "last" or "all"; told by the mirror.
    """

    run_id: str
    name: str
    start: float | None = None
    end: float | None = None
    status: Status = "running"
    status_known: bool = True
    config: dict[str, Any] | None = None
    source: str = "runmirror"
    time_source: str = "row"
    resumes: tuple[dict[str, Any], ...] = ()
    policy: Literal["last", "all"] = "last"


@dataclass(frozen=True, slots=True)
class LogFile:
    """A file of the log: its path below the log_path, kind, a version that changes with its content, its bytes, and how many
    they are. ``outside`` is its URL when a symbolic link leads to it, out of the log_path: then it is not sent."""

    path: str
    kind: Kind
    version: str
    read: Callable[[], bytes] = field(repr=False, compare=False)
    size: int = field(default=0, compare=False)
    outside: str = field(default="", compare=False)


class Source(Protocol):
    """A run as a mirror reads it; :class:`runmirror.log.runlog.RunLog` is the one over a log_path."""

    def info(self) -> RunInfo:
        """What is known of the run now."""
        ...

    def rows(self, after: Position) -> Iterator[Row]:
        """Rows at or above ``after.ordinal`` that are there now, in order, then it ends (call it again for more)."""
        ...

    def numbered(self) -> int:
        """How many ordinals were ever given out, as far as :meth:`rows` was read and the index remembers."""
        ...

    def files(self, kinds: frozenset[Kind]) -> list[LogFile]:
        """The files of these kinds that are there now."""
        ...

    def is_complete_at(self, position: Position) -> bool:
        """Whether no row lies behind ``position``, told without reading the rows."""
        ...


def list_files(storage: Storage, kinds: frozenset[Kind], *, foreign: bool = False) -> list[LogFile]:
    """The files of these kinds below a log_path, in both layouts, sorted by iteration and path; versions are the storage's.
    Secrets in the configuration, code and checkpoints of a ``foreign`` log are masked; runmirror's have none."""
    if not kinds:
        return []
    wanted = [(name, stat) for name, stat in _listed(storage, kinds) if name.kind in kinds]
    found: list[LogFile] = []
    for name, stat in sorted(
        wanted, key=lambda one: (-1 if one[0].iteration is None else one[0].iteration, one[0].path)
    ):
        path = name.path
        stat = storage.stat(path) if stat is None else stat
        if stat is not None:
            masked = foreign and name.kind not in layout.ROLLOUT_KINDS
            read = partial(_read_masked, storage, path, name.kind) if masked else partial(storage.read, path)
            outside = storage.url(path) if is_outside(storage, path) else ""
            found.append(LogFile(path, name.kind, stat.version, read, stat.size, outside))
    return found


def _listed(storage: Storage, kinds: frozenset[Kind]) -> Iterator[tuple[layout.FileName, Stat | None]]:
    """The names of files that may be there, and what a listing said of them. Where a request is paid for, one listing takes
    the place of one request a file; a local folder may hold far more than a log, so it is not gone through in depth."""
    paths = [layout.CONFIG, layout.CODE, layout.CHECKPOINTS]
    if kinds & layout.ROLLOUT_KINDS and not isinstance(storage, LocalStorage) and hasattr(storage, "scan"):
        for entry in storage.scan():
            if (name := layout.parse(entry.path)) is not None:
                yield name, entry.stat
        return
    if kinds & layout.ROLLOUT_KINDS:
        names = storage.list_dir("")
        paths += names
        for folder in filter(layout.is_iteration, names):
            paths += [f"{folder}/{name}" for name in storage.list_dir(folder)]
    for path in set(paths):
        if (name := layout.parse(path)) is not None:
            yield name, None


def _read_masked(storage: Storage, path: str, kind: Kind) -> bytes:
    data = storage.read(path)
    text = data.decode("utf-8", "surrogateescape")
    masked = mask_json(text) if kind == "config" else mask_text(text)
    return data if masked == text else masked.encode("utf-8", "surrogateescape")


def is_outside(storage: Storage, path: str) -> bool:
    """Whether a symbolic link leads to the file, out of the log_path: then it is not what the run logged."""
    return isinstance(storage, LocalStorage) and storage.leads_out(path)


@lru_cache(1024)
def warn_outside(url: str) -> None:
    """Tell, once a file, that it is not sent."""
    logger.warning(
        "%s is left out: it is a symbolic link out of the log_path. Copy the file there to have it sent", url
    )
