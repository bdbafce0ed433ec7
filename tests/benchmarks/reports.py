"""Rollouts of one iteration: what they cost the training thread, and how large the two forms of a report are."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import runmirror
from tests.benchmarks import measure
from tests.reports.groups import groups

if TYPE_CHECKING:
    from tests.benchmarks.measure import Line, Sizes

TURNS = 8
ANSWER = "I compare what I know so far with the hint, and I guess {turn}. " * 4


def measure_reports(sizes: Sizes, folder: Path) -> Iterator[Line]:
    """``log_rollouts`` of 4 groups of 4, beside waiting for the files; JSON beside HTML, and beside indented JSON."""
    given = groups(4, 4, TURNS, text=ANSWER)
    calls: list[list[float]] = []
    whole: list[list[float]] = []
    for number in range(sizes.rounds):
        with runmirror.start(folder / f"reports-{number}", code=False) as run:
            calls.append([])
            whole.append([])
            for iteration in range(sizes.reports):
                with run.iteration(iteration):
                    began = time.perf_counter()
                    run.log_rollouts(iteration, given)
                    calls[-1].append((time.perf_counter() - began) * 1e3)
                    run.log_checkpoint("done")  # returns when the files are there
                    whole[-1].append((time.perf_counter() - began) * 1e3)
    both = [(measure._percentile(times, 50), measure._percentile(times, 99)) for times in (calls, whole)]
    (ours, ours_late), (all_of_it, all_late) = both
    yield measure.Line(
        f"`log_rollouts` of 16 trajectories x {TURNS} turns, training thread: p50 / p99",
        measure._two(ours, ours_late, "ms"),
        "until all three files are written",
        measure._two(all_of_it, all_late, "ms"),
        measure._times(all_of_it / ours),
    )
    page = (folder / "reports-0/train_iteration_000000.html").stat().st_size
    tree = (folder / "reports-0/train_iteration_000000_logtree.json").read_bytes()
    indented = len(json.dumps(json.loads(tree), indent=2))
    yield measure.Line(
        "bytes of the report's JSON per byte of its HTML",
        f"{len(tree) / page:.2f}",
        "the same JSON with indent=2",
        f"{indented / page:.2f}",
        measure._times(indented / len(tree)),
    )
