"""Many runs over many workers: local processes and a real Dask cluster, one of whose workers is killed on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from runmirror.importer import Progress, import_runs
from runmirror.verifier import verify
from tests.servers.dask import dask_cluster
from tests.servers.mlflow import TWICE, MlflowServer

pytestmark = pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
RUNS, ROWS, KEYS = 14, 30, 5


def many_runs(root: Path, runs: int = RUNS) -> Path:
    """Finished logs of another tool, in two folders."""
    for number in range(runs):
        folder = root / f"sweep{number % 2}" / f"run{number:03d}"
        folder.mkdir(parents=True)
        rows = [
            {
                "step": step,
                "_timestamp": 1.7e9 + step,
                **{f"env/all/k{key}": number + step / (key + 1) for key in range(KEYS)},
            }
            for step in range(ROWS)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "checkpoints.jsonl").write_text(json.dumps({"name": "final", "batch": ROWS, "final": True}) + "\n")
    return root


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_dask_cluster_brings_the_same_as_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mlflow: MlflowServer
) -> None:
    """To TensorBoard and MLflow; a worker is killed after a few runs. Every point is there once, and a second import sends
    nothing."""
    monkeypatch.setenv("RUNMIRROR_HOME", str(tmp_path / "home"))
    root = many_runs(tmp_path / "runs")
    server = mlflow
    with dask_cluster(tmp_path / "dask") as cluster:
        from distributed import Client

        with Client(cluster.address) as client:  # type: ignore[no-untyped-call]
            client.wait_for_workers(2)  # type: ignore[no-untyped-call]
            executor = client.get_executor()  # type: ignore[no-untyped-call]

            def kill_one(progress: Progress) -> None:
                if progress.number == 4 and cluster.workers[0].poll() is None:
                    cluster.workers[0].kill()

            there = {"tracking_uri": server.url, "experiment": "dask"}
            summary = import_runs([root], "mlflow", there, executor=executor, on_progress=kill_one)
            assert cluster.workers[0].wait(10)
            assert [run.name for run in summary.runs if run.state != "complete"] == []
            assert len(summary.runs) == RUNS
            here = {"tracking_uri": server.url, "experiment": "local"}
            assert import_runs([root], "mlflow", here).ok
            for options in (there, here):
                assert all(run.ok for run in verify([root], "mlflow", options).runs)
                assert server.points(options["experiment"]) == RUNS * ROWS * KEYS
            assert server.runs("dask") == server.runs("local") == RUNS
            assert server.ask(TWICE) == []

            for logdir, how in ((tmp_path / "tb1", {"executor": executor}), (tmp_path / "tb2", {})):
                assert import_runs([root], "tensorboard", {"logdir": str(logdir)}, **how).ok  # type: ignore[arg-type]
            assert files(tmp_path / "tb1") == files(tmp_path / "tb2")
        again = run_command(
            root, "--to", "mlflow", "--tracking-uri", server.url, "--experiment", "dask", "--dask", cluster.address
        )
        assert "sent 0 rows" in again.stdout, again.stderr


def files(folder: Path) -> dict[str, bytes]:
    """What is in the event files of a logdir."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("events.*")}


def run_command(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "runmirror", "import", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_worker_that_means_another_place_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative logdir in another working directory: nothing is written there, and the summary says what to do."""
    root = many_runs(tmp_path / "runs", 2)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with ThreadPoolExecutor(1) as executor:

        class Elsewhere(ThreadPoolExecutor):
            def submit(self, call, /, *args, **kwargs):  # type: ignore[no-untyped-def]
                def there():  # type: ignore[no-untyped-def]
                    os.chdir(tmp_path / "elsewhere")
                    return call()

                return executor.submit(there)

        summary = import_runs([root], "tensorboard", {"logdir": "tb"}, executor=Elsewhere(1))
    assert {run.state for run in summary.runs} == {"behind"}
    assert "give an absolute path" in str(summary.runs[0].error)
    assert not (tmp_path / "elsewhere" / "tb").exists()


@pytest.mark.slow
def test_no_scheduler_is_one_line(tmp_path: Path) -> None:
    """An address at which nobody answers, within the deadline of the connection."""
    done = run_command(many_runs(tmp_path / "runs", 1), "--to", "tensorboard", "--dask", "tcp://127.0.0.1:1")
    assert done.returncode == 1
    assert "no Dask scheduler answers" in done.stderr.splitlines()[-1]


def test_the_rate_holds_over_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows arrive, and what the pace wrote down says that all of them were counted."""
    monkeypatch.setenv("RUNMIRROR_HOME", str(tmp_path / "home"))
    root = many_runs(tmp_path / "runs", 2)
    summary = import_runs([root], "tensorboard", {"logdir": str(tmp_path / "tb")}, workers=2, rate=1000.0)
    assert summary.ok
    assert summary.as_dict()["totals"]["rows"] == 2 * ROWS
    assert len(list((tmp_path / "home").glob("pace/tensorboard-*.next"))) == 1
