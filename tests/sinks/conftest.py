"""Fixtures that the tests of one sink share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from runmirror.sinks import wandb_process
from tests.servers.wandb import WandbServer, wandb_server


@pytest.fixture(scope="module")
def wandb_running() -> Iterator[WandbServer]:
    """One server for all tests of the module."""
    with wandb_server() as held:
        yield held


@pytest.fixture(scope="module")
def wandb_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """RUNMIRROR_HOME for all tests of the module, so that they share wandb's processes; nothing is left in it."""
    folder = tmp_path_factory.mktemp("home")
    yield folder
    wandb_process.end_idle()
    assert not (folder / "wandb").exists() or list((folder / "wandb").iterdir()) == []


@pytest.fixture
def wandb_user(wandb_running: WandbServer, wandb_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    """The server, with the environment of somebody who uses it."""
    monkeypatch.setenv("WANDB_BASE_URL", wandb_running.url)
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setenv("RUNMIRROR_HOME", str(wandb_home))
    wandb_running.requests.clear()
    yield wandb_running
    wandb_running.faults.clear()
