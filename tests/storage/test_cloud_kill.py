"""CloudStorage and the ends of processes: killed, at exit, after a fork; and the bill of a long run."""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runmirror.storage import CloudStorage, push_spool, spools, upload
from tests.forked import forked
from tests.servers.gcs import BUCKET, GcsServer, gcs_server
from tests.storage import cloud_writer

pytestmark = pytest.mark.slow
ROOT = f"{BUCKET}/exp/1"
URI = f"gs://{ROOT}"
METRICS = "metrics.jsonl"


@pytest.fixture
def server() -> Iterator[GcsServer]:
    with gcs_server() as server:
        yield server


def wait_for(until: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not until() and time.monotonic() < deadline:
        time.sleep(0.01)


class Writer:
    """A training process (:mod:`tests.storage.cloud_writer`), begun when this returns."""

    def __init__(
        self, server: GcsServer, folder: Path, how: str, count: int, pause: float = 0.002, home: Path | None = None
    ) -> None:
        command = [sys.executable, "-m", "tests.storage.cloud_writer", how, URI, json.dumps(server.options)]
        environment = os.environ | ({"RUNMIRROR_HOME": str(home)} if home is not None else {})
        self._out = folder / f"{secrets.token_hex(4)}.out"
        with self._out.open("wb") as out, self._out.with_suffix(".err").open("wb") as err:
            self.process = subprocess.Popen(
                [*command, str(count), str(pause)],
                stdout=out,
                stderr=err,
                env=environment,
                cwd=Path(__file__).parents[2],
            )
        wait_for(lambda: self.said() or self.process.poll() is not None)

    def said(self) -> list[int]:
        """The numbers of rows whose append has returned."""
        data = self._out.read_bytes()
        return [int(line) for line in data[: data.rfind(b"\n") + 1].split()]

    def errors(self) -> str:
        return self._out.with_suffix(".err").read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self, seconds: float = 100) -> int:
        return self.process.wait(seconds)


def steps(server: GcsServer) -> list[int]:
    data = server.contents(f"{ROOT}/{METRICS}") or b""
    assert data[-1:] in (b"\n", b"")
    return [json.loads(line)["step"] for line in data.splitlines()]


def test_twenty_kills_lose_and_double_nothing(server: GcsServer, tmp_path: Path) -> None:
    """SIGKILL at any moment, under errors and lost answers: every row whose append returned is there once, in order."""
    server.faults.error_rate, server.faults.lost_rate = 0.03, 0.05
    rng = random.Random(3)
    acknowledged = -1
    for number in range(20):
        out = tmp_path / f"{number}.out"
        out.touch()
        arguments = (os.environ["RUNMIRROR_HOME"], str(out), URI, json.dumps(server.options))
        child = forked(cloud_writer.write_until_killed, *arguments)
        wait_for(lambda out=out: out.stat().st_size)  # type: ignore[misc]
        time.sleep(rng.uniform(0.0, 0.3))
        child.kill()
        child.join()
        child.close()
        said = out.read_bytes()
        acknowledged = int(said[: said.rfind(b"\n")].split()[-1])
    server.faults.error_rate = server.faults.lost_rate = 0.0
    (left,) = spools()
    assert push_spool(left, server.options).unsynced == 0
    found = steps(server)
    assert found == list(range(len(found)))
    assert len(found) > acknowledged > 100
    reports = {name.rpartition("_")[2] for name in server.names(f"{ROOT}/train_iteration_")}
    assert {f"{step:06}.html" for step in range(0, acknowledged, 5)} <= reports
    assert all(stored.chunks[-1][-1:] in (b"\n", b"") for _, stored in server.history[f"{ROOT}/{METRICS}"])


def test_a_run_moves_between_machines(server: GcsServer, tmp_path: Path) -> None:
    """Killed on one, continued on the other, and back: what had been uploaded stays, no row is there twice."""
    homes = [tmp_path / "a", tmp_path / "b"]
    uploaded = 0
    for number in range(4):
        child = Writer(server, tmp_path, "close", 100_000, home=homes[number % 2])
        wait_for(lambda: len(steps(server)) > uploaded or child.process.poll() is not None)  # noqa: B023
        child.kill()
        assert child.said(), child.errors()
        assert len(steps(server)) > uploaded
        uploaded = len(steps(server))
    last = Writer(server, tmp_path, "close", 10, home=homes[0])
    assert last.end() == 0, last.errors()
    found = steps(server)
    assert found == list(range(len(found)))
    assert len(found) >= uploaded + 10


def test_a_living_writer_is_fenced_by_one_elsewhere(server: GcsServer, tmp_path: Path) -> None:
    """The first goes on training and ends in peace; not one of its later rows is in the object."""
    first = Writer(server, tmp_path, "close", 1500, home=tmp_path / "a")
    wait_for(lambda: steps(server) or first.process.poll() is not None)
    second = Writer(server, tmp_path, "close", 50, home=tmp_path / "b")
    assert second.end() == 0, second.errors()
    assert first.end() == 0, first.errors()
    assert "was taken over by process" in first.errors()
    found = steps(server)
    assert found == list(range(len(found)))
    assert first.said()[-1] > found[-1]


@pytest.mark.parametrize("how", ["return", "raise", "fork"])
def test_what_nobody_closed_is_uploaded_at_exit(server: GcsServer, how: str, tmp_path: Path) -> None:
    """The interpreter ends, with or without an exception, or a forked child did: all rows are in the object."""
    child = Writer(server, tmp_path, how, 20, 0.0)
    assert (child.end() != 0) == (how == "raise"), child.errors()
    assert steps(server) == list(range(21 if how == "fork" else 20))
    assert ("Traceback" in child.errors()) == (how == "raise")


@pytest.mark.parametrize("dead", ["down", "black hole"])
def test_a_dead_store_holds_no_exit_up(server: GcsServer, dead: str, tmp_path: Path) -> None:
    """Refused or silent while training: the process ends, the rows are in the spool, and a push brings them."""
    child = Writer(server, tmp_path, "return", 100, 0.01)
    server.faults.down = dead == "down"
    server.faults.latency = 3600.0 if dead == "black hole" else 0.0
    assert child.end() == 0, child.errors()
    server.faults.down, server.faults.latency = False, 0.0
    (left,) = spools()
    assert left.unsynced > 0
    push_spool(left, server.options)
    assert steps(server) == list(range(100))


def test_the_bill_of_a_long_run(server: GcsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 rows of 4 KB, uploaded every 12: at most 1.1 times their size goes up, nothing comes down, at most 2,000 class A
    operations; and at 200 random moments a reader finds whole rows, a prefix of the log."""
    monkeypatch.setattr(upload, "GAP", 0.0)
    rng = random.Random(4)
    line = json.dumps({"step": 0, "text": "x" * 4000}).encode()
    total = 0
    whole = 0
    size = len(line.replace(b'"step": 0', b'"step": %8d' % 0)) + 1
    looks: list[int] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            stored = server.history[f"{ROOT}/{METRICS}"]
            if stored:
                looks.append(stored[-1][1].size)
            done.wait(rng.uniform(0.0, 0.1))

    watcher = threading.Thread(target=look)
    watcher.start()
    with CloudStorage(URI, {**server.options, "upload_interval": 3600}) as storage:
        for number in range(10_000):
            row = line.replace(b'"step": 0', b'"step": %8d' % number) + b"\n"
            storage.append(METRICS, row)
            total += len(row)
            if number % 12 == 11:
                storage.flush()
    done.set()
    watcher.join()
    assert server.bytes_up <= 1.1 * total, server.bytes_up / total
    assert server.bytes_down == 0
    assert server.class_a <= 2000
    assert len(server.history[f"{ROOT}/{METRICS}"]) > 800
    sizes = [stored.size for _, stored in server.history[f"{ROOT}/{METRICS}"]]
    for moment in rng.sample(range(len(sizes)), 200):
        assert sizes[moment] % size == 0
        whole += 1
    assert whole == 200
    assert all(found % size == 0 for found in looks)
    data = server.contents(f"{ROOT}/{METRICS}") or b""
    assert [json.loads(row)["step"] for row in data.splitlines()[::997]] == list(range(0, 10_000, 997))
    assert len(data) == total


def test_pandas_reads_the_object_while_it_grows(server: GcsServer) -> None:
    """pd.read_json("gs://...", lines=True), by gcsfs's own default class in a process of its own."""
    code = (
        "import pandas as pd, sys, json\n"
        "options = json.loads(sys.argv[2])\n"
        "print(pd.read_json(sys.argv[1], lines=True, storage_options=options)['step'].sum())"
    )
    with CloudStorage(URI, {**server.options, "upload_interval": 3600}) as storage:
        for step in range(500):
            storage.append(METRICS, json.dumps({"step": step, "text": "x" * 1000}).encode() + b"\n")
            if step in (200, 400):
                storage.flush()
        found = subprocess.run(
            [sys.executable, "-c", code, f"{URI}/{METRICS}", json.dumps(server.options)],
            env=os.environ | {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}, capture_output=True, timeout=120
        )  # fmt: skip
        assert found.stdout.decode().strip() == str(sum(range(401))), found.stderr


def test_sigterm_can_be_answered_by_closing(server: GcsServer) -> None:
    """A handler that closes within the grace period leaves nothing behind."""
    code = (
        "import signal, sys, time, json\n"
        "from runmirror.storage import CloudStorage\n"
        "storage = CloudStorage(sys.argv[1], json.loads(sys.argv[2]))\n"
        "def end(*_):\n"
        "    storage.close(20)\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "for step in range(10**9):\n"
        "    storage.append('metrics.jsonl', b'{\"step\": %d}\\n' % step)\n"
        "    print(step, flush=True)\n"
        "    time.sleep(0.001)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, URI, json.dumps(server.options)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    time.sleep(0.3)
    child.send_signal(signal.SIGTERM)
    said = child.communicate(timeout=60)[0].split()
    assert child.returncode == 0
    assert len(steps(server)) >= len(said)
    assert spools() == []
