"""What a run costs among many. Started by name only."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from runmirror.find import find_runs
from runmirror.importer import import_runs
from runmirror.lane import signature
from tests.benchmarks import measure

if TYPE_CHECKING:
    from tests.benchmarks.measure import Line, Sizes


def cost_per_run(sizes: Sizes, folder: Path) -> Iterator[Line]:
    """Milliseconds per run at 10, 100, ... runs, each beside a tenth of them."""
    before: dict[str, float] = {}
    runs = 10
    while runs <= sizes.scale_runs:
        place = folder / str(runs)
        os.environ["RUNMIRROR_HOME"] = str(place / "home")
        logs = measure._make_logs(place / "logs", runs, sizes.scale_rows, timed=True)
        memory = _peak()
        found = {
            "import to TensorBoard": measure._timed(lambda logs=logs, place=place: _import(logs, place)),  # type: ignore[misc]
            "import again, nothing to do": measure._timed(lambda logs=logs, place=place: _import(logs, place)),  # type: ignore[misc]
            "a look of `mirror`": measure._timed(lambda logs=logs: [signature(o) for o in find_runs([logs])]),  # type: ignore[misc]
        }
        for what, seconds in found.items():
            cost = seconds / runs * 1000
            peer = f"{cost_before:.3g} ms per run" if (cost_before := before.get(what)) else "-"
            ratio = f"{cost_before / cost:.2f}x" if cost_before else "-"
            label = f"{what}, {runs:,} runs x {sizes.scale_rows} rows"
            yield measure.Line(label, f"{cost:.3g} ms per run", "a tenth of them", peer, ratio)
            before[what] = cost
        label = f"peak memory grown by importing {runs:,} runs twice"
        yield measure.Line(label, f"{(_peak() - memory) / 1024:.0f} MB", "-", "-", "-")
        shutil.rmtree(place)
        runs *= 10


def _import(logs: Path, place: Path) -> None:
    assert import_runs([logs], "tensorboard", {"logdir": str(place / "tb")}).ok


def _peak() -> int:
    """KB of memory this process has used at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
