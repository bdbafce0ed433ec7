"""SIGKILL of training, of the child, and of the whole group, each followed by what a user would do next."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from runmirror.importer import import_runs
from runmirror.testing.dummy import read_dummy
from tests.test_live import until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name != "posix", reason="SIGKILL")]

TRAIN = """
import os, sys, time
import runmirror
rows = int(sys.argv[1])
run = runmirror.start("run", report_to={"dummy": {"folder": "dummy"}}, code=False)
first = 0 if run.status().last_step is None else run.status().last_step + 1
for i in range(first, first + rows):
    run.log_metrics({"i": i})
    os.write(1, b"%d\\n" % i)  # this row has returned
    time.sleep(0.001)
run.finish(sys.argv[2])
"""


class Job:
    """One log_path, trained and killed again and again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.told = folder / "returned"

    def train(
        self, rows: int, status: str = "failed", meddle: Callable[[subprocess.Popen[bytes]], None] | None = None
    ) -> int:
        """Train in a process; ``meddle`` is called once rows have returned. The exit code."""
        before = self.returned()
        with self.told.open("ab") as told:
            command = [sys.executable, "-c", TRAIN, str(rows), status]
            process = subprocess.Popen(command, cwd=self.folder, stdout=told, stderr=subprocess.DEVNULL)
        if meddle is not None:
            until(lambda: len(self.returned()) > len(before))
            meddle(process)
        return process.wait(120)

    def returned(self) -> list[int]:
        """The rows whose call returned."""
        return [int(line) for line in self.told.read_bytes().split(b"\n")[:-1]] if self.told.exists() else []

    def delivered(self) -> list[float]:
        held = read_dummy(self.folder / "dummy").get("run") if (self.folder / "dummy").exists() else None
        return [] if held is None else [points["i"] for *_, points in held.rows if points]

    def held(self) -> int:
        """Bytes that the tracker has."""
        return sum(path.stat().st_size for path in (self.folder / "dummy").glob("*.jsonl"))

    def child(self) -> int | None:
        """The process that mirrors now: it holds its log file open."""
        for entry in Path("/proc").iterdir():
            try:
                command = (entry / "cmdline").read_bytes()
                if b"runmirror.child" in command and os.readlink(entry / "cwd") == str(self.folder):
                    return int(entry.name)
            except (OSError, ValueError):
                continue
        return None

    def check(self) -> None:
        """Nothing that returned is lost, nothing is there twice."""
        assert set(self.returned()) <= set(self.delivered())
        assert self.delivered() == sorted(set(self.delivered()))


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def kill_after(seconds: float) -> Callable[[subprocess.Popen[bytes]], None]:
    def kill(process: subprocess.Popen[bytes]) -> None:
        time.sleep(seconds)
        process.kill()

    return kill


def test_training_killed_and_resumed(job: Job) -> None:
    """20 SIGKILLs of training, each resumed at once while the old child still drains; then a run to the end."""
    moment = random.Random(11)
    for _ in range(20):
        job.train(10_000, meddle=kill_after(moment.uniform(0, 0.2)))
    assert job.train(20, "finished") == 0
    job.check()
    assert read_dummy(job.folder / "dummy")["run"].statuses[-1:] == ["finished"]


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the child through /proc")
def test_the_child_killed(job: Job) -> None:
    """16 SIGKILLs of the child during one training run, every fourth in its start, the others once it delivers: training
    ends well, every row once."""
    moment = random.Random(12)
    killed = 0

    def kill_children(process: subprocess.Popen[bytes]) -> None:
        nonlocal killed
        while killed < 16 and process.poll() is None:
            pid = job.child()
            if pid is not None:
                if killed % 4:  # one that keeps dying in its start is waited for
                    held = job.held()
                    until(lambda: job.held() > held or job.child() != pid)  # noqa: B023
                time.sleep(moment.uniform(0, 0.2))
                try:
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
                except ProcessLookupError:
                    pass
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)

    assert job.train(1_000_000, meddle=kill_children) == -signal.SIGTERM
    until(lambda: set(job.returned()) <= set(job.delivered()))
    assert killed == 16
    job.check()


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the child through /proc")
def test_the_whole_group_killed(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """10 SIGKILLs of training and child together, as Slurm and Kubernetes do; resumed, or imported at the end."""
    moment = random.Random(13)

    def kill_group(process: subprocess.Popen[bytes]) -> None:
        until(lambda: job.child() is not None)
        time.sleep(moment.uniform(0, 0.3))
        child = job.child()
        process.kill()
        if child is not None:
            os.kill(child, signal.SIGKILL)

    for _ in range(10):
        job.train(10_000, meddle=kill_group)
    monkeypatch.chdir(job.folder)
    assert import_runs([job.folder / "run"], "dummy", {"folder": "dummy"}, rewinds="all", patience=0).ok
    job.check()
