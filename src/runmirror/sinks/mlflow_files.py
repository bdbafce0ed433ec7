"""Files of a log as artifacts: under names that survive, without secrets, rollouts also as a table that MLflow shows (in the
shape of ``mlflow.log_table``, and the tag that lists it)."""

from __future__ import annotations

import json

from runmirror.log.layout import Kind, parse
from runmirror.log.masking import mask_json, mask_text
from runmirror.log.rows import decode, json_line
from runmirror.reports.reading import flat
from runmirror.reports.rollouts import restore
from runmirror.sinks.keys import ARTIFACT, encode

TAG = "mlflow.loggedArtifacts"
TAG_LENGTH = 5000
"""Characters of a tag that every server takes."""


def rollout_table(path: str, content: bytes) -> tuple[str, bytes] | None:
    """(name, bytes) of the table of a file of rollouts: a row per trajectory. None when there is none in it."""
    name = parse(path)
    records = [record for record in map(decode, content.split(b"\n")) if record is not None]
    if name is None or name.split is None or name.iteration is None or not records:
        return None
    rows = [flat(restore(record)) for record in records]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    table = {"columns": columns, "data": [[row.get(column) for column in columns] for row in rows]}
    return f"rollouts/{name.split.replace('/', '_')}_{name.iteration:06d}.json", json_line(table)


def listed(tag: str | None, name: str) -> str | None:
    """The tag with one more table in it; None when it is there, or when there is no room for it."""
    try:
        known = json.loads(tag) if tag else []
    except ValueError:
        return None
    entry = {"path": name, "type": "table"}
    if not isinstance(known, list) or entry in known:
        return None
    text = json.dumps([*known, entry])
    return text if len(text) <= TAG_LENGTH else None


def artifact_name(path: str) -> str:
    """The name of a file of the log among a run's artifacts: MLflow shows ``code.diff.txt``, not ``code.diff``."""
    return encode(f"{path}.txt" if path.endswith((".diff", ".patch")) else path, ARTIFACT)


def masked(kind: Kind, content: bytes) -> bytes:
    """A file without the secrets that other tools leave in it; rollouts and reports stay as they are."""
    if kind not in ("config", "code", "checkpoints"):
        return content
    text = content.decode("utf-8", "surrogateescape")
    return (mask_json(text) if kind == "config" else mask_text(text)).encode("utf-8", "surrogateescape")
