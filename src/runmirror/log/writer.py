"""The writer's side of a log_path: lines that survive a full disk, tails made whole, the journal.

Guarantees:

- :class:`Appender` never raises for what the disk or the storage does: a line that could not be written waits in memory,
  in order, within bounds, and what is dropped is counted.
- :func:`repair` leaves a file of whole lines. What it cuts away is kept in ``.runmirror/torn-N.txt`` first.
- Reading from the end takes blocks from the end: its cost does not grow with the file.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from runmirror.exceptions import LogBusyError, LogError
from runmirror.log import layout
from runmirror.log.locks import Lock, acquire
from runmirror.log.records import Checkpoint, JournalEntry, Status
from runmirror.log.rows import coerce, decode, json_line
from runmirror.log.snapshot import dump_config
from runmirror.log.status import began_empty
from runmirror.log.steps import OWN_STEP_KEYS, STEP_KEYS, find_step
from runmirror.storage import CloudStorage, LocalStorage, Storage, local_root

logger = logging.getLogger("runmirror")

HELD_LINES = 1000
HELD_BYTES = 4 << 20
"""What an Appender keeps while the disk is full: the newest lines, within both bounds."""
BLOCK = 64 << 10
"""Bytes of one step backwards through a file."""
STEP_SEARCH = 4 << 20
"""Bytes at the end of a log in which its last step is looked for."""


class Appender:
    """Whole lines, one storage append each, to one file. Calls must not overlap.

    Attributes:
        path: the file, below the storage's root.
        written: lines this Appender has brought into the file.
        lost: lines dropped from memory because the disk stayed full.
        error: what the storage said last, "" when nothing.
    """

    def __init__(
        self, storage: Storage, path: str, *, max_lines: int = HELD_LINES, max_bytes: int = HELD_BYTES
    ) -> None:
        self.written = 0
        self.lost = 0
        self.error = ""
        self._storage = storage
        self.path = path
        self._max_lines = max_lines
        self._max_bytes = max_bytes
        self._held: deque[bytes] = deque()
        self._held_bytes = 0
        self._warned = False
        self._retrying = False

    @property
    def held(self) -> int:
        """Lines that wait in memory."""
        return len(self._held)

    def append(self, line: bytes) -> bool:
        """Whether the line, with every line before it that is not lost, is in the file now."""
        if (self._held or self._retrying) and not self.retry():
            self._hold(line)
            return False
        if self._try(line):
            return True
        self._hold(line)
        return False

    def retry(self) -> bool:
        """Write what waits, oldest first. Whether nothing waits any more."""
        if self._retrying:  # a signal handler logs in the midst of it: its line goes behind those that wait
            return False
        self._retrying = True
        try:
            while self._held:
                line = self._held.popleft()
                self._held_bytes -= len(line)
                if not self._try(line):
                    self._held.appendleft(line)
                    self._held_bytes += len(line)
                    return False
            return True
        finally:
            self._retrying = False

    def waiting(self) -> bytes:
        """The lines that wait in memory, joined."""
        return b"".join(self._held)

    def give_up(self) -> None:
        """Count what still waits as lost."""
        self.lost += len(self._held)
        self._held.clear()
        self._held_bytes = 0

    def _try(self, line: bytes) -> bool:
        try:
            self._storage.append(self.path, line)
        except Exception as error:  # a Storage may be anyone's, and training goes on whatever it raises
            self.error = f"{type(error).__name__}: {error}"
            if not self._warned:
                self._warned = True
                logger.warning(
                    "can't write to %s (%s): training goes on, the last %d rows are kept in memory and tried again at "
                    "every row; make room on the disk", self._storage.url(self.path), self.error, self._max_lines
                )  # fmt: skip
            return False
        self.written += 1
        return True

    def _hold(self, line: bytes) -> None:
        self._held.append(line)
        self._held_bytes += len(line)
        while len(self._held) > self._max_lines or (self._held_bytes > self._max_bytes and len(self._held) > 1):
            self._held_bytes -= len(self._held.popleft())
            self.lost += 1


def size_of(storage: Storage, path: str) -> int:
    """The size in bytes; 0 for a missing file."""
    try:
        found = storage.stat(path)
    except FileNotFoundError:
        return 0
    return found.size if found is not None else 0


def lines_backwards(storage: Storage, path: str, limit: int | None = None) -> Iterator[bytes]:
    """The lines of a file, last first, without their newlines.

    A last line without newline comes first. ``limit`` is how many bytes from the end are read at most (all when None);
    the line in which that ends is left out.
    """
    end = size_of(storage, path)
    stop = 0 if limit is None else max(0, end - limit)
    pieces: list[bytes] = []  # of a line longer than a block, last piece first
    first = True
    while end > stop:
        start = max(stop, end - BLOCK)
        head, *lines = storage.read_range(path, start, end - start).split(b"\n")
        if lines:
            lines[-1] += b"".join(reversed(pieces))
            pieces = []
            if first and not lines[-1]:
                lines.pop()  # behind the final newline
            first = False
            yield from reversed(lines)
        pieces.append(head)
        end = start
    if stop == 0 and pieces and (last := b"".join(reversed(pieces))):
        yield last


def last_step(storage: Storage, path: str = layout.METRICS) -> int | None:
    """The step of the last row that has one, or None when no row near the end has."""
    keys = OWN_STEP_KEYS if began_empty(storage) else STEP_KEYS
    for line in lines_backwards(storage, path, STEP_SEARCH):
        row = decode(line)
        if row is not None and (step := find_step(row, keys)) is not None:
            return step
    return None


def count_lines(storage: Storage, path: str = layout.METRICS) -> int:
    """The number of newlines. Reads the whole file, a block at a time."""
    count, offset = 0, 0
    while block := _read_block(storage, path, offset):
        count += block.count(b"\n")
        offset += len(block)
    return count


def _read_block(storage: Storage, path: str, offset: int) -> bytes:
    try:
        return storage.read_range(path, offset, 16 * BLOCK)
    except FileNotFoundError:
        return b""


def repair(storage: Storage, path: str) -> None:
    """Make the file end with a whole line, and warn when it did not.

    A tail without newline gets one when it is a whole JSON object; else it is cut off, as is a run of NUL bytes (left by
    some file systems after a power cut). Raises OSError when the disk doesn't allow it.
    """
    size = size_of(storage, path)
    if size == 0 or storage.read_range(path, size - 1, 1) == b"\n":
        return
    tail = b""
    start = size
    while start > 0 and b"\n" not in tail:
        begin = max(0, start - max(BLOCK, len(tail)))
        tail = storage.read_range(path, begin, start - begin) + tail
        start = begin
    tail = tail[tail.rfind(b"\n") + 1 :]
    start = size - len(tail)
    body = tail.rstrip(b"\0")
    if decode(body) is not None:
        if len(body) < len(tail):
            _truncate(storage, path, start + len(body))
        storage.append(path, b"\n")
        logger.warning("%s did not end with a newline: one was added", storage.url(path))
        return
    kept = ""
    if body:
        taken = set(storage.list_dir(layout.OWN))
        number = next(number for number in range(1, len(taken) + 2) if f"torn-{number}.txt" not in taken)
        kept = f"{layout.OWN}/torn-{number}.txt"
        storage.write(kept, body)
    _truncate(storage, path, start)
    logger.warning(
        "%s ended in mid-line (a writer was killed, or the machine went down): %d bytes cut off at byte %d%s",
        storage.url(path), len(tail), start, f", kept in {kept}" if kept else ", all of them NUL"
    )  # fmt: skip


def _truncate(storage: Storage, path: str, size: int) -> None:
    root = local_root(storage.url(path))
    if root is None:
        storage.write(path, storage.read_range(path, 0, size))
    else:
        os.truncate(root, size)


def write_journal(
    storage: Storage,
    event: str,
    *,
    step: int | None,
    status: Status | None = None,
    wrote: list[str] | None = None,
    lost: int | None = None,
) -> None:
    """Append a :class:`JournalEntry` of now; the offset is the present size of the metrics. Raises OSError."""
    if isinstance(storage, LocalStorage):
        storage.reopen()  # rows that go into a file which was replaced come before the end of the run
    fields: dict[str, Any] = {
        "event": event,
        "time": time.time(),
        "offset": size_of(storage, layout.METRICS),
        "step": step,
        "status": status,
        "wrote": wrote,
        "lost": lost,
    }
    entry = JournalEntry.model_validate(fields)
    storage.append(layout.JOURNAL, entry.model_dump_json(exclude_none=True).encode() + b"\n")


def checkpoint_line(
    name: Any, known: dict[str, Any], paths: dict[str, Any], loop_state: Any, extra: dict[str, Any]
) -> bytes:
    """A line of checkpoints.jsonl: name, known fields, paths, then the rest; None is left out. Never raises for a value.

    Secrets in the rest are masked; a path stays as it is.
    """
    line: dict[str, Any] = {"name": _text(name)}
    line |= {key: value for key, value in dump_config(known).items() if value is not None}
    line |= {key: _text(path) for key, path in paths.items() if path is not None}
    more = dump_config(loop_state) | dump_config(extra)
    line |= {key: value for key, value in more.items() if key not in line and value is not None}
    return json_line(line)


def _text(value: Any) -> str:
    try:
        return os.fsdecode(value)
    except Exception:
        found = coerce(value)
        return str(found) if type(found) in (bool, int, float, str) else type(value).__name__


def latest_checkpoint(storage: Storage, waiting: bytes = b"") -> Checkpoint | None:
    """The last line of checkpoints.jsonl with a ``state_path``, or None. Broken lines are passed over.

    ``waiting`` are lines that are not in the file yet.
    """
    for lines in (reversed(waiting.split(b"\n")), lines_backwards(storage, layout.CHECKPOINTS)):
        for line in lines:
            data = decode(line)
            if data is None or not data.get("state_path"):
                continue
            try:
                return Checkpoint.model_validate(data)
            except ValidationError:
                continue
    return None


def lock_writer(storage: Storage) -> Lock | None:
    """The lock of the one writer of a log_path; None for a Storage that is no local folder. One in a cloud is claimed.

    Raises:
        LogBusyError: another process (of this machine) holds it.
        LogError: what runmirror keeps there for itself is a symbolic link.
    """
    if isinstance(storage, CloudStorage):
        storage.claim((layout.METRICS, layout.CHECKPOINTS, layout.JOURNAL))
        return None
    path = local_root(storage.url(layout.LOCK))
    if path is None:
        return None
    for own in (layout.OWN, layout.LOCK, layout.JOURNAL):  # a log_path of someone else may lead anywhere
        if os.path.islink(place := local_root(storage.url(own)) or ""):
            raise LogError(
                f"{place} is a symbolic link, which runmirror does not write through: remove it and start again"
            )
    return acquire(
        path,
        lambda holder: LogBusyError(
            f"{storage.url()} is being written by {holder}: end that process, or start with another log_path"
        ),
    )
