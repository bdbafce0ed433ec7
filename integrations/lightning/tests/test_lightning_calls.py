"""The calls that Lightning makes of its loggers, without it."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import runmirror
from integrations.installed import installed
from runmirror.exceptions import UnknownSinkError

if not installed("lightning"):  # its base class has no behaviour that is needed, and this is rank zero
    made = {}
    for name in ("", ".pytorch", ".pytorch.utilities", ".pytorch.loggers", ".pytorch.loggers.logger"):
        made[name] = sys.modules[f"lightning{name}"] = ModuleType(f"lightning{name}")
    utilities: Any = made[".pytorch.utilities"]
    utilities.rank_zero_only = lambda function: function
    logger: Any = made[".pytorch.loggers.logger"]
    logger.Logger = type("Logger", (), {})
    logger.rank_zero_experiment = lambda function: function

from runmirror_lightning import RunMirrorLogger


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_fit_and_test(tmp_path: Path) -> None:
    """Config from both hyperparameter calls, a row per call; the test after the fit is final numbers and supersedes nothing."""
    ours = RunMirrorLogger(tmp_path / "line", code=False)
    ours.log_hyperparams(Namespace(lr=0.1))
    ours.log_metrics({"loss": 0.5, "epoch": 0}, 0)
    ours.log_metrics({"loss": 0.25, "epoch": 0}, 1)
    path = str(tmp_path / "line" / "checkpoints" / "epoch=0.ckpt")
    ours.after_save_checkpoint(
        SimpleNamespace(_last_checkpoint_saved=path, best_model_path="", _last_global_step_saved=2)
    )
    ours.finalize("success")
    ours.log_metrics({"test_loss": 0.2, "epoch": 1}, 1)
    ours.finalize("success")
    assert [row.get("step") for row in rows(tmp_path / "line")] == [0, 1, None]
    run = runmirror.read_run(tmp_path / "line")
    assert (run.status, run.config, run.summary["test_loss"]) == ("finished", {"lr": 0.1}, 0.2)
    assert run.metrics(["loss"])["step"] == [0, 1]
    assert [(one.name, one.batch, one.state_path) for one in run.checkpoints] == [("epoch=0.ckpt", 2, path)]
    assert (ours.save_dir, ours.name, ours.version) == (str(tmp_path), "line", "")


def test_a_second_fit_goes_on(tmp_path: Path) -> None:
    """Of one logger: higher steps are rows of the same log. Of a new one: a log beside it."""
    ours = RunMirrorLogger(tmp_path / "line", code=False)
    for step in (0, 1):
        ours.log_metrics({"loss": 0.5}, step)
        ours.finalize("success")
    assert [row["step"] for row in rows(tmp_path / "line")] == [0, 1]
    again = RunMirrorLogger(tmp_path / "line", code=False)
    again.log_metrics({"loss": 0.5}, 0)
    again.finalize("failed")
    assert len(rows(tmp_path / "line-2")) == 1
    assert runmirror.read_run(tmp_path / "line-2").status == "failed"


def test_a_wrong_tracker_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(UnknownSinkError, match="tensorboard"):
        RunMirrorLogger(tmp_path, report_to="tensorbord")


def test_a_log_in_a_cloud_is_written_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The URI stays one; it is no folder below the working directory. Checkpoints go beside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUNMIRROR_HOME", str(tmp_path / "home"))
    ours = RunMirrorLogger("memory://lightning-runs/first/", code=False)
    ours.log_metrics({"loss": 0.5}, 0)
    ours.finalize("success")
    assert (ours.save_dir, ours.name) == ("memory://lightning-runs", "first")
    assert runmirror.read_run("memory://lightning-runs/first").metrics()["loss"] == [0.5]
    assert [path.name for path in tmp_path.iterdir() if path.name != "home"] == []
