"""A run's MLflow description: where the run comes from, the user's notes, and what its metrics mean.

A description that a person has changed stays as it is, told by a tag with the hash of what was written last. It is Markdown:
what stands in it of a key is escaped, so that no key makes a link, an image or markup.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping

from runmirror.catalogue.entries import Catalogue
from runmirror.catalogue.live import usable
from runmirror.catalogue.models import Description

NOTE, MARK = "mlflow.note.content", "runmirror.note"
OURS = "Mirrored by runmirror from a "
MOST, LONGEST = 20, 6000
"""Metrics that are told, and characters, at most (MLflow cuts at 8,000); main rewards come first."""
_HEAD = "| metric | unit | better | meaning |"
_BETTER = {"up": "higher", "down": "lower", "one": "near 1", "zero": "near 0", "steady": "steady", "": ""}


def first_note(said: str, notes: str | None) -> dict[str, str]:
    """The tags of a new run's description: ``said`` of where it comes from, and the user's notes."""
    note = f"{said}\n\n{notes[:LONGEST]}" if notes else said
    return {NOTE: note, MARK: _hash(note)}


def with_metrics(tags: Mapping[str, str], keys: Iterable[str]) -> dict[str, str]:
    """The tags that bring a run's description up to date: none when it is, or when it is not ours any more."""
    note = tags.get(NOTE, "")
    ours = _hash(note) == tags[MARK] if MARK in tags else "\n\n" not in note
    if not ours or not note.startswith(OURS):
        return {}
    first = note.partition(f"\n\n{_HEAD}")[0]
    table = _table(keys, usable(), LONGEST + 500 - len(first))
    new = f"{first}\n\n{table}" if table else first
    return {} if new == note else {NOTE: new, MARK: _hash(new)}


def _table(keys: Iterable[str], catalogue: Catalogue, longest: int) -> str:
    known = [one for one in map(catalogue.describe, sorted(keys)) if one is not None and not one.evaluation]
    known = sorted((one for one in known if one.metric.checks or one.metric.main), key=_rank)[:MOST]
    rows = [f"| `{_cell(one.key)}` | {one.unit} | {_BETTER[one.better]} | {_text(one.meaning)} |" for one in known]
    lines = [_HEAD, "| --- | --- | --- | --- |"]
    for row in rows:
        if sum(map(len, lines)) + len(row) < min(LONGEST, longest):
            lines.append(row)
    return "\n".join(lines) if len(lines) > 2 else ""


def _rank(one: Description) -> tuple[int, str]:
    return (one.metric.main if one.metric.main is not None else 1000), one.key


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\r", " ").replace("\n", " ").replace("`", "'")


def _text(text: str) -> str:
    """Text that says what it says in Markdown too: a meaning repeats parts of the key."""
    text = re.sub(r"([\\*_\[\]!~])", r"\\\1", text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _cell(text)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]
