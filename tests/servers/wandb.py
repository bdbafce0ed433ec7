"""A loopback server that speaks the part of W&B's protocol that an unmodified ``wandb`` needs.

::

    with wandb_server() as server:  # WANDB_BASE_URL=server.url, WANDB_API_KEY any 40 characters
        server.faults.append(Fault("file_stream", status=503, times=3))
        server.runs["me", "project", "id"].history  # rows by offset

A line sent to an offset that is already held takes its place; that is how W&B itself keeps a file. What it can't show:
what W&B does beyond its protocol (rendering, rate limits, derived summaries, real credentials).
"""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ENTITY = "me"
Key = tuple[str, str, str]


@dataclass
class Fault:
    """What happens to the next ``times`` requests of an operation (a GraphQL name, "file_stream" or "upload"): a
    ``status``, a ``drop`` (the connection closes without an answer), a ``truncate`` (half of the body), a ``delay``."""

    operation: str
    status: int = 0
    times: int = 1_000_000
    drop: bool = False
    truncate: bool = False
    delay: float = 0.0
    seen: int = 0


@dataclass
class StoredRun:
    """What the server holds of one run: lines by offset with the time they came, files, config, summary, state."""

    entity: str
    project: str
    id: str
    name: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    lines: dict[int, str] = field(default_factory=dict)
    arrived: dict[int, float] = field(default_factory=dict)
    last: int = -1
    events: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    replaced: int = 0
    state: str = "running"
    exit_code: int | None = None
    creations: int = 0

    @property
    def history(self) -> list[dict[str, Any]]:
        """Every row in the order of its offset."""
        return [json.loads(self.lines[offset]) for offset in sorted(self.lines)]

    def values(self) -> dict[str, Any]:
        """The config without W&B's wrapping."""
        return {key: one.get("value") if isinstance(one, dict) else one for key, one in self.config.items()}


class WandbServer:
    """The server's memory, and how it answers."""

    def __init__(self) -> None:
        self.url = ""
        self.runs: dict[Key, StoredRun] = {}
        self.faults: list[Fault] = []
        self.latency = 0.0
        self.requests: list[str] = []
        self.lock = threading.RLock()

    def run(self, project: str = "") -> StoredRun:
        """The only run there is (in a project)."""
        (one,) = self.of(project)
        return one

    def of(self, project: str = "") -> list[StoredRun]:
        """The runs (of a project)."""
        return [one for one in list(self.runs.values()) if project in ("", one.project)]

    def fault(self, operation: str) -> Fault | None:
        """The fault that strikes this request."""
        with self.lock:
            self.requests.append(operation)
            for one in self.faults:
                if one.operation == operation and one.seen < one.times:
                    one.seen += 1
                    return one
        return None

    def answer(self, operation: str, asked: dict[str, Any]) -> Any:
        """The ``data`` of a GraphQL answer."""
        entity = asked.get("entity") or asked.get("entityName") or ENTITY
        project = asked.get("project") or asked.get("projectName") or asked.get("modelName") or "uncategorized"
        key = (
            entity,
            project,
            str(asked.get("name") or asked.get("run") or asked.get("runName") or asked.get("runId")),
        )
        with self.lock:
            held = self.runs.get(key)
            if operation in ("Viewer", "GetDefaultEntity", "GetViewer"):
                return {"viewer": _VIEWER | {"entity": ENTITY}}
            if operation == "ServerFeaturesQuery":
                return {"serverInfo": {"features": []}}
            if operation.startswith("Probe"):  # older clients ask what the server knows
                return _KNOWN_FIELDS
            if operation == "UpsertBucket":
                return self._upsert(key, asked)
            if operation in ("RunResumeStatus", "RunStatus"):
                return {"model": {"id": "p", "name": project, "entity": {"id": "e", "name": entity}} | _bucket(held)}
            if operation.startswith("CreateRunFiles"):
                names = asked.get("files") or []
                files = [{"name": n, "uploadUrl": f"{self.url}/upload/{'/'.join(key)}?{n}"} for n in names]
                return {"createRunFiles": {"runID": key[2], "uploadHeaders": [], "files": files}}
            if operation == "HistoryPage":
                low, high = asked.get("minStep") or 0, asked.get("maxStep") or 1 << 62
                lines = [held.lines[at] for at in sorted(held.lines)] if held else []
                within = [line for line in lines if (found := _STEP.search(line)) and low <= int(found[1]) < high]
                return {"project": {"run": {"history": within}}}
            if operation == "RunFullHistory":
                return {"project": {"run": {"history": list(held.lines.values()) if held else [], "events": []}}}
            if operation == "RunParquetHistory":
                return {"project": {"run": {"parquetHistory": {"parquetUrls": []}}}}
            return {"project": {"internalId": "1", "run": _shown(held) if held else None}}

    def _upsert(self, key: Key, asked: dict[str, Any]) -> Any:
        fresh = key not in self.runs
        held = self.runs.setdefault(key, StoredRun(*key))
        held.creations += fresh
        held.name = asked.get("displayName") or held.name or key[2]
        held.fields |= {name: value for name, value in asked.items() if value is not None}
        if asked.get("config"):
            held.config |= json.loads(asked["config"])
        if held.state != "running" and asked.get("config") is None:
            held.state = "running"
        project = {"id": "p", "name": key[1], "entity": {"id": "e", "name": key[0]}}
        bucket = {"id": f"B{key[2]}", "name": key[2], "displayName": held.name, "description": None, "sweepName": None}
        bucket |= {"config": json.dumps(held.config), "historyLineCount": len(held.lines), "project": project}
        return {"upsertBucket": {"bucket": bucket, "inserted": fresh}}

    def stream(self, key: Key, body: dict[str, Any]) -> dict[str, Any]:
        """Take in a file_stream request."""
        with self.lock:
            held = self.runs.setdefault(key, StoredRun(*key))
            for name, chunk in (body.get("files") or {}).items():
                if name == "wandb-history.jsonl":
                    for number, line in enumerate(chunk["content"], chunk["offset"]):
                        held.replaced += number in held.lines
                        held.lines[number], held.arrived[number] = line, time.time()
                        found = _STEP.search(line)
                        held.last = max(held.last, int(found[1]) if found else -1)
                elif name == "wandb-summary.json":
                    held.summary = json.loads(chunk["content"][-1])
                elif name == "wandb-events.jsonl":
                    held.events += chunk["content"]
            held.state = "running"
            if body.get("complete"):
                held.exit_code = body.get("exitcode") or 0
                held.state = "failed" if held.exit_code else "finished"
        return {}


_STEP = re.compile(r'"_step":\s*(\d+)')
_KNOWN_FIELDS = {"RunType": {"fields": [{"name": "projectId"}, {"name": "historyKeys"}]}}
_KNOWN_FIELDS |= {"MutationType": {"fields": [{"name": "createRunFiles"}]}}
_KNOWN_FIELDS |= {name: {"fields": []} for name in ("QueryType", "ServerInfoType")}
_VIEWER = {"id": "VXNlcjox", "username": "me", "email": "me@example.org", "flags": "{}", "teams": {"edges": []}}


def _bucket(held: StoredRun | None) -> dict[str, Any]:
    if held is None:
        return {"bucket": None}
    lines = [held.lines[offset] for offset in sorted(held.lines)]
    bucket = {
        "id": f"B{held.id}",
        "name": held.id,
        "displayName": held.name,
        "summaryMetrics": json.dumps(held.summary),
    }
    bucket |= {"logLineCount": 0, "historyLineCount": len(lines), "eventsLineCount": len(held.events)}
    bucket |= {"historyTail": json.dumps(lines[-1:]), "eventsTail": json.dumps(held.events[-1:])}
    told = {"tags": held.fields.get("tags") or [], "notes": held.fields.get("notes")}
    bucket |= told | {"config": json.dumps(held.config), "wandbConfig": json.dumps({"t": 1})}
    return {"bucket": bucket}


def _shown(held: StoredRun) -> dict[str, Any]:
    keys = {"lastStep": held.last, "keys": {}, "sets": []}
    shown: dict[str, Any] = {
        "id": f"B{held.id}",
        "tags": held.fields.get("tags") or [],
        "name": held.id,
        "displayName": held.name,
        "sweepName": None,
    }
    shown |= {"state": held.state, "config": json.dumps(held.config), "group": held.fields.get("groupName")}
    shown |= {
        "jobType": held.fields.get("jobType"),
        "commit": None,
        "readOnly": False,
        "description": None,
        "notes": None,
    }
    shown |= {"createdAt": "2026-01-01T00:00:00Z", "heartbeatAt": "2026-01-01T00:00:00Z", "projectId": "1"}
    shown |= {"summaryMetrics": json.dumps(held.summary), "historyLineCount": len(held.lines), "historyKeys": keys}
    user = {"name": "me", "username": "me"}
    files = [{"node": _file(name, content), "cursor": name} for name, content in held.files.items()]
    listed = {"edges": files, "pageInfo": {"endCursor": None, "hasNextPage": False}}
    return shown | {"systemMetrics": "{}", "user": user, "files": listed, "fileCount": len(files), "internalId": "1"}


def _file(name: str, content: bytes) -> dict[str, Any]:
    place = {"url": "", "directUrl": "", "mimetype": "text/plain", "updatedAt": "2026-01-01T00:00:00Z", "md5": ""}
    return {"id": name, "name": name, "sizeBytes": len(content)} | place


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # headers and body in one packet
    server: _Http

    def log_message(self, *_: Any) -> None: ...

    def _body(self) -> bytes:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data

    def _say(self, body: Any, fault: Fault | None) -> None:
        data = json.dumps(body).encode()
        if fault and fault.status:
            data = b'{"error": "as asked"}'
        self.send_response(fault.status if fault and fault.status else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if fault and fault.truncate else data)
        self.close_connection = self.close_connection or bool(fault and fault.truncate)

    def _handle(self) -> None:
        held, body = self.server.held, self._body()
        time.sleep(held.latency)
        stream = re.fullmatch(r"/files/([^/]+)/([^/]+)/([^/]+)/file_stream", self.path)
        upload = re.fullmatch(r"/upload/([^/]+)/([^/]+)/([^/?]+)\?(.+)", self.path)
        asked = json.loads(body) if self.path.endswith("graphql") else {}
        found = re.search(r"(?:query|mutation)\s+(\w+)", asked.get("query", ""))
        operation = "file_stream" if stream else "upload" if upload else found[1] if found else "other"
        fault = held.fault(operation)
        if fault:
            time.sleep(fault.delay)
            if fault.drop:
                self.close_connection = True
                return
        if fault and fault.status:
            self._say({}, fault)
        elif stream:
            self._say(held.stream((stream[1], stream[2], stream[3]), json.loads(body)), fault)
        elif upload:
            held.runs[upload[1], upload[2], upload[3]].files[upload[4]] = body
            self._say({}, fault)
        else:
            self._say({"data": held.answer(operation, asked.get("variables") or {})} if found else {}, fault)

    do_GET = do_POST = do_PUT = _handle


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    held: WandbServer

    def handle_error(self, *_: Any) -> None:
        """A client that went away in the middle is nothing to report."""


@contextlib.contextmanager
def wandb_server() -> Iterator[WandbServer]:
    """Serve on a free port of the loopback interface until the block ends."""
    held = WandbServer()
    http = _Http(("127.0.0.1", 0), _Handler)
    http.held = held
    held.url = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield held
    finally:
        http.shutdown()
        http.server_close()
        thread.join(10)
