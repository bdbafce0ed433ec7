"""Import into W&B, beside the loop that people write by hand, on one loopback server. Started by name only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from runmirror.importer import import_runs
from runmirror.sinks import wandb_process
from tests.benchmarks import measure
from tests.benchmarks.writers import KEYS

if TYPE_CHECKING:
    from tests.benchmarks.measure import Line, Sizes

SERVE = """
import time
from tests.servers.wandb import wandb_server
with wandb_server() as server:
    print(server.url, flush=True)
    input()
"""
LOOP = "a loop of wandb.init, run.log, finish"


def import_wandb(sizes: Sizes, folder: Path) -> Iterator[Line]:
    """All runs with one worker and with two, and again; the plain loop is one process."""
    logs = measure._make_logs(folder / "logs", sizes.wandb_runs, sizes.wandb_rows, timed=True)
    few = measure._make_logs(folder / "few", 2, 20, timed=True)
    for path in folder.glob("*/*/metrics.jsonl"):
        os.utime(path, (1.7e9, 1.7e9))  # runs that ended long ago
    command = [sys.executable, "-c", SERVE]
    served = subprocess.Popen(command, cwd=measure.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert served.stdout is not None
    os.environ |= {
        "WANDB_BASE_URL": served.stdout.readline().strip(),
        "WANDB_API_KEY": "k" * 40,
        "WANDB_SILENT": "true",
    }
    os.environ |= {"WANDB_ERROR_REPORTING": "false", "WANDB_DIR": str(folder)}
    try:
        _import(few, "warm")
        rows = sizes.wandb_runs * sizes.wandb_rows
        ways: dict[str, Callable[[str], None]] = {"1 worker": partial(_import, logs), "2 workers": partial(_two, logs)}
        ways |= {LOOP: partial(_by_hand, logs)}
        speeds: dict[str, list[float]] = {name: [] for name in ways}
        again: list[float] = []
        for number in range(sizes.rounds):
            for place, (name, way) in enumerate(ways.items()):
                speeds[name].append(rows / measure._timed(partial(way, f"p{number}-{place}")))
            again.append(measure._timed(partial(_import, logs, f"p{number}-0")) / sizes.wandb_runs)
        theirs = speeds.pop(LOOP)
        for name, ours in speeds.items():
            what = f"import of {sizes.wandb_runs} runs x {sizes.wandb_rows:,} rows x {len(KEYS)} keys to W&B, {name}"
            ratio = median(a / b for a, b in zip(ours, theirs, strict=True))
            told = f"{measure._big(median(theirs))} rows/s"
            yield measure.Line(what, f"{measure._big(median(ours))} rows/s", LOOP, told, f"{ratio:.2f}x")
        yield measure.Line("import again to W&B, nothing to do", f"{median(again) * 1000:.3g} ms per run", "-", "-")
    finally:
        wandb_process.end_idle()
        served.communicate("\n")


def _import(logs: Path, project: str, workers: int = 1) -> None:
    assert import_runs([logs], "wandb", {"project": project}, workers=workers).ok


def _two(logs: Path, project: str) -> None:
    _import(logs, project, workers=2)


def _by_hand(logs: Path, project: str) -> None:
    """As in wandb's own guide, with the steps and times kept."""
    import wandb

    for log in sorted(logs.iterdir()):
        run = wandb.init(project=project, name=log.name)
        with open(log / "metrics.jsonl") as file:
            for line in file:
                row = json.loads(line)
                run.log(row, step=row["step"])
        run.finish()
