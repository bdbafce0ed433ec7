"""Event files that are changed while a mirror is at work, or between two."""

from __future__ import annotations

import json
import os
from pathlib import Path

from runmirror.log.index import LineIndex
from runmirror.log.runlog import RunLog
from runmirror.mirror import Mirror
from runmirror.sinks.event_reader import read_points
from runmirror.sinks.tensorboard import TensorBoardOptions, TensorBoardSink
from runmirror.storage import LocalStorage


def append(run: Path, first: int, last: int) -> None:
    run.mkdir(exist_ok=True)
    with (run / "metrics.jsonl").open("a") as file:
        for step in range(first, last):
            file.write(json.dumps({"step": step, "_timestamp": 1.7e9 + step, "loss": step / 2}) + "\n")


def mirror(tmp_path: Path) -> Mirror:
    source = RunLog(LocalStorage(tmp_path / "run"), "run", LineIndex(tmp_path / "state"))
    return Mirror(source, TensorBoardSink(TensorBoardOptions(logdir=str(tmp_path / "tb"))), tmp_path / "state")


def steps(tmp_path: Path) -> list[int]:
    return [step for _, step, _ in read_points(tmp_path / "tb" / "run")["loss"]]


def test_event_file_removed_after_open(tmp_path: Path) -> None:
    append(tmp_path / "run", 0, 50)
    with mirror(tmp_path) as first:
        first.deliver()
    with mirror(tmp_path) as second:
        second._open()
        for path in (tmp_path / "tb").rglob("*tfevents*"):
            path.unlink()
        append(tmp_path / "run", 50, 60)
        second.deliver()
    assert steps(tmp_path) == list(range(60))


def test_event_file_that_lost_its_end_gets_its_texts_back(tmp_path: Path) -> None:
    append(tmp_path / "run", 0, 20)
    (tmp_path / "run" / "config.json").write_text('{"lr": 1}')
    (tmp_path / "run" / "checkpoints.jsonl").write_text('{"name": "a", "batch": 1, "state_path": "x"}\n')
    with mirror(tmp_path) as first:
        first.deliver()
    (path,) = (tmp_path / "tb").rglob("*tfevents*")
    os.truncate(path, path.stat().st_size - 700)
    with mirror(tmp_path) as second:
        second.deliver()
    assert steps(tmp_path) == list(range(20))
    assert b"runmirror/checkpoints" in path.read_bytes()
    assert b"runmirror/config" in path.read_bytes()
