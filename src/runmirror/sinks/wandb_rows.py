"""What of a run goes to W&B, as plain data: rows, configuration, and points back from rows. Imports no wandb."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterable, Iterator
from typing import Any

from runmirror.log.masking import MASK, is_secret_key, mask_text
from runmirror.log.rows import Row
from runmirror.sinks.base import Point, Rejected, RunInfo

MAX_ROW = 1_000_000
"""Bytes of one row at most; W&B itself drops a row above ten times that, and then also every later summary."""
TEXT_ROOM = 200_000
"""Characters of all texts of a run in the summary."""
X_AXIS = "step"
_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def row_data(row: Row) -> tuple[dict[str, Any], list[Rejected]]:
    """A row as W&B gets it, and what it can't take: ``_timestamp`` in any case, numbers and the step when there are any."""
    data: dict[str, Any] = {"_timestamp": row.time}
    rejected: list[Rejected] = []
    points = row.scalars()
    if points:
        data[X_AXIS] = row.step
    room = MAX_ROW - 100
    for key, value in points.items():
        name = key if key.isascii() else key.encode("utf-8", "replace").decode()
        room -= 6 * len(name) + 32  # as JSON at most
        if name and name not in data:
            data[name] = value
        else:
            rejected.append(Rejected(row.ordinal, key, "W&B has no metric without a name, and each name once in a row"))
    if room < 0 and len(json.dumps(data)) > MAX_ROW:
        return {"_timestamp": row.time}, [Rejected(row.ordinal, None, f"the row is larger than {MAX_ROW:,} bytes")]
    return data, rejected


def config(given: dict[str, Any]) -> dict[str, Any]:
    """A configuration as strict JSON, nested as it is, secrets masked."""
    kept = {key: value for key, value in given.items() if key and key not in ("_wandb", "runmirror")}
    plain: dict[str, Any] = json.loads(json.dumps(_masked(kept), default=str).encode("utf-8", "replace"))
    return plain


def _masked(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: MASK if is_secret_key(str(key)) else _masked(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_masked(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # W&B would make it null
    return mask_text(value) if isinstance(value, str) else value


def times(run: RunInfo) -> dict[str, Any]:
    """What W&B has no field for: when the run really was, in Unix seconds, and where it is from."""
    about: dict[str, Any] = {"run_id": run.run_id, "source": run.source, "rewinds": run.policy, "start": run.start}
    about |= {"time_source": run.time_source, "mirrored": round(time.time(), 3)}
    if run.status != "running":
        about |= {"status": run.status, "end": run.end}
        if run.start is not None and run.end is not None:
            about["duration"] = run.end - run.start
    return {key: value for key, value in about.items() if value is not None}


def digest(value: Any) -> str:
    """16 hex characters that stand for plain data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def points(rows: Iterable[dict[str, Any]]) -> Iterator[Point]:
    """The points of rows as ``wandb.Api()`` gives them."""
    for row in rows:
        if X_AXIS not in row:
            continue
        step, when = int(row[X_AXIS]), float(row["_timestamp"])
        for key, value in row.items():
            number = _NONFINITE.get(value) if isinstance(value, str) else value
            if key != X_AXIS and key[:1] != "_" and isinstance(number, (int, float)):
                yield Point(key, step, when, number)
