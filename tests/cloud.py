"""What the tests of runs in a cloud share: a server with options to reach it, and processes on other machines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runmirror.find import ReadOptions
from tests.servers.gcs import GcsServer

BUCKET = "runs-bucket"
URI = f"gs://{BUCKET}/exp/run"
SECRET = "s3cr3t-of-the-bucket"


def options(server: GcsServer, interval: float = 0.1, **more: Any) -> dict[str, Any]:
    """Storage options: the server's, uploads soon, and something that must be found nowhere."""
    return {**server.options, "upload_interval": interval, "default_location": SECRET, **more}


def reading(server: GcsServer, **more: Any) -> ReadOptions:
    return ReadOptions(storage_options=server.options, **more)


def upload(server: GcsServer, folder: Path, prefix: str) -> None:
    """Copy a folder below ``bucket/prefix`` as another program would."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            server.put(f"{BUCKET}/{prefix}/{path.relative_to(folder).as_posix()}", path.read_bytes())


def rows_of(server: GcsServer, key: str = "exp/run") -> list[dict[str, Any]]:
    """The rows in the object; every line of it is whole."""
    data = server.contents(f"{BUCKET}/{key}/metrics.jsonl") or b""
    assert data == b"" or data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


def until(holds: Callable[[], object], seconds: float = 15) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)


class Trainer:
    """A training process with a RUNMIRROR_HOME of its own: a machine. It runs ``code`` with ``run`` and ``go`` (a function
    that waits for a word from here, and prints) in scope."""

    def __init__(self, server: GcsServer, home: Path, code: str, uri: str = URI, **start: Any) -> None:
        given = {"storage_options": options(server), "code": False, **start}
        head = (
            "import json, sys, time\nimport runmirror\n"
            "def go(text='ready'):\n    print(text, flush=True)\n    return sys.stdin.readline().strip()\n"
            f"run = runmirror.start({uri!r}, {{'lr': 1}}, **json.loads({json.dumps(given)!r}))\n"
        )
        environment = os.environ | {"RUNMIRROR_HOME": str(home), "RUNMIRROR_QUIET": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", head + code],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True
        )  # fmt: skip

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.returncode is None:
            self.kill()

    def line(self) -> str:
        """What it prints next."""
        assert self.process.stdout is not None
        found = self.process.stdout.readline().strip()
        assert found, self.process.communicate()[1]
        return found

    def say(self, text: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()

    def end(self) -> tuple[int, str]:
        """Wait for it; exit code and stderr."""
        _, err = self.process.communicate(timeout=120)
        return self.process.returncode, err
