"""Import into MLflow, on real servers of one and two workers, beside what people write by hand. Started by name only."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from runmirror.importer import import_runs
from tests.benchmarks import measure
from tests.benchmarks.writers import KEYS
from tests.servers.mlflow import mlflow_server

if TYPE_CHECKING:
    from tests.benchmarks.measure import Line, Sizes

BY_ROW, IN_BATCHES = "mlflow.log_metrics per row", "a loop of log_batch(1000)"


def import_mlflow(sizes: Sizes, folder: Path) -> Iterator[Line]:
    """One run and several, for the first time and again."""
    os.environ |= {"MLFLOW_DISABLE_TELEMETRY": "true"}
    one = measure._make_logs(folder / "one", 1, sizes.mlflow_rows, timed=True)
    many = measure._make_logs(folder / "many", sizes.mlflow_runs, sizes.mlflow_rows, timed=True)
    small = measure._make_logs(folder / "small", sizes.mlflow_again, 5, timed=True)
    for workers in (1, 2):
        with mlflow_server(folder / f"server{workers}", workers) as server:
            _import(one, server.url, "warm")
            ways = {"ours": partial(_import, url=server.url), BY_ROW: partial(_by_row, url=server.url)}
            ways[IN_BATCHES] = partial(_in_batches, url=server.url)
            where = f"MLflow, server of {workers} {'worker' if workers == 1 else 'workers'}"
            yield from _lines(
                f"import of 1 run x {sizes.mlflow_rows} rows x {len(KEYS)} keys to {where}", ways, one, sizes
            )
            both = {"ours": partial(_import, url=server.url, workers=2), IN_BATCHES: ways[IN_BATCHES]}
            yield from _lines(f"import of {sizes.mlflow_runs} runs, 2 processes, to {where}", both, many, sizes)
            if workers == 1:
                _import(small, server.url, "again")
                took = measure._timed(lambda: _import(small, server.url, "again"))
                told = f"{took / sizes.mlflow_again * 1000:.3g} ms per run"
                yield measure.Line(f"import again of {sizes.mlflow_again} runs, nothing to do, {where}", told, "-", "-")


def _lines(what: str, ways: dict[str, Callable[..., None]], logs: Path, sizes: Sizes) -> Iterator[Line]:
    points = len(list(logs.iterdir())) * sizes.mlflow_rows * len(KEYS)
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(sizes.rounds):
        for name, way in ways.items():
            experiment = f"{what} {name} {number}"
            speeds[name].append(points / measure._timed(partial(way, logs, experiment=experiment)))
    ours = speeds.pop("ours")
    for name, theirs in speeds.items():
        ratio = median(a / b for a, b in zip(ours, theirs, strict=True))
        told = f"{measure._big(median(theirs))} points/s"
        yield measure.Line(what, f"{measure._big(median(ours))} points/s", name, told, f"{ratio:.2f}x")


def _import(logs: Path, url: str, experiment: str, workers: int = 1) -> None:
    done = import_runs([logs], "mlflow", {"tracking_uri": url, "experiment": experiment}, workers=workers)
    assert done.ok, [run.error for run in done.runs if run.error]


def _rows(log: Path) -> Iterator[dict[str, Any]]:
    with open(log / "metrics.jsonl") as file:
        yield from map(json.loads, file)


def _by_row(logs: Path, url: str, experiment: str) -> None:
    import mlflow

    mlflow.set_tracking_uri(url)
    mlflow.set_experiment(experiment)
    for log in sorted(logs.iterdir()):
        with mlflow.start_run():
            for row in _rows(log):
                step = row.pop("step")
                row.pop("_timestamp")
                mlflow.log_metrics(row, step=step)


def _in_batches(logs: Path, url: str, experiment: str) -> None:
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

    client = MlflowClient(url)
    place = client.create_experiment(experiment)
    for log in sorted(logs.iterdir()):
        run_id = client.create_run(place).info.run_id
        batch: list[Metric] = []
        for row in _rows(log):
            step, when = row.pop("step"), round(row.pop("_timestamp") * 1000)
            batch += [Metric(key, value, when, step) for key, value in row.items()]
            if len(batch) >= 1000:
                client.log_batch(run_id, batch[:1000])
                batch = batch[1000:]
        client.log_batch(run_id, batch)
        client.set_terminated(run_id)
