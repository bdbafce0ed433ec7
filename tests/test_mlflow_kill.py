"""SIGKILL of a real import into MLflow and of its server, racing importers; and training while the server comes and goes.

What is in the end is counted by plain SQL: every point of the logs, none of them twice.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

import runmirror
from runmirror import failpoints
from runmirror.importer import import_runs
from runmirror.verifier import verify
from tests.forked import forked
from tests.logs import flat_log, resumed_rows, train_row, write_rows
from tests.servers.mlflow import TWICE, MlflowServer
from tests.servers.mlflow_quick import QuickServer
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


@pytest.fixture
def server(mlflow: QuickServer) -> QuickServer:
    return mlflow


@pytest.fixture
def options(server: MlflowServer, tmp_path: Path) -> dict[str, str]:
    return {"tracking_uri": server.url, "experiment": tmp_path.name}


def importer_of(logs: Path, options: dict[str, str], home: Path, failpoint: str = "") -> BaseProcess:
    """A process that imports, started."""
    return forked(import_all, logs, options, home, failpoint)


def import_all(logs: Path, options: dict[str, str], home: Path, failpoint: str = "") -> None:
    """An import in a process that has everything loaded, so that a kill meets it at work."""
    os.environ |= {"RUNMIRROR_HOME": str(home)} | ({failpoints.VARIABLE: failpoint} if failpoint else {})
    summary = import_runs([logs], "mlflow", options)
    assert summary.ok, summary


def ended(importer: BaseProcess) -> int | None:
    importer.join(120)
    assert importer.exitcode in (0, -signal.SIGKILL)
    return importer.exitcode


def check(server: MlflowServer, logs: Path, options: dict[str, str]) -> None:
    """Every point once, a run per log."""
    result = verify([logs], "mlflow", options)
    assert result.ok, result.as_dict()
    assert result.totals()["points"] > 4000
    assert server.ask(TWICE) == []
    assert server.points(options["experiment"]) == result.totals()["points"] - result.totals()["known"]["once"]
    assert server.runs(options["experiment"]) == len(result.runs)


def test_killed_at_every_failpoint(
    server: MlflowServer, logs: Path, options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One import, killed at each of them in turn, then let finish: every point once."""
    monkeypatch.setenv("RUNMIRROR_HOME", str(tmp_path / "home"))
    killed = [
        ended(importer_of(logs, options, tmp_path / "home", f"{name}:1")) == -signal.SIGKILL
        for name in failpoints.NAMES
    ]
    assert sum(killed) >= 8, dict(zip(failpoints.NAMES, killed, strict=True))
    assert ended(importer_of(logs, options, tmp_path / "home")) == 0
    check(server, logs, options)


def test_killed_at_random_moments(
    server: QuickServer, options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every point once, after 50 kills of an import of logs that grow; every tenth time as on another machine."""
    logs, moment, killed, took = tmp_path / "logs", random.Random(5), 0, 0.0
    flat_log(logs / "flat")
    for number in range(150):
        grow(logs / "long" / "metrics.jsonl", 50 * number, 50)
        grow(logs / "resumed" / "metrics.jsonl", 15 * number - number % 7, 15)
        began = time.monotonic()
        importer = importer_of(logs, options, tmp_path / f"home{number // 10}")
        if number:
            importer.join(moment.uniform(0, 1.2 * took))
            importer.kill()
        killed += ended(importer) == -signal.SIGKILL
        if importer.exitcode == 0:
            took = time.monotonic() - began
        if killed == 50:
            break
    assert killed == 50
    monkeypatch.setenv("RUNMIRROR_HOME", str(tmp_path / "home0"))
    import_all(logs, options, tmp_path / "home0")
    check(server, logs, options)


def grow(log: Path, step: int, rows: int) -> None:
    """Add rows to a log, from a step on."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        file.writelines(
            json.dumps(train_row(at) | {"_timestamp": 1.7e9 + at}) + "\n" for at in range(step, step + rows)
        )


def test_three_importers_at_once(
    server: MlflowServer, logs: Path, options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with its own state, as on three hosts: one run per log, every point once."""
    importers = [importer_of(logs, options, tmp_path / f"home{n}") for n in range(3)]
    assert [ended(importer) for importer in importers] == [0, 0, 0]
    monkeypatch.setenv("RUNMIRROR_HOME", str(tmp_path / "home1"))
    check(server, logs, options)


def test_the_server_is_killed(
    server: QuickServer, options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten times while an import runs, and started again: the import goes on by itself, every point once."""
    monkeypatch.setenv("RUNMIRROR_HOME", str(tmp_path / "home"))
    logs, moment = tmp_path / "logs", random.Random(6)
    flat_log(logs / "flat")
    grow(logs / "long" / "metrics.jsonl", 0, 1500)
    importer = importer_of(logs, options, tmp_path / "home")
    killed = 0
    while killed < 10 and importer.is_alive():
        before = server.points(options["experiment"])
        until(lambda: not importer.is_alive() or server.points(options["experiment"]) > before)  # noqa: B023
        time.sleep(moment.uniform(0, 0.15))
        if importer.is_alive():
            server.kill()
            killed += 1
            server.start()
    assert ended(importer) == 0
    assert killed == 10
    check(server, logs, options)


def test_live_while_the_server_is_down_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training is not held up; when the server comes, all rows are there; with the end told."""
    folder = tmp_path / "mlflow"
    folder.mkdir()
    server = QuickServer(folder)
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
        until(lambda: server.ask("SELECT status FROM runs") == [("FINISHED",)])  # perhaps after finish gave up waiting
        assert server.ask(TWICE) == []
        assert verify([tmp_path / "run"], "mlflow", options).ok
    finally:
        run.finish("killed", 5)
        server.end()
