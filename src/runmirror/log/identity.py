"""Who a log_path is: the id under which mirrors and trackers know it, wherever it lies.

Guarantees:

- A log that runmirror wrote keeps its id when its folder is moved or renamed, and gets another one when it is copied:
  the original is looked for at the place in ``run.json``. The id of a copy depends on the original's id and the copy's
  place alone, so a reader that may not write and a writer that opens the copy later agree on it.
- A copy in a cloud is told from its original when both are in clouds of one kind; the original is asked for once a process.
- Another program's log is known by its place (or, when asked, by its content).
- :func:`identify` never writes. :func:`claim` writes ``.runmirror/run.json`` only, and only when something changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
import uuid
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from runmirror.log import layout
from runmirror.log.records import Identity, RunRecord
from runmirror.storage import LocalStorage, Storage, local_root, storage_from_uri

logger = logging.getLogger("runmirror")

_FIRST_LINE = 1 << 20
"""Bytes of the first line of the metrics that count for an identity by content."""


def canonical_url(storage: Storage) -> str:
    """The one spelling of a log_path's place: symbolic links resolved, no slash at the end."""
    root = _local(storage.url())
    return storage.url().rstrip("/") if root is None else Path(os.path.realpath(root)).as_uri()


def identify(storage: Storage, *, metrics: str = layout.METRICS, by_content: bool = False) -> Identity:
    """The identity of a log_path, for readers. Writes nothing, and never raises for a damaged file.

    Args:
        storage: the log_path.
        metrics: the name of the metrics file; one with another name than the usual is a log of its own.
        by_content: know a log that runmirror did not write by the first line of its metrics and its config.json instead
            of by its place: for archives that move. A log that has neither is still known by its place.

    Returns:
        ``run_id`` is 32 hex characters for a foreign log or a copy, else what run.json says.
    """
    record = read_record(storage) if metrics == layout.METRICS else None
    if record is not None:
        run_id = _copy_id(record.run_id, storage) if _is_copy(record, storage) else record.run_id
        return Identity(run_id=run_id, own=True)
    content = _content(storage, metrics) if by_content else b""
    place = canonical_url(storage) + ("" if metrics == layout.METRICS else f"/{metrics}")
    return Identity(run_id=_hash(content or place.encode()), own=False)


def claim(storage: Storage, name: str | None = None) -> RunRecord:
    """The identity of a log_path for its writer, made or brought up to date in run.json; ``name`` None keeps what it has.

    A damaged run.json is kept as ``run.json.damaged`` and replaced by a new identity. Raises OSError when run.json
    can't be written.
    """
    url = canonical_url(storage)
    record = read_record(storage)
    if record is None:
        damaged = _read(storage, layout.RUN)
        if damaged.strip():
            storage.write(f"{layout.RUN}.damaged", damaged)
            logger.warning(
                "%s can't be read: it is kept as run.json.damaged and the run gets a new id", storage.url(layout.RUN)
            )
        record = RunRecord(run_id=uuid.uuid4().hex, url=url, created=time.time(), version=_version())
    elif _same_place(record.url, url):
        if name in (None, record.name):
            return record
    elif _is_copy(record, storage):
        update = {"run_id": _copy_id(record.run_id, storage), "url": url, "copied_from": record.run_id}
        record = RunRecord.model_validate(record.model_dump() | update)
    else:
        record = record.model_copy(update={"url": url})
    if name is not None:
        record = record.model_copy(update={"name": name})
    storage.write(layout.RUN, record.model_dump_json(indent=2).encode() + b"\n")
    return record


def read_record(storage: Storage) -> RunRecord | None:
    """What run.json says, or None when it is missing or damaged."""
    try:
        record = RunRecord.model_validate_json(_read(storage, layout.RUN))
    except ValidationError:
        return None
    return record if record.run_id else None


def own_name(storage: Storage) -> str:
    """What a run is called where nothing else names it: by its writer, else as its folder is."""
    record = read_record(storage)
    return (record.name if record else None) or os.path.basename(storage.url().rstrip("/"))


def _is_copy(record: RunRecord, storage: Storage) -> bool:
    """Whether the original is still where ``record`` says it was made, and that is another place than this one."""
    if _same_place(record.url, storage.url()):
        return False
    root = _local(record.url)
    return record.run_id == (_id_in_cloud(record.url, storage) if root is None else _id_at(LocalStorage(root)))


def _id_at(storage: Storage) -> str:
    record = read_record(storage)
    return record.run_id if record is not None else ""


def _id_in_cloud(url: str, storage: Storage) -> str:
    """The run id at another place of the cloud that ``storage`` is in; "" when there is none, or it can't be told."""
    options: Mapping[str, Any] | None = getattr(storage, "options", None)
    if options is None or url.partition("://")[0] != storage.url().partition("://")[0]:
        return ""
    if url not in _known_ids:
        with storage_from_uri(url, **options) as original:
            _known_ids[url] = _id_at(original)
    return _known_ids[url]


_known_ids: dict[str, str] = {}
"""URL -> run id of originals in clouds, as this process first saw them."""


def _same_place(left: str, right: str) -> bool:
    if left.rstrip("/") == right.rstrip("/"):
        return True
    with contextlib.suppress(OSError):
        one, other = _local(left), _local(right)
        return one is not None and other is not None and os.path.samefile(one, other)
    return False


def _local(url: str) -> str | None:
    try:
        return local_root(url)
    except ValueError:
        return None


def _copy_id(run_id: str, storage: Storage) -> str:
    return _hash(f"{run_id}|{canonical_url(storage)}".encode())


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def _content(storage: Storage, metrics: str) -> bytes:
    try:
        first = storage.read_range(metrics, 0, _FIRST_LINE).split(b"\n", 1)[0]
    except OSError:
        first = b""
    return first + b"\n" + config if (config := _read(storage, layout.CONFIG)) or first else b""


def _read(storage: Storage, path: str) -> bytes:
    try:
        return storage.read(path)
    except OSError:
        return b""


def _version() -> str:
    try:
        return metadata.version("runmirror")
    except metadata.PackageNotFoundError:
        return ""
