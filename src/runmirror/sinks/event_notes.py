"""What an event file holds besides rows: header, hyperparameters, the end of the run, files as text.

Guarantees: every record is deterministic and names itself (:func:`~runmirror.sinks.event_file.control`). Metadata is
never rewritten: TensorBoard keeps the first of a run.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tensorboard.compat.proto import summary_pb2 as _summary_pb2
from tensorboard.compat.proto import tensor_pb2 as _tensor_pb2
from tensorboard.compat.proto import types_pb2 as _types_pb2
from tensorboard.plugins.histogram import plugin_data_pb2 as _histogram_pb2
from tensorboard.plugins.hparams import api_pb2 as _api_pb2
from tensorboard.plugins.hparams import plugin_data_pb2 as _hparams_pb2
from tensorboard.plugins.text import plugin_data_pb2 as _text_pb2

from runmirror.log.layout import Kind
from runmirror.sinks.event_file import control, event_pb2

summary_pb2: Any = _summary_pb2  # generated code without types
tensor_pb2: Any = _tensor_pb2
types_pb2: Any = _types_pb2
api_pb2: Any = _api_pb2
hparams_pb2: Any = _hparams_pb2
text_pb2: Any = _text_pb2
histogram_pb2: Any = _histogram_pb2

BUCKETS = 30

TEXT_LIMIT = 64 * 1024
"""Bytes of one text at most; TensorBoard loads every text into memory."""

_FILE_STEP = -1  # a START at step 0 (a run begun afresh) must not take the files away
_EXACT = 2**53


def version_record(wall_time: float) -> bytes:
    """The first record of a file."""
    return control("version", wall_time, file_version="brain.Event:2")


def start_record(what: str, wall_time: float, step: int) -> bytes:
    """``SessionLog.START``: in a "rewind", and from a run's second one on, points at ``step`` or later are dropped by the
    slow loader."""
    return control(what, wall_time, step, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))


def describe_record(wall_time: float, texts: Mapping[str, str]) -> bytes:
    """What tags mean (tag -> Markdown), for TensorBoard's SCALARS tab: metadata only, to stand before their first points.
    Empty, it says of a run that its tags are described."""
    values = [
        summary_pb2.Summary.Value(
            tag=tag,
            metadata=summary_pb2.SummaryMetadata(
                summary_description=text,
                plugin_data=summary_pb2.SummaryMetadata.PluginData(plugin_name="scalars"),
                data_class=summary_pb2.DATA_CLASS_SCALAR,
            ),
        )
        for tag, text in texts.items()
    ]
    return control("describe", wall_time, summary=summary_pb2.Summary(value=values))


def again_record(wall_time: float, step: int, points: list[tuple[str, float]]) -> bytes:
    """Points that are written once more."""
    values = [summary_pb2.Summary.Value(tag=tag, simple_value=value) for tag, value in points]
    return control("repair", wall_time, step, summary=summary_pb2.Summary(value=values))


def hparams_record(wall_time: float, config: Mapping[str, Any]) -> bytes:
    """The configuration as hyperparameters. There is no experiment record: TensorBoard takes one of all runs at random
    and would hide the others' keys. (TensorBoard's own limit: a step beyond 2**31 in a run that has hyperparameters breaks
    the HPARAMS tab, whose answers hold steps as int32; the other tabs are not concerned.)"""
    info = hparams_pb2.SessionStartInfo(start_time_secs=wall_time)
    for key, value in flatten(config):
        entry = info.hparams[_utf8(key)]
        if isinstance(value, bool):
            entry.bool_value = value
        elif isinstance(value, int | float):
            entry.number_value = value
        else:
            entry.string_value = _utf8(value)
    return _hparams_record("hparams", wall_time, session_start_info=info)


def end_record(wall_time: float, succeeded: bool) -> bytes:
    """The end of the run."""
    status = api_pb2.STATUS_SUCCESS if succeeded else api_pb2.STATUS_FAILURE
    info = hparams_pb2.SessionEndInfo(status=status, end_time_secs=wall_time)
    return _hparams_record("end", wall_time, session_end_info=info)


def _hparams_record(what: str, wall_time: float, **info: Any) -> bytes:
    content = hparams_pb2.HParamsPluginData(version=0, **info).SerializeToString(deterministic=True)
    metadata = summary_pb2.SummaryMetadata(
        plugin_data=summary_pb2.SummaryMetadata.PluginData(plugin_name="hparams", content=content),
        data_class=summary_pb2.DATA_CLASS_TENSOR,
    )
    empty = tensor_pb2.TensorProto(dtype=types_pb2.DT_FLOAT)
    empty.tensor_shape.dim.add(size=0)
    (name,) = info
    value = summary_pb2.Summary.Value(tag=f"_hparams_/{name}", metadata=metadata, tensor=empty)
    return control(what, wall_time, _FILE_STEP, summary=summary_pb2.Summary(value=[value]))


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    """key.with.dots -> value: None left out; lists, NaN, infinities and integers no double holds as text."""
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flatten(value, f"{name}.")
        elif isinstance(value, bool | str):
            yield name, value
        elif isinstance(value, int):
            yield name, value if -_EXACT <= value <= _EXACT else str(value)
        elif isinstance(value, float):
            yield name, value if math.isfinite(value) else str(value)
        elif value is not None:
            yield name, str(value)


def text_value(tag: str, text: str) -> bytes:
    """A text as the serialised ``summary`` field of an Event."""
    metadata = summary_pb2.SummaryMetadata(
        plugin_data=summary_pb2.SummaryMetadata.PluginData(
            plugin_name="text", content=text_pb2.TextPluginData(version=0).SerializeToString(deterministic=True)
        ),
        data_class=summary_pb2.DATA_CLASS_TENSOR,
    )
    tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[text.encode("utf-8", "replace")])
    tensor.tensor_shape.SetInParent()
    value = summary_pb2.Summary.Value(tag=_utf8(tag), metadata=metadata, tensor=tensor)
    return bytes(summary_pb2.Summary(value=[value]).SerializeToString(deterministic=True))


def file_tag(path: str) -> str:
    """The tag of a file's text."""
    return f"runmirror/{_utf8(path)}"


def file_text(kind: Kind, content: bytes) -> str:
    """A file of the log as Markdown."""
    text = content.decode("utf-8", "replace")
    table = _checkpoints(text) if kind == "checkpoints" else None
    if table is not None:
        return table
    return fenced(pretty(text) if kind == "config" else text, {"config": "json", "code": "diff"}.get(kind, ""))


def sample_tag(split: str) -> str:
    """The tag of what was said in a split's rollouts."""
    return f"runmirror/rollouts/{_utf8(split)}"


def reward_tag(split: str) -> str:
    """The tag of a split's rewards."""
    return f"runmirror/reward/{_utf8(split)}"


def sample_text(told: Sequence[tuple[tuple[str, ...], Sequence[tuple[str, str]]]]) -> str:
    """Conversations, (headings, (role, text) pairs) each, as Markdown."""
    parts: list[str] = []
    for headings, messages in told:
        parts += [f"**{_cell(' / '.join(headings))}**"] if headings else []
        parts += [f"*{_cell(role)}*\n\n{fenced(text, '')}" for role, text in messages]
    return "\n\n".join(parts)


def histogram_value(tag: str, values: Sequence[float]) -> bytes:
    """The distribution of numbers as the serialised ``summary`` field of an Event: 30 buckets, one when all are the same."""
    low, high = min(values), max(values)
    width = high / BUCKETS - low / BUCKETS  # the distance itself may be infinite
    edges = [low + width * at for at in range(BUCKETS)] + [high] if width > 0 else [low - 0.5, high + 0.5]
    counts = [0] * (len(edges) - 1)
    for value in values:
        counts[min(len(counts) - 1, int(value / width - low / width)) if width > 0 else 0] += 1
    metadata = summary_pb2.SummaryMetadata(
        plugin_data=summary_pb2.SummaryMetadata.PluginData(
            plugin_name="histograms",
            content=histogram_pb2.HistogramPluginData(version=0).SerializeToString(deterministic=True),
        ),
        data_class=summary_pb2.DATA_CLASS_TENSOR,
    )
    tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_DOUBLE)
    tensor.tensor_shape.dim.add(size=len(counts))
    tensor.tensor_shape.dim.add(size=3)
    for at, count in enumerate(counts):
        tensor.double_val.extend((edges[at], edges[at + 1], float(count)))
    value = summary_pb2.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)
    return bytes(summary_pb2.Summary(value=[value]).SerializeToString(deterministic=True))


def rollout_record(wall_time: float, step: int, value: bytes) -> bytes:
    """A value of an iteration's rollouts: a distribution or a text."""
    return control("rollouts", wall_time, step, summary=summary_pb2.Summary.FromString(value))


def file_record(wall_time: float, path: str, text: str) -> bytes:
    """A file of the log as a text of the run."""
    summary = summary_pb2.Summary.FromString(text_value(file_tag(path), text))
    return control("file", wall_time, _FILE_STEP, summary=summary)


def pretty(text: str) -> str:
    """JSON with one value a line, or the text as it is when it's no JSON."""
    try:
        return json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return text


def fenced(text: str, language: str) -> str:
    """A Markdown code block that ``text`` can't end."""
    text, note = capped(text)
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{note}{fence}{language}\n{text}\n{fence}"


def capped(text: str) -> tuple[str, str]:
    """The first ``TEXT_LIMIT`` bytes, and a note when there are more."""
    data = text.encode("utf-8", "replace")
    if len(data) <= TEXT_LIMIT:
        return data.decode(), ""
    return data[:TEXT_LIMIT].decode("utf-8", "ignore"), f"*The first {TEXT_LIMIT} of {len(data)} bytes.*\n\n"


def _checkpoints(text: str) -> str | None:
    """The lines of checkpoints.jsonl as a table, the newest ones when there are too many; None when they can't be read."""
    try:
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        columns = list(dict.fromkeys(key for row in rows for key in row))
        lines = ["| " + " | ".join(_cell(row.get(column)) for column in columns) + " |" for row in rows]
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
    if not columns:
        return None
    head = f"| {' | '.join(map(_cell, columns))} |\n|{' --- |' * len(columns)}\n"
    kept: list[str] = []
    size = 0
    for line in reversed(lines):
        size += len(line.encode("utf-8", "replace")) + 1
        if size > TEXT_LIMIT:
            break
        kept.append(line)
    note = "" if len(kept) == len(lines) else f"*The last {len(kept)} of {len(lines)} checkpoints.*\n\n"
    return note + head + "\n".join(reversed(kept))


def _cell(value: Any) -> str:
    text = "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return _utf8(text).replace("\\", "\\\\").replace("|", "\\|").replace("\r", " ").replace("\n", " ")


def _utf8(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
