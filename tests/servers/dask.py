"""A real Dask scheduler with workers, each a process of its own, on the loopback address."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Cluster:
    """Where the scheduler is, and the worker processes."""

    address: str
    workers: list[subprocess.Popen[bytes]]


@contextlib.contextmanager
def dask_cluster(folder: Path, workers: int = 2) -> Iterator[Cluster]:
    """A scheduler and its workers, until the block ends. ``folder`` takes their files and is their working directory."""
    folder.mkdir(parents=True, exist_ok=True)
    where = folder / "scheduler.json"
    environment = os.environ | {"DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "10"}
    common = ["--host", "127.0.0.1", "--no-dashboard"]

    def start(module: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-W", "ignore", "-m", f"distributed.cli.{module}", *common, *arguments]
        log = open(folder / f"{module}.log", "ab")  # noqa: SIM115
        with log:
            return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)

    processes = [start("dask_scheduler", "--port", "0", "--scheduler-file", str(where))]
    try:
        deadline = time.monotonic() + 60
        while not where.exists():
            assert processes[0].poll() is None, (folder / "dask_scheduler.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for number in range(workers):
            name = ("--name", f"worker{number}", "--local-directory", str(folder / f"worker{number}"))
            arguments = ("--scheduler-file", str(where), "--no-nanny", "--nthreads", "1", *name)
            processes.append(start("dask_worker", *arguments))
        yield Cluster(json.loads(where.read_text())["address"], processes[1:])
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
