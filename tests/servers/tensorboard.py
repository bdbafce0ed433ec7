"""A real ``tensorboard`` server on a free port, read over HTTP as its own front end does.

::

    with tensorboard_server(logdir) as server:  # load_fast=False for the Python loader
        server.wait(lambda: server.points("run") == expected)
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class TensorBoardServer:
    """What a running server shows."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **query: str) -> Any:
        """The JSON answer to GET ``path``."""
        return self._ask(f"{path}?{urllib.parse.urlencode(query)}" if query else path, None)

    def post(self, path: str, body: Any) -> Any:
        """The JSON answer to POST ``path``."""
        return self._ask(path, json.dumps(body).encode())

    def _ask(self, path: str, body: bytes | None) -> Any:
        request = urllib.request.Request(
            self.url + path, data=body, headers={"Content-Type": "application/json"} if body else {}
        )
        with _NO_PROXY.open(request, timeout=30) as answer:
            return json.loads(answer.read())

    def runs(self) -> list[str]:
        """Names of all runs."""
        return list(self.get("/data/runs"))

    def tags(self, run: str) -> list[str]:
        """Scalar tags of a run."""
        return sorted(self.get("/data/plugin/scalars/tags").get(run, {}))

    def points(self, run: str) -> dict[str, list[tuple[float, int, float]]]:
        """tag -> (wall time, step, value) of all scalars of a run, in the order they are drawn."""
        return {
            tag: [
                (wall_time, step, float(value))
                for wall_time, step, value in self.get("/data/plugin/scalars/scalars", run=run, tag=tag)
            ]
            for tag in self.tags(run)
        }

    def texts(self, run: str) -> dict[str, list[str]]:
        """tag -> texts of a run, as HTML."""
        tags = self.get("/data/plugin/text/tags").get(run, {})
        return {tag: [entry["text"] for entry in self.get("/data/plugin/text/text", run=run, tag=tag)] for tag in tags}

    def wait(self, until: Callable[[], bool], seconds: float = 60) -> None:
        """Return as soon as ``until()`` holds, or after ``seconds``: the test's own assert then says what is missing."""
        deadline = time.monotonic() + seconds
        while not until() and time.monotonic() < deadline:
            time.sleep(0.1)


@contextlib.contextmanager
def tensorboard_server(logdir: Path | str, load_fast: bool = True) -> Iterator[TensorBoardServer]:
    """Serve ``logdir`` with the fast (default) or the Python loader, reading anew every second, until the block ends."""
    command = [sys.executable, "-W", "ignore", "-m", "tensorboard.main", "--logdir", str(logdir), "--port", "0"]
    command += ["--host", "127.0.0.1", "--reload_interval", "1", "--samples_per_plugin", "scalars=100000"]
    command += [f"--load_fast={'true' if load_fast else 'false'}"]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            yield TensorBoardServer(_address(process, output))
        finally:
            for end in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, end)  # the fast loader is a child of it, in the same group
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)


def _address(process: subprocess.Popen[bytes], output: Any) -> str:
    deadline = time.monotonic() + 90
    said = ""
    while time.monotonic() < deadline and process.poll() is None:
        said = os.pread(output.fileno(), 1 << 20, 0).decode("utf-8", "replace")
        if found := re.search(r"at (http://127\.0\.0\.1:\d+)/", said):
            return found[1]
        time.sleep(0.1)
    raise RuntimeError(f"tensorboard did not start:\n{said}")
