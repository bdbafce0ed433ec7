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

import hashlib
import json
import math
import os
import struct
from bisect import bisect_right
from pathlib import Path

from filelock import FileLock

from runmirror.storage.local import write_atomic

_RECORD = struct.Struct("<8sd")


class MovedError(Exception):
    """Another process numbered these lines otherwise: read the log again from the start."""


def line_digest(line: bytes) -> bytes:
    """8 bytes that stand for a line."""
    return hashlib.blake2b(line, digest_size=8).digest()


class LineIndex:
    """Line number -> ordinal, and per ordinal the line's digest and frozen time.

    Args:
        folder: where the two files are kept, or None for memory only.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._records = bytearray()
        self.starts: list[tuple[int, int]] = [(0, 0)]  # (first line, its ordinal) of each stretch, ascending
        if folder is not None:
            self.load()

    def load(self) -> None:
        """Read what is on disk; a half record at the end (a killed writer) is left out."""
        if self._folder is None:
            return
        try:
            records = (self._folder / "lines.bin").read_bytes()
            self._records = bytearray(records[: len(records) // _RECORD.size * _RECORD.size])
            self.starts = [(line, ordinal) for line, ordinal in json.loads((self._folder / "lines.json").read_bytes())]
        except FileNotFoundError:
            self.starts = self.starts or [(0, 0)]
        except (ValueError, TypeError):
            self.starts = [(0, 0)]

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

    def cut(self, line: int) -> int:
        """The log differs from ``line`` on: that line gets the next unused ordinal, which is returned."""
        self.starts = [start for start in self.starts if start[0] < line]
        self.starts.append((line, len(self)))
        if self._folder is not None:
            write_atomic(self._folder / "lines.json", json.dumps(self.starts).encode())
        return len(self)

    def extend(self, first: int, entries: list[tuple[bytes, float]]) -> None:
        """Number lines: ``entries`` are (digest, time or NaN) for the ordinals from ``first`` on, which must be the next.

        Raises:
            MovedError: another process has used these ordinals for other lines.
        """
        if not entries:
            return
        if self._folder is None:
            self._records += b"".join(_RECORD.pack(*entry) for entry in entries)
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self._folder / "lines.lock"):
            with open(self._folder / "lines.bin", "ab") as file:
                size = os.fstat(file.fileno()).st_size
                if size != len(self._records):  # another process was here, or was killed in mid-record
                    file.truncate(size // _RECORD.size * _RECORD.size)
                    starts = self.starts
                    self.load()
                    if self.starts != starts:
                        raise MovedError
                    for offset, (digest, _) in enumerate(entries):
                        known = self.record(first + offset)
                        if known is not None and known[0] != digest:
                            raise MovedError
                missing = entries[len(self) - first :]
                data = b"".join(_RECORD.pack(*entry) for entry in missing)
                file.write(data)
            self._records += data


NO_TIME = math.nan
"""The frozen time of a row that carries its own."""
