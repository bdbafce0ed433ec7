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
import shutil
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
from typing import TypeVar

from filelock import FileLock

Server = TypeVar("Server", bound="MlflowServer")
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
TWICE = """
SELECT run_uuid, key, timestamp, step, value, is_nan, COUNT(*) FROM metrics
GROUP BY run_uuid, key, timestamp, step, value, is_nan HAVING COUNT(*) > 1
"""
SHARED = "TESTS_SHARED_FOLDER"
"""The variable that names the folder of all processes of one run of the tests (tests/conftest.py sets it)."""
_MAKE_TABLES = """
import sys, warnings
warnings.simplefilter("ignore")
from mlflow.store.db.utils import _initialize_tables, create_sqlalchemy_engine
engine = create_sqlalchemy_engine(sys.argv[1])
_initialize_tables(engine)
engine.dispose()
"""


def with_tables(file: Path) -> Path:
    """Make ``file`` an MLflow database that has its tables and nothing else. They are made once in a run of the tests, for
    that takes longer than what most tests do with them, and copied; outside of one nothing is done."""
    shared = os.environ.get(SHARED)
    if shared is None or file.exists():
        return file
    template = Path(shared) / "mlflow.db"
    with FileLock(f"{template}.lock", timeout=200):
        if not template.exists():
            new = Path(f"{template}.new")
            command = [sys.executable, "-c", _MAKE_TABLES, f"sqlite:///{new}"]
            subprocess.run(command, check=True, capture_output=True, env=environment())
            new.rename(template)
    shutil.copyfile(template, file)
    return file


def environment() -> dict[str, str]:
    """The environment of an MLflow process: none of the user's settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    return kept | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}


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
    """A server that can be killed and started again.

    ``python`` is the interpreter that has MLflow; ``backend`` the URI of its database, SQLite in ``folder`` by default.
    """

    def __init__(self, folder: Path, workers: int = 1, python: str = sys.executable, backend: str = "") -> None:
        super().__init__(folder / "mlflow.db")
        self.folder, self.workers, self.python = folder, workers, python
        self.backend = backend or f"sqlite:///{self.file}"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        command = [self.python, "-W", "ignore", "-m", "mlflow", "server", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--workers", str(self.workers)]
        command += ["--backend-store-uri", self.backend]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        if self.python == sys.executable and self.backend.endswith(str(self.file)):
            with_tables(self.file)
        path = os.pathsep.join([os.path.dirname(self.python), os.environ.get("PATH", "")])  # its gunicorn
        with (self.folder / "server.log").open("ab") as output:
            self.process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=environment() | {"PATH": path},
                stdout=output,
                stderr=output,
                start_new_session=True,
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
def mlflow_server(folder: Path, workers: int = 1, **how: str) -> Iterator[MlflowServer]:
    """A server that runs until the block ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with running(MlflowServer(folder, workers, **how)) as server:
        yield server


@contextlib.contextmanager
def running(server: Server) -> Iterator[Server]:
    """The block with a server that runs."""
    try:
        server.start()
        yield server
    finally:
        server.kill()
