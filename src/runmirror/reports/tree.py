"""The report of one iteration as a tree: scopes, and in them text, tables, code, conversations.

Guarantees:

- No method raises for what it is given, and none writes a file: a closed tree is handed over (:mod:`.writing`).
- Scopes belong to a task: in asyncio tasks, and in threads, what is logged lands in the scope that the code is in, however
  the tasks interleave. A task begins in the scope it was created in; a thread, which knows none, at the top of the tree.
- A tree is JSON from the beginning, in blocks of about 1 MB: it takes as much memory as its JSON, and what is logged is
  copied.
- The JSON is tinker-cookbook's logtree: ``title``, ``started_at``, ``path``, ``root``; a node has ``tag``, ``attrs``,
  ``children`` (nodes, or text with ``&``, ``<``, ``>`` and quotes escaped as in HTML) and perhaps ``data``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from html import escape
from types import TracebackType
from typing import Any, Self

from runmirror.reports.plain import text_of, to_json

logger = logging.getLogger("runmirror")

BLOCK = 1 << 20
MAX_SCOPES = 60
"""Scopes in one another; what is logged deeper stays in the last."""
PARTIAL = "This report is partial: "

CURRENT: ContextVar[Scope | None] = ContextVar("runmirror_scope", default=None)
"""The scope that the running code is in."""
_OUTSIDE: ContextVar[tuple[Scope | None, ...]] = ContextVar("runmirror_outside", default=())
"""The scopes that the code was in before each report it entered."""


class Scope:
    """A node that is open: its children are blocks of JSON, and scopes.

    Attributes:
        tree: whose it is.
        kind: "root", "section", "details" or "div".
        title: of a section, or the summary of details.
        attrs: of a div, or of the root.
        level: of its own heading, 2 to 6; the next one in a section is one below.
        depth: how many scopes it is in.
    """

    __slots__ = ("attrs", "depth", "kind", "level", "parts", "title", "tree")

    def __init__(
        self, tree: Tree, kind: str, title: str, level: int, depth: int, attrs: Mapping[str, str] | None = None
    ) -> None:
        self.tree = tree
        self.kind = kind
        self.title = title
        self.level = level
        self.depth = depth
        self.attrs = dict(attrs or {})
        self.parts: list[bytearray | Scope] = []

    @property
    def next_level(self) -> int:
        """The level of a heading in it."""
        return min(6, self.level + 1) if self.kind == "section" else self.level

    def add(self, node: bytes) -> None:
        """Append a node, as JSON."""
        last = self.parts[-1] if self.parts else None
        if isinstance(last, bytearray) and len(last) + len(node) < BLOCK:
            last += b"," + node
        else:
            self.parts.append(bytearray(node))

    def json(self) -> Iterator[bytes | bytearray]:
        """The node and all below it, in pieces."""
        head, tail = self._frame()
        yield head
        for number, part in enumerate(self.parts):
            if number:
                yield b","
            if isinstance(part, Scope):
                yield from part.json()
            else:
                yield part
        yield tail

    def _frame(self) -> tuple[bytes, bytes]:
        """What is around the children."""
        mark = "\0"  # no text has it: a NUL is written as \u0000
        body: dict[str, Any]
        if self.kind == "section":
            inner = _node("div", "lt-section-body", mark)
            heading = _node(f"h{self.level}", f"lt-h{self.level}", escape(self.title))
            body = _node("section", "lt-section", heading, inner)
        elif self.kind == "details":
            inner = _node("div", "lt-details-body", mark)
            body = _node("details", "lt-details", _node("summary", "", escape(self.title)), inner)
        else:
            body = {"tag": "div" if self.kind == "div" else "body", "attrs": self.attrs, "children": [mark]}
        head, tail = to_json(body).rsplit(b'"\\u0000"', 1)
        return head, tail


class Tree:
    """One report being written; made by ``run.report(...)``, and handed over when its ``with`` block ends, or the last of
    them when several, one in another or in several tasks, are about the same report.

    Args:
        title: its title.
        path: the HTML's path below the log_path.
        close: called once with the tree when it is finished; None for a tree that records nothing.
    """

    def __init__(self, title: str, path: str, close: Callable[[Tree], None] | None = None) -> None:
        self.title = text_of(title)
        self.path = path
        self.started_at = datetime.now().astimezone()
        self.root = Scope(self, "root", self.title, 2, 0, {"class": "lt-root"})
        self._close = close
        self._closed = close is None
        self._lock = threading.RLock()  # a signal handler may log while its own thread is in here
        self._users = 0
        self._warned = False
        if not self._closed:
            self.root.add(to_json(_node("h1", "lt-title", escape(self.title))))
            self.root.add(to_json(_node("div", "lt-subtitle", f"Generated {self.started_at:%Y-%m-%dT%H:%M:%S}")))

    # -- what people log

    def text(self, text: Any) -> None:
        """A paragraph; its line breaks are kept."""
        self._add(lambda: _node("p", "lt-p", escape(text_of(text))))

    def header(self, text: Any, level: int | None = None) -> None:
        """A heading, of the level (1 to 6) that fits the scope when none is given."""

        def node() -> dict[str, Any]:
            rank = self._scope().next_level if level is None else min(6, max(1, int(level)))
            return _node(f"h{rank}", f"lt-h{rank}", escape(text_of(text)))

        self._add(node)

    def code(self, text: Any, language: str = "") -> None:
        """Text in a fixed-width font, as it is."""
        kind = f"language-{text_of(language)}" if language else ""
        self._add(lambda: _node("pre", "lt-code", _node("code", kind, escape(text_of(text)))))

    def details(self, text: Any, summary: Any = "Details") -> None:
        """Text that is folded away behind ``summary``."""
        fold = _node("summary", "", escape(text_of(summary)))
        self._add(lambda: _node("details", "lt-details", fold, _node("pre", "lt-details-body", escape(text_of(text)))))

    def table(self, rows: Any, caption: Any = "") -> None:
        """A table from a mapping (a row per key), a list of mappings or of sequences, or a data frame."""

        def add() -> bytes:
            if caption:
                self._scope().add(to_json(_node("div", "lt-table-caption", escape(text_of(caption)))))
            return to_json(_table(rows))

        self._add(add)

    def exception(self, error: BaseException) -> None:
        """An exception with its traceback; paths are shortened to what is below the working directory or a package."""
        self._add(lambda: _exception(error))

    def conversation(self, messages: Sequence[Any]) -> None:
        """A conversation: messages with ``role``, ``content`` (text, or a list of parts such as text, thinking, tool_call,
        image, or any other kind) and whatever else they have, all of which is kept in the node's ``data``."""
        self._add(lambda: _data_node(b'{"type":"conversation","messages":' + to_json(list(messages)) + b"}"))

    def data(self, data: Mapping[str, Any] | bytes) -> None:
        """A node for programs: a JSON object, or its bytes. Its ``type`` says what it is."""
        self._add(lambda: _data_node(data if isinstance(data, bytes) else to_json(data)))

    @contextlib.contextmanager
    def scope(self, title: Any) -> Iterator[None]:
        """A section with a heading: what is logged in the ``with`` block lands in it."""
        with self._inside("section", title):
            yield

    @contextlib.contextmanager
    def folded(self, summary: Any) -> Iterator[None]:
        """A part that is folded away behind ``summary``."""
        with self._inside("details", summary):
            yield

    @contextlib.contextmanager
    def div(self, **attrs: Any) -> Iterator[None]:
        """A part without a heading, with attributes for programs (``class_`` for ``class``)."""
        named = {text_of(key).rstrip("_").replace("_", "-"): text_of(value) for key, value in attrs.items()}
        with self._inside("div", "", named):
            yield

    # -- how it works

    def _scope(self) -> Scope:
        current = CURRENT.get()
        return current if current is not None and current.tree is self else self.root

    def _add(self, make: Callable[[], dict[str, Any] | bytes]) -> None:
        if self._closed:
            return
        try:
            with self._lock:
                if not self._closed:
                    node = make()
                    self._scope().add(node if isinstance(node, bytes) else to_json(node))
        except Exception as error:
            if not self._warned:
                self._warned = True
                logger.warning("%s: something could not be put into the report: %s", self.path, text_of(error))

    @contextlib.contextmanager
    def _inside(self, kind: str, title: Any, attrs: Mapping[str, str] | None = None) -> Iterator[None]:
        before = CURRENT.get()
        inside = above = self._scope()
        if not self._closed and above.depth < MAX_SCOPES:
            inside = Scope(self, kind, text_of(title), above.next_level, above.depth + 1, attrs)
            with self._lock:
                above.parts.append(inside)
        CURRENT.set(inside)
        try:
            yield
        finally:
            CURRENT.set(before)  # no token: it could not be used when a task or thread is left in another one

    def __enter__(self) -> Self:
        with self._lock:
            self._users += 1
        _OUTSIDE.set((*_OUTSIDE.get(), CURRENT.get()))
        CURRENT.set(self.root)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        *outside, before = _OUTSIDE.get() or (None,)
        _OUTSIDE.set(tuple(outside))
        CURRENT.set(before)
        with self._lock:
            self._users -= 1
            last = self._users <= 0
        if last:
            self.close(error)
        elif error is not None:
            self.exception(error)

    def close(self, error: BaseException | None = None, partial: str = "") -> None:
        """Hand the report over. Again: nothing happens.

        Args:
            error: what ended it early; the report is marked as partial and shows it.
            partial: another reason why it is partial.
        """
        with self._lock:
            if self._closed or self._close is None:
                return
            if error is not None or partial:
                self.root.attrs["data-partial"] = "true"
                reason = partial or f"{type(error).__name__} was raised"
                self.root.add(to_json(_node("p", "lt-p", escape(PARTIAL + reason))))
            if error is not None:
                self.root.add(to_json(_exception(error)))
            self._closed = True
        self._close(self)

    def json(self) -> Iterator[bytes | bytearray]:
        """The whole report as JSON, in pieces."""
        top = {"title": self.title, "started_at": self.started_at.isoformat(), "path": self.path}
        yield to_json(top)[:-1] + b',"root":'
        yield from self.root.json()
        yield b"}\n"


def _node(tag: str, kind: str, *children: Any) -> dict[str, Any]:
    return {"tag": tag, "attrs": {"class": kind} if kind else {}, "children": list(children)}


def _data_node(data: bytes) -> bytes:
    return b'{"tag":"div","attrs":{},"children":[],"data":' + data + b"}"


def _table(rows: Any) -> dict[str, Any]:
    columns: list[Any] | None = None
    if callable(getattr(rows, "to_dicts", None)):  # polars
        rows = rows.to_dicts()
    elif callable(getattr(rows, "itertuples", None)):  # pandas
        columns, rows = list(rows.columns), list(rows.itertuples(index=False))
    if isinstance(rows, Mapping):
        columns, rows = ["key", "value"], list(rows.items())
    rows = list(rows)
    if columns is None and rows and all(isinstance(row, Mapping) for row in rows):
        columns = list(dict.fromkeys(key for row in rows for key in row))
        rows = [[row.get(column, "") for column in columns] for row in rows]
    head = [] if columns is None else [_node("thead", "", _line("th", columns))]
    return _node("table", "lt-table", *head, _node("tbody", "", *(_line("td", row) for row in rows)))


def _line(tag: str, cells: Any) -> dict[str, Any]:
    cells = [cells] if isinstance(cells, str | bytes) or not hasattr(cells, "__iter__") else cells
    return _node("tr", "", *(_node(tag, "", escape(text_of(cell))) for cell in cells))


def _exception(error: BaseException) -> dict[str, Any]:
    told = traceback.TracebackException.from_exception(error)
    seen: set[int] = set()
    chain: list[traceback.TracebackException | None] = [told]
    while chain:
        one = chain.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        for frame in one.stack:
            frame.filename = _shortened(frame.filename)
        chain += [one.__cause__, one.__context__, *(getattr(one, "exceptions", None) or ())]
    summary = f"Exception: {type(error).__name__}: {text_of(error)}"
    node = _node(
        "details", "lt-exc", _node("summary", "", escape(summary)), _node("pre", "", escape("".join(told.format())))
    )
    node["attrs"]["open"] = "open"
    return node


def _shortened(path: str) -> str:
    """A source file's path without the folders that tell where somebody lives."""
    roots = sorted({os.path.abspath("."), *filter(os.path.isabs, sys.path)}, key=len, reverse=True)
    root = next((root for root in roots if path.startswith(root.rstrip(os.sep) + os.sep)), None)
    return os.path.relpath(path, root) if root else os.path.basename(path)
