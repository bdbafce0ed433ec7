"""The calls that an Accelerator makes of its trackers, without torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import runmirror
from integrations.installed import installed
from runmirror.exceptions import UnknownSinkError

if not installed("accelerate"):  # its base class has no behaviour that is needed here
    stand_in: Any = ModuleType("accelerate")
    stand_in.PartialState = lambda: SimpleNamespace(is_main_process=True)
    stand_in.tracking = ModuleType("accelerate.tracking")
    stand_in.tracking.GeneralTracker = type("GeneralTracker", (), {})
    sys.modules |= {"accelerate": stand_in, "accelerate.tracking": stand_in.tracking}

import runmirror_accelerate
from runmirror_accelerate import RunMirrorTracker


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """accelerate's view of this process."""
    process = SimpleNamespace(is_main_process=True)
    monkeypatch.setattr(runmirror_accelerate, "PartialState", lambda: process)
    return process


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_training_is_written(tmp_path: Path, main: SimpleNamespace) -> None:
    """By name: project and folder, then config, rows with and without a step, nested values, extra arguments."""
    tracker = RunMirrorTracker("first", str(tmp_path), code=False)
    tracker.start() if hasattr(tracker, "start") else None
    tracker.store_init_configuration({"lr": 0.1})
    tracker.log({"loss": 0.5}, step=3, commit=True)
    tracker.log({"loss": {"a": 1, "b": float("nan")}, "note": "text"})
    tracker.finish()
    first, second = rows(tmp_path / "first")
    assert (first["step"], first["loss"]) == (3, 0.5)
    assert (second["step"], second["loss/a"], second["note"], second["_nonfinite"]) == (4, 1, "text", {"loss/b": "nan"})
    read = runmirror.read_run(tmp_path / "first")
    assert (read.status, read.config) == ("finished", {"lr": 0.1})


def test_a_finished_log_is_left_alone_unless_told(tmp_path: Path, main: SimpleNamespace) -> None:
    """The second training is in ``first-2``; with resume=True the third goes on there."""
    for options in ({}, {}, {"resume": True}):
        tracker = RunMirrorTracker(tmp_path / "first", **options, code=False)
        tracker.log({"loss": 0.5})
        tracker.finish()
    assert [row["step"] for row in rows(tmp_path / "first")] == [0]
    assert [row["step"] for row in rows(tmp_path / "first-2")] == [0, 1]


def test_other_processes_write_nothing(tmp_path: Path, main: SimpleNamespace) -> None:
    main.is_main_process = False
    tracker = RunMirrorTracker(tmp_path / "first")
    tracker.store_init_configuration({"lr": 0.1})
    tracker.log({"loss": 0.5}, step=3)
    assert tracker.tracker.latest_checkpoint() is None
    tracker.finish()
    assert not (tmp_path / "first").exists()


def test_a_wrong_tracker_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(UnknownSinkError, match="tensorboard"):
        RunMirrorTracker(tmp_path, report_to="tensorbord")
