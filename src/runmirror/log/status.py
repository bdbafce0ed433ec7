"""How a run is, by its journal, else by what its log tells; and the small files that tell it. Reading never raises for
bad content: a broken line is left out."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from pydantic import ValidationError

from runmirror.log import layout
from runmirror.log.masking import mask_values
from runmirror.log.records import Checkpoint, JournalEntry, Status
from runmirror.log.rows import Position, decode, digest
from runmirror.log.sources import is_outside, warn_outside
from runmirror.storage import Storage

LATE_NEWLINES = (b"\r", b"\n", b"\r\n")
"""What may follow a last line that was read before its newline was there."""

SILENT_AFTER = 15 * 60.0
"""Seconds without a sign of life after which a run that did not say how it ended counts as killed."""

TAIL = 1 << 15
"""Bytes at the end of a log in which is looked for what the run said last."""


def read_lines(storage: Storage, path: str) -> list[dict[str, Any]]:
    """The objects of a small JSONL file; [] when it is missing."""
    try:
        data = storage.read(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [row for row in map(decode, data.split(b"\n")) if row is not None]


def read_journal(storage: Storage) -> list[JournalEntry]:
    """The journal of a log_path that runmirror wrote, oldest first."""
    entries: list[JournalEntry] = []
    for line in read_lines(storage, layout.JOURNAL):
        try:
            entries.append(JournalEntry.model_validate(line))
        except ValidationError:
            continue
    return entries


def count_starts(storage: Storage) -> int:
    """How often the run was started or resumed, by its journal."""
    return sum(entry.event != "finished" for entry in read_journal(storage))


def began_empty(storage: Storage) -> bool:
    """Whether runmirror wrote all of a log: another program's, which was continued, has rows before the first start."""
    journal = read_journal(storage)
    return bool(journal) and journal[0].offset == 0


def read_checkpoints(storage: Storage) -> list[Checkpoint]:
    """The checkpoints, in the order they were saved."""
    checkpoints: list[Checkpoint] = []
    for line in read_lines(storage, layout.CHECKPOINTS):
        try:
            checkpoints.append(Checkpoint.model_validate(line))
        except ValidationError:
            continue
    return checkpoints


def read_config(storage: Storage, *, foreign: bool = False) -> dict[str, Any] | None:
    """config.json, or None when it is missing, no object, or a link out of the log_path. Secrets of a ``foreign`` one are
    masked; runmirror masked its own when it wrote them."""
    if is_outside(storage, layout.CONFIG):
        warn_outside(storage.url(layout.CONFIG))
        return None
    try:
        config = decode(storage.read(layout.CONFIG))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return mask_values(config) if foreign and config is not None else config


def read_resumes(storage: Storage, journal: list[JournalEntry]) -> tuple[dict[str, Any], ...]:
    """The configs of resumes that differ from config.json, in order."""
    resumed = [entry for entry in journal if entry.event == "resumed"]
    wrote = [path for entry in resumed for path in entry.wrote or ()]
    wrote += [f"{layout.OWN}/resume_{n}/{layout.CONFIG}" for n in range(1, len(resumed) + 1)]  # told after the start
    found: list[dict[str, Any]] = []
    for path in dict.fromkeys(wrote):
        if path != layout.CONFIG and path.endswith("/" + layout.CONFIG):
            with contextlib.suppress(OSError, ValueError):  # somebody tidied up, or the path leads out of the log_path
                config = None if is_outside(storage, path) else decode(storage.read(path))
                found += [] if config is None else [config]
    return tuple(found)


def line_before(storage: Storage, path: str, end: int) -> bytes:
    """The line that ends at byte ``end`` (behind its newline, or at the end of the file), without its newline."""
    length = 1 << 14
    while True:
        body = storage.read_range(path, max(0, end - length), min(length, end)).removesuffix(b"\n")
        cut = body.rfind(b"\n")
        if cut >= 0 or length >= end:
            return body[cut + 1 :]
        length *= 4


def ends_at(storage: Storage, path: str, position: Position) -> bool:
    """Whether the log ends at ``position``, and its last line is still the one that was there."""
    stat = storage.stat(path)
    size = stat.size if stat else 0
    if position.offset <= 0 or not 0 <= size - position.offset <= 2:
        return size == position.offset
    behind = storage.read_range(path, position.offset - 1)
    if behind[1:] and (behind[:1] == b"\n" or behind[1:] not in LATE_NEWLINES):
        return False
    return digest(line_before(storage, path, position.offset)) == position.digest


def latest_values(storage: Storage, path: str) -> dict[str, Any]:
    """The last value of every key in the last rows of a log: the very last row need not tell how far the run is."""
    stat = storage.stat(path)
    size = stat.size if stat else 0
    start = max(0, size - TAIL)
    try:
        lines = storage.read_range(path, start, size - start).split(b"\n")[1 if start else 0 :] if size else []
        rows = [decode(line) or {} for line in (lines if any(lines) else [line_before(storage, path, size)])]
    except FileNotFoundError:
        return {}
    return {key: value for row in rows for key, value in row.items()}


def run_status(
    journal: list[JournalEntry], checkpoints: list[Checkpoint], last_row: dict[str, Any], modified: float | None
) -> tuple[Status, bool]:
    """(status, whether it is known rather than inferred from silence).

    Args:
        journal, checkpoints: as read; empty for a log that has none.
        last_row: the last values (:func:`latest_values`), {} when there is no row.
        modified: when the log was last written (Unix seconds), None when it has no rows.
    """
    if journal and journal[-1].event == "finished":
        return journal[-1].status or "finished", True
    if not journal:
        done = last_row.get("progress/done_frac")
        if any(checkpoint.final or checkpoint.name == "final" for checkpoint in checkpoints[-1:]):
            return "finished", True
        if isinstance(done, (int, float)) and done >= 1:
            return "finished", True
    latest = max([modified or 0.0, *(entry.time for entry in journal[-1:])])
    return ("running", True) if time.time() - latest < SILENT_AFTER else ("killed", False)
