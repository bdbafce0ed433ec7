"""CloudStorage on S3 (moto) and on a file system that fsspec has and we know nothing of (memory)."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runmirror.exceptions import LogError
from runmirror.storage import CloudStorage, remote, upload
from tests.servers.clouds import BUCKET, s3_server

METRICS = "metrics.jsonl"


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    with s3_server() as options:
        yield options


@pytest.fixture(params=["memory", pytest.param("s3", marks=pytest.mark.slow)])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, dict[str, Any]]:
    monkeypatch.setattr(upload, "GAP", 0.0)
    options = request.getfixturevalue("s3") if request.param == "s3" else {}
    return f"{request.param}://{BUCKET}/{secrets.token_hex(4)}", {**options, "upload_interval": 600}


def content(uri: str, options: dict[str, Any], path: str = METRICS) -> bytes:
    with CloudStorage(uri, options, local=False) as found:
        return found.read(path)


def test_a_writer_elsewhere_takes_over(
    place: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first one notices before its next upload; nothing of it is mixed in."""
    uri, options = place
    first = CloudStorage(uri, options)
    first.append(METRICS, b"1\n")
    first.flush()
    monkeypatch.setenv("RUNMIRROR_HOME", str(tmp_path / "other machine"))
    with CloudStorage(uri, options) as second:
        second.append(METRICS, b"2\n")
        second.flush()
        first.append(METRICS, b"late\n")
        with pytest.raises(LogError, match="was taken over by process"):
            first.flush()
        second.append(METRICS, b"3\n")
    first.close()
    assert content(uri, options) == b"1\n2\n3\n"


@pytest.mark.slow
def test_a_large_object_on_s3_is_copied_on_the_server(s3: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Above 5 MiB only new bytes are read from the spool, also when a resume elsewhere has no more than those."""
    uri, options = f"s3://{BUCKET}/large", {**s3, "upload_interval": 600}
    monkeypatch.setattr(upload, "GAP", 0.0)
    pieces = [os.urandom(3 << 20), os.urandom(3 << 20), b"small\n"]
    with CloudStorage(uri, options) as storage:
        for piece in pieces:
            storage.append(METRICS, piece)
            storage.flush()
    with CloudStorage(uri, options) as storage:
        storage.append(METRICS, b"more\n")
        grown = storage._view().grown(METRICS)  # type: ignore[union-attr]
        assert grown is not None
        assert grown.base == sum(map(len, pieces))
        assert storage.read_range(METRICS, grown.base - 6) == b"small\nmore\n"
    assert content(uri, options) == b"".join(pieces) + b"more\n"


@pytest.mark.slow
def test_another_program_on_s3_is_not_overwritten(s3: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A row it put in after we looked stays in front of ours: the condition on the ETag fails, and is understood."""
    uri, options = f"s3://{BUCKET}/shared", {**s3, "upload_interval": 600}
    monkeypatch.setattr(upload, "GAP", 0.0)
    with CloudStorage(uri, options) as storage:
        storage.append(METRICS, b"1\n")
        storage.flush()
        with CloudStorage(uri, options, local=False) as other:
            other.write(METRICS, b"1\ntheirs\n")
        storage.append(METRICS, b"2\n")
        storage.flush()
        assert storage.read(METRICS) == b"1\ntheirs\n2\n"
    assert content(uri, options) == b"1\ntheirs\n2\n"


@pytest.mark.slow
def test_s3_objects_have_a_type_and_are_never_cached(s3: dict[str, Any]) -> None:
    """By the store's own words."""
    uri = f"s3://{BUCKET}/kinds"
    with CloudStorage(uri, s3) as storage:
        storage.claim()
        storage.write("a.html", b"<p>")
        storage.flush()
        head = storage.remote._fs.call_s3("head_object", Bucket=BUCKET, Key="kinds/a.html")
    assert (head["ContentType"], head["CacheControl"]) == ("text/html; charset=utf-8", "no-cache")


def test_an_error_is_no_end_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever words are in the error and in the names of objects; what stores say of a range past the end is b""."""
    monkeypatch.setattr(remote, "PAUSES", ())
    objects = remote.connect("memory://orange/long-range-rl", {})
    said: list[Exception] = []

    def fail(*args: Any, **options: Any) -> bytes:
        raise said[-1]

    monkeypatch.setattr(objects._fs, "cat_file", fail)
    for text in ("InvalidToken: the token is invalid: orange/long-range-rl/x", "invalid answer about range x"):
        for kind in (OSError, RuntimeError, PermissionError):
            said.append(kind(text))
            with pytest.raises(OSError, match="invalid"):
                objects.read_range("x", 5, 10)
    for text in (
        "[Errno 22] The requested range is not satisfiable",
        "The range specified is invalid for the current size of the resource.\nErrorCode:InvalidRange",
        "416, message='Requested Range Not Satisfiable'",
    ):
        for kind in (OSError, RuntimeError):
            said.append(kind(text))
            assert objects.read_range("x", 5, 10) == b""
