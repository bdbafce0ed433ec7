"""When the rows of a log without timestamps were written, as well as the log tells. Never "now".

In order: the rows around it that carry their time; a rollout report's ``started_at`` plus the row's own duration
(tinker-cookbook's logtree JSON, a local time without zone, read in the zone given); durations counted on from there, and
back before it; without any of these, the modification time of the log for its last row and durations back from it. Times
never run backwards.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, tzinfo
from typing import Any, Literal, get_args

from runmirror.log.layout import parse
from runmirror.storage import Storage

TimeSource = Literal["row", "arrival", "inferred", "logtree", "mtime"]
TIME_SOURCES: tuple[TimeSource, ...] = get_args(TimeSource)
"""Where row times come from, best first: the row, when it was seen arriving, an earlier reading of the log, its reports,
its modification time."""
LATEST = 1e11
"""Unix seconds from which on a time is none."""
DURATION_KEYS = ("time/total", "step_time", "timing_s/step")
MAX_REPORTS = 400
_STARTED_AT = re.compile(rb'"started_at"\s*:\s*"([^"]+)"')


def row_time(data: dict[str, Any]) -> float | None:
    """The time a row carries itself (``_timestamp``), if it is a plausible one."""
    value = data.get("_timestamp")
    if (type(value) is float or type(value) is int) and 0 < value < LATEST:
        return float(value)
    return None


def duration(data: dict[str, Any]) -> float | None:
    """How long the iteration of a row took, in seconds, if it says so."""
    for key in DURATION_KEYS:
        value = data.get(key)
        if (type(value) is float or type(value) is int) and 0 <= value < 1e9:
            return float(value)
    return None


def report_starts(storage: Storage, zone: tzinfo) -> dict[int, float]:
    """iteration -> Unix seconds at which its training report was started, from at most MAX_REPORTS reports."""
    names = storage.list_dir("")
    for folder in [name for name in names if name.startswith("iteration_")]:
        names += [f"{folder}/train_logtree.json"]
    reports = [name for name in map(parse, names) if name and name.kind == "logtree" and name.split == "train"]
    reports = reports[:: len(reports) // MAX_REPORTS + 1]
    starts: dict[int, float] = {}
    for report in reports:
        try:
            found = _STARTED_AT.search(storage.read_range(report.path, 0, 4096))
            if found and report.iteration is not None:
                when = datetime.fromisoformat(found[1].decode())
                seconds = (when if when.tzinfo else when.replace(tzinfo=zone)).timestamp()
                if 0 < seconds < LATEST:
                    starts[report.iteration] = seconds
        except (OSError, ValueError, OverflowError):
            continue
    return starts


def infer_times(
    rows: Sequence[tuple[int, float | None, float | None]], starts: dict[int, float], modified: float
) -> tuple[list[float], TimeSource]:
    """A time for each row.

    Args:
        rows: (step, duration in seconds or None, its own time or None) of every row, in order.
        starts: step -> time at which that iteration began.
        modified: modification time of the log.
    """
    if not rows:
        return [], "mtime"
    times: list[float | None] = [own for _, _, own in rows]
    for step, number in {row[0]: number for number, row in enumerate(rows)}.items():  # the last row of each step
        if step in starts and times[number] is None:
            times[number] = starts[step] + (rows[number][1] or 0.0)
    source: TimeSource = "logtree"
    known = [number for number, time in enumerate(times) if time is not None]
    if not known:
        source, known, times[-1] = "mtime", [len(rows) - 1], modified
    for number in range(known[0] - 1, -1, -1):
        times[number] = _sum(times[number + 1], -(rows[number + 1][1] or 0.0))
    latest = times[0] or modified
    result: list[float] = []
    for number, time in enumerate(times):
        latest = max(latest, latest + (rows[number][1] or 0.0) if time is None else time)
        result.append(latest)
    return result, source


def _sum(time: float | None, seconds: float) -> float:
    return (time or 0.0) + seconds
