"""The sink as people have it: installed by pip, found by its entry point, used from the command line and live."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.logs import flat_log

pytestmark = pytest.mark.slow
SOURCE = Path(__file__).parents[1]
Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run Python in a folder where the plugin is installed and no network can be reached."""
    shutil.copytree(SOURCE, tmp_path / "source", ignore=shutil.ignore_patterns("tests", "__pycache__"))
    site = tmp_path / "site"
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target"]
    nowhere = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
    mine = {"PYTHONPATH": str(site), "TRACKIO_DIR": str(tmp_path / "trackio"), "RUNMIRROR_QUIET": "1"}

    def run(*command: str, ok: bool = True) -> str:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env=os.environ | nowhere | mine,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert not ok or done.returncode == 0, done.stderr
        return done.stdout

    run(*install, str(site), str(tmp_path / "source"))
    return run


LOOK = """
import json, sys
from trackio.sqlite_storage import SQLiteStorage as s
runs = s.get_runs(sys.argv[1])
logs = {run: [{k: v for k, v in row.items() if k != "timestamp"} for row in s.get_logs(sys.argv[1], run)] for run in runs}
print(json.dumps([logs, {run: s.get_run_config(sys.argv[1], run) for run in runs}]))
"""


def test_old_runs_are_imported_and_verified(run: Run, tmp_path: Path) -> None:
    """12 rows by an import, none by the second; every point compared; Trackio itself shows them, with the config."""
    flat_log(tmp_path / "runs" / "a")
    flat_log(tmp_path / "runs" / "b")
    for rows in (24, 0):
        told = json.loads(run("-m", "runmirror", "import", "runs", "--to", "trackio", "--json"))
        assert told["totals"]["rows"] == rows
    result = json.loads(run("-m", "runmirror", "verify", "runs", "--to", "trackio", "--json"))
    assert result["ok"]
    assert result["totals"]["matching"] == result["totals"]["points"] > 24
    logs, configs = json.loads(run("-c", LOOK, "runs"))
    assert sorted(logs) == ["a", "b"]
    steps = [row["step"] for row in logs["a"] if len(row) > 1]
    assert steps == [*range(12)]
    assert configs["a"]
    assert "trackio" in run("-m", "runmirror", "sinks", "trackio")
    assert "runmirror-trackio 0.1.0" in run("-m", "runmirror", "doctor", "runs", "--to", "trackio")


def test_a_run_is_mirrored_live(run: Run) -> None:
    """``report_to="trackio"``: delivered at the end, in the project of its folder; what Trackio can't take is named."""
    code = """
import runmirror
with runmirror.start("project/live", {"lr": 0.1}, report_to="trackio", code=False) as run:
    for step in range(20):
        run.log_metrics({"loss": 1 / (step + 1), "time": 1.0, "odd": float("nan")}, step)
print(run.status().sinks["trackio"].state)
"""
    assert run("-c", code).strip() == "delivered"
    logs, configs = json.loads(run("-c", LOOK, "project"))
    assert [row["loss"] for row in logs["live"] if "loss" in row] == [1 / (step + 1) for step in range(20)]
    assert configs["live"]["lr"] == 0.1
    result = json.loads(
        run("-m", "runmirror", "verify", "project/live", "--to", "trackio", "-o", "project=project", "--json")
    )
    assert (result["ok"], result["totals"]["known"]["rejected"]) == (True, 20)
