"""A report as one HTML file, for people.

Guarantees:

- Everything is escaped; tags and classes come from a fixed list, whatever a tree says. There is no script, and the page's
  own policy forbids scripts, forms, and anything from another place; images are shown when they are raster data in the tree.
- Characters that nobody sees but that change what is read (control characters, bidirectional overrides) are shown as their
  code points, and the direction of a text ends with it.
- It is made piece by piece from the tree, so that a large report needs little memory, and drawn piece by piece: groups are
  folded, and what is off the screen is not laid out (``content-visibility``). Long texts are cut into pieces, none is lost.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

import orjson

from runmirror.reports.rollouts import restore
from runmirror.reports.tree import Scope, Tree

PIECE = 20_000
"""Characters of a text that are shown in one piece; what is longer is folded away after the first."""
SHORT = 100
"""Characters of a value that stands beside its name."""
_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u202a-\u202e\u2066-\u2069\ufdd0-\ufdef\ufffe\uffff]")
_IMAGE = re.compile(r"data:image/(?:png|jpeg|gif|webp|bmp);base64,[A-Za-z0-9+/\s]++={0,2}\s*")
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_CLASSES = {
    "lt-subtitle": "sub",
    "lt-table-caption": "cap",
    "lt-p": "p",
    "lt-exc": "exc",
    "lt-details": "d",
}
_TAGS = frozenset(("p h1 h2 h3 h4 h5 h6 div span details summary pre code table thead tbody tr th td ul ol li").split())  # noqa: SIM905
_OPEN_SECTIONS = 1
"""Groups that are unfolded when the page opens."""


def render(tree: Tree) -> Iterator[str]:
    """The page, in pieces. Takes the tree apart: blocks that are rendered are let go."""
    yield _head(tree.title)
    contents = [part.title for part in tree.root.parts if isinstance(part, Scope) and part.kind == "section"]
    yield from _children(tree.root, _contents(contents))
    yield "</body>\n</html>\n"


@cache
def _style() -> str:
    return files("runmirror.reports").joinpath("style.css").read_text(encoding="utf-8").strip()


def _head(title: str) -> str:
    style = _style()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n<meta name="referrer" content="no-referrer">\n'
        f"<title>{shown(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
    )


def _contents(titles: Sequence[str]) -> str:
    if len(titles) < 2:
        return ""
    links = "".join(f'<a href="#s{number}">{shown(title)}</a>' for number, title in enumerate(titles))
    return f'<nav aria-label="Contents">{links}</nav>\n'


def shown(text: str, *, escaped: bool = False) -> str:
    """Text that is safe anywhere between tags. ``escaped`` says that it is HTML text already; markup in it is escaped all
    the same."""
    if not escaped or "<" in text or ">" in text or '"' in text:
        text = escape(text)
    if not text.isprintable() and _CONTROLS.search(text):
        text = _CONTROLS.sub(_code_point, text)
    return text


def _code_point(found: re.Match[str]) -> str:
    return f"&#x2039;U+{ord(found[0]):04X}&#x203a;"


def _children(scope: Scope, contents: str = "") -> Iterator[str]:
    number = 0
    parts, scope.parts = scope.parts, []
    for at in range(len(parts)):
        part, parts[at] = parts[at], bytearray()
        if isinstance(part, Scope):
            if contents:
                yield contents
                contents = ""
            yield from _scope(part, number)
            number += part.kind == "section"
            continue
        for node in orjson.loads(b"[" + part + b"]"):
            yield from _node(node, 0)


def _scope(scope: Scope, number: int) -> Iterator[str]:
    title = shown(scope.title)
    if scope.kind == "section":
        level = scope.level
        unfolded = " open" if level > 2 or number < _OPEN_SECTIONS else ""
        mark = f' id="s{number}"' if level == 2 else ""  # inside, so that a link to it unfolds the section
        yield f'<details class="s{level}"{unfolded}><summary><h{level}>{title}</h{level}></summary><div{mark}>\n'
        yield from _children(scope)
        yield "</div></details>\n"
    elif scope.kind == "details":
        yield f'<details class="d"><summary>{title}</summary><div>\n'
        yield from _children(scope)
        yield "</div></details>\n"
    else:
        yield "<div>\n"
        yield from _children(scope)
        yield "</div>\n"


def _node(node: Any, depth: int) -> Iterator[str]:
    if isinstance(node, str):
        yield shown(node, escaped=True)
        return
    if not isinstance(node, Mapping) or depth > 200:
        return
    data = node.get("data")
    if isinstance(data, Mapping):
        yield from _data(data)
        return
    attrs = node.get("attrs")
    attrs = attrs if isinstance(attrs, Mapping) else {}
    tag = node.get("tag")
    if tag in ("section", "body"):
        tag = "div"
    tag = tag if tag in _TAGS else "div"
    kind = _CLASSES.get(str(attrs.get("class")), "")
    kind = f' class="{kind}"' if kind else ""
    wide = tag == "table"
    children = node.get("children")
    children = children if isinstance(children, list) else []
    if tag == "p" and sum(len(child) for child in children if isinstance(child, str)) > PIECE:
        tag = "div"
    yield f"{'<div class=w>' if wide else ''}<{tag}{kind}{' open' if tag == 'details' and 'open' in attrs else ''}>"
    for child in children:
        if isinstance(child, str) and len(child) > PIECE:
            yield from _long(shown(child, escaped=True))
        else:
            yield from _node(child, depth + 1)
    yield f"</{tag}>{'</div>' if wide else ''}\n"


def _long(html: str) -> Iterator[str]:
    """Text in pieces of which only those on the screen are laid out; a piece never ends within a character reference."""
    start = 0
    while start < len(html):
        end = start + PIECE
        reference = html.rfind("&", max(start + 1, end - 10), end)
        if end < len(html) and reference > 0 and ";" not in html[reference:end]:
            end = reference
        yield f'<div class="k" dir="auto">{html[start:end]}</div>'
        start = end


def text_block(text: Any, kind: str = "t") -> Iterator[str]:
    """A text that somebody or some model wrote; a long one is folded after its first piece."""
    text = text if isinstance(text, str) else orjson.dumps(text).decode()
    if len(text) <= PIECE:
        yield f'<div class="{kind}" dir="auto">{shown(text)}</div>'
        return
    yield f'<div class="{kind}" dir="auto">{shown(text[:PIECE])}</div>'
    yield f'<details><summary class="n">{len(text) - PIECE:,} more characters</summary>'
    yield from _long(shown(text[PIECE:]))
    yield "</details>"


# -- data


def _data(data: Mapping[str, Any]) -> Iterator[str]:
    kind = data.get("type")
    if kind == "conversation" and isinstance(data.get("messages"), list):
        yield '<div class="conv">\n'
        for message in data["messages"]:
            yield from _message(message)
        yield "</div>\n"
    elif kind == "trajectory":
        yield from _trajectory(data)
    elif kind == "trajectory_details":
        for part in ("trajectories", "turns"):
            table = data.get(part)
            if isinstance(table, Mapping):
                yield f'<div class="cap">{part.capitalize()}</div>\n'
                yield from data_table(table.get("columns"), table.get("rows"))
    else:
        yield f'<details class="d"><summary>{shown(str(kind or "data"))}</summary><pre>'
        yield from text_block(orjson.dumps(data, option=orjson.OPT_INDENT_2).decode())
        yield "</pre></details>\n"


def _message(message: Any) -> Iterator[str]:
    if not isinstance(message, Mapping):
        message = {"content": message}
    role = str(message.get("role", "message"))
    known = role if role in _ROLES else ""
    known = "system" if known == "developer" else known
    name = message.get("name")
    label = f"{role} ({name})" if isinstance(name, str) and name else role
    yield f'<div class="m{" " if known else ""}{known}"><div class="r">{shown(label)}</div>'
    content = message.get("content")
    for part in content if isinstance(content, list) else [content]:
        yield from _part(part)
    for call in _list(message.get("tool_calls")):
        yield from _call(call)
    for call in _list(message.get("unparsed_tool_calls")):
        yield from _part({"type": "unparsed_tool_call", "unparsed_tool_call": call})
    yield "</div>\n"


def _part(part: Any) -> Iterator[str]:
    if part is None:
        return
    if not isinstance(part, Mapping):
        yield from text_block(part)
        return
    kind = part.get("type")
    if kind == "text" and isinstance(part.get("text"), str):
        yield from text_block(part["text"])
    elif kind in ("thinking", "reasoning") and isinstance(part.get("thinking", part.get("text")), str):
        yield '<details class="think" open><summary class="n">thinking</summary>'
        yield from text_block(part.get("thinking", part.get("text")))
        yield "</details>"
    elif kind in ("image", "image_url"):
        yield _image(part.get("image", part.get("image_url")))
    elif kind == "tool_call":
        yield from _call(part.get("tool_call", part))
    else:
        rest = {key: value for key, value in part.items() if key != "type"}
        yield f'<div class="call"><div class="n">{shown(str(kind or "part"))}</div>'
        yield from text_block(next(iter(rest.values())) if len(rest) == 1 else rest)
        yield "</div>"


def _call(call: Any) -> Iterator[str]:
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        yield from text_block(call)
        return
    yield f'<div class="call"><div class="n">tool call</div><code>{shown(function["name"])}</code>'
    arguments = function.get("arguments")
    if arguments is not None:
        yield from text_block(arguments, "t c")
    yield "</div>"


def _image(image: Any) -> str:
    if isinstance(image, Mapping):
        image = image.get("url")
    if isinstance(image, str) and _IMAGE.fullmatch(image):
        return f'<img alt="image" loading="lazy" src="{escape(image)}">'
    return f'<div class="n">image: {shown(str(image)[:200])}</div>'


def _trajectory(data: Mapping[str, Any]) -> Iterator[str]:
    """Where a trajectory's reward comes from: its turns, and what was added at the end."""
    data = restore(dict(data))
    steps = [step for step in _list(data.get("steps")) if isinstance(step, Mapping)]
    metrics = list(dict.fromkeys(key for step in steps for key in _mapping(step.get("metrics"))))
    columns = ["turn", "ob_len", "ac_len", "reward", *metrics]
    rows: list[list[Any]] = []
    for number, step in enumerate(steps):
        found = _mapping(step.get("metrics"))
        row = [step.get("step_idx", number), step.get("ob_len"), step.get("ac_len"), step.get("reward")]
        rows.append(row + [found.get(key, "") for key in metrics])
    yield from data_table(columns, rows)
    totals = {"final_reward": data.get("final_reward"), "total_reward": data.get("total_reward")}
    totals |= _mapping(data.get("trajectory_metrics"))
    yield f'<div class="p">{", ".join(f"{shown(str(key))} {_cell(value)[0]}" for key, value in totals.items())}</div>\n'
    logs = [(step.get("step_idx", number), _mapping(step.get("logs"))) for number, step in enumerate(steps)]
    if any(found for _, found in logs):
        yield '<details class="d" open><summary class="n">grading</summary>'
        for number, found in logs:
            yield f'<div class="n">turn {shown(str(number))}</div>' if found else ""
            for key, value in found.items():
                text = value if isinstance(value, str) else orjson.dumps(value).decode()
                if len(text) <= SHORT and "\n" not in text:
                    yield f'<div class="t" dir="auto">{shown(str(key))}: {shown(text)}</div>'
                else:
                    yield f'<div class="t" dir="auto">{shown(str(key))}:</div>'
                    yield from text_block(text)
        yield "</details>\n"


def data_table(columns: Any, rows: Any) -> Iterator[str]:
    """A table of data; numbers on the right."""
    head = "".join(f"<th>{_cell(column)[0]}" for column in _list(columns))
    yield f'<div class="w"><table><thead><tr>{head}<tbody>'
    for row in _list(rows):
        cells = (_cell(value) for value in _list(row))
        yield f"<tr>{''.join(f'<td{kind}>{text}' for text, kind in cells)}\n"
    yield "</table></div>\n"


def _cell(value: Any) -> tuple[str, str]:
    if isinstance(value, bool) or value is None:
        return str(value).lower() if value is not None else "", ""
    if isinstance(value, int | float):
        return f"{value:.4g}" if isinstance(value, float) else f"{value}", ' class="num"'
    return shown(value if isinstance(value, str) else orjson.dumps(value).decode()), ""


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
