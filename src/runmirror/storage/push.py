"""The spools on this machine: what they hold, and uploading what a killed writer left."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runmirror.storage.cloud import CloudStorage
from runmirror.storage.home import homes
from runmirror.storage.lease import TakenError
from runmirror.storage.spool import Spool, is_alive


@dataclass(frozen=True, slots=True)
class SpoolInfo:
    """A spool on this machine.

    Attributes:
        url: the log_path it belongs to.
        folder: where it lies.
        host, pid: of its last writer.
        alive: whether that process still runs.
        unsynced: bytes that the store doesn't have.
        pending_files: whole files among them.
        last_upload: Unix seconds, None when nothing was uploaded yet.
        error: what the store said last, "" when nothing.
        taken_by: who took the log_path over, "" when nobody did: such a spool is never uploaded.
        dropped: whole files that were not kept because too much waited.
    """

    url: str
    folder: Path
    writer: str
    host: str
    pid: int
    alive: bool
    unsynced: int
    pending_files: int
    last_upload: float | None
    error: str
    taken_by: str
    dropped: int


def describe(spool: Spool) -> SpoolInfo | None:
    """What there is to say of a spool, None when there is none."""
    if not spool.refresh() or spool.record is None:
        return None
    record = spool.record
    unsynced, files = spool.unsynced()
    return SpoolInfo(
        record.url, spool.folder, record.writer, record.host, record.pid, is_alive(record) and not record.taken_by, unsynced,
        files, record.last_upload, record.error, record.taken_by, record.dropped
    )  # fmt: skip


def spools() -> list[SpoolInfo]:
    """Every spool on this machine, by URL. Only reads."""
    found: list[SpoolInfo] = []
    for place in homes():
        for folder in sorted((place / "spools").glob("*")):
            if folder.is_dir() and (info := describe(Spool(folder))) is not None:
                found.append(info)
    return sorted(found, key=lambda info: (info.url, str(info.folder)))


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
