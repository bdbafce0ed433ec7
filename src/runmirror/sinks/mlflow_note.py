"""What a run's metrics mean, in its MLflow description: Markdown behind the sentence that says where the run comes from.

A description that a person has changed stays as it is, told by a tag with the hash of what was written last.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from runmirror.catalogue.entries import Catalogue
from runmirror.catalogue.live import usable
from runmirror.catalogue.models import Description

NOTE, MARK = "mlflow.note.content", "runmirror.note"
OURS = "Mirrored by runmirror from a "
MOST, LONGEST = 20, 6000
"""Metrics that are told, and characters, at most (MLflow cuts at 8,000); main rewards come first."""
_BETTER = {"up": "higher", "down": "lower", "one": "near 1", "zero": "near 0", "steady": "steady", "": ""}


def with_metrics(tags: Mapping[str, str], keys: Iterable[str]) -> dict[str, str]:
    """The tags that bring a run's description up to date: none when it is, or when it is not ours any more."""
    note = tags.get(NOTE, "")
    first, _, more = note.partition("\n\n")
    ours = _hash(note) == tags[MARK] if MARK in tags else not more
    if not ours or not first.startswith(OURS):
        return {}
    table = _table(keys, usable())
    new = f"{first}\n\n{table}" if table else first
    return {} if new == note else {NOTE: new, MARK: _hash(new)}


def _table(keys: Iterable[str], catalogue: Catalogue) -> str:
    known = [one for one in map(catalogue.describe, sorted(keys)) if one is not None and not one.evaluation]
    known = sorted((one for one in known if one.metric.checks or one.metric.main), key=_rank)[:MOST]
    rows = [f"| `{_cell(one.key)}` | {one.unit} | {_BETTER[one.better]} | {_cell(one.meaning)} |" for one in known]
    lines = ["| metric | unit | better | meaning |", "| --- | --- | --- | --- |"]
    for row in rows:
        if sum(map(len, lines)) + len(row) < LONGEST:
            lines.append(row)
    return "\n".join(lines) if rows else ""


def _rank(one: Description) -> tuple[int, str]:
    return (one.metric.main if one.metric.main is not None else 1000), one.key


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\r", " ").replace("\n", " ").replace("`", "'")


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]
