"""Small logs in the shapes of transformers / TRL, prime-rl and verl, made in code.

Keys and shapes follow real runs (TRL 1.16 GRPO with an evaluation every second step; prime-rl's FileMonitor; verl's file
logger): up to three rows share a step, and key sets differ from row to row.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.logs import STARTED, write_rows

Rows = list[dict[str, Any]]


def grpo_history(steps: int, *, shift: float = 0.0, final: bool = False) -> Rows:
    """A log_history: a row per step, an evaluation at every second one, and the final numbers when asked."""
    rows: Rows = []
    for step in range(1, steps + 1):
        row = {"epoch": step / 8, "grad_norm": 0.5, "kl": 0.001 * step, "loss": 0.1 * step + shift, "step": step}
        if step % 2:  # generation happens every second step
            row |= {"completions/mean_length": 16.0, "reward": 0.2 * step + shift, "rewards/digit_reward/mean": 0.5}
        rows.append(row | {"step_time": 0.25})
        if step % 2 == 0:
            rows.append({"epoch": step / 8, "eval_loss": 0.2 * step, "eval_reward": 0.3 * step, "step": step})
    if final:
        rows.append({"epoch": steps / 8, "total_flos": 0.0, "train_loss": 0.31, "train_runtime": 12.5, "step": steps})
    return rows


def write_state(path: Path, history: Rows, *, step: int, max_steps: int = 8, modified: float = STARTED) -> Path:
    """A trainer_state.json as transformers writes it: sorted keys, two spaces, bare NaN tokens."""
    state = {
        "best_metric": None,
        "epoch": step / 8,
        "eval_steps": 2,
        "global_step": step,
        "is_world_process_zero": True,
        "log_history": history,
        "logging_steps": 1,
        "max_steps": max_steps,
        "num_train_epochs": 1,
        "save_steps": 4,
        "stateful_callbacks": {"TrainerControl": {"args": {"should_save": True}}},
        "train_batch_size": 4,
        "trial_params": None,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(state, indent=2, sort_keys=True) + "\n")
    os.utime(path, (modified, modified))
    return path


def output_dir(folder: Path, *, final: bool = False) -> Path:
    """An output_dir of a run of 8 steps with checkpoints 4 and 8, the model's config.json, and other files around."""
    for step in (4, 8):
        checkpoint = folder / f"checkpoint-{step}"
        write_state(checkpoint / "trainer_state.json", grpo_history(step), step=step, modified=STARTED + step)
        (checkpoint / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 32}))
        (checkpoint / "training_args.bin").write_bytes(b"\x80\x02never unpickled")
    if final:
        write_state(folder / "trainer_state.json", grpo_history(8, final=True), step=8, modified=STARTED + 9)
    return folder


def on_log_rows(ranks: int = 1) -> Rows:
    """What a callback's on_log saw in a run of 4 steps, from every rank, the others' rows first."""
    rows: Rows = []
    for row in grpo_history(4, final=True):
        seen = {"_global_step": row["step"]} | {key: value for key, value in row.items() if key != "step"}
        rows += [seen | {"_not_rank0": True, "loss": 99.0} for _ in range(ranks - 1)] + [seen]
    rows[ranks - 1] |= {"rewards/none/mean": None, "_types": {"rewards/none/mean": "NoneType"}}
    return rows


def prime_rl_rows() -> Rows:
    """prime-rl's metrics.jsonl: several rows per step, an evaluation that arrives late."""
    rows: Rows = [{"step": n, "time": STARTED + 10 * n, "reward/mean": 0.1 * n, "loss/mean": 1.0 - n} for n in range(5)]
    rows.insert(1, {"step": 0, "time": STARTED + 1, "progress/total_tokens": 128})
    return [*rows, {"step": 2, "time": STARTED + 45, "eval/aime/avg@4": 0.25}]


def verl_rows() -> Rows:
    """verl's file logger: the values one level down, NaN as null."""
    return [
        {
            "step": n,
            "data": {"actor/pg_loss": 0.5 * n, "critic/score/mean": None if n == 1 else 0.1 * n, "timing_s/step": 2.0},
        }
        for n in range(4)
    ]


def ray_trial(folder: Path, *, done: bool = False) -> Path:
    """The folder of a trial of Ray: results with nested values and what names the machine, and the configuration."""
    config = {"lr": 1e-4, "env_config": {"size": 3}}
    rows: Rows = []
    for n in range(1, 5):
        nested = {
            "env_runners": {"episode_return_mean": 2.5 * n, "hist_stats": {"lengths": [1, 2]}},
            "loss": None if n == 1 else 0.5,
        }
        about = {"training_iteration": n, "timesteps_total": 100 * n, "timestamp": int(STARTED) + 10 * n, "pid": 7}
        machine = {"hostname": "node", "node_ip": "10.0.0.1", "date": "2026-01-01", "trial_id": "ab", "config": config}
        rows.append(nested | about | machine | {"done": done and n == 4, "time_this_iter_s": 10.0})
    write_rows(folder / "result.json", rows)
    (folder / "params.json").write_text(json.dumps(config))
    (folder / "progress.csv").write_text("training_iteration\n1\n")
    return folder


def sb3_rows() -> Rows:
    """progress.json of Stable-Baselines3: keys that come and go, the environment steps among them."""
    rows: Rows = [
        {"time/iterations": n, "rollout/ep_rew_mean": 9.5 * n, "time/total_timesteps": 64 * n} for n in range(1, 5)
    ]
    for row in rows[1:]:
        row["train/loss"] = float("nan")
    return rows
