from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.compat.tensorflow_stub import pywrap_tensorflow

from runmirror.sinks import event_file
from runmirror.sinks.event_file import (
    Damaged,
    EventLog,
    RowShapes,
    checksum,
    control,
    encode_row,
    event_files,
    frame,
    is_row,
    noted,
    split_row,
)
from runmirror.sinks.event_reader import read_events, read_points

INT64 = st.integers(-(2**63), 2**63 - 1)
KEYS = st.text(min_size=1, max_size=40).filter(lambda key: not key.startswith(("runmirror/", "_hparams_/")))
POINTS = st.dictionaries(KEYS, st.floats(width=32) | st.booleans() | st.integers(-(2**63), 2**63 - 1), max_size=8)
TIMES = st.floats(allow_nan=False, allow_infinity=False)


def encode(wall_time: float, step: int, points: dict[str, Any]) -> bytes:
    return encode_row(wall_time, step, RowShapes().of(tuple(points)).body(points))


def float32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def events(path: Path) -> list[Any]:
    return list(LegacyEventFileLoader(str(path)).Load())


def test_checksum_is_tensorboards() -> None:
    """The masked CRC-32C equals TensorBoard's own, which readers compare it with."""
    for data in (b"", b"a", bytes(range(256)) * 9):
        assert checksum(data) == pywrap_tensorflow.masked_crc32c(data)


def test_row_bytes_are_protobufs() -> None:
    """Byte for byte what protobuf writes for the same Event."""
    event = event_pb2.Event(wall_time=1700000000.25, step=300)
    event.summary.value.add(tag="loss", simple_value=0.5)
    event.summary.value.add(tag="größe/ü", simple_value=-3.0)
    assert encode(1700000000.25, 300, {"loss": 0.5, "größe/ü": -3.0}) == frame(
        event.SerializeToString(deterministic=True)
    )


def test_row_bytes_never_change() -> None:
    """The bytes of encoder version 1, written down: other ones need a new ENCODER."""
    expected = "1a00000000000000129bd82d09000010f4fc54d94110072a0d0a0b0a046c6f7373150000003f3aeccc1a"
    assert encode(1700000720.25, 7, {"loss": 0.5}).hex() == expected


@given(TIMES, INT64, POINTS)
def test_row_round_trip(wall_time: float, step: int, points: dict[str, Any]) -> None:
    """An Event that protobuf parses to the same time, step, tags in order and float32 values; split_row agrees."""
    record = encode(wall_time, step, points)
    data = record[12:-4]
    event = event_pb2.Event.FromString(data)
    assert (event.wall_time, event.step) == (wall_time, step)
    assert [value.tag for value in event.summary.value] == list(points)
    for value, expected in zip(event.summary.value, points.values(), strict=True):
        assert value.simple_value == float32(expected) or math.isnan(expected)
    assert is_row(data)
    assert split_row(data)[:2] == (wall_time, step)


@given(POINTS)
def test_shape_recognises_its_rows(points: dict[str, Any]) -> None:
    """The shape a row was made of, by its bytes alone; none for other keys of the same length."""
    shapes = RowShapes()
    shape = shapes.of(tuple(points))
    assert shapes.recognise(shape.body(points)) is shape
    assert shapes.of(tuple(points)) is shape
    if points:
        other = RowShapes()
        other.of(tuple(key[:-1] + ("x" if key[-1] != "x" else "y") for key in points))
        assert other.recognise(shape.body(points)) is None


def test_beyond_float32() -> None:
    """Infinity of the right sign, for floats and integers that float32 can't hold; NaN stays NaN."""
    points = {"a": 1e300, "b": -1e300, "c": 3.4028235677973366e38, "d": math.nan, "e": 2**63 - 1, "f": 1.5}
    event = event_pb2.Event.FromString(encode(1.0, 1, points)[12:-4])
    values = [value.simple_value for value in event.summary.value]
    assert values[:3] == [math.inf, -math.inf, math.inf]
    assert math.isnan(values[3])
    assert values[4:] == [2.0**63, 1.5]


def test_steps_beyond_int64_are_clamped() -> None:
    """The nearest step that fits."""
    for step, expected in ((2**63, 2**63 - 1), (-(2**63) - 1, -(2**63)), (-1, -1), (2**53 + 1, 2**53 + 1)):
        assert event_pb2.Event.FromString(encode(1.0, step, {})[12:-4]).step == expected


def test_keys_that_no_tag_can_hold() -> None:
    """Empty, reserved and colliding keys are refused by name; a lone surrogate is replaced; the rest is written."""
    keys = ("", "a?", "a\ud800", "b\udfff", "runmirror/x", "_hparams_/y", "custom_scalars__config__", "ok", "b\ud801")
    shape = RowShapes().of(keys)
    assert shape.tags == ("a?", "b?", "ok")
    assert [key for key, _ in shape.refused] == [
        "", "a\ud800", "runmirror/x", "_hparams_/y", "custom_scalars__config__", "b\ud801",
    ]  # fmt: skip
    event = event_pb2.Event.FromString(encode(1.0, 1, {key: float(at) for at, key in enumerate(keys)})[12:-4])
    assert [(value.tag, value.simple_value) for value in event.summary.value] == [("a?", 1.0), ("b?", 3.0), ("ok", 7.0)]


def test_control_records_name_themselves() -> None:
    """Their first field says who and what, and they are no rows."""
    data = control("version", 5.0, file_version="brain.Event:2")[12:-4]
    assert not is_row(data)
    event = event_pb2.Event.FromString(data)
    assert noted(event) == (str(event_file.ENCODER), "version")
    assert (event.wall_time, event.file_version) == (5.0, "brain.Event:2")
    assert noted(event_pb2.Event()) == ("", "")


def a_log(folder: Path, count: int = 5) -> EventLog:
    log = EventLog(folder)
    list(log.records())
    log.begin(7.0)
    log.append(control("version", 7.0, file_version="brain.Event:2"))
    log.append(b"".join(encode(float(step), step, {"a": float(step)}) for step in range(count)))
    return log


def test_records_can_be_read_at_their_places(tmp_path: Path) -> None:
    """Scanning gives every record with a place, and reading at the place gives the same bytes, across segments."""
    log = a_log(tmp_path)
    log.begin(9.0)
    log.append(encode(9.0, 9, {"b": 1.0}))
    again = EventLog(tmp_path)
    found = list(again.records())
    assert len(found) == 7
    assert [again.read(place) for place, _ in found] == [data for _, data in found]
    assert [path.name for path in event_files(tmp_path)] == [
        "events.out.tfevents.0000000007.runmirror.v1",
        "events.out.tfevents.0000000007.runmirror.v1.0001",
    ]
    log.close()
    again.close()


def test_torn_tail_is_completed_by_the_same_bytes_only(tmp_path: Path) -> None:
    """Cut at every byte of the last record, the log takes the record that was cut and no other."""
    a_log(tmp_path).close()
    (path,) = event_files(tmp_path)
    whole = path.read_bytes()
    last = encode(4.0, 4, {"a": 4.0})
    for cut in range(1, len(last)):
        path.write_bytes(whole[:-cut])
        log = EventLog(tmp_path)
        assert len(list(log.records())) == 5
        assert log.torn == last[:-cut]
        assert log.takes(last)
        assert not log.takes(encode(4.0, 4, {"abcdefg": 4.0}))
        log.append(last)
        log.close()
        assert path.read_bytes() == whole


@pytest.mark.parametrize("at", ["head", "data"])
def test_damage_names_file_and_offset(tmp_path: Path, at: str) -> None:
    """Damaged, with the offset of the record, at a wrong bit in its length or its data; records before it are given."""
    a_log(tmp_path).close()
    (path,) = event_files(tmp_path)
    raw = bytearray(path.read_bytes())
    size = len(encode(1.0, 1, {"a": 1.0}))
    offset = len(raw) - 2 * size
    raw[offset + (0 if at == "head" else 15)] ^= 1
    path.write_bytes(raw)
    log = EventLog(tmp_path)
    seen = []
    with pytest.raises(Damaged, match=rf"{path.name} is damaged at byte {offset} "):  # noqa: PT012
        for _, data in log.records():
            seen.append(data)
    assert len(seen) == 4


def test_zeros_behind_the_last_record_were_never_written(tmp_path: Path) -> None:
    """A file that a machine's crash filled with zeros is read up to them, and never appended to."""
    a_log(tmp_path).close()
    (path,) = event_files(tmp_path)
    path.write_bytes(path.read_bytes() + bytes(5000))
    log = EventLog(tmp_path)
    assert len(list(log.records())) == 6
    assert not log.takes(encode(5.0, 5, {"a": 5.0}))


def test_reads_ordinary_event_files(tmp_path: Path) -> None:
    """Scalars of both styles and text that another writer wrote."""
    event = event_pb2.Event(wall_time=3.0, step=4)
    event.summary.value.add(tag="simple", simple_value=0.5)
    for tag, dtype, fields in (
        ("float", 1, {"float_val": [1.5]}),
        ("double", 2, {"tensor_content": struct.pack("<d", 2.5)}),
        ("long", 9, {"int64_val": [7]}),
        ("text", 7, {"string_val": [b"hello"]}),
    ):
        tensor = event.summary.value.add(tag=tag).tensor
        tensor.dtype = dtype
        for name, value in fields.items():
            setattr(tensor, name, value) if isinstance(value, bytes) else getattr(tensor, name).extend(value)
    version = event_pb2.Event(wall_time=3.0, file_version="brain.Event:2")
    path = tmp_path / "events.out.tfevents.1.host"
    path.write_bytes(frame(version.SerializeToString()) + frame(event.SerializeToString()) + b"torn")
    first, second = read_events(tmp_path)
    assert (first.kind, second.kind) == ("version", "row")
    assert second.points == [("simple", 0.5), ("float", 1.5), ("double", 2.5), ("long", 7.0)]
    assert second.texts == [("text", "hello")]
    assert read_points(tmp_path)["double"] == [(3.0, 4, 2.5)]


def test_tensorboards_own_loader_reads_every_record(tmp_path: Path) -> None:
    """The same records, with TensorBoard's checksums passed."""
    a_log(tmp_path).close()
    (path,) = event_files(tmp_path)
    found = events(path)
    assert [event.step for event in found if event.HasField("summary")] == [0, 1, 2, 3, 4]
    assert found[0].file_version == "brain.Event:2"
    assert isinstance(found[1].summary, summary_pb2.Summary)
