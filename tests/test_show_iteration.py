"""``runmirror show RUN --iteration N``."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

import runmirror
from tests.reports.groups import groups, trajectory
from tests.test_cli import runmirror as run_cli


def show(run: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_cli("show", run, *arguments, cwd=Path(run).parent)


@pytest.fixture
def run(tmp_path: Path) -> str:
    """A run with rollouts of one iteration, an evaluation, and an iteration without a report."""
    long = [trajectory(text="long " * 1000 + "\x1b[31m")]
    with runmirror.start(tmp_path / "run", code=False) as run:
        run.log_rollouts(3, groups(2, 2))
        run.evaluation("held out/v2", 3).log_rollouts([long])
        run.log_rollouts(4, groups(30, 2, 1), num_groups_to_log=0)
    return str(tmp_path / "run")


def test_what_was_said_and_how_it_was_graded(run: str) -> None:
    """Headings, roles, texts, thoughts, calls; then every trajectory."""
    done = show(run, "--iteration", "3")
    assert done.returncode == 0, done.stderr
    lines = [line.strip(" ─") for line in done.stdout.splitlines()]
    start = lines.index("Group 0 (guess): reward 0.875 / Trajectory 0: reward 1.000")
    assert lines[0] == "run  train  Iteration 3"
    assert lines[start + 1 : start + 10] == [
        "system", "Guess.", "user", "What is it?", "assistant", "Perhaps 0?", "I guess 0.", 'compare({"n": 0})',
        "tool (compare)",
    ]  # fmt: skip
    table = [line.split() for line in lines[lines.index("group  trajectory  turns  tokens  final  reward  tags") + 1 :]]
    assert table[:2] == [["0", "0", "3", "33", "0", "1", "guess"], ["0", "1", "3", "33", "-0.25", "0.75", "guess"]]
    assert len(table) == 4


def test_an_evaluation_by_its_name(run: str) -> None:
    """Long texts are cut and say so; with --full they are whole. No control character reaches the terminal."""
    done = show(run, "--iteration", "3", "--split", "held out/v2")
    assert "more characters (--full shows them)" in done.stdout
    full = show(run, "--iteration", "3", "--split", "held out/v2", "--full").stdout
    assert full.count("long") == 3000
    assert "\x1b" not in full
    assert "--full" not in full


def test_rollouts_without_a_report(run: str) -> None:
    """The table alone, its first lines unless all are asked for."""
    done = show(run, "--iteration", "4")
    assert "no conversations in its report" in done.stdout
    assert "and 20 more (--full shows them)" in done.stdout
    assert show(run, "--iteration", "4", "--full").stdout.count("guess") == 60


def test_as_json(run: str) -> None:
    """The same as data."""
    found = json.loads(show(run, "--iteration", "3", "--json").stdout)
    assert (found["iteration"], found["split"], found["title"]) == (3, "train", "Iteration 3")
    assert found["conversations"][1]["messages"] == trajectory(1)["messages"]
    assert len(found["rollouts"]) == 4


@pytest.mark.slow
def test_what_is_not_there(run: str) -> None:
    """One line, exit code 1; a command line that makes no sense, 2."""
    done = show(run, "--iteration", "9")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "no rollout file of iteration 9; there are 3, 4" in done.stderr
    done = show(run, "--iteration", "3", "--split", "other")
    assert done.returncode == 1
    assert "report of eval/held_out_v2" in done.stderr
    assert show(run, run, "--iteration", "3").returncode == 2
    assert show(run, "--iteration", "3", "--watch").returncode == 2


def test_real_logs(samples: Path) -> None:
    """Both layouts of tinker-cookbook."""
    for name in ("tinker_flat", "tinker_newlayout"):
        done = show(str(samples / name), "--iteration", "8", "--split", "test")
        assert done.returncode == 0, done.stderr
        assert "assistant" in done.stdout
