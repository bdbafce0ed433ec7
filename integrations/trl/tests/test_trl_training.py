"""Real, tiny trainings of TRL on the CPU. They need torch and trl, which the tests of the repository do without.

GRPO runs where TRL is new, PPO where it is 1.12.0, the last that has it; README.md says how to run both.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import runmirror
from integrations.installed import installed

INSTALL = "pip install torch==2.13.0, then pip install"
grpo = pytest.mark.skipif(
    not (installed("torch") and installed("trl", "trainer/grpo_trainer.py")), reason=f"{INSTALL} trl"
)
ppo = pytest.mark.skipif(
    not (installed("torch") and installed("trl", "experimental/ppo")),
    reason=f"{INSTALL} trl==1.12.0, the last that has PPO",
)
mlflow = pytest.mark.skipif(
    not installed("sqlalchemy") or not installed("mlflow"), reason="pip install 'runmirror[mlflow-local]'"
)
pytestmark = pytest.mark.slow
TINY = Path(__file__).with_name("tiny.py")
SINKS = ("tensorboard", "mlflow")

_GRPO = """
num_tokens completions/mean_length completions/min_length completions/max_length completions/clipped_ratio
completions/mean_terminated_length completions/min_terminated_length completions/max_terminated_length
rewards/length_reward/mean rewards/length_reward/std rewards/digit_reward/mean rewards/digit_reward/std reward
reward_std frac_reward_zero_std kl entropy clip_ratio/low_mean clip_ratio/low_min clip_ratio/high_mean
clip_ratio/high_max clip_ratio/region_mean loss grad_norm learning_rate step_time epoch
"""
GRPO_KEYS = _GRPO.split()
_PPO = """
eps objective/kl objective/entropy objective/non_score_reward objective/rlhf_reward objective/scores
policy/approxkl_avg policy/clipfrac_avg loss/policy_avg loss/value_avg val/clipfrac_avg policy/entropy_avg
val/ratio val/ratio_var val/num_eos_tokens lr episode epoch
"""
PPO_KEYS = _PPO.split()


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., str]:
    """Run a Python command line in the test's folder, and give what it printed."""
    source = Path(__file__).parents[1] / "src"
    environment = os.environ | {
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH")])),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }

    def run(*command: str | Path, **extra: str) -> str:
        line = [sys.executable, *map(str, command)]
        done = subprocess.run(line, cwd=tmp_path, env=environment | extra, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (done.stdout[-3000:], done.stderr[-3000:])
        return done.stdout

    return run


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_log(log: Path, logged: Path) -> list[dict[str, Any]]:
    """Every call of ``on_log`` is a row, in order, with its keys, values and step."""
    rows = lines(log / "metrics.jsonl")
    told = lines(logged)
    assert len(rows) == len(told)
    for row, one in zip(rows, told, strict=True):
        final = "train_runtime" in one and "loss" not in one
        assert row.get("step") == (None if final else one["_global_step"])
        for key, value in one.items():
            if key != "_global_step" and isinstance(value, float) and not math.isfinite(value):
                assert key in row["_nonfinite"]
            elif key != "_global_step":
                assert row[key] == value, key
    return rows


def check_trackers(run: Callable[..., str], log: Path, keys: list[str]) -> None:
    """Both trackers hold every point of the log, under one run each, with all of ``keys``."""
    assert {*keys} <= {key for row in runmirror.read_run(log).rows() for key in row.scalars()}
    for sink in SINKS:
        result = json.loads(run("-m", "runmirror", "verify", log, "--to", sink, "--json"))
        assert result["ok"], result
        assert result["totals"]["matching"] == result["totals"]["points"] > len(keys)


def check_rollouts(log: Path, logged: Path) -> None:
    """Each row with new completions has its rollouts, with the rewards that it tells; no other row has any."""
    read = [one for split in ("train", "eval") for one in runmirror.read_run(log).rollouts(split=split)]
    told = lines(logged)
    for prefix, split in (("", "train"), ("eval_", "eval/eval")):
        rows = {one["_global_step"]: one for one in told if f"{prefix}reward" in one}
        assert rows.keys() == {one["iteration"] for one in read if one["split"] == split}
        for step, row in rows.items():
            found = [one for one in read if (one["split"], one["iteration"]) == (split, step)]
            assert len(found) == 4, "what TRL keeps: one generation batch"
            assert len({one["group_idx"] for one in found}) == 1
            assert all(one["steps"][0]["ac_len"] > 0 for one in found)
            if split == "train":  # an evaluation's row is about more completions than TRL keeps
                mean = statistics.fmean(one["total_reward"] for one in found)
                assert mean == pytest.approx(row["reward"], abs=1e-5)
                for name in ("rewards/length_reward", "rewards/digit_reward"):
                    mean = statistics.fmean(one["trajectory_metrics"][name] for one in found)
                    assert mean == pytest.approx(row[f"{name}/mean"], abs=1e-5)


@grpo
@mlflow
def test_grpo_is_written_mirrored_and_resumed(run: Callable[..., str], tmp_path: Path) -> None:
    """Four steps into TensorBoard and MLflow; then, from checkpoint 4, two more into the same log and the same runs."""
    log, logged = tmp_path / "grpo" / "runmirror", tmp_path / "logged.jsonl"
    run(TINY, "grpo", tmp_path, "--report-to", ",".join(SINKS))
    rows = check_log(log, logged)
    assert [row.get("step") for row in rows] == [1, 2, 2, 3, 4, 4, None]
    check_rollouts(log, logged)
    check_trackers(run, log, GRPO_KEYS + [key for key in rows[2] if key.startswith("eval_")])
    before = {path.name: json.loads(path.read_text()) for path in (log / ".runmirror/mirror").glob("*.json")}

    run(TINY, "grpo", tmp_path, "--report-to", ",".join(SINKS), "--steps", "6", "--resume")
    assert [row.get("step") for row in check_log(log, logged)] == [1, 2, 2, 3, 4, 4, None, 5, 6, 6, None]
    check_rollouts(log, logged)
    check_trackers(run, log, GRPO_KEYS)
    after = {path.name: json.loads(path.read_text()) for path in (log / ".runmirror/mirror").glob("*.json")}
    ids = [{name: state.get("tracker_run_id") for name, state in states.items()} for states in (before, after)]
    assert ids[0] == ids[1]
    read = runmirror.read_run(log)
    assert [one.name for one in read.checkpoints] == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert (read.config["max_steps"], read.config["model_config"]["model_type"]) == (4, "llama")


@grpo
def test_two_processes_write_one_log(run: Callable[..., str], tmp_path: Path) -> None:
    """Under torchrun each rank calls ``on_log``; the log has each row once. Chosen by name, its tracker by environment."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", TINY, "grpo", tmp_path]
    run(*launch, "--steps", "2", "--by-name", RUNMIRROR_REPORT_TO="tensorboard")
    log = tmp_path / "grpo" / "runmirror"
    rows = check_log(log, tmp_path / "logged.jsonl")
    assert [row.get("step") for row in rows] == [1, 2, 2, None]
    assert not (tmp_path / "grpo" / "runmirror-2").exists()
    done = runmirror.verify([log], "tensorboard", {"logdir": str(tmp_path / "tensorboard-mirror")})
    assert done.ok
    assert done.totals()["matching"] > len(GRPO_KEYS)


@ppo
@mlflow
def test_ppo_is_written_and_mirrored(run: Callable[..., str], tmp_path: Path) -> None:
    """Every key that PPO logs, in the log and in both trackers."""
    run(TINY, "ppo", tmp_path, "--report-to", ",".join(SINKS), "--steps", "3")
    log = tmp_path / "ppo" / "runmirror"
    rows = check_log(log, tmp_path / "logged.jsonl")
    assert len(rows) >= 3
    check_trackers(run, log, PPO_KEYS)
