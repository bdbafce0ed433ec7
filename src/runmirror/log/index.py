"""The line index of a log: which ordinal each line has, for ever.

Guarantees:

- Ordinals are dense from 0 and never used twice, even when the log is cut, replaced or grows again.
- A line keeps its ordinal and its time as long as it and everything before it stay the same bytes.
- Entries are on disk before the rows they number reach anyone; several processes may extend one index.

Kept as two files: ``lines.bin``, 16 bytes per ordinal (8 bytes BLAKE2b of the line, its time as a double; NaN when the
row carries its own), only ever appended; and ``lines.json``, where each stretch of lines begins. Without a folder the
index lives in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import struct
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from runmirror.log.locks import locked
from runmirror.openers import follow_no_link
from runmirror.storage.local import write_atomic

_RECORD = struct.Struct("<8sd")
ANY = b"\xff" * 8
"""The digest of a line that another machine numbered: whatever is there now keeps the ordinal."""
NO_TIME = math.nan
"""The frozen time of a row that carries its own."""


class MovedError(Exception):
    """Another process numbered these lines otherwise: read the log again from the start."""


def line_digest(line: bytes) -> bytes:
    """8 bytes that stand for a line, without the carriage return that may have come after the rest was read."""
    return hashlib.blake2b(line.removesuffix(b"\r"), digest_size=8).digest()


class LineIndex:
    """Line number -> ordinal, and per ordinal the line's digest and frozen time.

    Args:
        folder: where the two files are kept, or None for memory only.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._records = bytearray()
        self._unsynced = False
        self._seen: tuple[int, int] | None = None
        self.starts: list[tuple[int, int]] = [(0, 0)]  # (first line, its ordinal) of each stretch, ascending
        if folder is not None:
            self.load()

    def load(self) -> None:
        """Read what is on disk; a half record at the end (a killed writer) is left out.

        Lost records are filled up with zeros, which are no line's digest: their lines get new ordinals.
        """
        if self._folder is None:
            return
        self._seen = self._stamp()
        self.starts = self._read_starts()  # before the records, which only grow: each stretch's first one is there then
        try:
            records = (self._folder / "lines.bin").read_bytes()
        except FileNotFoundError:
            records = b""
        size = max(len(records) // _RECORD.size, self.starts[-1][1]) * _RECORD.size
        self._records = bytearray(records[:size].ljust(size, b"\0"))

    def moved(self) -> bool:
        """Whether another process has seen a cut since this one looked at the stretches."""
        return self._stamp() != self._seen

    def _stamp(self) -> tuple[int, int] | None:
        try:
            stat = os.stat(self._folder / "lines.json") if self._folder is not None else None
        except FileNotFoundError:
            return None
        return None if stat is None else (stat.st_mtime_ns, stat.st_size)

    def _read_starts(self) -> list[tuple[int, int]]:
        """The stretches on disk; those in memory when there is no file; one from the first line on when it is damaged."""
        if self._folder is None:
            return self.starts
        try:
            data = json.loads((self._folder / "lines.json").read_bytes())
            starts = [(int(line), int(ordinal)) for line, ordinal in data]
        except FileNotFoundError:
            return self.starts
        except (ValueError, TypeError, OverflowError):
            return [(0, 0)]
        rising = all(one[0] < next_[0] and one[1] < next_[1] for one, next_ in pairwise(starts))
        return starts if rising and starts and starts[0][0] == 0 and starts[0][1] >= 0 else [(0, 0)]

    def __len__(self) -> int:
        """The next ordinal that was never used."""
        return len(self._records) // _RECORD.size

    def ordinal(self, line: int) -> int:
        """The ordinal of the line with this number (from 0) in the log as it is now."""
        first, ordinal = self.starts[bisect_right(self.starts, line, key=lambda start: start[0]) - 1]
        return ordinal + line - first

    def record(self, ordinal: int) -> tuple[bytes, float] | None:
        """(digest, frozen time or NaN) of an ordinal, or None when it is new."""
        at = ordinal * _RECORD.size
        if at + _RECORD.size > len(self._records):
            return None
        digest, time = _RECORD.unpack_from(self._records, at)
        return digest, time

    def expect(self, line: int, content: bytes, fresh: list[tuple[bytes, float]]) -> int | None:
        """The ordinal of a line that carries its own time and follows the one before it as numbered: known and unchanged, or
        new (then it is added to ``fresh``, the entries for the next :meth:`extend`). None: it needs a closer look."""
        first, start = self.starts[-1]
        if line <= first:
            return None
        ordinal, mark = start + line - first, line_digest(content)
        at = ordinal * _RECORD.size
        if at < len(self._records):
            return ordinal if self._records[at : at + 8] in (mark, ANY) else None
        fresh.append((mark, NO_TIME))
        return ordinal

    def cut(self, line: int) -> int:
        """The log differs from ``line`` on: that line gets the next unused ordinal, which is returned.

        Raises:
            MovedError: another process has seen a cut that this one has not.
        """
        with self._locked():
            self.starts = [start for start in self.starts if start[0] < line] + [(line, len(self))]
            self._write_starts()
        return len(self)

    def skip(self, line: int, ordinal: int) -> None:
        """The ordinals below ``ordinal`` are used up: the line goes on from there, or from the next that was never used."""
        with self._locked():
            ordinal = max(ordinal, len(self))
            self.starts = [start for start in self.starts if start[0] < line] + [(line, ordinal)]
            self._records = self._records.ljust(ordinal * _RECORD.size, b"\0")
            self._write_starts()

    def adopt(self, starts: list[tuple[int, int]]) -> None:
        """Number as another machine did: ``starts`` as its index has them. What was known here is given up."""
        with self._locked():
            self.starts = [(line, ordinal) for line, ordinal in starts]
            self._records = bytearray(_RECORD.pack(ANY, NO_TIME) * self.starts[-1][1])
            if self._folder is not None:
                write_atomic(self._folder / "lines.bin", bytes(self._records))
            self._write_starts()

    def _write_starts(self) -> None:
        if self._folder is not None:
            write_atomic(self._folder / "lines.json", json.dumps(self.starts).encode())
            self._seen = self._stamp()

    def extend(self, first: int, entries: list[tuple[bytes, float]]) -> bool:
        """Number lines: ``entries`` are (digest, time or NaN) for the ordinals from ``first`` on, which must be the next.

        Returns:
            Whether another process has numbered some of them before; then its times are the ones that hold.

        Raises:
            MovedError: another process has used these ordinals for other lines.
        """
        if not entries:
            return False
        with self._locked():
            known = len(self) - first
            if known < 0 or any(self._digest(first + at) != entries[at][0] for at in range(min(known, len(entries)))):
                raise MovedError
            data = b"".join(_RECORD.pack(*entry) for entry in entries[known:])
            if self._folder is not None:
                with open(self._folder / "lines.bin", "ab", opener=follow_no_link) as file:
                    size = os.fstat(file.fileno()).st_size // _RECORD.size * _RECORD.size
                    file.truncate(size)  # a process was killed in mid-record
                    file.write(self._records[size:] + data)
                self._unsynced = True
            self._records += data
        return known > 0

    def fill(self, ordinal: int) -> None:
        """The ordinals below ``ordinal`` are used up, and their records lost: no line gets them again."""
        with self._locked():
            self._records = self._records.ljust(ordinal * _RECORD.size, b"\0")
            if self._folder is not None:
                write_atomic(self._folder / "lines.bin", bytes(self._records))

    def sync(self) -> None:
        """Have the records on the disk itself, when there are new ones."""
        if self._unsynced and self._folder is not None:
            with (
                contextlib.suppress(FileNotFoundError),
                open(self._folder / "lines.bin", "rb+", opener=follow_no_link) as file,
            ):
                os.fsync(file.fileno())
        self._unsynced = False

    def _digest(self, ordinal: int) -> bytes:
        at = ordinal * _RECORD.size
        return bytes(self._records[at : at + 8])

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Alone in the folder, and up to date with it."""
        if self._folder is None:
            yield
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        with locked(str(self._folder / "lines.lock")):
            starts = self.starts
            try:
                size = (self._folder / "lines.bin").stat().st_size
            except FileNotFoundError:
                size = 0
            if size != len(self._records):
                self.load()
            if self._read_starts() != starts:
                raise MovedError
            yield
