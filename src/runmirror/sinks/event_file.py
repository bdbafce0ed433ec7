"""TensorBoard event files as bytes: encode rows, scan, append, never rewrite.

Guarantees:

- Bytes are a function of what is encoded: no clock, host name, process id or thread.
- A row is one record; a record that is no row names itself in ``Event.source_metadata``, its first field, so that a scan
  tells them apart by one byte and "records that are rows" is the number of rows a file holds.
- A file only grows. A torn last record is completed when the next record begins with the same bytes; when it doesn't, a
  new segment is begun, whose name sorts after, and the torn one stays as it is (TensorBoard reads on in the next file).
- Files are read as a stream, and a record whose checksum is wrong raises :class:`Damaged` with file and offset.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

import google_crc32c
from tensorboard.compat.proto import event_pb2 as _event_pb2

event_pb2: Any = _event_pb2  # generated code without types

ENCODER = 1
"""Version of the bytes: another one never appends to this one's files, it begins a new segment."""
NAME = re.compile(r"events\.out\.tfevents\.\d{10}\.runmirror\.v\d+(\.\d{4})?")
"""Names of our own event files."""

_CRC_DELTA = 0xA282EAD8
_UINT32 = 0xFFFFFFFF
_INT64 = 2**63
_ROW = 0x09
_NOTE = 0x52
_WORD = struct.Struct("<I")
_HEAD = struct.Struct("<QI")
_TIME = struct.Struct("<Bd")
_DOUBLE = struct.Struct("<d")
_MAX_RECORD = 2**31
_MAX_SHAPES = 1000
_MAX_SHAPE_KEYS = 200_000
_RESERVED = ("runmirror/", "_hparams_/", "custom_scalars__config__")


class Damaged(Exception):
    """A record that can't be what was written: ``path`` and the byte offset where it begins."""

    def __init__(self, path: Path, offset: int, why: str) -> None:
        super().__init__(f"{path} is damaged at byte {offset} ({why})")


def checksum(data: bytes) -> int:
    """The masked CRC-32C of TFRecord files."""
    crc: int = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + _CRC_DELTA) & _UINT32


_heads: dict[int, bytes] = {}


def frame(data: bytes) -> bytes:
    """``data`` as one record: length, its checksum, data, its checksum."""
    size = len(data)
    head = _heads.get(size)
    if head is None:
        if len(_heads) > 4096:
            _heads.clear()
        length = size.to_bytes(8, "little")
        head = _heads[size] = length + _WORD.pack(checksum(length))
    return b"".join((head, data, _WORD.pack(checksum(data))))


def varint(number: int) -> bytes:
    """An int64 as protobuf writes it."""
    number &= 2**64 - 1
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def control(what: str, wall_time: float, step: int = 0, **fields: Any) -> bytes:
    """A record that is no row, named ``what`` in its source metadata."""
    note = event_pb2.Event(source_metadata=event_pb2.SourceMetadata(writer=f"runmirror/{ENCODER} {what}"))
    event = event_pb2.Event(wall_time=wall_time, step=step, **fields)
    # One message cut in two is one message, so the note can come first, where a scan sees it.
    return frame(note.SerializeToString(deterministic=True) + event.SerializeToString(deterministic=True))


def noted(event: Any) -> tuple[str, str]:
    """(encoder version, what) of a record of ours that is no row; ("", "") of any other."""
    writer, _, what = event.source_metadata.writer.partition(" ")
    name, _, version = writer.partition("/")
    return (version, what) if name == "runmirror" else ("", "")


def tag_of(key: str) -> str:
    """The tag for a metric key: the key itself, with lone surrogates replaced, which no tag can hold."""
    return key.encode("utf-8", "replace").decode()


class RowShape:
    """The bytes all rows with the same keys share, as a template that only the values are put into.

    Attributes:
        number: its place in the index, or 0 for one that is not kept there.
        tags: tags of the values, in order.
        refused: (key, reason) of the keys that can't be written.
    """

    __slots__ = ("_arguments", "_constant", "_lead", "_mask", "_pack", "_used", "number", "refused", "size", "tags")

    def __init__(self, number: int, keys: Sequence[str]) -> None:
        self.number = number
        self.refused: list[tuple[str, str]] = []
        used: dict[str, str] = {}
        exact = {key for key in keys if tag_of(key) == key}
        for key in keys:
            tag = tag_of(key)
            if not key:
                self.refused.append((key, "TensorBoard has no tag for an empty key"))
            elif tag.startswith(_RESERVED):
                self.refused.append((key, f"the tag {tag!r} is reserved for records that are no metrics"))
            elif tag in used or (tag != key and tag in exact):
                self.refused.append((key, f"not valid UTF-8, and what it becomes ({tag!r}) is the tag of another key"))
            else:
                used[tag] = key
        self.tags = tuple(used)
        self._used = tuple(used.values()) if self.refused else None
        prefixes = []
        for tag in self.tags:
            name = b"\x0a" + varint(len(tag.encode())) + tag.encode() + b"\x15"
            prefixes.append(b"\x0a" + varint(len(name) + 4) + name)
        lead = b"\x2a" + varint(sum(map(len, prefixes)) + 4 * len(prefixes)) if prefixes else b""
        self._lead = len(lead)
        if prefixes:
            prefixes[0] = lead + prefixes[0]
        self._pack = struct.Struct("<" + "".join(f"{len(prefix)}sf" for prefix in prefixes))
        self._arguments: list[Any] = [part for prefix in prefixes for part in (prefix, 0.0)]
        self.size = self._pack.size
        mask = b"".join(b"\xff" * len(prefix) + bytes(4) for prefix in prefixes)
        self._mask = int.from_bytes(mask, "little")
        self._constant = int.from_bytes(self._pack.pack(*self._arguments), "little")

    def body(self, points: dict[str, float]) -> bytes:
        """The summary of a row with exactly the keys this shape was made of."""
        arguments = self._arguments[:]
        arguments[1::2] = points.values() if self._used is None else [points[key] for key in self._used]
        try:
            return self._pack.pack(*arguments)
        except OverflowError:  # beyond float32
            arguments[1::2] = [_float32(value) for value in arguments[1::2]]
            return self._pack.pack(*arguments)

    def body_with(self, points: dict[str, float], more: bytes) -> bytes:
        """The same, with further serialised values behind the points."""
        values = self.body(points)[self._lead :] + more
        return b"\x2a" + varint(len(values)) + values

    def fits(self, body: bytes) -> bool:
        """Whether ``body``, which is ``size`` bytes long, is a row of this shape."""
        return int.from_bytes(body, "little") & self._mask == self._constant


def _float32(value: float) -> float:
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.inf if value > 0 else -math.inf


class RowShapes:
    """The shapes of a run's rows. Up to a bound each has a number; rows of further ones are read back when needed."""

    def __init__(self) -> None:
        self._by_keys: dict[tuple[str, ...], RowShape] = {}
        self._by_size: dict[int, list[RowShape]] = {}
        self._keys = 0
        self.numbered: list[RowShape] = [RowShape(0, ())]

    def of(self, keys: tuple[str, ...]) -> RowShape:
        """The shape of a row with these keys, in this order."""
        shape = self._by_keys.get(keys)
        if shape is None:
            kept = len(self.numbered) < _MAX_SHAPES and self._keys + len(keys) < _MAX_SHAPE_KEYS
            shape = RowShape(len(self.numbered) if kept else 0, keys)
            if kept:
                self._keys += len(keys)
                self._by_keys[keys] = shape
                self.numbered.append(shape)
                self._by_size.setdefault(shape.size, []).append(shape)
        return shape

    def recognise(self, body: bytes) -> RowShape | None:
        """The kept shape that a row's summary was made of, or None."""
        for shape in self._by_size.get(len(body), ()):
            if shape.fits(body):
                return shape
        return None


def encode_row(wall_time: float, step: int, body: bytes) -> bytes:
    """The record of one row."""
    if not -_INT64 <= step < _INT64:
        step = _INT64 - 1 if step > 0 else -_INT64
    return frame(b"".join((_TIME.pack(_ROW, wall_time), b"\x10", varint(step), body)))


def is_row(data: bytes) -> bool:
    """Whether a record of ours is a row."""
    return data[0] != _NOTE


def split_row(data: bytes) -> tuple[float, int, bytes]:
    """(wall time, step, summary) of the data :func:`encode_row` framed."""
    step = shift = 0
    at = 10
    while True:
        byte = data[at]
        step |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            break
        shift += 7
    return _DOUBLE.unpack_from(data, 1)[0], step - 2**64 if step >= _INT64 else step, data[at:]


class Scan:
    """Records of one open file, in order; behind the last one, ``end`` and the ``torn`` bytes after it."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self._file = path, file
        self.end = 0
        self.torn = b""
        self.lost = False

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        read = self._file.read
        known: dict[bytes, int] = {}
        while head := read(12):
            size = known.get(head)
            if size is None:
                if len(head) < 12:
                    self.torn = head
                    return
                size, crc = _HEAD.unpack(head)
                if crc != checksum(head[:8]) or size > _MAX_RECORD:
                    if self._only_zeros(head):
                        return
                    raise Damaged(self.path, self.end, "its length is not what was written")
                if len(known) < 4096:
                    known[head] = size
            data = read(size + 4)
            if len(data) < size + 4:
                self.torn = head + data
                return
            payload = data[:size]
            if _WORD.unpack_from(data, size)[0] != checksum(payload) or not payload:
                raise Damaged(self.path, self.end, "its checksum doesn't match its bytes")
            at, self.end = self.end, self.end + size + 16
            yield at, payload

    def _only_zeros(self, head: bytes) -> bool:
        """A file that the machine's crash made longer than its bytes: nothing behind here was ever readable."""
        while head:
            if head.strip(b"\0"):
                return False
            head = self._file.read(1 << 20)
        self.lost = True
        return True


@dataclass(slots=True)
class Segment:
    """One event file: its path, the encoder version in its first record, its size, and where its records start when all
    segments are thought of as one sequence."""

    path: Path
    base: int
    end: int = 0
    version: str = ""


class EventLog:
    """The event files of one run folder, read and appended as one sequence of records.

    A record's place is its offset in that sequence.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.segments: list[Segment] = []
        self.torn = b""
        self._lost = False
        self._writer: int | None = None
        self._readers: dict[Path, FileIO] = {}

    def records(self) -> Iterator[tuple[int, bytes]]:
        """Every whole record with its place, from the first file on. Raises Damaged."""
        self.close()
        self.segments.clear()
        base = 0
        for path in event_files(self.folder, own=True):
            with path.open("rb", buffering=1 << 20) as file:
                segment = Segment(path, base)
                self.segments.append(segment)
                scan = Scan(path, file)
                for at, data in scan:
                    if not segment.version and not is_row(data):
                        segment.version = noted(event_pb2.Event.FromString(data))[0]
                    yield base + at, data
                segment.end, self.torn, self._lost = scan.end, scan.torn, scan.lost
                base += os.fstat(file.fileno()).st_size

    @property
    def end(self) -> int:
        """The place of the next record of the last segment."""
        return self.segments[-1].base + self.segments[-1].end

    def takes(self, data: bytes) -> bool:
        """Whether ``data`` can be appended to the last segment: it is of this encoder, and so are its torn bytes."""
        if not self.segments or self._lost or not data.startswith(self.torn):
            return False
        return self.segments[-1].version in ("", str(ENCODER))

    def begin(self, seconds: float) -> None:
        """A new segment, made with its first bytes. The first one's name has the time in it, later ones its name."""
        if not self.segments:
            time = int(min(max(seconds, 0), 10**10 - 1)) if math.isfinite(seconds) else 0
            self.segments.append(Segment(self.folder / f"events.out.tfevents.{time:010d}.runmirror.v{ENCODER}", 0))
        else:
            last = self.segments[-1]
            stem, version, number = re.split(r"(\.v\d+)", last.path.name)
            path = last.path.with_name(f"{stem}{version}.{int(number[1:] or 0) + 1:04d}")
            self.segments.append(Segment(path, last.base + last.path.stat().st_size))
        self.segments[-1].version = str(ENCODER)
        self.torn, self._lost = b"", False
        if self._writer is not None:
            os.close(self._writer)
            self._writer = None

    def append(self, data: bytes) -> None:
        """Write whole records in one go, less the torn bytes already there. Raises OSError."""
        segment = self.segments[-1]
        if self._writer is None:
            held = segment.end + len(self.torn)
            flags = os.O_WRONLY | os.O_APPEND | getattr(os, "O_BINARY", 0) | (0 if held else os.O_CREAT)
            self._writer = os.open(segment.path, flags, 0o666)
            if os.fstat(self._writer).st_size != held:
                raise OSError(f"{segment.path}: changed since it was read")
        left = memoryview(data)[len(self.torn) :]
        while left:
            left = left[os.write(self._writer, left) :]
        self.torn = b""
        segment.end += len(data)

    def read(self, place: int) -> bytes:
        """The data of the record at ``place``."""
        segment = next(segment for segment in reversed(self.segments) if segment.base <= place)
        reader = self._readers.get(segment.path)
        if reader is None:
            reader = self._readers[segment.path] = FileIO(segment.path)
        reader.seek(place - segment.base)
        size = int.from_bytes(reader.read(12)[:8], "little")
        return reader.read(size)

    def intact(self) -> bool:
        """Whether the file that is written is still the one at its path."""
        if self._writer is None:
            return True
        try:
            there = os.stat(self.segments[-1].path)
        except FileNotFoundError:
            return False
        mine = os.fstat(self._writer)
        return (there.st_ino, there.st_dev) == (mine.st_ino, mine.st_dev)

    def close(self) -> None:
        """Close the files. Safe to call again; reading and writing open them anew."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        writer, self._writer = self._writer, None
        if writer is not None:
            os.close(writer)


def event_files(folder: Path, own: bool = False) -> list[Path]:
    """The event files right in ``folder``, in the order TensorBoard reads them; ``own`` leaves out those of others."""
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_file() and "tfevents" in entry.name)
    except FileNotFoundError:
        return []
    return [folder / name for name in names if not own or NAME.fullmatch(name)]
