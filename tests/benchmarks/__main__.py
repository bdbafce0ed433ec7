"""``python -m tests.benchmarks``: one markdown table, in about four minutes on two cores."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path

from tests.benchmarks.measure import BY_DEFAULT, MEASUREMENTS, Sizes


def main() -> None:
    """Measure, and print the machine and the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("what", nargs="*", help=f"of {', '.join(MEASUREMENTS)}; {', '.join(BY_DEFAULT)} by default")
    for size in fields(Sizes):
        parser.add_argument(f"--{size.name.replace('_', '-')}", type=int, default=size.default)
    arguments = vars(parser.parse_args())
    chosen = arguments.pop("what") or list(BY_DEFAULT)
    if unknown := set(chosen) - set(MEASUREMENTS):
        parser.error(f"{', '.join(sorted(unknown))}: there is {', '.join(MEASUREMENTS)}")
    sizes = Sizes(**arguments)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    machine = f"{cores} cores, {platform.machine()}, {platform.system()}, Python {platform.python_version()}"
    print(f"{datetime.now(UTC):%Y-%m-%d}, {machine}, {sizes.rounds} rounds; the ratio says how many times better.\n")
    print("| measured | runmirror | beside | that takes | ratio |\n|---|---|---|---|---|")
    for name in chosen:
        with tempfile.TemporaryDirectory(prefix="runmirror-benchmark-") as folder:
            os.environ["RUNMIRROR_HOME"] = str(Path(folder) / "home")
            for line in MEASUREMENTS[name](sizes, Path(folder)):
                print(f"| {line.what} | {line.ours} | {line.peer} | {line.theirs} | {line.ratio} |")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
