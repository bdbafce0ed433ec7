"""``report_to`` for runs in a cloud: the mirrors read the spool on the writer's machine, whatever the network does."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import runmirror
from runmirror.sinks.registry import installed_sinks
from runmirror.testing import MemoryOptions, MemorySink
from runmirror.testing.dummy import read_dummy
from tests.cloud import URI, Trainer, options, reading, rows_of, until
from tests.servers.gcs import GcsServer, gcs_server
from tests.servers.mlflow import with_tables

pytestmark = pytest.mark.skipif(os.name != "posix", reason="process groups")


@pytest.fixture
def server() -> Iterator[GcsServer]:
    with gcs_server() as found:
        yield found


def place(sink: str, folder: Path) -> dict[str, Any]:
    """Options that put everything of a sink into a folder."""
    folder.mkdir()
    if sink == "mlflow":
        with_tables(folder / "mlflow.db")
    return {"mlflow": {"tracking_uri": f"sqlite:///{folder}/mlflow.db"}, "tensorboard": {"logdir": str(folder)}}.get(
        sink, {"folder": str(folder)}
    )


@pytest.mark.slow
@pytest.mark.parametrize("sink", [name for name in installed_sinks() if name in ("dummy", "mlflow", "tensorboard")])
def test_live_and_imported_are_the_same(
    server: GcsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sink: str
) -> None:
    """Rows in two lives (of MLflow one: it takes seconds to begin), a NaN, text, a late evaluation row and a summary: live, and
    by an import on another machine."""
    monkeypatch.chdir(tmp_path)
    live, fresh = place(sink, tmp_path / "live"), place(sink, tmp_path / "fresh")
    for life in (1,) if sink == "mlflow" else range(2):
        with runmirror.start(
            URI, {"lr": 1e-3}, report_to={sink: live}, resume=True, code=False, storage_options=options(server)
        ) as run:
            for step in range(life * 15, life * 15 + 15):
                run.log_metrics({"loss": 1 / (step + 1), "kl": float("nan") if step == 3 else 0.1, "note": "x"}, step)
                if step == 20:
                    run.log_metrics({"test/reward": 0.5, "test/length": 7}, step - 2)
            run.log_checkpoint(str(life), state_path="s")
            run.log_summary({"final/reward": 0.25})
        assert run.status().sinks[sink].state == "delivered"
        assert run.status().cloud is None
    monkeypatch.setenv("RUNMIRROR_HOME", str(tmp_path / "elsewhere"))
    assert runmirror.import_runs([URI], sink, fresh, rewinds="all", read=reading(server)).ok
    results = [runmirror.verify([URI], sink, to, rewinds="all", read=reading(server)) for to in (live, fresh)]
    assert [result.ok for result in results] == [True, True], results
    assert results[0].totals() == results[1].totals()
    assert results[0].totals()["matching"] > 30


@pytest.mark.slow
def test_a_dead_network_does_not_hold_up_the_mirrors(server: GcsServer, tmp_path: Path) -> None:
    """Started without a network, and ended without one: the tracker has it all, the spool too."""
    server.faults.down = True
    place_ = {"folder": str(tmp_path / "dummy")}
    run = runmirror.start(URI, report_to={"dummy": place_}, code=False, storage_options=options(server))
    for n in range(20):
        run.log_metrics({"n": n})
    until(lambda: len(read_dummy(tmp_path / "dummy")["run"].rows) == 20 if (tmp_path / "dummy").exists() else False)
    run.finish(deadline=15)
    assert run.status().sinks["dummy"].state == "delivered"
    assert rows_of(server) == []
    server.faults.down = False
    assert runmirror.start(URI, resume=True, code=False, storage_options=options(server)).finish() is None
    assert [row["n"] for row in rows_of(server)] == list(range(20))


def test_a_sink_object_reads_the_spool(server: GcsServer) -> None:
    """In a thread of the training process."""
    sink = MemorySink(MemoryOptions())
    given = {"storage_options": options(server, interval=60), "code": False}
    with runmirror.start(URI, report_to=sink, **given) as run:
        for n in range(5):
            run.log_metrics({"n": n})
        until(lambda: run.status().sinks["memory"].state == "current")
    assert run.status().sinks["memory"].state == "delivered"
    assert len(rows_of(server)) == 5


@pytest.mark.slow
def test_training_is_killed(server: GcsServer, tmp_path: Path) -> None:
    """The mirror brings the rows that were not uploaded, and ends the tracker's run as killed."""
    dummy = tmp_path / "dummy"
    given = {"report_to": {"dummy": {"folder": str(dummy)}}, "storage_options": options(server, interval=60)}
    code = "for n in range(50): run.log_metrics({'n': n})\ngo()\n"
    with Trainer(server, tmp_path / "home", code, **given) as trainer:
        trainer.line()
        trainer.process.send_signal(signal.SIGKILL)
        until(lambda: dummy.exists() and len(read_dummy(dummy)["run"].rows) == 50)
        until(lambda: read_dummy(dummy)["run"].statuses == ["killed"])
    assert len(rows_of(server)) < 50
