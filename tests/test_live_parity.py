"""The same run mirrored live and imported into a fresh place holds the same points, for every sink there is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import runmirror
from runmirror.sinks import wandb_process
from runmirror.sinks.registry import installed_sinks
from tests.servers.wandb import wandb_server

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name != "posix", reason="process groups")]


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, Path], dict[str, Any]]]:
    """Options that put everything of a sink into a folder, or into what stands for one."""
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    with wandb_server() as server:
        yield partial(options_for, server.url)
        wandb_process.end_idle()


def options_for(url: str, sink: str, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    return {
        "dummy": {"folder": str(folder)},
        "mlflow": {"tracking_uri": f"sqlite:///{folder}/mlflow.db"},
        "tensorboard": {"logdir": str(folder)},
        "wandb": {"project": folder.name, "base_url": url},
    }[sink]


@pytest.mark.parametrize("sink", installed_sinks())
def test_live_and_imported_are_the_same(
    sink: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Callable[[str, Path], dict[str, Any]]
) -> None:
    """Both hold every point of the log by ``verify``, and as many: 30 rows in two lives, a NaN, text, a late evaluation
    row, and a summary."""
    monkeypatch.chdir(tmp_path)
    live, fresh = place(sink, tmp_path / "live"), place(sink, tmp_path / "fresh")
    for life in range(2):
        with runmirror.start(tmp_path / "run", {"lr": 1e-3}, report_to={sink: live}, resume=True, code=False) as run:
            for step in range(life * 15, life * 15 + 15):
                run.log_metrics({"loss": 1 / (step + 1), "kl": float("nan") if step == 3 else 0.1, "note": "x"}, step)
                if step == 20:
                    run.log_metrics({"test/reward": 0.5, "test/length": 7}, step - 2)
            run.log_summary({"final/reward": 0.25})
        assert run.status().sinks[sink].state == "delivered"
    assert runmirror.import_runs([tmp_path / "run"], sink, fresh, rewinds="all").ok
    results = [runmirror.verify([tmp_path / "run"], sink, options, rewinds="all") for options in (live, fresh)]
    assert [result.ok for result in results] == [True, True]
    assert results[0].totals() == results[1].totals()
    assert results[0].totals()["matching"] > 60
