"""SIGKILL of a real import into MLflow and of its server, racing importers; and training while the server comes and goes.

What is in the end is counted by plain SQL: every point of the logs, none of them twice.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import runmirror
from runmirror import failpoints
from runmirror.verifier import verify
from tests.logs import flat_log, resumed_rows, train_row, write_rows
from tests.servers.mlflow import TWICE, MlflowServer, mlflow_server
from tests.test_live import until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name != "posix", reason="SIGKILL")]


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs with files and a rewind, and one of several requests."""
    folder = tmp_path_factory.mktemp("logs")
    flat_log(folder / "flat")
    write_rows(folder / "resumed" / "metrics.jsonl", resumed_rows())
    write_rows(folder / "long" / "metrics.jsonl", (train_row(step) for step in range(400)))
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as running:
        yield running


@pytest.fixture
def options(server: MlflowServer, tmp_path: Path) -> dict[str, str]:
    return {"tracking_uri": server.url, "experiment": tmp_path.name}


def begin(logs: Path, options: dict[str, str], home: Path, failpoint: str = "") -> subprocess.Popen[bytes]:
    """An import in a process of its own."""
    environment = os.environ | {"RUNMIRROR_HOME": str(home)} | ({failpoints.VARIABLE: failpoint} if failpoint else {})
    command = [sys.executable, "-m", "runmirror", "import", str(logs), "--to", "mlflow"]
    command += [part for name, value in options.items() for part in ("-o", f"{name}={value}")]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def ended(process: subprocess.Popen[bytes]) -> int:
    _, errors = process.communicate(timeout=120)
    assert process.returncode in (0, -signal.SIGKILL), errors.decode()
    return process.returncode


def check(server: MlflowServer, logs: Path, options: dict[str, str]) -> None:
    """Every point once, a run per log."""
    result = verify([logs], "mlflow", options)
    assert result.ok, result.as_dict()
    assert result.totals()["points"] > 4000
    assert server.ask(TWICE) == []
    assert server.points(options["experiment"]) == result.totals()["points"]
    assert server.runs(options["experiment"]) == len(result.runs)


def test_killed_at_every_failpoint(
    server: MlflowServer, logs: Path, options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One import, killed at each of them in turn, then let finish: every point once."""
    monkeypatch.setenv("RUNMIRROR_HOME", str(tmp_path / "home"))
    killed = [
        ended(begin(logs, options, tmp_path / "home", f"{name}:1")) == -signal.SIGKILL for name in failpoints.NAMES
    ]
    assert sum(killed) >= 8, dict(zip(failpoints.NAMES, killed, strict=True))
    assert ended(begin(logs, options, tmp_path / "home")) == 0
    check(server, logs, options)


def test_killed_at_random_moments(
    server: MlflowServer, options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every point once, after 14 kills while points go in, some with the state lost as well."""
    logs = write_rows(tmp_path / "long" / "metrics.jsonl", (train_row(step) for step in range(5000)))
    moment, killed = random.Random(5), 0
    for number in range(14):
        process = begin(logs, options, tmp_path / f"home{number // 5}")  # every fifth time as on another machine
        before = server.points(options["experiment"])
        until(lambda: process.poll() is not None or server.points(options["experiment"]) > before)  # noqa: B023
        time.sleep(moment.uniform(0, 0.1))
        process.kill()
        killed += ended(process) == -signal.SIGKILL
    assert killed >= 10
    assert ended(begin(logs, options, tmp_path / "home0")) == 0
    monkeypatch.setenv("RUNMIRROR_HOME", str(tmp_path / "home0"))
    check(server, logs, options)


def test_three_importers_at_once(
    server: MlflowServer, logs: Path, options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with its own state, as on three hosts: one run per log, every point once."""
    processes = [begin(logs, options, tmp_path / f"home{n}") for n in range(3)]
    assert [ended(process) for process in processes] == [0, 0, 0]
    monkeypatch.setenv("RUNMIRROR_HOME", str(tmp_path / "home1"))
    check(server, logs, options)


def test_the_server_is_killed(logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice while an import runs, and started again: the import goes on by itself, every point once."""
    monkeypatch.setenv("RUNMIRROR_HOME", str(tmp_path / "home"))
    with mlflow_server(tmp_path / "mlflow") as server:
        options = {"tracking_uri": server.url, "experiment": "killed"}
        process = begin(logs, options, tmp_path / "home")
        for points in (1, 1500):
            until(lambda points=points: process.poll() is not None or server.points("killed") >= points)  # type: ignore[misc]
            server.kill()
            server.start()
        assert ended(process) == 0
        check(server, logs, options)


def test_live_while_the_server_is_down_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training is not held up; when the server comes, all rows are there; with the end told."""
    folder = tmp_path / "mlflow"
    folder.mkdir()
    server = MlflowServer(folder)
    options = {"tracking_uri": server.url, "experiment": "live"}
    run = runmirror.start(tmp_path / "run", {"lr": 1}, report_to={"mlflow": options}, code=False)
    try:
        for step in range(20):
            run.log_metrics({"loss": 1.0 / (step + 1), "mean@1": step}, step=step)
        server.start()
        until(lambda: server.file.exists() and server.points("live") == 40)
        server.kill()
        for step in range(20, 25):
            run.log_metrics({"loss": 1.0 / (step + 1), "mean@1": step}, step=step)
        server.start()
        until(lambda: server.points("live") == 50)
        run.finish("finished", 60)
        assert server.ask("SELECT status FROM runs") == [("FINISHED",)]
        assert server.ask(TWICE) == []
        assert verify([tmp_path / "run"], "mlflow", options).ok
    finally:
        run.finish("killed", 5)
        server.kill()
