"""The report as a tree: its JSON, its scopes in tasks and threads, and what it takes."""

from __future__ import annotations

import asyncio
import contextvars
import html
import json
import logging
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runmirror import reports
from runmirror.reports.reading import conversations
from runmirror.reports.tree import BLOCK, CURRENT, MAX_SCOPES, Tree

Node = dict[str, Any]


def load(tree: Tree) -> Node:
    """A closed tree, read back."""
    loaded: Node = json.loads(b"".join(tree.json()))
    return loaded


def children(tree: Tree) -> list[Any]:
    """What was logged: below the title and the time."""
    found: list[Any] = load(tree)["root"]["children"]
    return found[2:]


def node(tag: str, kind: str, *below: Any) -> Node:
    return {"tag": tag, "attrs": {"class": kind} if kind else {}, "children": list(below)}


def section(level: int, title: str, *below: Any) -> Node:
    heading = node(f"h{level}", f"lt-h{level}", title)
    return node("section", "lt-section", heading, node("div", "lt-section-body", *below))


def make(fill: Callable[[Tree], None]) -> Tree:
    tree = Tree("T", "train_iteration_000000.html", lambda tree: None)
    with tree:
        fill(tree)
    return tree


def test_the_top_of_the_tree() -> None:
    """title, started_at, path and root, which begins with the title and the time, escaped as HTML."""
    tree = Tree('a <b> & "c"', "x.html", lambda tree: None)
    tree.close()
    found = load(tree)
    assert list(found) == ["title", "started_at", "path", "root"]
    assert (found["title"], found["path"]) == ('a <b> & "c"', "x.html")
    assert found["started_at"] == tree.started_at.isoformat()
    assert tree.started_at.tzinfo is not None
    title = node("h1", "lt-title", "a &lt;b&gt; &amp; &quot;c&quot;")
    time = node("div", "lt-subtitle", f"Generated {tree.started_at:%Y-%m-%dT%H:%M:%S}")
    assert found["root"] == node("body", "lt-root", title, time)


def test_every_kind_of_node() -> None:
    """Each method makes the node that readers of logtrees know."""

    def fill(tree: Tree) -> None:
        tree.text("a <b>\n'c'")
        tree.header("plain")
        tree.header("of a level", 5)
        with tree.scope("Outer & more"):
            tree.header("inner")
            with tree.scope("Inner"):
                tree.text(1)
        with tree.folded("fold"):
            tree.text("x")
        with tree.div(class_="mine", data_id=3):
            tree.text("y")
        tree.details("long\ntext", "more")
        tree.code("x < 1", "python")

    assert children(make(fill)) == [
        node("p", "lt-p", "a &lt;b&gt;\n&#x27;c&#x27;"),
        node("h2", "lt-h2", "plain"),
        node("h5", "lt-h5", "of a level"),
        section(2, "Outer &amp; more", node("h3", "lt-h3", "inner"), section(3, "Inner", node("p", "lt-p", "1"))),
        node(
            "details", "lt-details", node("summary", "", "fold"), node("div", "lt-details-body", node("p", "lt-p", "x"))
        ),
        {"tag": "div", "attrs": {"class": "mine", "data-id": "3"}, "children": [node("p", "lt-p", "y")]},
        node("details", "lt-details", node("summary", "", "more"), node("pre", "lt-details-body", "long\ntext")),
        node("pre", "lt-code", node("code", "language-python", "x &lt; 1")),
    ]


def test_tables() -> None:
    """From a mapping, mappings, sequences, pandas and polars; a cell that a row has not is empty."""
    import pandas as pd
    import polars as pl

    def table(head: Sequence[str] | None, *rows: Sequence[str]) -> Node:
        body = node("tbody", "", *(node("tr", "", *(node("td", "", cell) for cell in row)) for row in rows))
        if head is None:
            return node("table", "lt-table", body)
        first = node("thead", "", node("tr", "", *(node("th", "", cell) for cell in head)))
        return node("table", "lt-table", first, body)

    def fill(tree: Tree) -> None:
        tree.table({"a": 1, "b": 0.5}, "the <caption>")
        tree.table([{"x": 1}, {"x": 2, "y": "<"}])
        tree.table([[1, 2], (3, None)])
        tree.table(pd.DataFrame({"p": [1]}))
        tree.table(pl.DataFrame({"p": [1]}))

    assert children(make(fill)) == [
        node("div", "lt-table-caption", "the &lt;caption&gt;"),
        table(["key", "value"], ["a", "1"], ["b", "0.5"]),
        table(["x", "y"], ["1", ""], ["2", "&lt;"]),
        table(None, ["1", "2"], ["3", "None"]),
        table(["p"], ["1"]),
        table(["p"], ["1"]),
    ]


def test_conversations_keep_everything() -> None:
    """Messages as they are, known or not, also objects; the node has no children."""

    class Message:
        def model_dump(self) -> dict[str, Any]:
            return {"role": "user", "content": "hi"}

    messages = [
        {
            "role": "assistant",
            "content": [{"type": "new kind", "x": [1]}, {"type": "text", "text": "<"}],
            "trainable": True,
        },
        {"role": "tool", "content": None, "mine": {"deep": [None, 1.5]}},
    ]
    tree = make(lambda tree: tree.conversation([*messages, Message()]))
    data = {"type": "conversation", "messages": [*messages, {"role": "user", "content": "hi"}]}
    assert children(tree) == [{"tag": "div", "attrs": {}, "children": [], "data": data}]


def test_what_is_logged_is_copied() -> None:
    """A message that is changed later is not changed in the report."""
    message = {"role": "user", "content": "before"}

    def fill(tree: Tree) -> None:
        tree.conversation([message])
        message["content"] = "after"

    assert children(make(fill))[0]["data"]["messages"][0]["content"] == "before"


def test_an_exception_makes_it_partial() -> None:
    """It goes on to the caller; the report says so, is marked, and its traceback names no folder of anybody."""
    tree = Tree("T", "x.html", lambda tree: None)

    def fail() -> None:
        with tree, tree.scope("S"):
            tree.text("before")
            raise ValueError("bad <x>")

    with pytest.raises(ValueError, match="bad <x>"):
        fail()
    root = load(tree)["root"]
    assert root["attrs"] == {"class": "lt-root", "data-partial": "true"}
    *_, scope, note, block = root["children"]
    assert scope == section(2, "S", node("p", "lt-p", "before"))
    assert note == node("p", "lt-p", "This report is partial: ValueError was raised")
    assert (block["tag"], block["attrs"]) == ("details", {"class": "lt-exc", "open": "open"})
    assert block["children"][0] == node("summary", "", "Exception: ValueError: bad &lt;x&gt;")
    text = html.unescape(block["children"][1]["children"][0])
    assert ", in fail" in text
    assert str(Path(__file__).parents[2]) not in text


def test_causes_are_shown_without_folders() -> None:
    """A chain of exceptions, and one that was logged only."""
    try:
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise RuntimeError("outer") from error
    except RuntimeError as error:
        caught = error
    (block,) = children(make(lambda tree: tree.exception(caught)))
    text = block["children"][1]["children"][0]
    assert "KeyError" in text
    assert "RuntimeError: outer" in text
    assert str(Path(__file__).parents[2]) not in text


class Nasty:
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_nothing_raises(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever is logged: what has no text is named by its class, what can't be used is told once."""
    loop: list[Any] = []
    loop.append(loop)

    def fill(tree: Tree) -> None:
        tree.text(Nasty())
        tree.text("\ud800 lone")
        tree.header("x", "high")  # type: ignore[arg-type]
        tree.table(7)
        tree.table(Nasty())
        tree.conversation(None)  # type: ignore[arg-type]
        tree.conversation([{"role": "user", "content": loop, "big": 2**80, "nasty": Nasty(), "nan": float("nan")}])
        tree.conversation([{1: b"bytes", "s": {2, 1}}])
        with tree.scope(Nasty()):
            tree.text("inside")

    with caplog.at_level(logging.WARNING, "runmirror"):
        found = children(make(fill))
    assert found[0] == node("p", "lt-p", "&lt;Nasty&gt;")
    assert found[1] == node("p", "lt-p", "\ufffd lone")
    message = found[2]["data"]["messages"][0]
    assert message == {"role": "user", "content": ["<cycle>"], "big": float(2**80), "nasty": "<Nasty>", "nan": None}
    assert found[3]["data"]["messages"] == [{"1": "<5 bytes>", "s": [1, 2]}]
    assert found[4] == section(2, "&lt;Nasty&gt;", node("p", "lt-p", "inside"))
    assert len(caplog.records) == 1
    assert "train_iteration_000000.html: something could not be put into the report" in caplog.text


def test_arrays_become_lists_or_are_described() -> None:
    """Small ones are written out, large ones named by shape."""
    import numpy as np

    tree = make(lambda tree: tree.conversation([{"a": np.arange(3), "b": np.zeros((2000, 2)), "c": np.float32(0.5)}]))
    (found,) = children(tree)
    assert found["data"]["messages"] == [{"a": [0, 1, 2], "b": "<ndarray of shape (2000, 2)>", "c": 0.5}]


def test_a_closed_tree_takes_no_more() -> None:
    """What comes late, such as from a task that was left behind, is ignored; closing again does nothing."""
    closed: list[Tree] = []
    tree = Tree("T", "x.html", closed.append)
    with tree:
        tree.text("in time")
    tree.text("late")
    tree.close()
    assert children(tree) == [node("p", "lt-p", "in time")]
    assert closed == [tree]


def test_too_deep_stays_in_the_last_scope() -> None:
    """200 scopes in one another: what is inside is there, and the JSON can be read."""

    def fill(tree: Tree, depth: int = 200) -> None:
        if depth == 0:
            tree.text("bottom")
        else:
            with tree.scope(depth):
                fill(tree, depth - 1)

    text = b"".join(make(fill).json()).decode()
    assert text.count('"section"') == MAX_SCOPES
    assert "bottom" in text


def test_blocks_are_bounded() -> None:
    """A million bytes a block or so, and one node at least."""

    def fill(tree: Tree) -> None:
        for _ in range(40):
            tree.text("x" * (BLOCK // 10))
        tree.text("y" * 2 * BLOCK)

    tree = make(fill)
    sizes = [len(part) for part in tree.root.parts if isinstance(part, bytearray)]
    assert len(sizes) >= 5
    assert sorted(sizes)[-2] <= BLOCK
    assert len(children(tree)) == 41


# -- scopes

Plan = list[Any]
"""A text, or (a title, a plan)."""

plans: st.SearchStrategy[Plan] = st.recursive(
    st.lists(st.text(max_size=12), max_size=3),
    lambda below: st.lists(st.text(max_size=12) | st.tuples(st.text(max_size=12), below), max_size=4),
    max_leaves=25,
)


def expect(plan: Plan, level: int = 2) -> list[Node]:
    found = []
    for one in plan:
        if isinstance(one, str):
            found.append(node("p", "lt-p", html.escape(one)))
        else:
            found.append(section(level, html.escape(one[0]), *expect(one[1], min(6, level + 1))))
    return found


def log(tree: Tree, plan: Plan) -> None:
    for one in plan:
        if isinstance(one, str):
            tree.text(one)
        else:
            with tree.scope(one[0]):
                log(tree, one[1])


@given(plans)
@settings(max_examples=150, deadline=None)
def test_random_trees_come_back(plan: Plan) -> None:
    """Whatever is logged, in whatever scopes, is what the JSON holds, in order."""
    assert children(make(lambda tree: log(tree, plan))) == expect(plan)


@given(st.lists(plans, min_size=2, max_size=5), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_tasks_never_mix_scopes(many: list[Plan], seed: int) -> None:
    """Tasks that interleave at every step, each in a scope of its own, by the functions of the module: each has its own."""
    dice = random.Random(seed)

    async def run(number: int, plan: Plan) -> None:
        with reports.scope(f"task {number}"):
            await steps(plan)

    async def steps(plan: Plan) -> None:
        for one in plan:
            for _ in range(dice.randrange(3)):
                await asyncio.sleep(0)
            if isinstance(one, str):
                reports.text(one)
            else:
                with reports.scope(one[0]):
                    await steps(one[1])

    async def everything() -> None:
        await asyncio.gather(*(run(number, plan) for number, plan in enumerate(many)))
        reports.text("end")

    tree = make(lambda tree: asyncio.run(everything()))
    expected = [section(2, f"task {number}", *expect(plan, 3)) for number, plan in enumerate(many)]
    assert children(tree) == [*expected, node("p", "lt-p", "end")]


def test_threads_have_scopes_of_their_own() -> None:
    """Threads that log to one tree at the same time: each scope holds its own, in order; none is below another thread's."""

    def work(tree: Tree, number: int, ready: threading.Barrier) -> None:
        with tree.scope(f"thread {number}"):
            ready.wait(10)
            for at in range(200):
                with tree.scope(f"{number}-{at}"):
                    tree.text(f"{number}:{at}")

    def fill(tree: Tree) -> None:
        ready = threading.Barrier(4)
        with tree.scope("main"), ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda number: work(tree, number, ready), range(4)))
            tree.text("main again")

    main, *rest = children(make(fill))
    assert main == section(2, "main", node("p", "lt-p", "main again"))
    assert sorted(rest, key=str) == [
        section(2, f"thread {n}", *(section(3, f"{n}-{at}", node("p", "lt-p", f"{n}:{at}")) for at in range(200)))
        for n in range(4)
    ]


def test_a_thread_with_a_copied_context_is_in_the_scope() -> None:
    """``asyncio.to_thread`` and ``copy_context().run``: the functions of the module land where they were called from. A bare
    thread is in no report."""

    def fill(tree: Tree) -> None:
        with tree.scope("outer"):
            asyncio.run(asyncio.to_thread(reports.text, "to_thread"))
            with ThreadPoolExecutor(1) as pool:
                pool.submit(contextvars.copy_context().run, reports.text, "copied").result()
                pool.submit(reports.text, "bare").result()

    expected = [node("p", "lt-p", "to_thread"), node("p", "lt-p", "copied")]
    assert children(make(fill)) == [section(2, "outer", *expected)]


def test_without_a_report_the_module_does_nothing() -> None:
    """Every function, at any time."""
    reports.text("x")
    reports.header("x")
    reports.code("x")
    reports.details("x")
    reports.table({"a": 1})
    reports.conversation([])
    reports.exception(ValueError())
    with reports.scope("x"), reports.folded("y"):
        reports.text("x")
    assert not reports.current().root.parts
    assert CURRENT.get() is None or CURRENT.get() is reports.current().root


def test_two_reports_at_once() -> None:
    """The functions of the module write to the inner one; a tree's own methods to that tree, at its top."""

    def fill(inner: Tree) -> None:
        reports.text("inner")
        with inner.scope("S"):
            outer.text("outer")

    with (outer := Tree("O", "o.html", lambda tree: None)):
        tree = make(fill)
        reports.text("outer again")
    assert children(tree) == [node("p", "lt-p", "inner"), section(2, "S")]
    assert children(outer) == [node("p", "lt-p", "outer"), node("p", "lt-p", "outer again")]


# -- tinker-cookbook's own


def replay(tree: Tree, nodes: list[Any]) -> None:
    """Log what a sample holds with our methods."""
    caption = ""
    for one in nodes:
        tag, kind, below = one["tag"], one["attrs"].get("class"), one["children"]
        text = html.unescape(below[0]) if below and isinstance(below[0], str) else ""
        if "data" in one:
            tree.conversation(one["data"]["messages"])
        elif tag == "section":
            with tree.scope(html.unescape(below[0]["children"][0])):
                replay(tree, below[1]["children"])
        elif kind == "lt-table-caption":
            caption = text
        elif tag == "table":
            rows = [[cell["children"][0] for cell in row["children"]] for row in below[1]["children"]]
            tree.table({html.unescape(key): html.unescape(value) for key, value in rows}, caption)
        else:
            assert (tag, kind) == ("p", "lt-p")
            tree.text(text)


def test_the_same_json_as_tinker_cookbook(samples: Path) -> None:
    """The content of every sample, logged with our methods: the same JSON but for the time and the path."""
    found = sorted(samples.glob("tinker_*/**/*_logtree.json"))
    assert len(found) >= 10
    for path in found:
        theirs = json.loads(path.read_bytes())
        tree = Tree(theirs["title"], theirs["path"], lambda tree: None)
        with tree:
            replay(tree, theirs["root"]["children"][2:])
        ours = load(tree)
        assert list(conversations(ours)) == list(conversations(theirs))
        for one in (ours, theirs):
            del one["started_at"], one["root"]["children"][1]
        assert ours == theirs
