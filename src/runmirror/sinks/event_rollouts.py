"""What TensorBoard shows of rollouts: rewards as a distribution, and of a report the first conversations as text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import islice
from typing import Any

from runmirror.log.layout import parse
from runmirror.log.rows import decode, json_line
from runmirror.reports.reading import conversations
from runmirror.reports.rollouts import restore
from runmirror.sinks import event_notes

SAMPLES = 4
"""Conversations of a report that are shown."""
LONGEST = 4000
"""Characters of a message that are shown."""


def rollout_value(path: str, content: bytes) -> tuple[str, int, bytes] | None:
    """(tag, step, value) of a file of rollouts or a logtree; None when there is nothing in it to show."""
    name = parse(path)
    if name is None or name.iteration is None or name.split is None:
        return None
    if name.kind == "rollouts":
        rewards = _rewards(content)
        tag = event_notes.reward_tag(name.split)
        return (tag, name.iteration, event_notes.histogram_value(tag, rewards)) if rewards else None
    told = islice(conversations(decode(content) or {}), SAMPLES)
    text = event_notes.sample_text([(each.headings, [_message(one) for one in each.messages]) for each in told])
    tag = event_notes.sample_tag(name.split)
    return (tag, name.iteration, event_notes.text_value(tag, _capped(text))) if text else None


def _rewards(content: bytes) -> list[float]:
    """The total rewards that are finite numbers."""
    records = (decode(line) for line in content.split(b"\n"))
    found = [restore(record).get("total_reward") for record in records if record is not None]
    return [float(value) for value in found if isinstance(value, int | float) and math.isfinite(value)]


def _message(message: Any) -> tuple[str, str]:
    """(role, text) of a message; what is no text is JSON."""
    if not isinstance(message, Mapping):
        return "message", _json(message)
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [_part(part) for part in parts if part is not None]
    texts += [_json(call) for call in message.get("tool_calls") or ()]
    text = "\n".join(texts)
    return str(message.get("role", "message")), text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping):
        kind = part.get("type")
        if kind in ("text", "thinking") and isinstance(part.get(kind), str):
            return str(part[kind])
        if kind in ("image", "image_url"):
            return "[image]"
    return _json(part)


def _json(value: Any) -> str:
    return json_line(value).decode().rstrip()


def _capped(text: str) -> str:
    shown, note = event_notes.capped(text)
    return note + shown
