"""A real training of Lightning. It needs torch, which the tests of the repository do without."""

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
    pytest.mark.skipif(not installed("lightning"), reason="pip install torch==2.13.0, then pip install lightning"),
]
TRAIN = Path(__file__).with_name("train.py")


@pytest.mark.parametrize("devices", [1, 2])
def test_a_training_is_written_and_mirrored(tmp_path: Path, devices: int) -> None:
    """A row per step, once whatever the number of processes; the result of the test after them; all in the tracker."""
    log = tmp_path / "runs" / "line"
    source = Path(__file__).parents[1] / "src"
    path = os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH")]))
    line = [sys.executable, str(TRAIN), str(log), "tensorboard", str(devices)]
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [*range(16 // devices)]
    run = runmirror.read_run(log)
    assert (run.status, run.config["lr"]) == ("finished", 0.1)
    assert rows[-1]["test_loss"] < rows[0]["loss"]
    assert run.metrics(["loss"])["step"] == [*range(16 // devices)]
    assert run.latest_checkpoint is not None
    assert os.path.isfile(str(run.latest_checkpoint.state_path))
    assert str(run.latest_checkpoint.state_path).startswith(str(log))
    result = runmirror.verify([log], "tensorboard", {"logdir": str(tmp_path / "tensorboard-mirror")})
    assert result.ok
    assert result.totals()["matching"] >= 2 * 16 // devices
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["line"]
