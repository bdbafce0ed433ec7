"""A real ``mlflow server`` on a free port with a SQLite database, and what is in that database.

::

    with mlflow_server(folder) as server:
        server.kill()  # SIGKILL of all its processes
        server.start()  # at the same address, on the same database
        server.duplicates()
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
TWICE = """
SELECT run_uuid, key, timestamp, step, value, is_nan, COUNT(*) FROM metrics
GROUP BY run_uuid, key, timestamp, step, value, is_nan HAVING COUNT(*) > 1
"""


class Database:
    """The tables of an MLflow SQLite database, by plain SQL."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def ask(self, query: str, *values: object) -> list[tuple[object, ...]]:
        """The rows of an answer."""
        with contextlib.closing(sqlite3.connect(self.file, timeout=30)) as connection:
            return list(connection.execute(query, values))

    def points(self, experiment: str) -> int:
        """How many points an experiment has, in runs that are not deleted."""
        query = (
            "SELECT COUNT(*) FROM metrics m JOIN runs r USING (run_uuid) JOIN experiments e USING (experiment_id) "
            "WHERE e.name = ? AND r.lifecycle_stage = 'active'"
        )
        found = self.ask(query, experiment)[0][0]
        assert isinstance(found, int)
        return found

    def runs(self, experiment: str) -> int:
        """How many runs an experiment has that are not deleted."""
        query = (
            "SELECT COUNT(*) FROM runs r JOIN experiments e USING (experiment_id) "
            "WHERE e.name = ? AND r.lifecycle_stage = 'active'"
        )
        found = self.ask(query, experiment)[0][0]
        assert isinstance(found, int)
        return found


class MlflowServer(Database):
    """A server that can be killed and started again."""

    def __init__(self, folder: Path, workers: int = 1) -> None:
        super().__init__(folder / "mlflow.db")
        self.folder, self.workers = folder, workers
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        command = [sys.executable, "-W", "ignore", "-m", "mlflow", "server", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--workers", str(self.workers)]
        command += ["--backend-store-uri", f"sqlite:///{self.file}"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        environment.pop("MLFLOW_TRACKING_URI", None)
        with (self.folder / "server.log").open("ab") as output:
            self.process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        deadline = time.monotonic() + 120
        while not self.answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"mlflow did not start:\n{(self.folder / 'server.log').read_text()[-3000:]}")
            time.sleep(0.1)

    def answers(self) -> bool:
        """Whether it is up."""
        try:
            with _NO_PROXY.open(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def kill(self) -> None:
        """SIGKILL of the server and its workers."""
        process, self.process = self.process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


@contextlib.contextmanager
def mlflow_server(folder: Path, workers: int = 1) -> Iterator[MlflowServer]:
    """A server that runs until the block ends."""
    folder.mkdir(parents=True, exist_ok=True)
    server = MlflowServer(folder, workers)
    try:
        server.start()
        yield server
    finally:
        server.kill()
