"""The calls that Stable-Baselines3 makes of its writers, without it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import runmirror
from integrations.installed import installed

if not installed("stable_baselines3"):  # its base class has no behaviour of its own
    for name in ("stable_baselines3", "stable_baselines3.common", "stable_baselines3.common.logger"):
        sys.modules[name] = ModuleType(name)
    stand_in: Any = sys.modules["stable_baselines3.common.logger"]
    stand_in.KVWriter = type("KVWriter", (), {})

from runmirror_sb3 import RunMirrorWriter

DUMP = {"rollout/ep_rew_mean": np.float32(9.5), "time/fps": 812, "time/total_timesteps": 64, "train/loss": float("nan")}
NOT_IN_TENSORBOARD = {
    "rollout/ep_rew_mean": (),
    "time/fps": None,
    "time/total_timesteps": ("tensorboard",),
    "train/loss": (),
}


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_each_dump_is_a_row(tmp_path: Path) -> None:
    """At its environment step; what only TensorBoard leaves out is there; NaN, numpy and media do no harm."""
    writer = RunMirrorWriter(tmp_path / "ppo", {"lr": 3e-4}, code=False)
    writer.write(DUMP, NOT_IN_TENSORBOARD, 64)
    writer.write(DUMP | {"media": object()}, NOT_IN_TENSORBOARD | {"media": (), "time/fps": ("runmirror",)}, 128)
    writer.close()
    first, second = rows(tmp_path / "ppo")
    assert (first["step"], first["rollout/ep_rew_mean"], first["time/total_timesteps"]) == (64, 9.5, 64)
    assert first["_nonfinite"] == {"train/loss": "nan"}
    assert (second["step"], "time/fps" in second, [*second["_rejected"]]) == (128, False, ["media"])
    run = runmirror.read_run(tmp_path / "ppo")
    assert (run.status, run.config) == ("finished", {"lr": 3e-4})


def test_a_finished_log_is_left_alone(tmp_path: Path) -> None:
    for _ in range(2):
        writer = RunMirrorWriter(tmp_path / "ppo", code=False)
        writer.write(DUMP, {}, 64)
        writer.close()
    assert (len(rows(tmp_path / "ppo")), len(rows(tmp_path / "ppo-2"))) == (1, 1)
