"""SIGKILL of a real import into W&B while wandb's own process lives on; and live runs beside a W&B run of one's own.

What is in the end is what the loopback server holds: every row of the log, none of them twice.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import runmirror
from runmirror.sinks import wandb_process
from tests.logs import train_row, write_rows
from tests.servers.wandb import Fault, WandbServer, wandb_server

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not os.path.isdir("/proc"), reason="finds processes in /proc")]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[WandbServer]:
    with wandb_server() as held:
        monkeypatch.setenv("WANDB_BASE_URL", held.url)
        monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
        yield held
        wandb_process.end_idle()


def family(home: Path) -> dict[str, list[int]]:
    """The recorded processes of all workers below RUNMIRROR_HOME: "worker" and "cores"."""
    found: dict[str, list[int]] = {"worker": [], "cores": []}
    for name, pids in found.items():
        for path in (home / "wandb").glob(f"*/{name}"):
            with contextlib.suppress(OSError):
                pids += map(int, path.read_text().split())
    return found


def kill(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def test_thirty_kills_with_the_old_core_alive(server: WandbServer, tmp_path: Path) -> None:
    """Mirror and worker are killed at any moment while wandb's own process is stopped, as if it hung; half of these go on
    uploading when the next mirror, which ends them, has started."""
    path = write_rows(tmp_path / "run" / "metrics.jsonl", [train_row(n) for n in range(6000)])
    home = Path(os.environ["RUNMIRROR_HOME"])
    command = [sys.executable, "-m", "runmirror", "import", str(path.parent), "--to", "wandb", "--rewinds", "all"]
    chance = random.Random(5)
    kills = 0
    while kills < 30:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        began = time.monotonic()
        while not family(home)["cores"] and process.poll() is None and time.monotonic() < began + 60:
            time.sleep(0.01)
        time.sleep(chance.uniform(0.0, 0.5))
        found = family(home)
        for core in found["cores"]:
            kill(core, signal.SIGSTOP)
        for pid in (process.pid, *found["worker"]):
            kill(pid, signal.SIGKILL)
        process.wait()
        kills += 1
        if kills % 2:
            for core in found["cores"]:
                kill(core, signal.SIGCONT)
        (held,) = server.of() or [None]
        if held is not None and len(held.lines) == 6000:
            path.write_text(path.read_text() + "".join(f'{{"step": {6000 + kills}, "x": {n}}}\n' for n in range(200)))
            os.utime(path, (1.7e9, 1.7e9))
    assert runmirror.import_runs([path.parent], "wandb", rewinds="all").ok
    held = server.run()
    rows = path.read_text().count("\n")
    assert [row["_step"] for row in held.history] == list(range(rows))
    assert sorted(held.lines) == list(range(rows))
    assert runmirror.verify([path.parent], "wandb", rewinds="all").ok
    wandb_process.end_idle()
    assert list((home / "wandb").iterdir()) == []


TRAIN = """
import sys, time
import wandb, runmirror
if "own" in sys.argv:
    mine = wandb.init(project="own", id="mine", group="ours", settings=wandb.Settings(silent=True, console="off"))
run = runmirror.start("run", {"lr": 1}, report_to={"wandb": {"project": "p"}}, code=False)
run.log_metrics({"loss": 1.0}, 0)
while "own" in sys.argv and not run.urls:
    time.sleep(0.1)
for n in range(1, 20):
    run.log_metrics({"loss": 1 / (n + 1)}, n)
    if "own" in sys.argv:
        mine.log({"mine": n})
    time.sleep(float(sys.argv[1]))
while "refused" in sys.argv and run.status().sinks["wandb"].error is None:
    time.sleep(0.1)
run.finish(deadline=float(sys.argv[2]))
print(run.status().sinks["wandb"].state)
if "own" in sys.argv:
    mine.finish()
"""


def train(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "work").mkdir()
    command = [sys.executable, "-W", "ignore", "-c", TRAIN, *arguments]
    return subprocess.run(command, cwd=tmp_path / "work", capture_output=True, text=True, timeout=120, check=False)


def again(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Run the command that was printed, until it is done: the live mirror may be at one of its own last tries."""
    words = done.stderr.rpartition("To deliver it later: ")[2].split()
    for _ in range(20):
        if (
            subprocess.run([sys.executable, "-m", *words], capture_output=True, timeout=120, check=False).returncode
            == 0
        ):
            return words
        time.sleep(0.1)
    raise AssertionError(f"never done: {words}")


def test_a_run_of_ones_own_is_left_alone(server: WandbServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is open in the training process: it has its own rows only, ours joins its group, one line says how to have only
    one, and the statistics of the machine are those of the training process."""
    monkeypatch.setenv("WANDB_X_STATS_SAMPLING_INTERVAL", "1")
    done = train(tmp_path, "0.15", "60", "own")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "delivered"
    own, ours = server.run("own"), server.run("p")
    assert [row["mine"] for row in own.history] == list(range(1, 20))
    assert all("loss" not in row for row in own.history)
    assert [row["loss"] for row in ours.history] == [1 / (n + 1) for n in range(20)]
    assert (own.fields["groupName"], ours.fields["groupName"]) == ("ours", "ours")
    assert "your own W&B run mine is left alone" in done.stderr
    assert any("proc.memory" in line or "proc.cpu" in line for line in ours.events)
    assert (ours.state, ours.values()["runmirror"]["status"]) == ("finished", "finished")
    assert {path.name for path in (tmp_path / "work").iterdir()} == {"run", "wandb"}  # wandb's own is of the other run


def test_a_refusal_leaves_training_alone(server: WandbServer, tmp_path: Path) -> None:
    """Training ends as ever and is told; the command that it prints brings everything later."""
    server.faults.append(Fault("UpsertBucket", status=403))
    done = train(tmp_path, "0.01", "1", "refused")
    assert done.returncode == 0, done.stderr
    assert "wandb needs you" in done.stderr
    assert "To deliver it later: runmirror import" in done.stderr
    server.faults.clear()
    again(done)
    assert [row["loss"] for row in server.run("p").history] == [1 / (n + 1) for n in range(20)]


def test_offline_training_prints_the_command_that_delivers(
    server: WandbServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """WANDB_MODE=offline: nothing is sent, nothing waits, and the printed command works in the same environment."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    done = train(tmp_path, "0.01", "1")
    assert done.returncode == 0, done.stderr
    assert server.requests == []
    assert "mode=online" in again(done)
    assert len(server.run("p").history) == 20
