"""MLflow as people run it: what its REST API gives to its pages, an old server, PostgreSQL, and a client of mlflow-skinny."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import urllib.parse
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from runmirror.importer import import_runs
from runmirror.verifier import verify
from tests.forked import command, forked
from tests.logs import async_rows, flat_log, nested_log, resumed_rows, train_row, write_rows
from tests.servers.mlflow import TWICE, MlflowServer, mlflow_server, running
from tests.servers.postgres import MlflowOnPostgres, postgres
from tests.servers.venvs import venv_with

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name != "posix", reason="process groups")]
ROOT = Path(__file__).parents[2]
BEGAN = datetime(2024, 3, 5, 9, 30, tzinfo=UTC).timestamp()
OLD = ("Flask", "gunicorn<24", "graphene", "alembic", "sqlalchemy<2.1", "numpy", "pandas<3")
"""What the server of MLflow 2.22 needs of its many packages."""


@pytest.fixture
def server(mlflow: MlflowServer) -> MlflowServer:
    return mlflow


@pytest.fixture
def venvs(request: pytest.FixtureRequest) -> Path:
    return Path(request.config.cache.mkdir("venvs")) if request.config.cache else Path()


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """Every shape, with NaN, a wide run, and keys that MLflow refuses."""
    folder = tmp_path / "logs"
    flat_log(folder / "flat")
    nested_log(folder / "nested")
    write_rows(folder / "resumed" / "metrics.jsonl", resumed_rows())
    write_rows(folder / "async" / "metrics.jsonl", async_rows())
    odd = {"mean@1": 0.5, "a//b": 1.0, "kl": 2.0, "kl/mean": 3.0, "k" * 300: 4.0, "nan": float("nan")}
    wide = {f"w{n}": n / 3 for n in range(150)}
    write_rows(folder / "odd" / "metrics.jsonl", (train_row(step) | odd | wide for step in range(6)))
    return folder


def check(server: MlflowServer, logs: Path, options: dict[str, str]) -> None:
    """Import twice: the second time sends nothing; verify is content, and plain SQL counts every point once."""
    assert import_runs([logs], "mlflow", options).ok
    result = verify([logs], "mlflow", options)
    assert result.ok, result.as_dict()
    points = result.totals()["points"]
    assert points > 1200
    again = import_runs([logs], "mlflow", options)
    assert (again.ok, sum(run.points + run.files for run in again.runs)) == (True, 0)
    assert server.points(options["experiment"]) == points
    assert server.runs(options["experiment"]) == len(result.runs)
    assert server.ask(TWICE) == []


def get(server: MlflowServer, call: str, **query: str) -> Any:
    """An answer of the server, as its pages ask for it."""
    url = f"{server.url}/{call}?{urllib.parse.urlencode(query)}"
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=30) as answer:
        body = answer.read()
    return json.loads(body) if call.startswith("ajax-api") else body


def test_what_its_pages_get(server: MlflowServer, tmp_path: Path) -> None:
    """Date, duration, status, description, commit, params, points by step under the log's keys, and files that open."""
    log = flat_log(tmp_path / "sweep" / "gsm8k" / "lr4e-5")
    write_rows(log / "metrics.jsonl", (train_row(step) | {"_timestamp": BEGAN + step * 600} for step in range(12)))
    done = import_runs([tmp_path / "sweep"], "mlflow", {"tracking_uri": server.url, "records": "config,code,report"})
    assert done.ok
    url = urllib.parse.urlsplit(done.runs[0].url or "")
    page, _, query = url.fragment.partition("?")
    assert query == "workflowType=machine_learning"
    experiment_id, run_id = page.split("/")[2], page.split("/")[4]
    experiment = get(server, "ajax-api/2.0/mlflow/experiments/get", experiment_id=experiment_id)["experiment"]
    assert experiment["name"] == "sweep"
    assert {"key": "mlflow.experimentKind", "value": "custom_model_development"} in experiment["tags"]
    run = get(server, "ajax-api/2.0/mlflow/runs/get", run_id=run_id)["run"]
    info, tags = run["info"], {tag["key"]: tag["value"] for tag in run["data"]["tags"]}
    assert (info["run_name"], info["status"]) == ("gsm8k/lr4e-5", "FINISHED")
    assert (info["start_time"], info["end_time"]) == (BEGAN * 1000, (BEGAN + 6600) * 1000)
    assert tags["mlflow.source.git.commit"] == "5e9d034"
    assert "tinker-cookbook" in tags["mlflow.note.content"]
    params = {param["key"]: param["value"] for param in run["data"]["params"]}
    assert params == {"learning_rate": "4e-05", "model.name": "tiny", "model.rank": "8"}
    assert {metric["key"] for metric in run["data"]["metrics"]} == {key for key in train_row(0) if key != "step"}
    history = "ajax-api/2.0/mlflow/metrics/get-history-bulk-interval"
    points = get(server, history, run_ids=run_id, metric_key="env/all/reward/total", max_results="2500")["metrics"]
    expected = [(step, 0.1 * step, (BEGAN + step * 600) * 1000) for step in range(12)]
    assert [(one["step"], one["value"], one["timestamp"]) for one in points] == expected
    files = get(server, "ajax-api/2.0/mlflow/artifacts/list", run_id=run_id)["files"]
    assert {one["path"] for one in files} >= {"config.json", "code.diff.txt", "train_iteration_000000.html"}
    assert json.loads(get(server, "get-artifact", run_uuid=run_id, path="config.json"))["model"]["rank"] == 8


def test_real_logs_arrive_whole(server: MlflowServer, samples: Path) -> None:
    """The samples beside the checkout, each file of them, with all their records."""
    paths = [samples, *samples.glob("*.json*")]
    options = {"tracking_uri": server.url, "records": "config,code,checkpoints,report,logtree,rollouts"}
    assert import_runs(paths, "mlflow", options).ok
    assert verify(paths, "mlflow", options).ok


@pytest.mark.timeout(600)
def test_an_old_server(venvs: Path, logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow 2.22, which refuses points that it has: exact counts, also when all of them come again."""
    python = venv_with(venvs, "mlflow-2.22", ("--no-deps", "mlflow==2.22.*"), ("mlflow-skinny==2.22.*", *OLD))
    with mlflow_server(tmp_path / "mlflow", python=python) as server:
        options = {"tracking_uri": server.url, "experiment": "old"}
        check(server, logs, options)
        with contextlib.closing(sqlite3.connect(server.file, timeout=30)) as connection, connection:
            connection.execute("UPDATE tags SET value = 'lost' WHERE key = 'runmirror.cursor'")
        monkeypatch.setenv("RUNMIRROR_HOME", str(tmp_path / "another home"))
        check(server, logs, options)


def test_postgresql(logs: Path, tmp_path: Path) -> None:
    """As the database of a server with two workers, with three processes that import at once."""
    with postgres() as database:
        (tmp_path / "mlflow").mkdir()
        with running(MlflowOnPostgres(tmp_path / "mlflow", workers=2, backend=database)) as server:
            options = {"tracking_uri": server.url, "experiment": "place"}
            arguments = ["import", str(logs), "--to", "mlflow", "--tracking-uri", server.url, "--experiment", "place"]
            said = tmp_path / "said"
            importers = [forked(command, arguments, tmp_path / f"home{number}", said) for number in range(3)]
            for importer in importers:
                importer.join(120)
                assert importer.exitcode == 0, said.read_text()
            check(server, logs, options)


def test_the_client_of_mlflow_skinny(venvs: Path, server: MlflowServer, logs: Path, tmp_path: Path) -> None:
    """Enough for a server; a database is refused with what to install."""
    python = venv_with(venvs, "mlflow-skinny", ("-e", f"{ROOT}[mlflow]"))
    importer = _importer(logs, server.url, "skinny", tmp_path / "home", python)
    _, errors = importer.communicate(timeout=120)
    assert importer.returncode == 0, errors
    check(server, logs, {"tracking_uri": server.url, "experiment": "skinny"})
    importer = _importer(logs, f"sqlite:///{tmp_path}/new.db", "skinny", tmp_path / "home", python)
    output, errors = importer.communicate(timeout=120)
    assert importer.returncode == 3, errors
    assert "pip install 'runmirror[mlflow-local]'" in output
    assert not (tmp_path / "new.db").exists()


def _importer(logs: Path, uri: str, experiment: str, home: Path, python: str) -> subprocess.Popen[str]:
    arguments = ["import", str(logs), "--to", "mlflow", "--tracking-uri", uri, "--experiment", experiment]
    environment = os.environ | {"RUNMIRROR_HOME": str(home)}
    return subprocess.Popen(
        [python, "-m", "runmirror", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
