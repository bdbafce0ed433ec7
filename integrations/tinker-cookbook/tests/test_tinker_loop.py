"""tinker-cookbook's own RL loop on clients that answer at random. It needs tinker-cookbook in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import runmirror
from integrations.installed import installed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not installed("tinker_cookbook"),
        reason="in an environment of its own: pip install torch==2.13.0, then pip install tinker-cookbook",
    ),
]
LOOP = Path(__file__).with_name("stub_loop.py")


def loop(folder: Path, *arguments: str) -> None:
    source = Path(__file__).parents[1] / "src"
    path = os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH")]))
    line = [sys.executable, str(LOOP), str(folder), *arguments]
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_loop_attaches_and_mirrors(tmp_path: Path) -> None:
    """What the loop logged is in our log, and every point of it in the tracker; then it resumes with two more steps."""
    log = tmp_path / "tinker" / "runmirror"
    for steps in ("4", "6"):
        loop(tmp_path, steps, "tensorboard")
        logged = lines(tmp_path / "logged.jsonl")
        rows = lines(log / "metrics.jsonl")
        assert len(rows) == len(logged) > 3
        for row, one in zip(rows, logged, strict=True):
            assert {key: value for key, value in row.items() if key[0] != "_"} == {
                k: v for k, v in one.items() if v is not None
            }
        result = runmirror.verify([log], "tensorboard", {"logdir": str(tmp_path / "tensorboard-mirror")})
        assert result.ok
        assert result.totals()["matching"] == result.totals()["points"] > 100
    run = runmirror.read_run(log)
    assert (run.status, run.config["learning_rate"]) == ("finished", 1e-4)
    assert run.metrics(["env/all/reward/total"])["step"] == [*range(6)]


def test_its_log_path_is_mirrored_without_code(tmp_path: Path) -> None:
    """``runmirror mirror`` over the folder that tinker-cookbook writes: every point, and nothing is written into it."""
    loop(tmp_path, "4")
    folder = tmp_path / "tinker"
    before = {path.name for path in folder.iterdir()}
    follow = [sys.executable, "-m", "runmirror", "mirror", str(folder), "--to", "tensorboard", "--logdir", "tb"]
    done = subprocess.run([*follow, "--exit-idle", "1s"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = runmirror.verify([folder], "tensorboard", {"logdir": str(tmp_path / "tb")})
    assert (result.ok, result.totals()["missing"]) == (True, 0)
    assert result.totals()["matching"] > 100
    assert {path.name for path in folder.iterdir()} == before
