"""Google Cloud Storage's JSON API in this process, on loopback, with what public emulators leave out.

Generations and preconditions on every verb, compose (32 sources, no MD5), ranges with 416, paged listings, the limit of one
mutation a second per object name, faults, counters of operations and bytes, and every past content of an object.

::

    with gcs_server() as server:
        fs = gcsfs.core.GCSFileSystem(**server.options)
        server.faults.error_rate = 0.03  # 503 before anything happened
        server.faults.next["compose"] = ["lost"]  # done, but the answer never comes
        server.calls["compose"], server.bytes_up, server.contents("bucket/run/metrics.jsonl")
"""

from __future__ import annotations

import base64
import contextlib
import json
import random
import re
import struct
import threading
import time
import urllib.parse
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import google_crc32c

CLASS_A = ("insert", "compose", "list", "patch")
CLASS_B = ("get", "media")
BUCKET = "runs-bucket"


@dataclass
class Stored:
    """One version of an object. Its bytes are chunks, so that a compose copies none."""

    chunks: tuple[bytes, ...]
    size: int
    crc: int
    generation: int
    content_type: str = "application/octet-stream"
    cache_control: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    updated: float = field(default_factory=time.time)
    components: int | None = None

    @property
    def data(self) -> bytes:
        return b"".join(self.chunks)


@dataclass
class Faults:
    """What goes wrong. Rates are of mutating and reading requests alike, drawn from ``rng``.

    Attributes:
        error_rate: 503 before anything was done.
        lost_rate: done, but the connection breaks before the answer.
        latency: seconds before every answer.
        gate: what every request waits for, after it was counted; None for nothing.
        down: every connection breaks at once.
        one_per_second: a second mutation of a name within a second gets 429.
        next: operation -> faults of its next calls, each "503", "429", "lost", "silence" for
            an answer that never comes, or "" for none.
    """

    error_rate: float = 0.0
    lost_rate: float = 0.0
    latency: float = 0.0
    gate: threading.Event | None = None
    down: bool = False
    one_per_second: bool = False
    next: dict[str, list[str]] = field(default_factory=dict)
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def draw(self, operation: str) -> str:
        planned = self.next.get(operation)
        if planned:
            return planned.pop(0)
        chance = self.rng.random()
        return "503" if chance < self.error_rate else "lost" if chance < self.error_rate + self.lost_rate else ""


class Refusal(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, message: str = "") -> None:
        super().__init__(message)
        self.status = status


class GcsServer:
    """The buckets, and what was asked of them."""

    def __init__(self) -> None:
        self.faults = Faults()
        self.calls: Counter[str] = Counter()
        self.by_name: dict[str, Counter[str]] = defaultdict(Counter)
        self.bytes_up = 0
        self.bytes_down = 0
        self.limited = 0
        self.under_way = 0  # requests that are not answered yet
        self.history: dict[str, list[tuple[float, Stored]]] = defaultdict(list)
        self._objects: dict[str, Stored] = {}
        self._lock = threading.RLock()
        self._generation = time.time_ns() // 1000
        self._mutated: dict[str, float] = {}
        self.closed = threading.Event()
        server = self

        class Handler(_Handler):
            gcs = server

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # a client that was killed

        self._http = Server(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._http.server_address[1]}"
        self.options = {"token": "anon", "project": "anything", "endpoint_url": self.endpoint}
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.closed.set()
        self._http.shutdown()
        self._http.server_close()

    # -- for tests

    @property
    def class_a(self) -> int:
        """Operations billed as class A."""
        return sum(self.calls[name] for name in CLASS_A)

    @property
    def class_b(self) -> int:
        """Operations billed as class B."""
        return sum(self.calls[name] for name in CLASS_B)

    def reset_counters(self) -> None:
        with self._lock:
            self.calls.clear()
            self.by_name.clear()
            self.bytes_up = self.bytes_down = self.limited = 0

    def contents(self, name: str) -> bytes | None:
        """The bytes of ``bucket/key``, or None."""
        found = self._objects.get(name)
        return None if found is None else found.data

    def stored(self, name: str) -> Stored:
        return self._objects[name]

    def names(self, prefix: str = "") -> list[str]:
        """All ``bucket/key``."""
        with self._lock:
            return sorted(name for name in self._objects if name.startswith(prefix))

    def put(self, name: str, data: bytes, content_type: str = "application/octet-stream", **metadata: str) -> Stored:
        """Place an object as another program would."""
        with self._lock:
            return self._store(name, (data,), google_crc32c.value(data), content_type, None, metadata, None)

    # -- the API

    def _store(
        self,
        name: str,
        chunks: tuple[bytes, ...],
        crc: int,
        content_type: str,
        cache_control: str | None,
        metadata: dict[str, str],
        components: int | None,
    ) -> Stored:
        self._generation = max(self._generation + 1, time.time_ns() // 1000)
        size = sum(map(len, chunks))
        stored = Stored(chunks, size, crc, self._generation, content_type, cache_control, metadata)
        stored.components = components
        self._objects[name] = stored
        self.history[name].append((stored.updated, stored))
        return stored

    def check(self, name: str, query: dict[str, str], wanted: str = "ifGenerationMatch") -> None:
        found = self._objects.get(name)
        if wanted in query and int(query[wanted]) != (found.generation if found else 0):
            raise Refusal(412, "At least one of the pre-conditions you specified did not hold.")

    def limit(self, name: str) -> None:
        now = time.monotonic()
        if self.faults.one_per_second and now - self._mutated.get(name, -9.0) < 1.0:
            self.limited += 1
            raise Refusal(429, f"The object {name} exceeded the rate limit for object mutation operations")
        self._mutated[name] = now

    def insert(self, name: str, query: dict[str, str], data: bytes, resource: dict[str, Any]) -> Stored:
        with self._lock:
            self.check(name, query)
            self.limit(name)
            kind = resource.get("contentType", "application/octet-stream")
            cache, metadata = resource.get("cacheControl"), resource.get("metadata", {})
            return self._store(name, (data,), google_crc32c.value(data), kind, cache, metadata, None)

    def compose(self, bucket: str, key: str, query: dict[str, str], body: dict[str, Any]) -> Stored:
        name = f"{bucket}/{key}"
        with self._lock:
            self.check(name, query)
            sources = []
            if not 1 <= len(body["sourceObjects"]) <= 32:
                raise Refusal(400, "The number of source components provided is not 1 to 32.")
            for source in body["sourceObjects"]:
                found = self._objects.get(f"{bucket}/{source['name']}")
                if found is None:
                    raise Refusal(404, f"Object {source['name']} not found")
                expected = source.get("objectPreconditions", {}).get("ifGenerationMatch")
                if expected is not None and int(expected) != found.generation:
                    raise Refusal(412, "source generation")
                sources.append(found)
            self.limit(name)
            crc, chunks = sources[0].crc, sources[0].chunks
            for source in sources[1:]:
                for chunk in source.chunks:
                    crc = google_crc32c.extend(crc, chunk)
                chunks += source.chunks
            to = body.get("destination", {})
            kind = to.get("contentType", "application/octet-stream")
            count = sum(source.components or 1 for source in sources)
            return self._store(name, chunks, crc, kind, to.get("cacheControl"), to.get("metadata", {}), count)

    def delete(self, name: str, query: dict[str, str]) -> None:
        with self._lock:
            if name not in self._objects:
                raise Refusal(404, "No such object")
            self.check(name, query)
            del self._objects[name]

    def patch(self, name: str, query: dict[str, str], body: dict[str, Any]) -> Stored:
        with self._lock:
            if name not in self._objects:
                raise Refusal(404, "No such object")
            self.check(name, query)
            self.limit(name)
            stored = self._objects[name]
            stored.metadata = body.get("metadata", stored.metadata)
            stored.content_type = body.get("contentType", stored.content_type)
            return stored

    def find(self, name: str, query: dict[str, str]) -> Stored:
        with self._lock:
            found = self._objects.get(name)
            if found is None or ("generation" in query and int(query["generation"]) != found.generation):
                raise Refusal(404, f"No such object: {name}")
            self.check(name, query)
            return found

    def list(self, bucket: str, query: dict[str, str]) -> dict[str, Any]:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        most, start = min(1000, int(query.get("maxResults", 1000))), query.get("pageToken", "")
        with self._lock:
            keys = sorted(name[len(bucket) + 1 :] for name in self._objects if name.startswith(f"{bucket}/{prefix}"))
            items: list[dict[str, Any]] = []
            prefixes: list[str] = []
            token = ""
            for key in keys:
                rest = key[len(prefix) :]
                folder = prefix + rest.split(delimiter)[0] + delimiter if delimiter and delimiter in rest else ""
                if (folder or key) <= start or (folder and folder in prefixes):
                    continue
                if len(items) + len(prefixes) >= most:
                    break
                token = folder or key
                if folder:
                    prefixes.append(folder)
                else:
                    items.append(resource_of(bucket, key, self._objects[f"{bucket}/{key}"]))
            else:
                token = ""
        answer: dict[str, Any] = {"kind": "storage#objects"}
        answer |= {"items": items} if items else {}
        answer |= {"prefixes": prefixes} if prefixes else {}
        return answer | ({"nextPageToken": token} if token else {})


def resource_of(bucket: str, key: str, stored: Stored) -> dict[str, Any]:
    """The object as the JSON API describes it."""
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(stored.updated)) + f".{int(stored.updated % 1 * 1000):03d}Z"
    found: dict[str, Any] = {
        "kind": "storage#object",
        "name": key,
        "bucket": bucket,
        "generation": str(stored.generation),
        "metageneration": "1",
        "size": str(stored.size),
        "contentType": stored.content_type,
        "crc32c": base64.b64encode(struct.pack(">I", stored.crc)).decode(),
        "updated": moment,
        "timeCreated": moment,
        "storageClass": "STANDARD",
    }
    if stored.metadata:
        found["metadata"] = stored.metadata
    if stored.cache_control:
        found["cacheControl"] = stored.cache_control
    if stored.components:
        found["componentCount"] = stored.components
    return found


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # one segment per answer
    gcs: GcsServer

    def log_message(self, *args: Any) -> None:
        pass

    def _handle(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if len(body) < length or self.gcs.faults.down:  # a client that was killed while it sent
            self.close_connection = True
            return
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        operation, bucket, key = self._parse(url.path, query)
        server = self.gcs
        name = f"{bucket}/{key}"
        with server._lock:
            server.calls[operation] += 1
            server.by_name[name][operation] += 1
            server.bytes_up += length if operation in ("insert", "upload") else 0
            server.under_way += 1
            fault, gate = server.faults.draw(operation), server.faults.gate
        try:
            if gate is not None:
                gate.wait(60)
            self._respond(fault, operation, bucket, key, query, body)
        finally:
            with server._lock:
                server.under_way -= 1

    def _respond(self, fault: str, operation: str, bucket: str, key: str, query: dict[str, str], body: bytes) -> None:
        if self.gcs.faults.latency:
            time.sleep(self.gcs.faults.latency)
        if fault == "silence":
            self.gcs.closed.wait()
            self.close_connection = True
            return
        try:
            if fault.isdigit():
                raise Refusal(int(fault), "try again later")
            answer = self._answer(operation, bucket, key, query, body)
        except Refusal as error:
            message = {"error": {"code": error.status, "message": str(error)}}
            if not fault.startswith("lost"):
                self._send(error.status, json.dumps(message).encode())
                return
            answer = b"", "", 0
        if fault == "lost":
            self.close_connection = True
            return
        self._send(answer[2] or 200, answer[0], answer[1])

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = _handle

    def _parse(self, path: str, query: dict[str, str]) -> tuple[str, str, str]:
        unquote = urllib.parse.unquote
        if found := re.fullmatch(r"/upload/storage/v1/b/([^/]+)/o", path):
            return "insert", unquote(found[1]), query.get("name", "")
        if found := re.fullmatch(r"/(?:download/)?storage/v1/b/([^/]+)/o/([^/]+)/compose", path):
            return "compose", unquote(found[1]), unquote(found[2])
        if found := re.fullmatch(r"/(?:download/)?storage/v1/b/([^/]+)/o/([^/]+)", path):
            kinds = {"DELETE": "delete", "PATCH": "patch", "GET": "media" if query.get("alt") == "media" else "get"}
            return kinds.get(self.command, "other"), unquote(found[1]), unquote(found[2])
        if found := re.fullmatch(r"/storage/v1/b/([^/]+)/o/?", path):
            return "list", unquote(found[1]), ""
        return "other", "", path

    def _answer(
        self, operation: str, bucket: str, key: str, query: dict[str, str], body: bytes
    ) -> tuple[bytes, str, int]:
        server = self.gcs
        name = f"{bucket}/{key}"
        stored = None
        if operation == "insert":
            resource, data = self._upload(query, body)
            key = resource.get("name") or key
            stored = server.insert(f"{bucket}/{key}", query, data, resource)
        elif operation == "compose":
            stored = server.compose(bucket, key, query, json.loads(body))
        elif operation == "patch":
            stored = server.patch(name, query, json.loads(body))
        elif operation == "get":
            stored = server.find(name, query)
        elif operation == "list":
            return json.dumps(server.list(bucket, query)).encode(), "application/json", 0
        elif operation == "delete":
            server.delete(name, query)
            return b"", "", 204
        elif operation == "media":
            return self._media(server.find(name, query))
        if stored is None:
            raise Refusal(404, f"no such method: {self.command} {self.path}")
        return json.dumps(resource_of(bucket, key, stored)).encode(), "application/json", 0

    def _upload(self, query: dict[str, str], body: bytes) -> tuple[dict[str, Any], bytes]:
        kind = self.headers.get("Content-Type", "")
        if query.get("uploadType") == "media":
            return {"name": query["name"], "contentType": kind or "application/octet-stream"}, body
        if query.get("uploadType") != "multipart":
            raise Refusal(400, f"uploadType {query.get('uploadType')} is not served here")
        mark = b"--" + kind.split("boundary=")[1].strip('"').encode()
        _, described, rest = body.split(mark, 2)
        resource: dict[str, Any] = json.loads(re.split(rb"\r?\n\r?\n", described, maxsplit=1)[1])
        head, data = re.split(rb"\r?\n\r?\n", rest, maxsplit=1)
        data = data[: data.rindex(mark)]
        data = data[:-2] if data.endswith(b"\r\n") else data[:-1]
        if "contentType" not in resource and (found := re.search(rb"Content-Type: (.*)", head)):
            resource["contentType"] = found[1].strip().decode()
        return resource, data

    def _media(self, stored: Stored) -> tuple[bytes, str, int]:
        data, status = stored.data, 0
        if wanted := self.headers.get("Range"):
            found = re.fullmatch(r"bytes=(\d*)-(\d*)", wanted)
            if found is None:
                raise Refusal(400, "range")
            start, end = found[1], found[2]
            first = int(start) if start else max(0, len(data) - int(end))
            last = min(len(data), int(end) + 1) if start and end else len(data)
            if first >= len(data) or (first >= last):
                raise Refusal(416, "The requested range cannot be satisfied.")
            data, status = data[first:last], 206
        with self.gcs._lock:
            self.gcs.bytes_down += len(data)
        return data, stored.content_type, status

    def _send(self, status: int, data: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        if kind:
            self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()


@contextlib.contextmanager
def gcs_server() -> Iterator[GcsServer]:
    """A server that answers until the block ends. Every bucket name exists."""
    server = GcsServer()
    try:
        yield server
    finally:
        server.close()
