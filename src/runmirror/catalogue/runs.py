"""The health of runs, read from their logs and from the cursors of mirrors.

Guarantees:

- Nothing is written anywhere and no tracker is asked.
- A :class:`RunWatch` reads on where it stopped; after a resume from an older checkpoint it reads once more from the start,
  so that findings are about the points that are still valid.
- A run that can't be read is a :class:`RunHealth` with the reason in ``error``, never an exception.
"""

from __future__ import annotations

import logging
import os
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from runmirror.catalogue.entries import Catalogue
from runmirror.catalogue.findings import Finding, make, rows_text
from runmirror.catalogue.health import Health
from runmirror.cursors import SinkState, sink_states, unchanged
from runmirror.find import Found, ReadOptions, find_runs, open_log
from runmirror.log.records import Status
from runmirror.log.rows import START, Row
from runmirror.log.runlog import RunLog
from runmirror.state import HEARTBEAT

log = logging.getLogger("runmirror")
_ORDER = {"training": 0, "log": 1, "mirror": 2}


@dataclass(frozen=True, slots=True)
class RunHealth:
    """A run and what is wrong with it.

    Attributes:
        path, name: as :func:`runmirror.find.find_runs` names it.
        status: how the run is; None when it can't be read.
        rows: rows that were looked at.
        findings: what is wrong, about training first, then by step; () for a healthy run.
        error: why it can't be read, None when it can.
    """

    path: str
    name: str
    status: Status | None = None
    rows: int = 0
    findings: tuple[Finding, ...] = field(default=())
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Whether it was read and nothing is wrong."""
        return self.error is None and not self.findings

    def as_dict(self) -> dict[str, Any]:
        """The run as data that is strict JSON."""
        fields = ("path", "name", "status", "rows", "error")
        found = [finding.as_dict() for finding in self.findings]
        return {name: getattr(self, name) for name in fields} | {"findings": found}


def check_runs(
    paths: Iterable[str | os.PathLike[str]], *, catalogue: Catalogue | None = None, read: ReadOptions | None = None
) -> list[RunHealth]:
    """The health of every run below ``paths``.

    Args:
        paths: runs, folders of runs, metrics files, globs.
        catalogue: what metrics mean; default: the shipped one, with the files of ``RUNMIRROR_CATALOGUE``.
        read: how the logs are read, such as the options of the cloud they are in.

    Raises:
        NotALogError: a path holds no run.
        CatalogueError: a catalogue file can't be read.
    """
    catalogue, read = catalogue or Catalogue.load(), read or ReadOptions()
    return [_check(found, catalogue, read) for found in find_runs(paths, storage_options=read.storage_options)]


def _check(found: Found, catalogue: Catalogue, read: ReadOptions) -> RunHealth:
    try:
        watch = RunWatch(lambda: open_log(found, read), catalogue)
        findings = watch.read()
        status = watch.source.info().status
        findings += watch.mirrors(status)
        return RunHealth(found.path, found.name, status, watch.rows, tuple(findings))
    except Exception as error:  # whatever one log has in it, the others are checked
        log.debug("checking %s", found.path, exc_info=True)
        return RunHealth(found.path, found.name, error=f"{type(error).__name__}: {error}")


class RunWatch:
    """One run, checked again and again at the cost of what is new.

    Args:
        source: opens the log.
        catalogue: what its metrics mean.
    """

    def __init__(self, source: Callable[[], RunLog], catalogue: Catalogue) -> None:
        self._open = source
        self._catalogue = catalogue
        self._start()

    def _start(self) -> None:
        self.source = self._open()
        self.rows = 0
        """Rows that were looked at."""
        self._position = START
        self._ends = array("q")
        self._rewinds: list[tuple[int, int, int | None]] = []  # (ordinal, step, the step the run had come to)
        self._highest: int | None = None
        self._health: Health | None = None

    def read(self) -> list[Finding]:
        """What is wrong with training and with the log by now, training first, then by step. Raises OSError."""
        if self._position != START and not unchanged(self.source, self._position):
            self._start()
        if self._health is None:
            self._health = Health(self._catalogue, self.source.info().config)
        row, known = None, len(self._rewinds)
        for row in self.source.rows(self._position):
            self._ends.append(row.end)
            self.rows += not (row.fault or row.data.get("_not_rank0"))
            self._see(row)
            if len(self._rewinds) == known:
                self._health.feed(row)
        if row is not None:
            self._position = row.position
        if len(self._rewinds) > known:
            self._again()
        return sorted(self._health.findings, key=_order)

    def _see(self, row: Row) -> None:
        if row.rewind is not None:
            self._rewinds.append((row.ordinal, row.rewind, self._highest))
            self._highest = row.step
        elif not (row.summary or row.fault):
            self._highest = row.step if self._highest is None else max(self._highest, row.step)

    def _again(self) -> None:
        """Look at the rows that are valid after all resumes, from the start."""
        self._health = Health(self._catalogue, self.source.info().config)
        tops = {ordinal: highest for ordinal, _, highest in self._rewinds}
        below = self._rewinds[:]
        for row in self._open().rows(START):
            if row.ordinal >= self._position.ordinal:
                return
            while below and below[0][0] <= row.ordinal:
                below.pop(0)
            if row.rewind is not None or row.fault or not any(row.step >= step for _, step, _ in below):
                self._health.feed(row, tops.get(row.ordinal))

    def mirrors(self, status: Status) -> list[Finding]:
        """What is wrong with the mirrors of the run, by their state files on this machine."""
        found: list[Finding] = []
        for sink in sink_states(self.source, self._ends):
            if _is_behind(sink, status):
                behind = "the log was changed below its cursor" if sink.behind is None else rows_text(sink.behind)
                what = f"{behind} ({sink.last_error})" if sink.last_error else behind
                found.append(make("sink-behind", None, None, what, about="mirror", other=sink.sink))
            if sink.rejected:
                what = "1 row or key" if sink.rejected == 1 else f"{sink.rejected:,} rows or keys"
                found.append(make("rejected", None, None, what, about="mirror", other=sink.sink))
        return found


def _is_behind(sink: SinkState, status: Status) -> bool:
    """Whether a mirror is behind for good: rows that come now are on their way."""
    if sink.behind == 0:
        return False
    waits = time.time() - (sink.updated or 0.0) > HEARTBEAT
    return status != "running" or sink.last_error is not None or waits


def _order(finding: Finding) -> tuple[int, int, int]:
    step = finding.step if finding.step is not None else 0
    return _ORDER[finding.about], step, finding.row or 0
