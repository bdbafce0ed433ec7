"""Who writes a log_path, as its store has it: ``.runmirror/writer.json``."""

from __future__ import annotations

import json
import time
from typing import Any

from runmirror.exceptions import LogError
from runmirror.storage.remote import Remote

LEASE = ".runmirror/writer.json"
"""Made when a writer begins, replaced by the next one, removed when it ends in peace."""


class TakenError(LogError):
    """Another writer has the log_path now."""


def lease_of(remote: Remote) -> dict[str, Any]:
    """Who writes a log_path, as the store has it; {} when nobody says."""
    try:
        data = json.loads(remote.read(LEASE))
    except (FileNotFoundError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def whom(lease: dict[str, Any]) -> str:
    """The writer, for people."""
    if not lease:
        return "someone who removed it or finished it since"
    try:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(lease["since"]))
        return f"process {lease['pid']} on host {lease['host']}, which writes it since {since}"
    except (KeyError, TypeError, ValueError, OverflowError):
        return "another writer"
