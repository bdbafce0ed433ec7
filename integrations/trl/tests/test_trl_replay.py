"""What a Trainer tells its callbacks, replayed from recordings of real ones, without torch."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import runmirror
from integrations.installed import installed

if not installed("transformers"):  # its one class that is needed has no behaviour of its own here
    stand_in = ModuleType("transformers")
    stand_in.TrainerCallback = type("TrainerCallback", (), {})  # type: ignore[attr-defined]
    sys.modules["transformers"] = stand_in

from runmirror_trl import RunMirrorCallback

MODEL = SimpleNamespace(config={"model_type": "llama", "hidden_size": 32})
Rows = list[dict[str, Any]]


class Arguments(SimpleNamespace):
    """The parts of TrainingArguments that a callback reads."""

    def to_dict(self) -> dict[str, Any]:
        return {"learning_rate": 1e-3, "hub_token": "<HUB_TOKEN>", "output_dir": self.output_dir}


@pytest.fixture
def arguments(tmp_path: Path) -> Arguments:
    return Arguments(output_dir=str(tmp_path / "grpo"), run_name=None, report_to=[])


def state(step: int, main: bool = True) -> SimpleNamespace:
    return SimpleNamespace(global_step=step, is_world_process_zero=main)


def train(callback: RunMirrorCallback, arguments: Arguments, logged: Rows, start: int = 0, main: bool = True) -> None:
    """The calls of one ``trainer.train()``: a checkpoint after every second step, as recorded."""
    callback.on_train_begin(arguments, state(start, main), None, model=MODEL)
    for row in logged:
        row = dict(row)
        now = state(row.pop("_global_step"), main)
        before = dict(row)
        callback.on_log(arguments, now, None, logs=row, model=MODEL)
        assert row == before, "the dict is shared with other callbacks"
        if now.global_step % 2 == 0 and "loss" in row:
            callback.on_save(arguments, now, None, model=MODEL)
    callback.on_train_end(arguments, now, None)


def written(folder: str | Path, log: str = "runmirror") -> Rows:
    return [json.loads(line) for line in (Path(folder) / log / "metrics.jsonl").read_text().splitlines()]


def made_up(first: int = 1, last: int = 4) -> Rows:
    """Rows of the shapes that TRL 1.16 logs: varying keys, an evaluation at a train row's step, final numbers."""
    rows: Rows = []
    for step in range(first, last + 1):
        row = {
            "loss": 0.5 / step,
            "grad_norm": 0.9,
            "reward": 0.1 * step,
            "rewards/digits/mean": 0.2,
            "epoch": step / 8,
        }
        rows.append({"_global_step": step} | row | ({"num_tokens": 88.0 * step} if step % 2 else {}))
        if step % 2 == 0:
            rows.append({"_global_step": step, "eval_loss": 0.1 * step, "eval_reward": 0.3, "epoch": step / 8})
    final = {"train_runtime": 6.9, "train_loss": 0.2, "total_flos": 0.0, "epoch": last / 8}
    return [*rows, {"_global_step": last} | final]


def recordings(samples: Path) -> Iterator[Rows]:
    for path in sorted(samples.glob("trl_*_on_log.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        yield [
            {k: v for k, v in row.items() if k not in ("_types", "_not_rank0")}
            for row in rows
            if not row.get("_not_rank0")
        ]


def same(row: dict[str, Any], logged: dict[str, Any]) -> None:
    """A row holds what was logged, NaN included, and the step unless it is a final one."""
    final = "train_runtime" in logged and "loss" not in logged
    assert row.get("step") == (None if final else logged["_global_step"])
    odd = row.get("_nonfinite", {})
    kept = {key: value for key, value in row.items() if key[0] != "_" and key not in ("step", "runmirror/hidden_nan")}
    assert {key: float(odd[key]) if key in odd else value for key, value in kept.items()} == pytest.approx(
        {key: value for key, value in logged.items() if key != "_global_step"}, nan_ok=True
    )


def test_recorded_trainings_are_written_row_for_row(samples: Path, arguments: Arguments, tmp_path: Path) -> None:
    """GRPO with and without values, on two ranks, and PPO: each call is one row with its own keys and step."""
    found = list(recordings(samples))
    assert len(found) >= 4
    for number, logged in enumerate(found):
        arguments.output_dir = str(tmp_path / str(number))
        train(RunMirrorCallback(), arguments, logged)
        rows = written(arguments.output_dir)
        assert len(rows) == len(logged)
        for row, one in zip(rows, logged, strict=True):
            same(row, one)


def test_train_eval_and_final_rows_stay_apart(arguments: Arguments) -> None:
    """Three rows at the last step: two with it, the final numbers without one, as the run's summary."""
    logged = made_up()
    train(RunMirrorCallback(), arguments, logged)
    rows = written(arguments.output_dir)
    for row, one in zip(rows, logged, strict=True):
        same(row, one)
    run = runmirror.read_run(f"{arguments.output_dir}/runmirror")
    assert (run.status, run.summary["train_loss"]) == ("finished", 0.2)


def test_config_and_checkpoints_are_kept(arguments: Arguments) -> None:
    """The Trainer's arguments, the model's config beside them; a line per save with the folder to resume from."""
    train(RunMirrorCallback(), arguments, made_up())
    run = runmirror.read_run(f"{arguments.output_dir}/runmirror")
    assert run.config["learning_rate"] == 1e-3
    assert run.config["model_config"] == {"model_type": "llama", "hidden_size": 32}
    assert [(one.name, one.batch) for one in run.checkpoints] == [("checkpoint-2", 2), ("checkpoint-4", 4)]
    assert run.latest_checkpoint is not None
    assert run.latest_checkpoint.state_path == f"{arguments.output_dir}/checkpoint-4"


def test_a_resume_continues_and_a_new_training_begins_anew(arguments: Arguments) -> None:
    """From checkpoint 2 the same log goes on, the repeated steps superseded; without one, a numbered log beside it does."""
    train(RunMirrorCallback(), arguments, made_up(1, 4))
    train(RunMirrorCallback(), arguments, made_up(3, 6), start=2)
    run = runmirror.read_run(f"{arguments.output_dir}/runmirror")
    assert run.metrics(["loss"])["step"] == [1, 2, 3, 4, 5, 6]
    train(RunMirrorCallback(), arguments, made_up(1, 2))
    train(RunMirrorCallback(), arguments, made_up(2, 3), start=1)
    assert [row.get("step") for row in written(arguments.output_dir, "runmirror-2")] == [1, 2, 2, None, 2, 2, 3, None]
    assert len(written(arguments.output_dir)) == 14
    names = [json.loads((Path(arguments.output_dir) / log / ".runmirror/run.json").read_text())["name"] for log in LOGS]
    assert names == ["grpo", "grpo-2"]


LOGS = ("runmirror", "runmirror-2")


def test_evaluations_outside_training_are_kept(arguments: Arguments) -> None:
    """Before training: a row at step 0. After it: final numbers, which supersede nothing. PPO's last save too."""
    callback = RunMirrorCallback()
    callback.on_log(arguments, state(0), None, logs={"eval_loss": 3.0}, model=MODEL)
    train(callback, arguments, made_up(1, 2))
    callback.on_log(arguments, state(2), None, logs={"eval_loss": 1.0}, model=MODEL)
    callback.on_save(arguments, state(2), None, model=MODEL)
    run = runmirror.read_run(f"{arguments.output_dir}/runmirror")
    assert [row.step for row in run.rows() if not row.summary] == [0, 1, 2, 2]
    assert (run.summary["eval_loss"], run.summary["train_loss"], run.status) == (1.0, 0.2, "finished")
    assert len(run.checkpoints) == 2


def test_other_ranks_write_nothing(arguments: Arguments) -> None:
    train(RunMirrorCallback(), arguments, made_up(), main=False)
    assert not Path(arguments.output_dir).exists()


def test_a_nan_that_is_shown_as_zero_is_marked(arguments: Arguments) -> None:
    """loss 0.0 beside grad_norm NaN gets the mark; an honest zero, and a loss that is NaN itself, don't."""
    logged = [(0.0, math.nan), (0.0, 0.0), (math.nan, math.nan), (0.0, math.inf), (0.0, None)]
    rows = [{"_global_step": n, "loss": loss, "grad_norm": norm} for n, (loss, norm) in enumerate(logged)]
    train(RunMirrorCallback(), arguments, rows)
    marks = [row.get("runmirror/hidden_nan") for row in written(arguments.output_dir)]
    assert marks == [1, None, None, 1, None]


def test_prefixes_are_those_of_transformers(arguments: Arguments) -> None:
    train(RunMirrorCallback(prefixes=True), arguments, [{"_global_step": 1, "loss": 1, "eval_a/b": 2, "test_c": 3}])
    (row,) = written(arguments.output_dir)
    assert {key for key in row if key[0] != "_"} == {"step", "train/loss", "eval/a/b", "test/c"}


def test_what_can_be_wrong_is_told_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(runmirror.exceptions.UnknownSinkError, match="tensorboard"):
        RunMirrorCallback(report_to="tensorbord")
    monkeypatch.setenv("RUNMIRROR_REPORT_TO", "mlfow")
    with pytest.raises(runmirror.exceptions.UnknownSinkError, match="mlflow"):
        RunMirrorCallback()


def test_a_log_that_cannot_be_opened_stops_nothing(
    arguments: Arguments, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One error for the whole training; once the place is free the next row is written."""
    (tmp_path / "grpo").write_text("a file where the folder should be")
    callback = RunMirrorCallback()
    callback.on_train_begin(arguments, state(0), None, model=MODEL)
    for step in (1, 2, 3):
        if step == 3:
            (tmp_path / "grpo").unlink()
        callback.on_log(arguments, state(step), None, logs={"loss": 1.0, 7: "odd key"}, model=MODEL)
    callback.on_train_end(arguments, state(3), None)
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert [row["step"] for row in written(arguments.output_dir)] == [3]


def test_a_tracker_that_is_told_twice_is_named_once(arguments: Arguments, caplog: pytest.LogCaptureFixture) -> None:
    """TRL's own report_to=["dummy"] beside ours: one warning, from the main process."""
    arguments.report_to = ["dummy", "none"]
    for main in (True, False):
        callback = RunMirrorCallback(report_to="dummy")
        callback._options["report_to"] = None  # only the warning is looked at
        callback.on_train_begin(arguments, state(0, main), None, model=MODEL)
        callback.on_train_end(arguments, state(0, main), None)
    assert [r.getMessage() for r in caplog.records if "two runs" in r.getMessage()] == [
        "dummy gets two runs: one of the Trainer's report_to, one of runmirror's"
    ]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """transformers' table of integrations."""
    held: dict[str, Any] = {}
    for name in ("transformers.integrations", "transformers.integrations.integration_utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    utils: Any = sys.modules["transformers.integrations.integration_utils"]
    utils.INTEGRATION_TO_CALLBACK = held
    sys.modules["transformers.integrations"].integration_utils = utils  # type: ignore[attr-defined]
    return held


def test_enable_adds_one_name(table: dict[str, Callable[[], Any]]) -> None:
    """``report_to="runmirror"`` finds a class that is called without arguments."""
    from runmirror_trl import enable

    enable()
    assert isinstance(table["runmirror"](), RunMirrorCallback)
