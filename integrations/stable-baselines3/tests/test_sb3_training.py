"""A real training of Stable-Baselines3. It needs torch, which the tests of the repository do without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import runmirror
from integrations.installed import installed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not installed("stable_baselines3"),
        reason="pip install torch==2.13.0, then pip install stable-baselines3",
    ),
]
TRAIN = Path(__file__).with_name("train.py")


def test_a_training_is_written_and_mirrored(tmp_path: Path) -> None:
    """Row for row what Stable-Baselines3's own JSON writer has; every point is in the tracker."""
    log = tmp_path / "runs" / "ppo"
    source = Path(__file__).parents[1] / "src"
    path = os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH")]))
    line = [sys.executable, str(TRAIN), str(log), "tensorboard"]
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    theirs = [json.loads(line) for line in (log / "progress.json").read_text().splitlines()]
    assert len(rows) == len(theirs) == 5
    for row, one in zip(rows, theirs, strict=True):
        assert {key: value for key, value in row.items() if key[0] != "_" and key != "step"} == pytest.approx(one)
    assert [row["step"] for row in rows] == [one["time/total_timesteps"] for one in theirs]
    result = runmirror.verify([log], "tensorboard", {"logdir": str(tmp_path / "tensorboard-mirror")})
    assert result.ok
    assert result.totals()["matching"] > 50
