"""A tracker in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from pydantic import Field

from runmirror.log.records import Status
from runmirror.log.rows import Row
from runmirror.sinks.base import Capabilities, LogFile, Opened, Point, Rejected, RunInfo, SinkOptions


@dataclass
class MemoryRun:
    """What the in-memory tracker holds of one run: rows as (ordinal, step, time, points), files, status."""

    name: str
    rows: list[tuple[int, int, float, dict[str, float]]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    status: Status = "running"


class MemoryOptions(SinkOptions):
    """Options of :class:`MemorySink`. ``tracker`` names the tracker: sinks with one name share it."""

    tracker: str = Field(default="memory", description="which in-memory tracker")


class MemorySink:
    """A tracker in memory, for tests. It keeps every row it was put, so a row sent twice shows."""

    name: ClassVar[str] = "memory"
    Options: ClassVar[type[SinkOptions]] = MemoryOptions
    capabilities: ClassVar[Capabilities] = Capabilities(
        records=frozenset({"config", "code", "checkpoints"}),
        default_records=frozenset({"config", "code", "checkpoints"}),
        test_only=True,
    )
    trackers: ClassVar[dict[str, dict[str, MemoryRun]]] = {}

    def __init__(self, options: MemoryOptions | None = None) -> None:
        self.options = options or MemoryOptions()
        self.run: MemoryRun | None = None

    def destination(self) -> str:
        """``memory://<tracker>``."""
        return f"memory://{self.options.tracker}"

    @property
    def runs(self) -> dict[str, MemoryRun]:
        """Every run of this tracker by run id."""
        return self.trackers.setdefault(self.options.tracker, {})

    def open(self, run: RunInfo, tracker_run_id: str | None) -> Opened:
        """Create or find the run; tells the position it holds."""
        self.run = self.runs.setdefault(run.run_id, MemoryRun(run.name))
        return Opened(f"{self.destination()}/{run.name}", run.run_id, len(self.run.rows))

    def put(self, rows: Sequence[Row]) -> list[Rejected]:
        """Keep the rows. A gap or a repeated ordinal is an AssertionError: the mirror broke its promise."""
        run = self._opened()
        for row in rows:
            if row.ordinal != len(run.rows):
                raise AssertionError(f"row {row.ordinal} came where {len(run.rows)} was due")
            run.rows.append((row.ordinal, row.step, row.time, row.scalars()))
        return []

    def put_file(self, file: LogFile) -> None:
        """Keep the bytes."""
        self._opened().files[file.path] = file.read()

    def flush(self, deadline: float) -> int:
        """Everything put is safe."""
        return len(self._opened().rows)

    def close(self, run: RunInfo | None, deadline: float) -> None:
        """Note how the run ended."""
        if run is not None:
            self._opened().status = run.status
        self.run = None

    def read_back(self, run: RunInfo, tracker_run_id: str | None) -> Iterator[Point] | None:
        """Every point of every row, superseded ones too."""
        held = self.trackers.get(self.options.tracker, {}).get(tracker_run_id or run.run_id)
        if held is None:
            return None
        return (Point(key, step, time, value) for _, step, time, points in held.rows for key, value in points.items())

    def _opened(self) -> MemoryRun:
        if self.run is None:
            raise RuntimeError("open comes first")
        return self.run
