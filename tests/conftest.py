"""Shared fixtures: no test touches the user's state, environment or working directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.register_assert_rewrite("runmirror.testing.conformance")

SAMPLES = Path(os.environ.get("RUNMIRROR_SAMPLES", Path(__file__).parents[2] / "shared" / "samples"))


@pytest.fixture(autouse=True)
def _clean_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("WANDB_", "MLFLOW_", "TENSORBOARD_", "RUNMIRROR_", "SLURM_", "OMPI_")) or name == "RANK":
            monkeypatch.delenv(name)
    monkeypatch.setenv("RUNMIRROR_HOME", str(tmp_path / "home"))


@pytest.fixture
def samples() -> Path:
    """The folder of real logs beside the checkout."""
    if not SAMPLES.is_dir():
        pytest.skip("no folder of sample logs beside the checkout; the same shapes are tested on tests/logs.py")
    return SAMPLES
