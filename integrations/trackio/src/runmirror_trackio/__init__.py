"""Trackio, a local dashboard over SQLite, as a sink: ``--to trackio``, ``report_to="trackio"``.

Guarantees: every row of the log is one row of Trackio's table, written in one transaction per batch under an id made of the
run's and the row's place in the log. So the table itself is the cursor, and a row that is sent twice is there once.

Source: trackio/sqlite_storage.py (``SQLiteStorage.bulk_log``: ``INSERT OR IGNORE`` by ``log_id``, a row's step and time as
given; ``query_project``: read-only SQL), trackio/utils.py (``RESERVED_KEYS``, NaN and infinities as text).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar

from pydantic import Field

from runmirror.exceptions import OptionError
from runmirror.log.rows import Row
from runmirror.sinks.base import Capabilities, LogFile, Opened, Point, Rejected, RunInfo, SinkOptions, env_field

__all__ = ["TrackioOptions", "TrackioSink"]
_RESERVED = ("project", "run", "timestamp", "step", "time", "metrics")
_PAGE = 1000


class TrackioOptions(SinkOptions):
    """Options of :class:`TrackioSink`. Where Trackio keeps its projects is its own ``TRACKIO_DIR``."""

    project: str = env_field("", "TRACKIO_PROJECT", "the project; default: the name of the folder of the runs")
    group: str = Field(default="", description="the project when none is given; set by runmirror")


class TrackioSink:
    """One run of a Trackio project on this machine. Superseded points stay, and what ends a run is not shown."""

    name: ClassVar[str] = "trackio"
    requires: ClassVar[tuple[str, ...]] = ("trackio",)
    Options: ClassVar[type[SinkOptions]] = TrackioOptions
    capabilities: ClassVar[Capabilities] = Capabilities(
        keys=f"any text but {', '.join(_RESERVED)}, which Trackio uses itself, and none that begins with __",
        records=frozenset({"config"}),
        default_records=frozenset({"config"}),
        time_precision=1e-5,
    )

    def __init__(self, options: TrackioOptions) -> None:
        from trackio.sqlite_storage import SQLiteStorage

        self.options = options
        self._project = options.project or options.group or "runmirror"
        self._trackio = SQLiteStorage
        try:
            SQLiteStorage.validate_project_name(self._project)
        except ValueError as error:
            raise OptionError(f"option 'project' of the sink 'trackio': {error}") from None

    def destination(self) -> str:
        return str(self._trackio.get_project_db_path(self._project).parent)

    def open(self, run: RunInfo, tracker_run_id: str | None) -> Opened:
        self._run = run
        self._find(run, tracker_run_id)
        self._insert([("run", 0, run.start or 0.0, {})])  # so that a run without rows is shown too
        found = self._query(f"SELECT max(log_id) AS last FROM metrics WHERE {self._mine}")
        last = found[0]["last"] if found else None
        self._position = int(last.rpartition(":")[2]) + 1 if last else 0
        url = f"{self._trackio.get_project_db_path(self._project)} (trackio show --project {self._project})"
        return Opened(url, f"{self._project}/{self._id}", self._position)

    def _find(self, run: RunInfo, tracker_run_id: str | None) -> None:
        """A run stays in the project it was made in, whatever the options say now."""
        project, _, known = (tracker_run_id or "").rpartition("/")
        self._project, self._id = project or self._project, known or run.run_id
        name = self._id.replace("'", "''")
        self._mine = f"run_id = '{name}' AND log_id >= '{name}:0' AND log_id < '{name}:a'"

    def refuses(self, key: str) -> str | None:
        if key in _RESERVED or key.startswith("__"):
            return "Trackio uses this name itself"
        return None

    def put(self, rows: Sequence[Row]) -> list[Rejected]:
        refused = [(row.ordinal, key, self.refuses(key)) for row in rows for key in row.scalars()]
        taken = [{k: v for k, v in row.scalars().items() if self.refuses(k) is None} for row in rows]
        self._insert([(f"{r.ordinal:015d}", r.step, r.time, p) for r, p in zip(rows, taken, strict=True)])
        self._position = rows[-1].ordinal + 1 if rows else self._position
        return [Rejected(ordinal, key, reason) for ordinal, key, reason in refused if reason]

    def put_file(self, file: LogFile) -> None:
        if file.kind == "config":
            text = file.read().decode("utf-8", "replace")
            try:
                config = json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 19 else digits)
            except ValueError:
                config = text
            self._insert(
                [("run", 0, self._run.start or 0.0, {})], config if isinstance(config, dict) else {"config": config}
            )

    def flush(self, deadline: float) -> int:
        return self._position

    def close(self, run: RunInfo | None, deadline: float) -> None:
        """Nothing is held open."""

    def read_back(self, run: RunInfo, tracker_run_id: str | None) -> Iterator[Point] | None:
        self._find(run, tracker_run_id)
        return self._points() if self._query(f"SELECT 1 FROM metrics WHERE {self._mine} LIMIT 1") else None

    def _points(self) -> Iterator[Point]:
        last = 0
        columns = "SELECT id, step, timestamp, metrics FROM metrics"
        while page := self._query(f"{columns} WHERE {self._mine} AND id > {last} ORDER BY id LIMIT {_PAGE}"):
            last = page[-1]["id"]
            for row in page:
                time = datetime.fromisoformat(row["timestamp"]).timestamp()
                for key, value in json.loads(row["metrics"]).items():
                    yield Point(key, row["step"], time, float(value))

    def _query(self, sql: str) -> list[dict[str, Any]]:
        try:
            return list(self._trackio.query_project(self._project, sql)["rows"])
        except FileNotFoundError:  # no such project yet
            return []

    def _insert(self, rows: list[tuple[str, int, float, dict[str, Any]]], config: dict[str, Any] | None = None) -> None:
        self._trackio.bulk_log(
            self._project,
            self._run.name,
            [points for *_, points in rows],
            steps=[step for _, step, _, _ in rows],
            timestamps=[datetime.fromtimestamp(time, UTC).isoformat() for _, _, time, _ in rows],
            log_ids=[f"{self._id}:{place}" for place, *_ in rows],
            config=config,
            run_id=self._id,
        )
