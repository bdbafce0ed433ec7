"""Content types of the files of a log_path: what makes a browser show a report instead of saving it."""

from __future__ import annotations

_KINDS = {
    "html": "text/html; charset=utf-8",
    "json": "application/json",
    "jsonl": "application/x-ndjson",
    "diff": "text/plain; charset=utf-8",
    "txt": "text/plain; charset=utf-8",
}


def kind_of(path: str) -> str:
    """The content type of a file, by its name."""
    return _KINDS.get(path.rpartition(".")[2].lower(), "application/octet-stream")
