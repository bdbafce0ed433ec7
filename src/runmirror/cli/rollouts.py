"""``runmirror show RUN --iteration N``: what was said and how it was graded, in the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from runmirror.read import RunView
from runmirror.reports.reading import Conversation

CUT = 1500
"""Characters of a text that are shown unless all of them are asked for."""
ROWS = 40
"""Trajectories that the table lists unless all of them are asked for."""
_STYLES = {"system": "magenta", "developer": "magenta", "user": "blue", "assistant": "green", "tool": "yellow"}


def load(run: RunView, iteration: int, split: str) -> dict[str, Any]:
    """What a run has of an iteration, as data: title, conversations (each with the headings above it), trajectories.

    Raises:
        FileNotFoundError: there is neither a report nor rollouts.
    """
    found = run.iterations
    one = found.get(iteration)
    if one is None or not (one.has("logtree", split) or one.has("rollouts", split)):
        run.logtree(iteration, split)  # tells what is there
    assert one is not None  # noqa: S101
    told = run.conversations(iteration, split) if one.has("logtree", split) else []
    return {
        "run": run.name,
        "iteration": iteration,
        "split": split,
        "title": run.logtree(iteration, split).get("title") if one.has("logtree", split) else None,
        "conversations": [{"headings": list(each.headings), "messages": each.messages} for each in told],
        "rollouts": list(one.rollouts(split)) if one.has("rollouts", split) else [],
    }


def draw(data: Mapping[str, Any], *, full: bool = False) -> RenderableType:
    """The same for people."""
    title = data["title"] or f"iteration {data['iteration']}"
    parts: list[RenderableType] = [Text(clean(f"{data['run']}  {data['split']}  {title}"), style="bold")]
    above: tuple[str, ...] = ()
    for each in data["conversations"]:
        told = Conversation(tuple(each["headings"]), each["messages"])
        if told.headings != above:
            above = told.headings
            parts.append(Rule(Text(clean(" / ".join(above)))))
        for message in told.messages:
            parts += _message(message, full)
    if not data["conversations"]:
        parts.append(Text("no conversations in its report", style="dim"))
    if data["rollouts"]:
        parts += ["", _table(data["rollouts"], full)]
    return Group(*parts)


def _message(message: Any, full: bool) -> Iterator[RenderableType]:
    message = message if isinstance(message, Mapping) else {"content": message}
    role, name = str(message.get("role", "message")), message.get("name")
    label = f"{role} ({name})" if isinstance(name, str) and name else role
    yield Text(clean(label), style=f"bold {_STYLES.get(role, '')}".strip())
    content = message.get("content")
    for part in content if isinstance(content, list) else [content]:
        text, style = _part(part)
        if text:
            yield _block(text, style, full)
    for key in ("tool_calls", "unparsed_tool_calls"):
        for call in message[key] if isinstance(message.get(key), list) else ():
            yield _block(_call(call), "cyan", full)


def _part(part: Any) -> tuple[str, str]:
    """(text, style) of one part of a message."""
    if part is None or isinstance(part, str):
        return part or "", ""
    if not isinstance(part, Mapping):
        return _json(part), ""
    kind = part.get("type")
    for name in ("text", "thinking"):
        if kind == name and isinstance(part.get(name), str):
            return part[name], "dim" if name == "thinking" else ""
    if kind == "tool_call":
        return _call(part.get("tool_call", part)), "cyan"
    if kind in ("image", "image_url"):
        return "[image]", "dim"
    return f"[{kind}] {_json({key: value for key, value in part.items() if key != 'type'})}", "dim"


def _call(call: Any) -> str:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if isinstance(function, Mapping) and isinstance(function.get("name"), str):
        arguments = function.get("arguments", "")
        return f"{function['name']}({arguments if isinstance(arguments, str) else _json(arguments)})"
    return _json(call)


def _block(text: str, style: str, full: bool) -> RenderableType:
    more = len(text) - CUT
    if more > 0 and not full:
        text = f"{text[:CUT]}\n… {more:,} more characters (--full shows them)"
    return Padding(Text(clean(text), style=style), (0, 0, 0, 2))


def _table(records: list[dict[str, Any]], full: bool) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("group", "trajectory", "turns", "tokens", "final", "reward"):
        table.add_column(column, justify="right")
    table.add_column("tags", overflow="fold")
    shown = records if full else records[:ROWS]
    for record in shown:
        steps = [step for step in record.get("steps") or () if isinstance(step, Mapping)]
        tokens = sum(step["ac_len"] for step in steps if isinstance(step.get("ac_len"), int))
        tags = record.get("tags")
        cells = [record.get("group_idx"), record.get("traj_idx"), len(steps), tokens]
        cells += [record.get("final_reward"), record.get("total_reward"), ", ".join(map(str, tags or ()))]
        table.add_row(*(Text(clean(f"{cell + 0.0:.4g}" if isinstance(cell, float) else f"{cell}")) for cell in cells))
    if len(shown) < len(records):
        return Group(table, Text(f"and {len(records) - len(shown):,} more (--full shows them)", style="dim"))
    return table


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def clean(text: str) -> str:
    """Text that can't steer a terminal, with its line breaks and tabs."""
    return "".join(char if char.isprintable() or char in "\n\t" else "�" for char in text)
