"""Google Cloud Storage, through gcsfs's own requests, without what makes gcsfs unsafe or slow for a growing log.

- gcsfs's core class: the default one asks for the bucket's type over gRPC, again and again where that fails.
- One request per try: gcsfs would repeat a refused connection for 34 s and log a traceback for every 416.
- Every write names the generation it replaces. ``extend`` uploads the new bytes as a part object of the writer's own, then
  composes object and part on the server. Both generations are checked, so a repeated request can't add bytes twice.
- Content types, ``no-cache`` (public objects would be an hour old else), never a content encoding (ranges would break).
"""

from __future__ import annotations

import base64
import contextlib
import errno
import inspect
import io
import json
import secrets
import struct
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from runmirror.exceptions import MissingPackageError
from runmirror.storage.remote import (
    ABSENT,
    ANY,
    CONNECT_TIMEOUT,
    REQUEST_TIMEOUT,
    SILENCE_TIMEOUT,
    WRITER,
    Bytes,
    ConflictError,
    Content,
    Object,
    PastEndError,
    Remote,
    crc_of,
    one_line,
    own_file_system,
)

PARTS = ".runmirror/parts"
"""Folder of part objects, below the root."""
WHOLE = 16 << 20
"""Larger content is uploaded in parts of this size (larger still: in 31), then composed."""
FIELDS = "name,size,updated,generation,crc32c,metadata"


class GcsRemote(Remote):
    """Objects below ``gs://bucket/prefix``."""

    conditional = True
    extends = True
    unique_versions = True

    def _connect(self, uri: str, options: dict[str, Any]) -> tuple[Any, str]:
        try:
            import aiohttp
            from gcsfs.core import GCSFileSystem
        except ImportError as error:
            raise MissingPackageError(f"{uri} needs gcsfs: pip install 'runmirror[gcs]'") from error
        self._bucket, _, prefix = uri.split("://", 1)[1].partition("/")
        self._once = inspect.unwrap(GCSFileSystem._request)  # without the retries
        limits = aiohttp.ClientTimeout(REQUEST_TIMEOUT, sock_connect=CONNECT_TIMEOUT, sock_read=SILENCE_TIMEOUT)
        given = {"requests_timeout": limits, **options}
        return own_file_system(GCSFileSystem, lambda session: session.close(), given), prefix.strip("/")

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}" if self._root and path else self._root or path

    def _call(self, method: str, path: str, *parts: str, about: str, **extra: Any) -> bytes:
        """One request, tried again where that can help."""
        from fsspec.asyn import sync

        def once() -> bytes:
            if extra.get("data") is not None:
                extra["data"] = io.BytesIO(extra["data"].getvalue())
            answer = sync(self._fs.loop, self._once, self._fs, method, path, *parts, **extra)
            return bytes(answer[3])

        return self._ask(about, once)

    def _explain(self, error: Exception, path: str) -> Exception:
        where = f"{self.uri}/{path}"
        code = str(getattr(error, "code", ""))
        if isinstance(error, FileExistsError) or code == "412":
            return ConflictError(f"{where}: not the generation that was expected")
        if code == "416":
            return PastEndError(errno.EINVAL, "no such range", where)
        if code in ("401", "403") or (isinstance(error, OSError) and str(error).startswith("Forbidden")):
            return PermissionError(13, f"access refused: {one_line(error)}", where)
        if isinstance(error, ValueError) or (code[:1] == "4" and code not in ("408", "429")):
            return OSError(22, one_line(error), where)
        if isinstance(error, _transient()):
            return ConnectionError(5, one_line(error), where)
        return super()._explain(error, path)

    # -- reading

    def _parse(self, resource: dict[str, Any]) -> Object:
        crc = resource.get("crc32c")
        return Object(
            size=int(resource.get("size", 0)),
            mtime=datetime.fromisoformat(resource["updated"]).timestamp() if "updated" in resource else 0.0,
            version=str(resource["generation"]),
            crc=struct.unpack(">I", base64.b64decode(crc))[0] if crc else None,
            writer=resource.get("metadata", {}).get(WRITER, ""),
        )

    def _stat(self, path: str) -> Object | None:
        found = self._call("GET", "b/{}/o/{}", self._bucket, self._full(path), about=path, fields=FIELDS)
        return self._parse(json.loads(found))

    def read(self, path: str) -> bytes:
        return self._media(path, None)

    def read_range(self, path: str, offset: int, length: int | None) -> bytes:
        if length == 0:
            return b""
        end = "" if length is None else str(offset + length - 1)
        try:
            return self._media(path, {"Range": f"bytes={offset}-{end}"})
        except PastEndError:
            return b""

    def _media(self, path: str, headers: dict[str, str] | None) -> bytes:
        url = f"{self._fs._location}/download/storage/v1/b/{{}}/o/{{}}"
        return self._call("GET", url, self._bucket, self._full(path), about=path, headers=headers, alt="media")

    def _pages(self, prefix: str, **extra: str) -> Iterator[dict[str, Any]]:
        token: str | None = None
        while True:
            found = self._call(
                "GET", "b/{}/o", self._bucket, about=prefix, prefix=prefix, pageToken=token, maxResults="1000",
                fields=f"items({FIELDS}),prefixes,nextPageToken", **extra
            )  # fmt: skip
            page: dict[str, Any] = json.loads(found)
            yield page
            token = page.get("nextPageToken")
            if not token:
                return

    def _folder(self, path: str) -> str:
        full = self._full(path)
        return f"{full}/" if full else ""

    def list_dir(self, prefix: str) -> list[str]:
        folder = self._folder(prefix)
        names: set[str] = set()
        for page in self._pages(folder, delimiter="/"):
            names.update(item["name"][len(folder) :] for item in page.get("items", ()))
            names.update(name[len(folder) :].rstrip("/") for name in page.get("prefixes", ()))
        return sorted(names - {""})

    def scan(self, prefix: str = "") -> Iterator[tuple[str, Object]]:
        folder, root = self._folder(prefix), self._folder("")
        for page in self._pages(folder):
            for item in page.get("items", ()):
                path = item["name"][len(root) :]
                if path and not path.endswith("/") and not path.startswith(PARTS + "/"):
                    yield path, self._parse(item)

    # -- writing

    def put(self, path: str, content: Content, kind: str, writer: str, expect: str = ANY) -> Object:
        if content.size <= WHOLE:
            return self._upload(path, content.read(0, content.size), kind, writer, expect)
        step = max(WHOLE, -(-content.size // 31))
        mark = f"{PARTS}/{secrets.token_hex(8)}"
        parts: list[tuple[str, Object]] = []
        try:
            for start in range(0, content.size, step):
                data = content.read(start, min(step, content.size - start))
                part = f"{mark}-{len(parts)}"
                parts.append((part, self._upload(part, data, kind, writer, ANY)))
            return self._compose(path, parts, kind, writer, expect)
        finally:
            for part, _ in parts:
                with contextlib.suppress(OSError):
                    self.delete(part)

    def extend(self, path: str, head: Object, tail: Content, kind: str, writer: str) -> Object:
        if tail.size == 0:
            return self._compose(path, [(path, head)], kind, writer, head.version)
        if tail.size > WHOLE:  # what an outage left
            for start in range(0, tail.size, WHOLE):
                head = self.extend(path, head, Bytes(tail.read(start, min(WHOLE, tail.size - start))), kind, writer)
            return head
        name = f"{PARTS}/{writer}-{path.rsplit('/', 1)[-1]}"
        data = tail.read(0, tail.size)
        part = self._upload(name, data, kind, writer, ANY)
        if part.crc != crc_of(data):
            raise ConnectionError(5, "the new bytes did not arrive as they were sent", f"{self.uri}/{path}")
        return self._compose(path, [(path, head), (name, part)], kind, writer, head.version)

    def forget_parts(self, path: str, writer: str) -> None:
        self.delete(f"{PARTS}/{writer}-{path.rsplit('/', 1)[-1]}")

    def _upload(self, path: str, data: bytes, kind: str, writer: str, expect: str) -> Object:
        resource = {"name": self._full(path), **_described(kind, writer)}
        mark = secrets.token_hex(16)
        body = b"".join(
            (
                f"--{mark}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n".encode(),
                json.dumps(resource).encode(),
                f"\r\n--{mark}\r\nContent-Type: {kind}\r\n\r\n".encode(),
                data,
                f"\r\n--{mark}--\r\n".encode(),
            )
        )
        answer = self._call(
            "POST", f"{self._fs._location}/upload/storage/v1/b/{{}}/o", self._bucket, about=path, data=io.BytesIO(body),
            headers={"Content-Type": f'multipart/related; boundary="{mark}"'}, uploadType="multipart",
            ifGenerationMatch=_generation(expect)
        )  # fmt: skip
        return self._parse(json.loads(answer))

    def _compose(self, path: str, sources: list[tuple[str, Object]], kind: str, writer: str, expect: str) -> Object:
        body = {
            "sourceObjects": [
                {"name": self._full(name), "objectPreconditions": {"ifGenerationMatch": found.version}}
                for name, found in sources
            ],
            "destination": _described(kind, writer),
        }
        answer = self._call(
            "POST", "b/{}/o/{}/compose", self._bucket, self._full(path), about=path, json=body,
            ifGenerationMatch=_generation(expect)
        )  # fmt: skip
        return self._parse(json.loads(answer))

    def delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._call("DELETE", "b/{}/o/{}", self._bucket, self._full(path), about=path)

    def close(self) -> None:
        session = self._fs._session
        if session is not None:
            self._fs._session = None
            self._fs.close_session(self._fs.loop, session)


def _transient() -> tuple[type[Exception], ...]:
    """What gcsfs's requests raise when trying again may help; ValueError and 4xx are sorted out before."""
    from aiohttp import ClientError
    from gcsfs.retry import HttpError
    from google.auth.exceptions import GoogleAuthError
    from requests.exceptions import RequestException

    return HttpError, ClientError, RequestException, GoogleAuthError


def _described(kind: str, writer: str) -> dict[str, Any]:
    return {"contentType": kind, "cacheControl": "no-cache", "metadata": {WRITER: writer}}


def _generation(expect: str) -> str | None:
    return None if expect == ANY else "0" if expect == ABSENT else expect
