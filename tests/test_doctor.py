"""``runmirror doctor``: each thing that can be wrong is told with one fix, and nothing is written."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from runmirror import doctor, start
from runmirror.find import Found, open_run
from runmirror.mirror import Mirror
from runmirror.sinks import checks
from runmirror.sinks.base import Check
from runmirror.sinks.registry import make_sink
from runmirror.state import peek
from runmirror.testing import DummyOptions, DummySink
from tests.logs import flat_log, train_row, write_rows
from tests.test_cli import runmirror


def problems(tmp_path: Path, to: str = "dummy", paths: tuple[str, ...] = ("runs",), **options: Any) -> dict[str, Check]:
    """What is wrong, by name; each with a fix."""
    if to == "dummy":
        options = {"folder": str(tmp_path / "dummy")} | options
    found = [check for check in doctor.examine([tmp_path / path for path in paths], to, options) if not check.ok]
    assert all(check.fix for check in found)
    return {check.name: check for check in found}


def everything(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_a_healthy_machine_has_no_problem(tmp_path: Path) -> None:
    """Exit 0, a line per check with what was found, for our own and foreign logs; no file or folder is made."""
    flat_log(tmp_path / "runs" / "foreign")
    with start(tmp_path / "runs" / "own", {}) as run:
        run.log_metrics({"loss": 1.0})
    before = everything(tmp_path)
    done = runmirror("doctor", "runs", "--to", "tensorboard", "--logdir", "tb", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "ok       runs: 2 below runs: 1 runmirror, 1 tinker-cookbook; 13 rows" in done.stdout
    assert f"ok       logdir: {tmp_path}/tb can be made" in done.stdout
    assert f"ok       state: {tmp_path}/home can be made" in done.stdout
    assert "ok       tensorboard: 2." in done.stdout
    assert done.stdout.endswith("All is well.\n")
    assert everything(tmp_path) == before


def test_as_json_with_problems(tmp_path: Path) -> None:
    """Exit 3 and one JSON object: ok false, and each check with name, ok, found and fix."""
    done = runmirror("doctor", "nowhere", "--to", "dummy", "--json", cwd=tmp_path)
    told = json.loads(done.stdout)
    assert (done.returncode, done.stderr, told["ok"]) == (3, "", False)
    (wrong,) = [check for check in told["checks"] if not check["ok"]]
    assert wrong.keys() == {"name", "ok", "found", "fix"}
    assert "nowhere does not exist" in wrong["found"]
    assert list(tmp_path.iterdir()) == []


def test_a_problem_is_followed_by_its_fix(tmp_path: Path) -> None:
    """Exit 3; the line after a problem says what to do; the last line counts."""
    flat_log(tmp_path / "runs" / "a")
    done = runmirror("doctor", "runs", "nowhere", "--to", "tensorbord", cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert (done.returncode, lines[-1]) == (3, "2 problems.")
    assert [line.startswith("         fix: ") for line in lines].count(True) == 2
    assert any("did you mean 'tensorboard'" in line for line in lines)


@pytest.mark.parametrize(
    ("to", "options", "name", "told"),
    [
        ("tensorbord", {}, "sink", "did you mean 'tensorboard'"),
        ("tensorboard", {"logdri": "x"}, "options", "did you mean 'logdir'"),
        ("tensorboard", {"logdir": "gs://"}, "options", "names no bucket"),
        ("dummy", {"transient": 2}, "options", "'transient'"),
    ],
)
def test_a_wrong_sink_or_option(tmp_path: Path, to: str, options: dict[str, Any], name: str, told: str) -> None:
    """One problem that names it; the runs are looked at all the same."""
    flat_log(tmp_path / "runs" / "a")
    found = problems(tmp_path, to, **options)
    assert list(found) == [name]
    assert told in found[name].found


def test_broken_lines_are_named(tmp_path: Path) -> None:
    """The run, and file and line of the first three."""
    rows = [train_row(step) for step in range(4)]
    path = write_rows(tmp_path / "runs" / "a" / "metrics.jsonl", rows)
    path.write_text(path.read_text() + "{broken\n" * 5 + json.dumps(train_row(9)) + "\n")
    found = problems(tmp_path)["log"]
    assert found.found.startswith("a: metrics.jsonl:5: broken line, metrics.jsonl:6: ")
    assert found.found.endswith("and 2 more")


def test_a_log_that_cannot_be_read(tmp_path: Path) -> None:
    """Named with its error; the others are counted."""
    flat_log(tmp_path / "runs" / "a")
    (tmp_path / "runs" / "b" / ".runmirror").mkdir(parents=True)
    (tmp_path / "runs" / "b" / ".runmirror" / "run.json").write_text("{}")
    (tmp_path / "runs" / "b" / "metrics.jsonl").mkdir()
    assert problems(tmp_path)["log"].found.startswith("b: IsADirectoryError")


def test_another_mirror_at_work(tmp_path: Path) -> None:
    """A problem while its lock is held, with its process; none after; one that takes the lock meanwhile is not disturbed."""
    flat_log(tmp_path / "runs" / "a")
    source, folder = open_run(Found(str(tmp_path / "runs" / "a"), "a"))
    sink = DummySink(DummyOptions(folder=str(tmp_path / "dummy")))
    with Mirror(source, sink, folder) as mirror:
        mirror.deliver(patience=0)
        found = problems(tmp_path)["other mirrors"]
        assert f"a: process {os.getpid()} on {socket.gethostname()} mirrors it" in found.found
        assert "other mirrors" not in problems(tmp_path, folder=str(tmp_path / "elsewhere"))
    assert problems(tmp_path) == {}


def test_a_mirror_on_another_host(tmp_path: Path) -> None:
    """A problem while its heartbeat is fresh; none when that stopped."""
    flat_log(tmp_path / "runs" / "a")
    source, folder = open_run(Found(str(tmp_path / "runs" / "a"), "a"))
    sink = DummySink(DummyOptions(folder=str(tmp_path / "dummy")))
    with Mirror(source, sink, folder) as mirror:
        mirror.deliver(patience=0)
        path = mirror.state.path
    for age, busy in ((1.0, True), (1000.0, False)):
        state = json.loads(path.read_bytes())
        state["owner"] = {"host": "gpu7", "pid": 4711, "heartbeat": time.time() - age}
        path.write_text(json.dumps(state))
        found = problems(tmp_path)
        assert bool(found) is busy
        assert not busy or "process 4711 on gpu7" in found["other mirrors"].found


def test_state_of_a_newer_version(tmp_path: Path) -> None:
    """Told with the upgrade."""
    flat_log(tmp_path / "runs" / "a")
    source, folder = open_run(Found(str(tmp_path / "runs" / "a"), "a"))
    sink = make_sink("dummy", {"folder": str(tmp_path / "dummy")})
    with Mirror(source, sink, folder) as mirror:
        mirror.deliver(patience=0)
        path = mirror.state.path
    assert peek(folder, "dummy", source.identity.run_id, sink.destination(), "last") is not None
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"format": 99}))
    assert "state format 99" in problems(tmp_path)["cursor"].found


def test_folders_that_are_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A logdir or RUNMIRROR_HOME below a file is a problem with the option that names another."""
    flat_log(tmp_path / "runs" / "a")
    (tmp_path / "file").touch()
    monkeypatch.setenv("RUNMIRROR_HOME", str(tmp_path / "file" / "home"))
    found = problems(tmp_path, "tensorboard", logdir=str(tmp_path / "file" / "tb"))
    assert "--logdir DIR" in found["logdir"].fix
    assert "RUNMIRROR_HOME" in found["state"].fix


def test_folders_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A logdir in a read-only folder is a problem (the answer of the system is replaced: root may write anywhere)."""
    flat_log(tmp_path / "runs" / "a")
    (tmp_path / "locked").mkdir(mode=0o500)
    access = os.access
    monkeypatch.setattr(checks.os, "access", lambda path, mode: path != tmp_path / "locked" and access(path, mode))
    found = problems(tmp_path, "tensorboard", logdir=str(tmp_path / "locked" / "tb"))["logdir"]
    assert found.found == f"{tmp_path}/locked can't be written"


def test_a_folder_nobody_may_look_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home of a user there isn't, and a logdir below a folder that is closed, are told, not raised."""
    flat_log(tmp_path / "runs" / "a")
    monkeypatch.setenv("RUNMIRROR_HOME", "~no-such-user/state")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o000)
    try:
        found = doctor.examine([tmp_path / "runs"], "tensorboard", {"logdir": str(closed / "tb")})
    finally:
        closed.chmod(0o700)
    assert {"state", "logdir"} <= {check.name for check in found}


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under 500 MB free is a problem."""
    flat_log(tmp_path / "runs" / "a")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    assert problems(tmp_path)["disk"].found.startswith("0.0 GB free")


def test_a_sink_whose_check_fails_or_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A problem with the error; a hang is given up after the deadline."""
    flat_log(tmp_path / "runs" / "a")
    release = threading.Event()

    def hangs(self: DummySink) -> list[Check]:
        release.wait(30)
        return []

    def fails(self: DummySink) -> list[Check]:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(DummySink, "check", fails)
    assert "ConnectionError: no route to host" in problems(tmp_path)["tracker"].found
    monkeypatch.setattr(DummySink, "check", hangs)
    monkeypatch.setattr(doctor, "SINK_SECONDS", 0.05)
    assert "check did not return within 0.05 s" in problems(tmp_path)["tracker"].found
    release.set()
