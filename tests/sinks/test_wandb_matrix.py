"""The oldest wandb that is supported passes the sink's tests too; the newest is what the other tests run with."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLDEST = re.findall(r'"wandb>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())[0]
TESTS = ["tests/sinks/test_wandb_conformance.py", "tests/sinks/test_wandb.py"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_oldest_wandb(pytestconfig: pytest.Config) -> None:
    """In a folder of its own, kept for the next time; skipped where it can't be installed."""
    assert pytestconfig.cache is not None
    folder = pytestconfig.cache.mkdir(f"wandb-{OLDEST}-py{sys.version_info[0]}{sys.version_info[1]}")
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        install = [sys.executable, "-m", "pip", "install", "-q", "--target", str(folder), f"wandb=={OLDEST}"]
        done = subprocess.run(install, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"wandb {OLDEST} can't be installed here: {done.stderr.strip().splitlines()[-1:]}")
        (folder / "complete").touch()
    paths = [str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    choice = "not (at_every_line or open_here or outage)"  # the longest ones
    command = [sys.executable, "-m", "pytest", "-q", "-n", "3", "-p", "no:cacheprovider", "-k", choice, *TESTS]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
    which = [sys.executable, "-c", "import wandb; print(wandb.__version__)"]
    assert subprocess.run(which, env=environment, capture_output=True, text=True, check=True).stdout.strip() == OLDEST
