"""How a Run is doing: what ``run.status()`` answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runmirror.live import SinkStatus
from runmirror.log.records import Status
from runmirror.storage import CloudStatus

if TYPE_CHECKING:
    from runmirror.catalogue.findings import Finding


@dataclass(frozen=True)
class RunStatus:
    """How a Run is doing.

    Attributes:
        state: "running", or how it ended.
        rows: rows this Run has brought into metrics.jsonl.
        last_step: of the last row, None before the first.
        bytes: size of metrics.jsonl.
        rejected: distinct keys that were left out of rows (counted up to 1,000).
        waiting: rows in memory because the disk is full; tried again at every row.
        lost: rows that could not be kept.
        error: what the disk said last, "" when nothing.
        sinks: sink -> how it is doing.
        cloud: of a log_path in a cloud, how the uploads are doing: ``unsynced`` bytes, ``last_upload``, ``error``; else,
            and once a run has ended and all is up, None.
        lost_files: of reports and rollouts, that could not be written.
    """

    state: Status
    rows: int
    last_step: int | None
    bytes: int
    rejected: int
    waiting: int
    lost: int
    error: str
    sinks: Mapping[str, SinkStatus]
    cloud: CloudStatus | None = None
    lost_files: int = 0

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is wrong with the run, as ``runmirror health`` tells it. Looking reads the rows that are new since somebody
        looked last, on the thread that does; it never raises. Gone in a copy."""
        check: Callable[[], tuple[Finding, ...]] = self.__dict__.get("_check", tuple)
        return check()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_check"}
