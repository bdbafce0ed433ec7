"""The measurements. Each gives lines of the table; none asserts a time."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import runmirror
from runmirror.importer import import_runs
from runmirror.log.rows import START
from runmirror.log.runlog import RunLog
from runmirror.storage import LocalStorage
from tests.benchmarks.health import line as health_line
from tests.benchmarks.writers import KEYS, TRACKERS, WRITERS, make_rows, readable_rows, tensorboardx_writer

ROOT = Path(__file__).parents[2]
MISSING = "not installed"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    rounds: int = 3
    writes: int = 1000
    paced: int = 300
    kept: int = 250
    runs: int = 100
    run_rows: int = 1000
    read_rows: int = 100_000
    reports: int = 50
    mlflow_runs: int = 20
    mlflow_rows: int = 500
    mlflow_again: int = 1000
    scale_runs: int = 10_000
    scale_rows: int = 20
    wandb_runs: int = 20
    wandb_rows: int = 1000
    follow_runs: int = 1000
    follow_rows: int = 7
    follow_every: int = 10


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table: what was measured of runmirror and of a peer, and how many times better runmirror is."""

    what: str
    ours: str
    peer: str
    theirs: str
    ratio: str = ""


Times = dict[str, list[list[float]]]
"""name -> per round: the measured values"""


def installed(name: str) -> bool:
    """Whether the package that a peer needs, the first word of its name, is there."""
    return find_spec(re.split(r"\W", name)[0]) is not None


def write(sizes: Sizes, folder: Path) -> Iterator[Line]:
    """``log_metrics`` of 50 scalars: time on the training thread."""
    for what, count, pause in (("back to back", sizes.writes, 0.0), ("one per 5 ms", sizes.paced, 0.005)):
        rows = make_rows(count)
        times: Times = {name: [] for name in WRITERS | TRACKERS if installed(name)}
        for number in range(sizes.rounds):
            for name, found in times.items():
                found.append(_time_writer(name, folder / f"write-{pause}-{number}-{len(name)}", rows, pause))
        ours = times["runmirror"]
        label = f"`log_metrics` of {len(KEYS)} scalars, {what}: p50 / p99"
        shown = _two(_percentile(ours, 50), _percentile(ours, 99), "us")
        for name in list(WRITERS | TRACKERS)[1:]:
            if name not in times:
                yield Line(label, shown, name, MISSING)
                continue
            theirs = times[name]
            pairs = {p: zip(_each(theirs, p), _each(ours, p), strict=True) for p in (50, 99)}
            ratios = [median(a / b for a, b in pairs[p]) for p in (50, 99)]
            told = _two(_percentile(theirs, 50), _percentile(theirs, 99), "us")
            yield Line(label, shown, name, told, f"{_times(ratios[0])} / {_times(ratios[1])}")


def _time_writer(name: str, folder: Path, rows: list[dict[str, float]], pause: float) -> list[float]:
    """Microseconds of each call, the first 20 left out."""
    took: list[float] = []
    with (WRITERS | TRACKERS)[name](folder) as log:
        due = time.perf_counter()
        for step, row in enumerate(rows):
            start = time.perf_counter_ns()
            log(row, step)
            took.append((time.perf_counter_ns() - start) / 1000)
            due += pause
            if pause:
                time.sleep(max(0.0, due - time.perf_counter()))
    return took[min(20, len(took) // 2) :]


SINKS: dict[str, dict[str, object]] = {
    "a healthy one": {},
    "one that hangs": {"hang": 1.0, "calls": ["put"]},
    "one that is down": {"transient": 1.0},
    "one whose process crashes": {"crash": 1.0},
}


def live(sizes: Sizes, folder: Path) -> Iterator[Line]:
    """``log_metrics`` with ``report_to`` on, whatever the tracker does, beside no tracker; one row per 5 ms."""
    os.environ["RUNMIRROR_QUIET"] = "1"
    rows = make_rows(sizes.paced)
    without: list[list[float]] = []
    times: Times = {name: [] for name in SINKS}
    for number in range(sizes.rounds):
        without.append(_time_run(folder / f"live-{number}", rows, None))
        for place, (name, found) in enumerate(times.items()):
            options = {"folder": str(folder / f"dummy-{number}-{place}"), **SINKS[name]}
            found.append(_time_run(folder / f"live-{number}-{place}", rows, {"dummy": options}))
    told = _two(_percentile(without, 50), _percentile(without, 99), "us")
    for name, ours in times.items():
        ratios = [median(a / b for a, b in zip(_each(without, p), _each(ours, p), strict=True)) for p in (50, 99)]
        shown = _two(_percentile(ours, 50), _percentile(ours, 99), "us")
        label = f"`log_metrics`, one per 5 ms, mirrored live to {name}: p50 / p99"
        yield Line(label, shown, "the same, mirrored to none", told, f"{_times(ratios[0])} / {_times(ratios[1])}")


def _time_run(folder: Path, rows: list[dict[str, float]], report_to: object) -> list[float]:
    run = runmirror.start(folder, report_to=report_to or "none", code=False)
    until = time.perf_counter() + (1.0 if report_to else 0.0)  # the child's start is not what is measured
    while time.perf_counter() < until:
        time.sleep(0.05)
    took: list[float] = []
    for row in rows:
        start = time.perf_counter_ns()
        run.log_metrics(row)
        took.append((time.perf_counter_ns() - start) / 1000)
        time.sleep(0.005)
    run.finish(deadline=0.5)
    return took[min(20, len(took) // 2) :]


def kill(sizes: Sizes, folder: Path) -> Iterator[Line]:
    """Rows that can be read after SIGKILL, of those whose call had returned. All writers at once: they mostly sleep."""
    children = {}
    for number, name in enumerate(name for name in WRITERS if installed(name)):
        place = folder / f"kill-{number}"
        command = [sys.executable, "-m", "tests.benchmarks.writers", name, str(place), str(sizes.kept), "0.02"]
        children[name] = place, subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    kept: dict[str, str] = {}
    for name, (place, child) in children.items():
        assert child.stdout is not None
        returned = len(child.stdout.read(sizes.kept))
        child.kill()
        returned += len(child.stdout.read())
        child.wait()
        child.stdout.close()
        kept[name] = f"{readable_rows(place)} of {returned}"
    for name in list(WRITERS)[1:]:
        label = "rows kept after SIGKILL, logged 20 ms apart"
        yield Line(label, kept["runmirror"], name, kept.get(name, MISSING))


def import_(sizes: Sizes, folder: Path) -> Iterator[Line]:
    """Import to TensorBoard, for the first time and again, beside reading the JSON and writing with tensorboardX."""
    logs = _make_logs(folder / "logs", sizes.runs, sizes.run_rows, timed=True)
    few = _make_logs(folder / "untimed", min(sizes.runs, 10), sizes.run_rows, timed=False)
    peer = "json.loads, tensorboardX add_scalar (1 run)"
    first, untimed, again, theirs = [], [], [], []
    for number in range(sizes.rounds):
        place = folder / f"tb-{number}"
        os.environ["RUNMIRROR_HOME"] = str(place / "home")
        scalars = sizes.run_rows * len(KEYS)
        first.append(scalars * sizes.runs / _time_import(logs, place / "first"))
        again.append(_time_import(logs, place / "first") / sizes.runs)
        untimed.append(scalars * min(sizes.runs, 10) / _time_import(few, place / "untimed"))
        if installed("tensorboardX"):
            theirs.append(scalars / _timed(partial(_convert, logs / "run-000", place / "peer")))
        shutil.rmtree(place)
    rows = f"{sizes.run_rows:,} rows x {len(KEYS)} keys"
    for what, ours in ((f"import of {sizes.runs} runs x {rows} to TensorBoard", first),
                       (f"the same, {min(sizes.runs, 10)} runs whose rows carry no time", untimed)):  # fmt: skip
        shown = f"{_big(median(ours))} scalars/s"
        if not theirs:
            yield Line(what, shown, peer, MISSING)
            continue
        ratio = median(a / b for a, b in zip(ours, theirs, strict=True))
        yield Line(what, shown, peer, f"{_big(median(theirs))} scalars/s", _times(ratio))
    once = [scalars / speed for speed in first]
    ratio = median(a / b for a, b in zip(once, again, strict=True))
    told = f"{median(once) * 1000:.3g} ms per run"
    yield Line(
        "import again, nothing to do", f"{median(again) * 1000:.3g} ms per run", "its first import", told, _times(ratio)
    )


def _make_logs(folder: Path, runs: int, rows: int, timed: bool) -> Path:
    for number in range(runs):
        place = folder / f"run-{number:03d}"
        place.mkdir(parents=True)
        with open(place / "metrics.jsonl", "w") as file:
            for step, row in enumerate(make_rows(rows, number)):
                head = {"step": step, "_timestamp": 1.7e9 + step} if timed else {"step": step}
                file.write(json.dumps(head | row) + "\n")
    return folder


def _time_import(logs: Path, logdir: Path) -> float:
    return _timed(lambda: _import(logs, logdir))


def _import(logs: Path, logdir: Path) -> None:
    assert import_runs([logs], "tensorboard", {"logdir": str(logdir)}).ok


def _convert(log: Path, folder: Path) -> None:
    with tensorboardx_writer(folder) as write_row, open(log / "metrics.jsonl") as file:
        for line in file:
            row = json.loads(line)
            step = row.pop("step")
            row.pop("_timestamp")
            write_row(row, step)


def mlflow(sizes: Sizes, folder: Path) -> Iterator[Line]:
    """Import to MLflow, on servers of its own."""
    from tests.benchmarks.mlflow import import_mlflow

    yield from import_mlflow(sizes, folder)


def scale(sizes: Sizes, folder: Path) -> Iterator[Line]:
    """What a run costs among ten times as many: the first import to TensorBoard, the next one, one look of ``mirror``."""
    from tests.benchmarks.scale import cost_per_run

    yield from cost_per_run(sizes, folder)


def follow(sizes: Sizes, folder: Path) -> Iterator[Line]:
    """``runmirror mirror`` over many runs at once."""
    from tests.benchmarks.follow import follow as measure_follow

    yield from measure_follow(sizes, folder)


def wandb(sizes: Sizes, folder: Path) -> Iterator[Line]:
    """Import to W&B, on a server of its own."""
    from tests.benchmarks.wandb import import_wandb

    yield from import_wandb(sizes, folder)


def read(sizes: Sizes, folder: Path) -> Iterator[Line]:
    """Reading a long log, row by row and by the libraries people open it with."""
    path = _make_logs(folder / "long", 1, sizes.read_rows, timed=True) / "run-000" / "metrics.jsonl"
    few = folder / "part.jsonl"
    with open(path, "rb") as file, open(few, "wb") as part:
        part.writelines(line for _, line in zip(range(max(1, sizes.read_rows // 10)), file, strict=False))
    peers = {"orjson, line by line": (_read_orjson, path, sizes.read_rows)}
    peers["polars read_ndjson"] = (_read_polars, path, sizes.read_rows)
    peers["pandas read_json (a tenth of it)"] = (_read_pandas, few, max(1, sizes.read_rows // 10))
    ours: list[float] = []
    theirs: dict[str, list[float]] = {name: [] for name in peers if installed(name)}
    for _ in range(sizes.rounds):
        ours.append(sizes.read_rows / _timed(lambda: _read_runlog(path)))
        for name, speeds in theirs.items():
            function, source, count = peers[name]
            speeds.append(count / _timed(partial(function, source)))
    what = f"reading {sizes.read_rows:,} rows x {len(KEYS)} keys"
    for name in peers:
        shown = f"{_big(median(ours))} rows/s"
        if name not in theirs:
            yield Line(what, shown, name, MISSING)
            continue
        ratio = median(a / b for a, b in zip(ours, theirs[name], strict=True))
        yield Line(what, shown, name, f"{_big(median(theirs[name]))} rows/s", _times(ratio))


def _read_runlog(path: Path) -> None:
    for _ in RunLog(LocalStorage(path.parent)).rows(START):
        pass


def _read_orjson(path: Path) -> None:
    import orjson

    with open(path, "rb") as file:
        for line in file:
            orjson.loads(line)


def _read_polars(path: Path) -> None:
    import polars

    polars.read_ndjson(path)


def _read_pandas(path: Path) -> None:
    import pandas

    pandas.read_json(path, lines=True)


def health(sizes: Sizes, folder: Path) -> Iterator[Line]:
    """Checking runs for what goes wrong in them."""
    yield Line(*health_line(sizes.rounds, sizes.runs, sizes.run_rows, folder / "health"))


def reports(sizes: Sizes, folder: Path) -> Iterator[Line]:
    """Rollouts and reports (:mod:`tests.benchmarks.reports`)."""
    from tests.benchmarks.reports import measure_reports

    yield from measure_reports(sizes, folder)


MEASUREMENTS: dict[str, Callable[[Sizes, Path], Iterator[Line]]] = {
    "write": write,
    "live": live,
    "kill": kill,
    "import": import_,
    "read": read,
    "health": health,
    "reports": reports,
    "mlflow": mlflow,
    "scale": scale,
    "wandb": wandb,
    "follow": follow,
}
BY_DEFAULT = ("write", "kill", "import", "read", "reports")


def _timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _percentile(rounds: list[list[float]], percent: int) -> float:
    return median(_each(rounds, percent))


def _each(rounds: list[list[float]], percent: int) -> list[float]:
    return [sorted(values)[min(len(values) - 1, len(values) * percent // 100)] for values in rounds]


def _two(first: float, second: float, unit: str) -> str:
    return f"{_short(first)} / {_short(second)} {unit}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 20 else f"{value:.1f}"


def _big(value: float) -> str:
    return f"{value / 1e6:.2f} M" if value >= 1e6 else f"{value:,.0f}"


def _times(ratio: float) -> str:
    return f"{ratio:,.0f}x" if ratio >= 20 else f"{ratio:.2g}x"
