"""A PostgreSQL server of its own on a free loopback port, with one empty database. Skips the test when it isn't installed."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers.mlflow import MlflowServer

INSTALL = "apt-get install postgresql"


class MlflowOnPostgres(MlflowServer):
    """An MLflow server whose database is PostgreSQL."""

    def ask(self, query: str, *values: object) -> list[tuple[object, ...]]:
        """The rows of an answer; places in the query are ``?``."""
        import psycopg

        with contextlib.closing(psycopg.connect(self.backend)) as connection, connection.cursor() as cursor:
            cursor.execute(query.replace("?", "%s"), values)
            return list(cursor.fetchall())


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """The URI of the database. As root the server runs as the user ``postgres``, for it refuses root."""
    programs = _programs()
    folder = Path(tempfile.mkdtemp(prefix="runmirror-postgres-"))
    owner: dict[str, Any] = {}
    if os.geteuid() == 0:
        owner = {"user": "postgres", "group": "postgres", "extra_groups": []}
        shutil.chown(folder, "postgres", "postgres")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server: subprocess.Popen[bytes] | None = None
    try:
        made = [programs / "initdb", "-D", folder / "data", "-A", "trust", "-U", "runmirror", "--no-sync", "-E", "UTF8"]
        subprocess.run(made, check=True, cwd=folder, capture_output=True, timeout=120, **owner)
        command = [programs / "postgres", "-D", folder / "data", "-p", str(port), "-k", folder]
        command += ["-c", "listen_addresses=127.0.0.1", "-c", "fsync=off"]
        server = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **owner)
        ready = [programs / "pg_isready", "-h", "127.0.0.1", "-p", str(port)]
        deadline = time.monotonic() + 60
        while subprocess.run(ready, capture_output=True).returncode:
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("PostgreSQL did not start")
            time.sleep(0.1)
        yield f"postgresql://runmirror@127.0.0.1:{port}/postgres"
    finally:
        if server is not None:
            server.send_signal(signal.SIGQUIT)  # end at once
            server.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


def _programs() -> Path:
    pytest.importorskip("psycopg", reason="no driver for PostgreSQL: pip install 'psycopg[binary]'")
    known = [os.path.dirname(shutil.which("initdb") or ""), *sorted(glob.glob("/usr/lib/postgresql/*/bin"))[::-1]]
    for folder in filter(None, known):
        if all(os.path.exists(os.path.join(folder, program)) for program in ("initdb", "postgres", "pg_isready")):
            return Path(folder)
    pytest.skip(f"PostgreSQL is not installed: {INSTALL}")
