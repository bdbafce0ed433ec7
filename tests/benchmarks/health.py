"""The health of many runs, beside merely reading them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from statistics import median

from runmirror.catalogue import check_runs
from runmirror.find import find_runs, open_log
from runmirror.log.rows import START
from tests.catalogue.synthetic import FAMILIES, healthy

KEYS = 50


def check_health(rounds: int, runs: int, rows: int, folder: Path) -> Iterator[tuple[float, float]]:
    """(seconds to check, seconds to read) of ``runs`` healthy runs of 50 keys, for each round."""
    for number in range(runs):
        random = Random(number)
        made = healthy(random, FAMILIES[number % len(FAMILIES)], rows)
        for row in made:
            row |= {f"mine/{n}": random.random() for n in range(KEYS - len(row))}
        path = folder / f"run-{number:03}" / "metrics.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in made))
    for _ in range(rounds):
        began = time.perf_counter()
        found = check_runs([folder])
        checked = time.perf_counter()
        if not all(run.ok for run in found):
            raise RuntimeError(f"healthy runs have findings: {[str(one) for run in found for one in run.findings][:5]}")
        for one in find_runs([folder]):
            for _row in open_log(one).rows(START):
                pass
        yield checked - began, time.perf_counter() - checked


def line(rounds: int, runs: int, rows: int, folder: Path) -> tuple[str, str, str, str, str]:
    """The cells of its line in the table."""
    times = list(check_health(rounds, runs, rows, folder))
    ours, theirs = median(one for one, _ in times), median(other for _, other in times)
    what = f"`runmirror health` of {runs:,} runs x {rows:,} rows x {KEYS} keys"
    return what, f"{ours:.2f} s", "reading them", f"{theirs:.2f} s", f"{median(b / a for a, b in times):.2g}x"
