"""What the configuration of a resume has otherwise than the first one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def changed(before: Any, after: Mapping[str, Any]) -> dict[str, Any]:
    """What of ``after`` differs from ``before``, nested; a key that is gone is None."""
    found: dict[str, Any] = {}
    for key, value in after.items():
        old = before.get(key) if isinstance(before, dict) else None
        if isinstance(value, dict) and isinstance(old, dict):
            if inner := changed(old, value):
                found[key] = inner
        elif old != value or (isinstance(before, dict) and key not in before):
            found[key] = value
    gone = [key for key in before if key not in after and key not in ("_wandb", "runmirror")]
    return found | dict.fromkeys(gone)
