"""Event files read back, ours and anyone's, as TensorBoard's default loader understands them.

Guarantees: whole records in file order, a torn tail is left out, nothing is written. Raises
:class:`~runmirror.sinks.event_file.Damaged` at a record whose checksum is wrong.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorboard.compat.proto import types_pb2 as _types_pb2

from runmirror.sinks.event_file import Scan, event_files, event_pb2, noted

types_pb2: Any = _types_pb2

_PACKED = {types_pb2.DT_FLOAT: ("<f", "float_val"), types_pb2.DT_DOUBLE: ("<d", "double_val")}
_PACKED |= {types_pb2.DT_INT32: ("<i", "int_val"), types_pb2.DT_INT64: ("<q", "int64_val")}


@dataclass(frozen=True, slots=True)
class EventRecord:
    """One record. ``kind`` is "row", or for those runmirror adds: "version", "start", "rewind", "repair", "hparams",
    "file", "end". ``points`` are (tag, number), ``texts`` (tag, text)."""

    kind: str
    wall_time: float
    step: int
    points: list[tuple[str, float]]
    texts: list[tuple[str, str]]


def read_events(run_dir: Path | str) -> Iterator[EventRecord]:
    """Every record of the event files right in ``run_dir``."""
    for path in event_files(Path(run_dir)):
        with path.open("rb", buffering=1 << 20) as file:
            for _, data in Scan(path, file):
                yield decode_event(event_pb2.Event.FromString(data))


def decode_event(event: Any) -> EventRecord:
    """An Event proto as a record: scalars of either style, and text."""
    points: list[tuple[str, float]] = []
    texts: list[tuple[str, str]] = []
    for value in event.summary.value:
        if value.HasField("simple_value"):
            points.append((value.tag, value.simple_value))
        elif value.HasField("tensor"):
            tensor = value.tensor
            if tensor.dtype == types_pb2.DT_STRING:
                texts.append((value.tag, b"\n".join(tensor.string_val).decode("utf-8", "replace")))
            elif tensor.dtype in _PACKED and not any(dim.size != 1 for dim in tensor.tensor_shape.dim):
                code, field = _PACKED[tensor.dtype]
                listed = getattr(tensor, field)
                if len(tensor.tensor_content) == struct.calcsize(code):
                    listed = struct.unpack(code, tensor.tensor_content)
                points.extend((value.tag, float(number)) for number in listed[:1])
    kind = noted(event)[1]
    if not kind:
        kind = "version" if event.HasField("file_version") else "start" if event.HasField("session_log") else "row"
    return EventRecord(kind, event.wall_time, event.step, points, texts)


def read_points(run_dir: Path | str) -> dict[str, list[tuple[float, int, float]]]:
    """tag -> (wall time, step, value) of the points TensorBoard shows, oldest step first.

    A new point takes the place of every earlier one of its tag at the same or a later step, as in TensorBoard's default
    loader, so of a resumed run only what survived is left.
    """
    shown: dict[str, list[tuple[float, int, float]]] = {}
    for record in read_events(run_dir):
        for tag, number in record.points:
            points = shown.setdefault(tag, [])
            while points and points[-1][1] >= record.step:
                points.pop()
            points.append((record.wall_time, record.step, number))
    return shown
