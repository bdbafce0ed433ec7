"""``runmirror mirror`` over a folder of runs that are all being written. Started by name only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING

from tests.benchmarks import measure
from tests.benchmarks.writers import make_rows

if TYPE_CHECKING:
    from tests.benchmarks.measure import Line, Sizes


def follow(sizes: Sizes, folder: Path) -> Iterator[Line]:
    """Seconds until a row is in TensorBoard, and what the process needs for it. Linux only."""
    logs, tb = folder / "logs", folder / "tb"
    runs = [logs / f"run-{number:04d}" for number in range(sizes.follow_runs)]
    rows = make_rows(sizes.follow_rows)
    for run in runs:
        run.mkdir(parents=True)
        _append(run, 0, rows[0])
    command = [sys.executable, "-m", "runmirror", "mirror", str(logs), "--to", "tensorboard", "--logdir", str(tb)]
    with open(folder / "output", "wb") as output:
        mirror = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        began = time.monotonic()
        while len(list(tb.glob("*/events.*"))) < len(runs):
            assert mirror.poll() is None, (folder / "output").read_text()[-2000:]
            time.sleep(0.2)
        yield _line(sizes, "until the first row of all is there", f"{time.monotonic() - began:.3g} s")
        events = {run: next((tb / run.name).glob("events.*")) for run in runs}
        pause = sizes.follow_every / len(runs)
        due = time.monotonic() + pause
        written: dict[Path, float] = {}
        waited: list[float] = []
        used = _cpu(mirror.pid), time.monotonic()
        memory, files = _memory(mirror.pid), 0
        for step, row in enumerate(rows[1:], 1):
            for run in runs:
                if run in written:
                    waited.append(_waited(events[run], written[run], sizes.follow_every))
                written[run] = _append(run, step, row)
                files = max(files, len(os.listdir(f"/proc/{mirror.pid}/fd"))) if run == runs[0] else files
                due += pause
                time.sleep(max(0.0, due - time.monotonic()))
        share = (_cpu(mirror.pid) - used[0]) / (time.monotonic() - used[1])
        grown = _memory(mirror.pid) - memory
        waited += [_waited(events[run], written[run], sizes.follow_every) for run in runs[: len(runs) // 2]]
        cuts = quantiles(waited, n=100)
        yield _line(sizes, "until a row is there: p50 / p99", f"{cuts[49]:.2g} / {cuts[98]:.2g} s")
        yield _line(sizes, "of a core, open files, memory (grown by)",
                    f"{share:.0%}, {files}, {(memory + grown) / 1024:.0f} MB ({grown / 1024:.0f} MB)")  # fmt: skip
    finally:
        mirror.terminate()
        mirror.wait(60)


def _line(sizes: Sizes, what: str, told: str) -> Line:
    label = f"`mirror` of {sizes.follow_runs:,} live runs to TensorBoard, a row each per {sizes.follow_every} s"
    return measure.Line(f"{label}: {what}", told, "-", "-")


def _append(run: Path, step: int, row: dict[str, float]) -> float:
    """When the row was there, in Unix seconds."""
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "_timestamp": time.time(), **row}) + "\n")
    return time.time()


def _waited(events: Path, written: float, most: float) -> float:
    """Seconds from then to the last change of the event file; ``most`` when it did not change."""
    waited = events.stat().st_mtime - written
    return waited if waited >= 0 else most


def _cpu(pid: int) -> float:
    """Seconds of processor time."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory(pid: int) -> int:
    """KB."""
    told = Path(f"/proc/{pid}/status").read_text()
    return int(told.partition("VmRSS:")[2].split()[0])
