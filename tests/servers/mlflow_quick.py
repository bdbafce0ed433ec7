"""An MLflow server that is up again at once after a SIGKILL: a process that has everything loaded is its parent.

What runs, and is killed, is the app that ``mlflow server`` runs, on uvicorn, with the same settings.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.servers.mlflow import MlflowServer, environment, with_tables

_PARENT = """
import os, sys, warnings
warnings.simplefilter("ignore")
from mlflow.server import constants
port, store, files = sys.argv[1:]
os.environ[constants.BACKEND_STORE_URI_ENV_VAR] = store
os.environ[constants.SERVE_ARTIFACTS_ENV_VAR] = "true"
os.environ[constants.ARTIFACTS_DESTINATION_ENV_VAR] = files
os.environ[constants.ARTIFACT_ROOT_ENV_VAR] = "mlflow-artifacts:/"
import uvicorn
from mlflow.server.fastapi_app import app
from mlflow.store.db.utils import create_sqlalchemy_engine, _initialize_tables
engine = create_sqlalchemy_engine(store)
_initialize_tables(engine)
engine.dispose()
for line in sys.stdin:
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")
        os._exit(0)
    print(child, flush=True)
    os.waitpid(child, 0)
"""


class QuickServer(MlflowServer):
    """Killed and started like any other, in a fraction of the time."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        with_tables(self.file)
        command = [sys.executable, "-c", _PARENT, str(self.port), self.backend, str(folder / "artifacts")]
        with (folder / "server.log").open("ab") as output:
            self.parent = subprocess.Popen(
                command, cwd=folder, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output
            )
        self.child = 0

    def start(self) -> None:
        """Start it, and wait until it answers."""
        assert self.parent.stdin is not None
        assert self.parent.stdout is not None
        self.parent.stdin.write(b"start\n")
        self.parent.stdin.flush()
        line = self.parent.stdout.readline()
        if not line:
            raise RuntimeError(f"mlflow did not start:\n{(self.folder / 'server.log').read_text()[-3000:]}")
        self.child = int(line)
        deadline = time.monotonic() + 60
        while not self.answers():
            assert time.monotonic() < deadline, "mlflow did not start"
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL."""
        child, self.child = self.child, 0
        if child:
            os.kill(child, 9)
            deadline = time.monotonic() + 30
            while _lives(child) and time.monotonic() < deadline:
                time.sleep(0.01)

    def end(self) -> None:
        """Kill it, and its parent."""
        self.kill()
        self.parent.kill()
        self.parent.communicate()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@contextlib.contextmanager
def quick_server(folder: Path) -> Iterator[QuickServer]:
    """A server that runs until the block ends."""
    folder.mkdir(parents=True, exist_ok=True)
    server = QuickServer(folder)
    try:
        server.start()
        yield server
    finally:
        server.end()
