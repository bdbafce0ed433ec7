"""Shared fixtures: no test touches the user's state, environment or working directory."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers.mlflow import SHARED
from tests.servers.mlflow_quick import QuickServer, quick_server

pytest.register_assert_rewrite("runmirror.testing.conformance")

SAMPLES = Path(os.environ.get("RUNMIRROR_SAMPLES", Path(__file__).parents[2] / "shared" / "samples"))


def seconds(item: pytest.Item) -> float:
    """How long a test takes, as its marks say: ``slow(20)``, or a few seconds for ``slow`` alone."""
    return max((float(mark.args[0]) if mark.args else 3.0 for mark in item.iter_markers("slow")), default=0.0)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests first, then the modules that take longest: a long test that starts last would be waited for by a
    process that has nothing else to do. The rest stays in random order."""
    modules: Counter[Path] = Counter()
    for item in items:
        modules[item.path] += round(seconds(item))
    items.sort(key=lambda item: (-seconds(item) if seconds(item) >= 20 else 0.0, -modules[item.path]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``-n``: a process that is done takes over half of what another one has left (tests of a module stay together)."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getoption("dist") == "load" else None


@pytest.fixture(scope="session", autouse=True)
def _shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder for what the processes of ``-n`` make once for all of them."""
    base = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SHARED, str(base.parent if "PYTEST_XDIST_WORKER" in os.environ else base))
        yield


@pytest.fixture(scope="session")
def _mlflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[QuickServer]:
    with quick_server(tmp_path_factory.mktemp("mlflow")) as running:
        yield running


@pytest.fixture
def mlflow(_mlflow: QuickServer) -> QuickServer:
    """An MLflow server that the tests of this process share: each has experiments of its own."""
    if not _mlflow.answers():  # a test that failed had killed it
        _mlflow.kill()
        _mlflow.start()
    return _mlflow


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
