"""TRL's completions as rollouts, replayed with files as TRL writes them: after ``on_log``, under the name of the step."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import runmirror
from integrations.installed import installed

if not installed("transformers"):  # its one class that is needed has no behaviour of its own here
    stand_in = ModuleType("transformers")
    stand_in.TrainerCallback = type("TrainerCallback", (), {})  # type: ignore[attr-defined]
    sys.modules.setdefault("transformers", stand_in)

from runmirror_trl import RunMirrorCallback

Row = tuple[Any, Any, float | None, float | None]  # prompt, completion, and what two reward functions gave


def tokenizer(texts: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
    """One token per word."""
    assert not add_special_tokens
    return {"input_ids": [[0] * len(text.split()) for text in texts]}


class Training:
    """The calls of a Trainer on its callback, and TRL's files."""

    def __init__(self, folder: Path, **more: Any) -> None:
        arguments = {"output_dir": str(folder), "run_name": None, "report_to": [], "log_completions": True}
        self.args = SimpleNamespace(**arguments, reward_weights=[1.0, 0.5], to_dict=dict, **more)
        self.folder = folder
        self.callback = RunMirrorCallback()
        self.state = SimpleNamespace(global_step=0, is_world_process_zero=True)

    def begin(self, step: int = 0) -> None:
        self.state.global_step = step
        self.callback.on_train_begin(self.args, self.state, None)

    def log(self, step: int, rows: list[Row], prefix: str = "", new: bool = True, **logs: float) -> None:
        self.state.global_step = step
        rewards = {f"{prefix}reward": 0.0, f"{prefix}rewards/digits/mean": 0.0, f"{prefix}rewards/length/mean": 0.0}
        logs = {f"{prefix}loss": 1.0} | (rewards if new else {}) | logs
        self.callback.on_log(self.args, self.state, None, logs=logs, processing_class=tokenizer)
        self.write(step, rows)

    def write(self, step: int, rows: list[Row]) -> None:
        pyarrow = pytest.importorskip("pyarrow", reason="pip install pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet", reason="pip install pyarrow")
        columns = {
            "step": [step] * len(rows),
            "prompt": [row[0] for row in rows],
            "completion": [row[1] for row in rows],
            "digits": pyarrow.array([row[2] for row in rows], pyarrow.float64()),
            "length": pyarrow.array([row[3] for row in rows], pyarrow.float64()),
            "answer": ["12"] * len(rows),
            "advantage": [0.25] * len(rows),
        }
        (self.folder / "completions").mkdir(parents=True, exist_ok=True)
        parquet.write_table(pyarrow.table(columns), self.folder / "completions" / f"completions_{step:05d}.parquet")

    def save(self) -> None:
        self.callback.on_save(self.args, self.state, None)

    def end(self) -> None:
        self.callback.on_train_end(self.args, self.state, None)

    def rollouts(self, split: str = "train") -> list[dict[str, Any]]:
        return list(runmirror.read_run(self.folder / "runmirror").rollouts(split=split))

    def rewards(self, *splits: str) -> dict[tuple[str, int], list[float]]:
        found: dict[tuple[str, int], list[float]] = {}
        for one in (one for split in ("train", *splits) for one in self.rollouts(split)):
            found.setdefault((one["split"], one["iteration"]), []).append(one["total_reward"])
        return found


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path / "grpo")


def test_each_completion_is_a_trajectory_of_its_prompts_group(training: Training) -> None:
    """Groups by prompt, weighted rewards by function, tokens, the extra column, and the conversation."""
    training.begin()
    chat = [{"role": "user", "content": "7 + 5"}]
    said = [{"role": "assistant", "content": "it is 12"}]
    training.log(
        1, [(chat, said, 1.0, 2.0), (chat, said, math.nan, -2.0), ([chat[0] | {"content": "2"}], said, None, None)]
    )
    training.end()
    first, second, other = training.rollouts()
    assert [(one["group_idx"], one["traj_idx"]) for one in (first, second, other)] == [(0, 0), (0, 1), (1, 0)]
    assert (first["split"], first["iteration"], first["total_reward"]) == ("train", 1, 2.0)
    assert first["trajectory_metrics"] == {"rewards/digits": 1.0, "rewards/length": 2.0, "advantage": 0.25}
    turn = first["steps"][0]
    assert (turn["ob_len"], turn["ac_len"], turn["logs"]) == (3, 3, {"answer": "12"})
    assert second["total_reward"] == -1.0, "of the function that gave one"
    assert math.isnan(other["total_reward"])
    talk = next(iter(runmirror.read_run(training.folder / "runmirror").conversations(1)))
    assert talk.messages == [*chat, *said]


def test_a_file_is_taken_once_as_what_its_row_was(training: Training) -> None:
    """An evaluation replaces the file of training, with its rows behind old ones; a step may repeat completions."""
    training.begin()
    train: list[Row] = [("a", "1", 1.0, 0.0), ("a", "2", 2.0, 0.0)]
    training.log(1, train)
    training.log(2, train, new=False)  # trained on the same once more
    training.log(2, [train[1], ("b", "3", 3.0, 0.0)], prefix="eval_", eval_runtime=0.1)
    training.callback.on_evaluate(training.args, training.state, None)
    assert training.rewards("eval") == {("train", 1): [1.0, 2.0], ("eval/eval", 2): [3.0]}
    training.log(3, [("c", "4", 4.0, 0.0)])
    training.save()
    (training.folder / "completions" / "completions_00003.parquet").unlink()
    training.log(4, [("c", "5", 5.0, 0.0)])
    training.log(4, [("c", "5", 5.0, 0.0)], new=False, train_runtime=1.0)
    training.end()
    expected = {("train", 1): [1.0, 2.0], ("train", 3): [4.0], ("train", 4): [5.0], ("eval/eval", 2): [3.0]}
    assert training.rewards("eval") == expected


def test_a_resume_takes_its_own_files_only(training: Training) -> None:
    """Killed after step 3 and resumed from 2: step 3 is what the resumed training said, once; 2 is as it was."""
    training.begin()
    training.log(2, [("a", "1", 1.0, 0.0)])
    training.save()
    training.log(3, [("a", "2", 2.0, 0.0)])
    assert training.callback.run is not None
    training.callback.run.finish("killed")
    training.write(2, [("a", "changed", 9.0, 0.0)])
    resumed = Training(training.folder)
    resumed.begin(step=2)
    resumed.log(3, [("a", "3", 3.0, 0.0)])
    resumed.end()
    assert resumed.rewards() == {("train", 2): [1.0], ("train", 3): [3.0]}


def test_an_evaluation_after_training_is_taken(training: Training) -> None:
    """By name, when there are several; the log is closed again."""
    training.begin()
    training.log(1, [("a", "1", 1.0, 0.0)])
    training.end()
    training.log(1, [("b", "2", 2.0, 0.0)], prefix="eval_", eval_hard_runtime=0.1)
    training.callback.on_evaluate(training.args, training.state, None)
    assert training.rewards("hard") == {("train", 1): [1.0], ("eval/hard", 1): [2.0]}
    assert runmirror.read_run(training.folder / "runmirror").status == "finished"


def test_trouble_is_told_once_and_stops_nothing(
    training: Training, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that are broken, and no pyarrow; the rows are written all the same. Other ranks read nothing."""
    training.begin()
    for step in (1, 2, 3):
        training.log(step, [("a", "1", 1.0, 0.0)])
        (training.folder / "completions" / f"completions_{step:05d}.parquet").write_bytes(b"PAR1 torn")
    training.save()
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    for step in (4, 5):
        training.state.global_step = step
        row = {"loss": 1.0, "reward": 0.0}
        training.callback.on_log(training.args, training.state, None, logs=row)
    training.end()
    told = [record.getMessage() for record in caplog.records if "completions" in record.getMessage()]
    assert len(told) == 2
    assert "completions_00001.parquet" in told[0]
    assert "pip install pyarrow" in told[1]
    assert len(list(runmirror.read_run(training.folder / "runmirror").rows())) == 5
    training.state.is_world_process_zero = False
    training.callback._completions.expect(training.args, training.state, {"reward": 1.0}, None)
    assert training.callback._completions.expected is None
