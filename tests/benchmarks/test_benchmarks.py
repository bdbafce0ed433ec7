"""The benchmark itself runs from end to end. No time is asserted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TINY = ["--rounds", "1", "--writes", "30", "--paced", "5", "--kept", "5", "--runs", "2", "--run-rows", "20"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_it_prints_one_table() -> None:
    """A header and 24 lines of five cells, none empty but a ratio; of 5 rows killed after, runmirror keeps 5."""
    done = run("write", "live", "kill", "import", "read", *TINY, "--read-rows", "100")
    assert done.returncode == 0, done.stderr
    table = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 24
    for line in table:
        assert all(cell.strip() for cell in line.split("|")[1:5])
        assert line.count("|") == 6
    assert "| 5 of 5 | json: open, append, close | 5 of 5 |" in done.stdout


@pytest.mark.slow
def test_mlflow_is_measured() -> None:
    """Seven lines: a run and several, on two servers, and an import again."""
    done = run("mlflow", "--rounds", "1", "--mlflow-runs", "2", "--mlflow-rows", "5", "--mlflow-again", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n| import") == 7


@pytest.mark.slow
def test_the_cost_of_a_run_is_measured() -> None:
    """Four lines for each power of ten."""
    done = run("scale", "--scale-runs", "10", "--scale-rows", "5")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("10 runs") == 4


@pytest.mark.slow
def test_health_is_measured() -> None:
    """One line, of runs without a finding."""
    done = run("health", "--rounds", "1", "--runs", "3", "--run-rows", "70")
    assert (done.returncode, done.stdout.count("`runmirror health` of 3 runs x 70 rows x 50 keys")) == (0, 1), (
        done.stderr
    )


@pytest.mark.slow
def test_reports_are_measured() -> None:
    """Two lines; the JSON is at most twice the HTML, and indented it would be larger."""
    done = run("reports", "--rounds", "1", "--reports", "2")
    assert done.returncode == 0, done.stderr
    _, sizes = [line.split("|") for line in done.stdout.splitlines() if line.startswith("| `log_r") or "bytes" in line]
    assert float(sizes[2]) <= 2 < 10 * float(sizes[4])
    assert sizes[5].strip() > "1x"


@pytest.mark.slow
def test_wandb_is_measured() -> None:
    """Three lines: with one worker, with two, and again."""
    done = run("wandb", "--rounds", "1", "--wandb-runs", "2", "--wandb-rows", "5")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n| import") == 3


@pytest.mark.slow
def test_what_can_be_chosen() -> None:
    """Only the lines asked for; an unknown name is exit code 2 and tells the known ones."""
    assert run("read", "--rounds", "1", "--read-rows", "10").stdout.count("\n| reading") == 3
    done = run("nothing")
    assert (done.returncode, "write, live, kill, import, read, health, reports, mlflow" in done.stderr) == (2, True)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_mirror_of_many_live_runs_is_measured() -> None:
    """Three lines."""
    done = run("follow", "--follow-runs", "4", "--follow-rows", "3", "--follow-every", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n| `mirror` of 4 live runs") == 3
