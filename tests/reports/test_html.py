"""The page as text: what it has, what it never has."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import runmirror
from runmirror.reports.html import PIECE, render, shown
from runmirror.reports.tree import Tree
from tests.reports.groups import groups
from tests.reports.hostile import HOSTILE
from tests.reports.pages import put_everywhere

ALLOWED = {
    "html", "head", "meta", "title", "style", "body", "nav", "a", "h1", "h2", "h3", "h4", "h5", "h6", "p", "div", "details",
    "summary", "pre", "code", "table", "thead", "tbody", "tr", "th", "td", "img",
}  # fmt: skip


class Page(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def page(fill: Any, title: str = "T") -> str:
    tree = Tree(title, "x.html", lambda tree: None)
    with tree:
        fill(tree)
    return "".join(render(tree))


def check(text: str) -> Page:
    """Only tags and attributes of ours, nothing that loads or runs anything."""
    read = Page(text)
    for tag, attrs in read.tags:
        assert tag in ALLOWED
        assert set(attrs) <= {"class", "dir", "id", "open", "href", "src", "alt", "loading", "lang", "charset", "content",
                              "http-equiv", "name", "aria-label"}  # fmt: skip
        if tag == "a":
            assert re.fullmatch(r"#s\d+", attrs["href"] or "")
        if tag == "img":
            assert (attrs["src"] or "").startswith("data:image/png;base64,")
        assert re.fullmatch(r"[a-z0-9 ]*", attrs.get("class") or "")
    return read


@pytest.mark.parametrize("text", HOSTILE[:-1])
def test_hostile_texts_are_only_text(text: str) -> None:
    """In every place; no tag, attribute or class comes from them, and no invisible character that changes what is read."""
    read = check(page(lambda tree: put_everywhere(tree, text), title=text))
    assert not re.search("[\x00-\x08\x0b\x0e-\x1f\x7f\u202a-\u202e\u2066-\u2069]", read.text)


@given(st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_text_is_only_text(text: str) -> None:
    """Whatever it is."""
    check(page(lambda tree: put_everywhere(tree, text)))


def test_what_is_read_is_what_was_written() -> None:
    """Text comes through as it is, but for characters that nobody could see, which are named."""
    words = "a <b> & \"c\" 'd' &amp; &lt; é 漢字 \u05d0 \u200f\tx\nnext"
    read = Page(page(lambda tree: (tree.text(words), tree.conversation([{"role": "user", "content": words}]))))
    assert read.text.count(words) == 2
    assert shown("a\x00b\u202ec") == "a&#x2039;U+0000&#x203a;b&#x2039;U+202E&#x203a;c"


def test_the_policy_of_the_page() -> None:
    """Nothing may be loaded or run; the one style is named by its hash."""
    text = page(lambda tree: tree.text("x"))
    (style,) = re.findall(r"(?s)<style>(.*?)</style>", text)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = next(a["content"] for t, a in Page(text).tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    assert "style=" not in text
    assert "@import" not in style
    assert "url(" not in style


def test_an_image_that_is_none_costs_no_time() -> None:
    """400,000 spaces behind the start of one: as text, at once (pairs of them would take minutes)."""
    parts = [{"type": "image", "image": "data:image/png;base64," + " " * 400_000 + "!"}]
    assert "<img" not in page(lambda tree: tree.conversation([{"role": "user", "content": parts}]))


def test_images() -> None:
    """Raster data in the report is shown; anything else is named, and not loaded."""
    pixel = "data:image/png;base64,iVBORw0KGgo="
    given = [
        pixel,
        {"url": pixel},
        "https://example.com/x.png",
        "data:image/svg+xml;base64,AAAA",
        f'{pixel}"onload="x',
        7,
    ]
    parts = [{"type": "image", "image": one} for one in given]
    read = check(page(lambda tree: tree.conversation([{"role": "user", "content": parts}])))
    assert [attrs["src"] for tag, attrs in read.tags if tag == "img"] == [pixel, pixel]
    assert "image: https://example.com/x.png" in read.text


def test_long_texts_are_whole_and_in_pieces() -> None:
    """No piece is longer than the bound, none ends within a character reference, and together they are the text."""
    text = "a&<" * (PIECE // 2)
    found = page(lambda tree: (tree.text(text), tree.conversation([{"role": "user", "content": text}])))
    read = Page(found)
    assert read.text.replace(f"{len(text) - PIECE:,} more characters", "").count(text) == 2
    pieces = re.findall(r'<div class="[kt]" dir="auto">(.*?)</div>', found)
    assert len(pieces) > 4
    assert max(len(html.unescape(piece)) for piece in pieces) <= PIECE
    assert all(html.escape(html.unescape(piece)) == piece for piece in pieces)


def test_contents_and_folding(tmp_path: Path) -> None:
    """A link to each group, with its reward; the first is unfolded, the others are not. One section needs no contents."""
    with runmirror.start(tmp_path / "run", code=False) as run:
        run.log_rollouts(0, groups(3))
    read = check((tmp_path / "run/train_iteration_000000.html").read_text())
    assert [attrs["href"] for tag, attrs in read.tags if tag == "a"] == ["#s0", "#s1", "#s2", "#s3"]
    assert [attrs["id"] for tag, attrs in read.tags if "id" in attrs] == ["s0", "s1", "s2", "s3"]
    outer = ["open" in attrs for tag, attrs in read.tags if attrs.get("class") == "s2"]
    assert outer == [True, False, False, False]
    assert "Group 0 (guess): reward 0.875Group 1" in read.text
    assert "penalty" in read.text
    assert "<nav" not in page(lambda tree: tree.text("x"))


def test_numbers_that_are_none() -> None:
    """NaN and infinities are named in the page."""
    step = {"ob_len": 1, "ac_len": 1, "reward": None, "metrics": {"m": None}, "logs": {}}
    record = {"type": "trajectory", "steps": [step], "total_reward": None, "final_reward": 0.0}
    marks = {"/steps/0/reward": "nan", "/total_reward": "inf"}
    read = check(page(lambda tree: tree.data(record | {"_nonfinite": marks})))
    assert "nan" in read.text
    assert "total_reward inf" in read.text


@pytest.mark.parametrize(
    "data",
    [
        {"type": "conversation"},
        {"type": "conversation", "messages": [None, [], {}, {"content": {"a": 1}}, {"tool_calls": 3}]},
        {"type": "trajectory", "steps": 3, "trajectory_metrics": []},
        {"type": "trajectory", "steps": [1, {"metrics": 2, "logs": 3}]},
        {"type": "trajectory_details", "trajectories": 1, "turns": {"columns": None, "rows": [3, None, [[{}]]]}},
        {},
    ],
)
def test_data_of_any_shape(data: dict[str, Any]) -> None:
    """Nothing raises; what is not known is shown as JSON."""
    check(page(lambda tree: tree.data(data)))
