"""``python -m tests.benchmarks.cloud [--tinker PYTHON]``: what a log_path on gs:// costs, in about three minutes.

Two tables: the time of ``log_metrics`` on gs:// beside a local folder, with a quick, a slow and a dead store; and the bill of
one run beside tinker-cookbook's ``FsspecStorage`` on the same server, for which PYTHON is an interpreter that has it
(``pip install --no-deps tinker-cookbook && pip install gcsfs``).
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from runmirror.storage import push_spool, spools
from tests.servers.gcs import BUCKET, GcsServer, gcs_server

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured: rounds and rows of the times, rows of the bill and of the kill."""

    rounds: int = 5
    timed: int = 3000
    billed: int = 2000
    killed: int = 250


def start(
    python: str,
    kind: str,
    where: str,
    options: dict[str, Any],
    rows: int,
    pause: float,
    every: int,
    out: Path,
    home: Path | None = None,
) -> subprocess.Popen[bytes]:
    """One writer, its stdout in ``out``."""
    command = [python, str(ROOT / "tests/benchmarks/cloud_writer.py"), kind, where, json.dumps(options)]
    environment = os.environ | ({"RUNMIRROR_HOME": str(home)} if home is not None else {})
    with out.open("wb") as file:
        return subprocess.Popen([*command, str(rows), str(pause), str(every)], stdout=file, cwd=ROOT, env=environment)


def times_of(where: str, options: dict[str, Any], rows: int, folder: Path) -> list[float]:
    """Microseconds of each ``log_metrics``, one per 2 ms."""
    out = folder / secrets.token_hex(4)
    process = start(sys.executable, "run", where, options, rows, 0.002, 0, out, folder / f"home-{out.name}")
    deadline = time.monotonic() + 300
    while out.read_bytes().count(b"\n") < 2 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    process.kill()  # a dead store would be waited for
    process.wait()
    return [value / 1000 for value in json.loads(out.read_bytes().split(b"\n")[1])]


def log_metrics(sizes: Sizes, server: GcsServer, folder: Path) -> Iterator[str]:
    """Lines of the first table. Uploads as often as by default: a second after the first row, then every ten."""
    options = server.options
    cases = [("local folder", 0.0), ("gs://, at once", 0.0), ("gs://, 300 ms", 0.3), ("gs://, never answers", 3600.0)]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name, _ in cases}
    for number in range(sizes.rounds):
        for name, latency in cases:
            mark = f"{number}-{secrets.token_hex(3)}"
            where = f"gs://{BUCKET}/times/{mark}" if name != "local folder" else str(folder / mark)
            server.faults.latency = latency if latency < 60 else 0.0
            if latency > 60:  # from its first row on
                server.faults.next["insert"] = [""] * 6 + ["silence"] * 1000
            times = times_of(where, options if "gs://" in name else {}, sizes.timed, folder)
            server.faults.next.clear()
            cuts = quantiles(times, n=100)
            found[name].append((cuts[49], cuts[98]))
    base = found["local folder"]
    yield "| `log_metrics` of 50 scalars | p50 us | p99 us | of local, p50 | of local, p99 |\n|---|---|---|---|---|"
    for name, values in found.items():
        ratios = [median(value[n] / local[n] for value, local in zip(values, base, strict=True)) for n in (0, 1)]
        p50, p99 = (median(value[n] for value in values) for n in (0, 1))
        yield f"| {name} | {p50:.1f} | {p99:.1f} | {ratios[0]:.2f} | {ratios[1]:.2f} |"


def bill(sizes: Sizes, server: GcsServer, folder: Path, tinker: str | None) -> Iterator[str]:
    """Lines of the second table."""
    server.faults.latency = 0.0
    yield (
        f"| {sizes.billed} rows of 4 KB, upload every 20 | up, x size | down, x size | class A | class B | "
        f"rows lost at SIGKILL (of {sizes.killed}) |\n|---|---|---|---|---|---|"
    )
    for name, python, kind in (("runmirror", sys.executable, "storage"), ("tinker-cookbook", tinker, "tinker")):
        if python is None:
            yield f"| {name} | not measured: --tinker is not given | | | | |"
            continue
        server.reset_counters()
        out = folder / secrets.token_hex(4)
        options = {**server.options, **({"upload_interval": 3600} if kind == "storage" else {})}
        start(python, kind, f"gs://{BUCKET}/bill/{kind}", options, sizes.billed, 0.0, 20, out).wait(600)
        size = len(server.contents(f"{BUCKET}/bill/{kind}/metrics.jsonl") or b"") or 1
        up, down = server.bytes_up / size, server.bytes_down / size
        lost = killed(sizes, server, folder, python, kind, options)
        yield f"| {name} | {up:.2f} | {down:.2f} | {server.class_a} | {server.class_b} | {lost} |"


def killed(sizes: Sizes, server: GcsServer, folder: Path, python: str, kind: str, options: dict[str, Any]) -> str:
    """Rows whose call returned and that are in no object: right after a SIGKILL, and after what recovers them."""
    before = server.calls.copy()
    out = folder / secrets.token_hex(4)
    where = f"gs://{BUCKET}/killed/{kind}"
    process = start(python, kind, where, options, 1_000_000, 0.005, 20, out)
    while out.stat().st_size < sizes.killed and process.poll() is None:
        time.sleep(0.002)
    process.kill()
    process.wait()
    returned = out.read_bytes().count(b".")

    def missing() -> int:
        return max(0, returned - (server.contents(f"{BUCKET}/killed/{kind}/metrics.jsonl") or b"").count(b"\n"))

    lost = missing()
    for left in spools():
        if left.url == where:
            push_spool(left, server.options)
    server.calls = before
    return f"{lost} until `push`, then {missing()}" if kind == "storage" else f"{missing()}, for good"


def main() -> None:
    """Measure, and print both tables."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.cloud", description=__doc__)
    parser.add_argument("--tinker", help="an interpreter with tinker-cookbook and gcsfs")
    parser.add_argument("what", nargs="*", default=["times", "bill"], help="times, bill")
    for name, value in (("rounds", 5), ("timed", 3000), ("billed", 2000), ("killed", 250)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = vars(parser.parse_args())
    tinker, what = given.pop("tinker"), given.pop("what")
    sizes = Sizes(**given)
    with tempfile.TemporaryDirectory(prefix="runmirror-benchmark-") as folder, gcs_server() as server:
        os.environ["RUNMIRROR_HOME"] = str(Path(folder) / "home")
        if "times" in what:
            for line in log_metrics(sizes, server, Path(folder)):
                print(line, flush=True)
            print()
        if "bill" in what:
            for line in bill(sizes, server, Path(folder), tinker):
                print(line, flush=True)


if __name__ == "__main__":
    main()
