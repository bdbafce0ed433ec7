"""What the name of a file of a log_path says: its content type, and its place in an upload."""

from __future__ import annotations

JOURNAL = ".runmirror/journal.jsonl"
ORDER = {"checkpoints.jsonl": 1, JOURNAL: 2}
"""Growing files that come after the others."""

_KINDS = {
    "html": "text/html; charset=utf-8",
    "json": "application/json",
    "jsonl": "application/x-ndjson",
    "diff": "text/plain; charset=utf-8",
    "txt": "text/plain; charset=utf-8",
}


def kind_of(path: str) -> str:
    """The content type of a file: what makes a browser show a report instead of saving it."""
    return _KINDS.get(path.rpartition(".")[2].lower(), "application/octet-stream")
