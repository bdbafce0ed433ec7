"""What tinker-cookbook tells its loggers, replayed from recordings of real runs, without torch."""

from __future__ import annotations

import json
import logging
import sys
from abc import ABC
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import runmirror
from integrations.installed import installed
from runmirror.exceptions import UnknownSinkError

if not installed("tinker_cookbook"):  # its abstract class has no behaviour that is needed here
    for name in ("tinker_cookbook", "tinker_cookbook.utils", "tinker_cookbook.utils.ml_log"):
        sys.modules[name] = ModuleType(name)
    utils: Any = sys.modules["tinker_cookbook.utils"]
    utils.ml_log = sys.modules["tinker_cookbook.utils.ml_log"]
    utils.ml_log.Logger = type("Logger", (ABC,), {})
    utils.ml_log.setup_logging = None

import runmirror_tinker
from runmirror_tinker import RunMirrorLogger, attach

CONFIG = {"learning_rate": 1e-4, "log_path": "/tmp/run"}


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """``ml_log.setup_logging`` as a function that only makes a list of children; and what it made."""
    made: list[SimpleNamespace] = []

    def setup_logging(
        log_dir: str, wandb_project: Any = None, wandb_name: Any = None, config: Any = None, **more: Any
    ) -> SimpleNamespace:
        made.append(SimpleNamespace(loggers=[]))
        return made[-1]

    monkeypatch.setattr(runmirror_tinker.ml_log, "setup_logging", setup_logging)
    return made


def written(log_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (log_path / "metrics.jsonl").read_text().splitlines()]


def decoded(row: dict[str, Any]) -> dict[str, Any]:
    """A row as it was passed: NaN back in its place, bookkeeping left out."""
    odd = row.get("_nonfinite", {})
    return {key: repr(float(odd[key]) if key in odd else value) for key, value in row.items() if key[0] != "_"}


def test_recorded_rows_are_written_as_they_were_logged(samples: Path, tmp_path: Path) -> None:
    """Synchronous, asynchronous with late rows, and resumed: the same rows in the same order, NaN included."""
    recorded = sorted([*samples.glob("tinker_*_metrics.jsonl"), *samples.glob("tinker_*/metrics.jsonl")])
    assert len(recorded) >= 4
    for number, path in enumerate(recorded):
        ours = RunMirrorLogger(str(tmp_path / str(number)), code=False)
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            ours.log_metrics({key: value for key, value in row.items() if key != "step"}, row.get("step"))
        ours.close()
        shown = [{key: repr(value) for key, value in row.items()} for row in rows]
        assert [decoded(row) for row in written(tmp_path / str(number))] == shown


def test_every_call_has_its_row(tmp_path: Path) -> None:
    """Rows, an event of an earlier step, final numbers with and without their own method; a value that json refuses."""
    ours = RunMirrorLogger(str(tmp_path / "run"), code=False)
    ours.log_hparams(CONFIG)
    ours.enable_event_steps()
    ours.log_metrics({"loss": float("nan"), "np": SimpleNamespace(item=lambda: 2.5)}, 0)
    ours.log_metrics({"loss": 0.5}, step=1)
    ours.log_metrics_event({"test/reward": 1.0}, 0, "evaluation/step", {"test/reward": "evaluation/step"})
    ours.log_summary({"tokens": 7})
    ours.log_metrics({"cost": 0.25})
    assert ours.get_logger_url() is None
    ours.close()
    rows = [{key: value for key, value in row.items() if key != "_timestamp"} for row in written(tmp_path / "run")]
    assert rows == [
        {"step": 0, "loss": None, "np": 2.5, "_nonfinite": {"loss": "nan"}},
        {"step": 1, "loss": 0.5},
        {"step": 0, "test/reward": 1.0, "evaluation/step": 0},
        {"tokens": 7},
        {"cost": 0.25},
    ]
    run = runmirror.read_run(tmp_path / "run")
    assert (run.status, run.config, run.summary) == ("finished", CONFIG, {"tokens": 7, "cost": 0.25})


def test_attach_adds_a_logger_to_every_run(setup: list[SimpleNamespace], tmp_path: Path) -> None:
    """Its log is in the run's folder, under the run's name, with the config; attaching again adds no second one."""
    attach(code=False)
    attach(code=False)
    made = runmirror_tinker.ml_log.setup_logging(
        str(tmp_path / "gsm8k"), config=CONFIG, do_configure_logging_module=False
    )
    assert setup == [made]
    (ours,) = made.loggers
    ours.log_metrics({"loss": 0.5}, 0)
    ours.close()
    log = tmp_path / "gsm8k" / "runmirror"
    assert written(log)[0]["loss"] == 0.5
    assert json.loads((log / ".runmirror" / "run.json").read_text())["name"] == "gsm8k"
    assert runmirror.read_run(log).config == CONFIG


def test_a_resume_continues(setup: list[SimpleNamespace], tmp_path: Path) -> None:
    """The second start of a folder, finished or not, goes on; steps that are repeated supersede the old ones."""
    attach(code=False)
    for steps in (range(6), range(4, 8)):
        (ours,) = runmirror_tinker.ml_log.setup_logging(str(tmp_path / "run"), None, "named", CONFIG).loggers
        for step in steps:
            ours.log_metrics({"loss": float(step)}, step)
        ours.close()
    run = runmirror.read_run(tmp_path / "run" / "runmirror")
    assert run.metrics(["loss"])["step"] == [0, 1, 2, 3, 4, 5, 6, 7]


def test_a_log_that_cannot_be_opened_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One error; once the place is free the next row is written, with the config."""
    (tmp_path / "run").write_text("a file where the folder should be")
    ours = RunMirrorLogger(str(tmp_path / "run"), code=False)
    ours.log_hparams(CONFIG)
    ours.log_metrics({"loss": 1.0}, 0)
    (tmp_path / "run").unlink()
    ours.log_metrics({"loss": 2.0}, 1)
    ours.close()
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1
    assert [row["step"] for row in written(tmp_path / "run")] == [1]
    assert runmirror.read_run(tmp_path / "run").config == CONFIG


def test_a_wrong_tracker_is_told_at_once(setup: list[SimpleNamespace], tmp_path: Path) -> None:
    with pytest.raises(UnknownSinkError, match="tensorboard"):
        attach(report_to="tensorbord")
    with pytest.raises(UnknownSinkError, match="tensorboard"):
        RunMirrorLogger(str(tmp_path), report_to="tensorbord")
