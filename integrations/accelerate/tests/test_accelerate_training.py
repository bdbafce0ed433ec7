"""Real training loops of accelerate. They need torch, which the tests of the repository do without."""

from __future__ import annotations

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
        not (installed("torch") and installed("accelerate")),
        reason="pip install torch==2.13.0, then pip install accelerate",
    ),
]
TRAIN = Path(__file__).with_name("train.py")


@pytest.mark.parametrize(("how", "processes"), [("name", 1), ("instance", 1), ("name", 2)])
def test_a_loop_is_written_and_mirrored(tmp_path: Path, how: str, processes: int) -> None:
    """20 rows of falling loss, once, whatever the number of processes; the tracker holds every point."""
    source = Path(__file__).parents[1] / "src"
    path = os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH")]))
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    line = [sys.executable, *launch, str(TRAIN), str(tmp_path), how, "tensorboard"]
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    run = runmirror.read_run(tmp_path / "line")
    columns = run.metrics()
    assert (columns["step"], {*columns["processes"]}) == ([*range(20)], {processes})
    assert columns["loss"][-1] < columns["loss"][0]
    assert (run.status, run.config) == ("finished", {"lr": 0.1, "steps": 20})
    result = runmirror.verify([tmp_path / "line"], "tensorboard", {"logdir": str(tmp_path / "tensorboard-mirror")})
    assert (result.ok, result.totals()["matching"]) == (True, 40)
