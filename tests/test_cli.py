"""The command line as a user runs it: real processes, their output and exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runmirror.cli import common
from tests.logs import flat_log, train_row, write_rows
from tests.test_follow import until
from tests.test_importer import tree


def runmirror(*arguments: str | Path, cwd: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "runmirror", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, input=stdin, capture_output=True, text=True, timeout=120, check=False)


def test_import_says_what_it_did_and_where_to_look(tmp_path: Path) -> None:
    """Exit 0, one summary line, the line that opens TensorBoard; the default logdir is ./tensorboard-mirror."""
    flat_log(tmp_path / "runs" / "a")
    done = runmirror("import", "runs", "--to", "tensorboard", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 run: 1 complete; sent 12 rows, " in done.stdout
    assert f"tensorboard --logdir {tmp_path}/tensorboard-mirror --samples_per_plugin scalars=100000" in done.stdout
    assert len(tree(tmp_path / "tensorboard-mirror")) == 1


def test_import_as_json(tmp_path: Path) -> None:
    """The summary as one JSON object on stdout, and nothing else there."""
    flat_log(tmp_path / "runs" / "a")
    done = runmirror("import", "runs", "--to", "tensorboard", "--json", cwd=tmp_path)
    result = json.loads(done.stdout)
    assert (result["ok"], result["totals"]["rows"], result["runs"][0]["state"]) == (True, 12, "complete")


def test_dry_run_writes_nothing(tmp_path: Path) -> None:
    """The plan as a table and as JSON; no logdir, no state file."""
    flat_log(tmp_path / "runs" / "a")
    done = runmirror("import", "runs", "--to", "tensorboard", "--dry-run", cwd=tmp_path)
    assert (done.returncode, "new" in done.stdout, "12" in done.stdout) == (0, True, True)
    done = runmirror("import", "runs", "--to", "tensorboard", "--dry-run", "--json", cwd=tmp_path)
    assert [(run["name"], run["state"]) for run in json.loads(done.stdout)] == [("a", "new")]
    assert not (tmp_path / "tensorboard-mirror").exists()
    assert [path for path in (tmp_path / "home").rglob("*") if path.is_file()] == []


def test_options_reach_the_sink(tmp_path: Path) -> None:
    """``--logdir`` and ``-o``: the logdir given, without the excluded keys."""
    flat_log(tmp_path / "runs" / "a")
    options = ["--logdir", "tb", "-o", "exclude=held out/*,time/*"]
    done = runmirror("import", "runs", "--to", "tensorboard", *options, "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["totals"]["points"] == 12 * 8
    assert (tmp_path / "tb" / "a").is_dir()


def test_paths_from_stdin_globs_and_files(tmp_path: Path) -> None:
    """'-' takes a list of runs from stdin; a glob and a metrics file are runs too."""
    for name in ("a", "b", "c"):
        flat_log(tmp_path / "runs" / name)
    listed = runmirror("import", "-", "--to", "tensorboard", "--json", cwd=tmp_path, stdin="runs/a\n\nruns/b\n")
    assert [run["name"] for run in json.loads(listed.stdout)["runs"]] == ["a", "b"]
    arguments = ["runs/[ab]", "runs/c/metrics.jsonl"]
    globbed = runmirror("import", *arguments, "--to", "tensorboard", "--json", cwd=tmp_path)
    assert [run["name"] for run in json.loads(globbed.stdout)["runs"]] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere", "--to", "tensorboard"], "nowhere does not exist"),
        (["empty", "--to", "tensorboard"], "empty holds no run"),
        (["runs", "--to", "tensorbord"], "did you mean 'tensorboard'"),
        (["runs", "--to", "tensorboard", "-o", "logdri=x"], "did you mean 'logdir'"),
        (["runs", "--to", "tensorboard", "-o", "logdir"], "FIELD=VALUE"),
        (["runs", "--to", "tensorboard", "--timezone", "Mars"], "no such zone"),
        (["runs", "--to", "tensorboard", "--timezone", "Europe"], "no such zone"),
    ],
)
def test_an_error_is_one_plain_line(tmp_path: Path, arguments: list[str], told: str) -> None:
    """Exit 1 and one line on stderr that says what to do; the traceback with --debug."""
    flat_log(tmp_path / "runs" / "a")
    (tmp_path / "empty").mkdir()
    done = runmirror("import", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)
    assert told in done.stderr
    assert "Traceback" in runmirror("import", *arguments, "--debug", cwd=tmp_path).stderr


def test_a_run_that_is_not_whole_exits_3(tmp_path: Path) -> None:
    """Exit 3, the broken run named with its reason, the other one imported."""
    flat_log(tmp_path / "runs" / "a")
    broken = tmp_path / "runs" / "b"
    (broken / ".runmirror").mkdir(parents=True)
    (broken / ".runmirror" / "run.json").write_text("{}")
    (broken / "metrics.jsonl").mkdir()
    done = runmirror("import", "runs", "--to", "tensorboard", cwd=tmp_path)
    assert done.returncode == 3
    assert "b: IsADirectoryError" in done.stdout
    assert "1 complete" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="SIGINT")
def test_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    """Exit 130 and one line; the same command finishes it."""
    for number in range(4):
        write_rows(tmp_path / "runs" / str(number) / "metrics.jsonl", (train_row(step) for step in range(20_000)))
    command = [sys.executable, "-m", "runmirror", "import", "runs", "--to", "tensorboard"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not tree(tmp_path / "tensorboard-mirror"):
        pass
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "run the same command again" in told
    done = runmirror("import", "runs", "--to", "tensorboard", "--json", cwd=tmp_path)
    assert [run["state"] for run in json.loads(done.stdout)["runs"]] == ["complete"] * 4


@pytest.mark.slow
def test_demo_trains_and_mirrors(tmp_path: Path) -> None:
    """A log in runmirror-demo/1, then /2, each imported, and the line that opens them."""
    for number in (1, 2):
        done = runmirror("demo", "--iterations", "2", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "See it with: tensorboard --logdir" in done.stdout
        assert (tmp_path / "runmirror-demo" / str(number) / "metrics.jsonl").is_file()
    assert len(tree(tmp_path / "tensorboard-mirror")) == 2


@pytest.mark.parametrize(
    "said", [{"logdir": "gs://b/tb"}, {"pairs": ["logdir=gs://b/tb"]}, {"pairs": ["logging-dir=gs://b/tb"]}]
)
def test_a_logdir_in_a_cloud_gets_the_storage_options(said: dict[str, Any]) -> None:
    """However it was named; one on this machine does not."""
    assert common.options(storage=["project=mine"], **said)["storage_options"] == {"project": "mine"}
    assert "storage_options" not in common.options(storage=["project=mine"], logdir="tb")


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_again_ends_a_mirror_at_once(tmp_path: Path) -> None:
    """Though its sink hangs; the first one waits for what is on its way."""
    flat_log(tmp_path / "runs" / "a")
    command = [sys.executable, "-m", "runmirror", "mirror", "runs", "--to", "dummy", "-o", f"folder={tmp_path / 'd'}"]
    process = subprocess.Popen([*command, "-o", "hang=1"], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "following 1 run" in process.stderr.readline()
    until((tmp_path / "d").exists)
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.send_signal(signal.SIGINT)
    with process.stderr:
        assert process.wait(30) == -signal.SIGINT
