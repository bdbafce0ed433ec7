"""RunLog: the rows and files of one log_path, as a mirror reads them.

Guarantees:

- Rows come in file order, one per line, with dense ordinals that are never used twice: a blank or broken line, and a
  line that was cut away before it was delivered, comes as a row without values and with a ``fault``.
- Only whole lines are read. A last line without newline counts when it is a whole JSON object.
- Reading is incremental by byte offset; a log that shrank or was replaced is read again from the start, and lines that
  did not change keep their ordinals (see :mod:`runmirror.log.index`).
- Memory does not grow with the log, but for 16 bytes a row when there is an index.
- Nothing is ever written into the log_path.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, tzinfo
from typing import Any, NamedTuple

import orjson

from runmirror.exceptions import NotALogError
from runmirror.log import layout
from runmirror.log.identity import identify
from runmirror.log.index import ANY, NO_TIME, LineIndex, MovedError, line_digest
from runmirror.log.layout import Kind
from runmirror.log.records import Checkpoint, Status
from runmirror.log.rows import Position, Row, decode
from runmirror.log.sources import LogFile, RunInfo, list_files
from runmirror.log.status import (
    LATE_NEWLINES,
    began_empty,
    ends_at,
    latest_values,
    read_checkpoints,
    read_config,
    read_journal,
    read_resumes,
    run_status,
)
from runmirror.log.steps import HIGHEST, OWN_STEP_KEYS, STEP_KEYS, Rewinds, find_step
from runmirror.log.times import LATEST, TIME_SOURCES, TimeSource, duration, infer_times, report_starts, row_time
from runmirror.storage import Storage, local_root

CHUNK = 1 << 17
"""Bytes read at a time."""
ARRIVAL_WINDOW = 5 * 60.0
"""A row was seen arriving when the log had been read to its end at most this many seconds before."""

CUT = "cut from the log before it was sent"


class Block(NamedTuple):
    """Whole lines without their newlines, the offset of the first, and whether the last one's newline is there yet."""

    lines: list[bytes]
    start: int
    whole: bool


class RunLog:
    """One log_path, read.

    Args:
        storage: its root.
        name: the run's name in trackers.
        index: where ordinals and inferred times are kept; None for none (then nothing is hashed, and a log that was cut
            is simply read anew).
        metrics: the name of the metrics file.
        step_key: the key that is the step, instead of the usual ones.
        zone: the zone of times without one.
        adapt: turns a decoded object of another framework into ours.
        source: the kind of log, for people; found out when None.
        by_content: know a foreign log by its content instead of its place (:func:`runmirror.log.identity.identify`).
        status_unknown: what a run counts as that stopped without saying how it ended; default "killed".
    """

    def __init__(
        self,
        storage: Storage,
        name: str = "",
        index: LineIndex | None = None,
        *,
        metrics: str = layout.METRICS,
        step_key: str | None = None,
        zone: tzinfo = UTC,
        adapt: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        source: str | None = None,
        by_content: bool = False,
        status_unknown: Status | None = None,
    ) -> None:
        self.storage = storage
        self.name = name
        self.metrics = metrics
        self.index = index
        self.identity = identify(storage, metrics=metrics, by_content=by_content)
        self.source = source or self._guess_source()
        self.time_source: TimeSource = "row"
        self.broken: list[str] = []
        """``file:line: what`` of the first 100 broken lines."""
        self.broken_count = 0
        own = self.identity.own and began_empty(storage)
        self._step_keys = (step_key,) if step_key else OWN_STEP_KEYS if own else STEP_KEYS
        self._zone = zone
        self._adapt = adapt
        self._status_unknown = status_unknown
        self._wanted = 0  # the first ordinal that is asked for
        cloud = self.identity.own and local_root(storage.url()) is None
        self.state_in: Storage | None = storage if cloud else None
        """Where mirrors keep a copy of their state: the log_path, when it is in a cloud and ours."""
        self.writer_gone = False
        """Set when the writing process is known to be gone: a run that did not end is killed then, however fresh."""
        self._reset()

    def _guess_source(self) -> str:
        if self.identity.own:
            return "runmirror"
        tinker = self.metrics == layout.METRICS and self.storage.exists(layout.CHECKPOINTS)
        return "tinker-cookbook" if tinker else "metrics"

    def _reset(self) -> None:
        self._offset = 0  # behind the last line read
        self._last_line = b""  # its bytes, to notice a log that was replaced
        self._newline_due = False  # whether its newline was not there yet
        self._lines = 0  # lines read
        self._row = Row(-1, {}, 0, math.nan)  # the last row
        self.has_steps = self.identity.own  # whether a row read so far had one; else ordinals are the steps
        self._resumes: list[int] = []  # offsets of the journal's resumes that no row has followed yet
        self._resumes_read = 0
        self._journal_version = ""
        self._was_cut = False  # lines before the next row were cut away
        self._rewinds = Rewinds(self._replay, self.identity.own)
        self._inferred: list[float] = []  # times by line
        self._start: float | None = None  # of the run, once it is known
        self._at_end = -math.inf  # when the log was last read to its end
        self.broken.clear()
        self.broken_count = 0

    # -- rows

    def rows(self, after: Position) -> Iterator[Row]:
        """Every row at or above ``after.ordinal`` that is in the log now, in order; then it ends. Call it again, with the
        last row's position, for those that came since. A missing metrics file is an empty log.

        Raises:
            OSError: the log can't be read. NotALogError: another run of ours is in its place now.
        """
        if after.ordinal <= self._row.ordinal or self._changed():
            self._restart()
        wanted = self._wanted = after.ordinal
        for _ in range(3):
            try:
                for block in self._read():
                    if block[0].ordinal >= wanted:
                        yield from block
                    else:
                        yield from [row for row in block if row.ordinal >= wanted]
                    wanted = max(wanted, block[-1].ordinal + 1)
                return
            except MovedError:  # another process numbers this log too, and saw it cut before we did
                self._restart()
        raise OSError(f"{self.storage.url(self.metrics)}: the log keeps being rewritten; try again when it rests")

    def _restart(self) -> None:
        if self.identity.own and identify(self.storage, metrics=self.metrics) != self.identity:
            raise NotALogError(
                f"{self.storage.url()}: the run was removed or made anew while it was read: open it again"
            )
        at_end = self._at_end
        self._reset()
        if self.index is not None:
            self.index.load()
            self._at_end = at_end  # lines that were there then have their times in the index

    def _changed(self) -> bool:
        """Whether what was read is no longer there: the log shrank, its last line is another or a longer one, or another
        process saw it cut."""
        if self.index is not None and self.index.moved():
            return True
        if not self._offset:
            return False
        length = len(self._last_line)
        try:
            found = self.storage.read_range(
                self.metrics, self._offset - length - (0 if self._newline_due else 1), length + 1
            )
        except FileNotFoundError:
            return True
        behind = found[length:]
        whole = behind in LATE_NEWLINES or not behind if self._newline_due else behind == b"\n"
        return found[:length] != self._last_line or not whole

    def _read(self) -> Iterator[list[Row]]:
        for block in self._blocks(self._offset, self._newline_due):
            if self.identity.own:
                self._read_resumes()
            yield self._number(block)
        self._at_end = time.time()

    def _read_resumes(self) -> None:
        """Take up new resumes. Called behind the rows were read: a writer notes a resume before its first row."""
        stat = self.storage.stat(layout.JOURNAL)
        if stat is None or stat.version == self._journal_version:
            return
        self._journal_version = stat.version
        resumes = [entry.offset for entry in read_journal(self.storage) if entry.event == "resumed"]
        self._resumes += resumes[self._resumes_read :]
        self._resumes_read = len(resumes)

    def _blocks(self, offset: int, newline_due: bool = False) -> Iterator[Block]:
        """The whole lines from ``offset`` on, a block at a time."""
        tail, size = b"", CHUNK
        while True:
            try:
                chunk = self.storage.read_range(self.metrics, offset + len(tail), size)
            except FileNotFoundError:
                return
            if newline_due and chunk == b"\r":  # half of a late newline
                return
            if newline_due and chunk:
                skip = 2 if chunk[:2] == b"\r\n" else 1 if chunk[:1] == b"\n" else 0
                chunk, offset, newline_due = chunk[skip:], offset + skip, False
                if not chunk:
                    continue
            lines = chunk.split(b"\n")
            lines[0] = tail + lines[0]
            rest = lines.pop()
            if lines:
                yield Block(lines, offset, True)
                offset += len(tail) + len(chunk) - len(rest)
            elif not chunk and rest[-1:] not in b"\0" and decode(rest) is not None:  # NULs: a power cut, to be repaired
                yield Block([rest], offset, False)
            tail = rest
            if not chunk:
                return
            size = CHUNK if lines else size * 2

    def _number(self, block: Block) -> list[Row]:
        """Give the lines of a block their ordinals, steps and times."""
        rows: list[Row] = []
        fresh: list[tuple[bytes, float]] = []
        rewinds, loads = self._rewinds, orjson.loads
        index = self.index
        simple = self._adapt is None and self._step_keys[0] == STEP_KEYS[0]
        highest = self._highest_if(simple)
        newline, most, latest = int(block.whole), HIGHEST, LATEST
        end, number = block.start, self._lines - 1
        for line in block.lines:
            end += len(line) + newline
            number += 1
            try:
                data = loads(line)
            except orjson.JSONDecodeError:
                data = decode(line)
            # Measured: with this short way for plain rows reading stays within a quarter of bare orjson.
            if highest is not None and type(data) is dict:
                step, when = data.get("step"), data.get("_timestamp")
                if type(step) is int and type(when) is float and highest < step <= most and 0.0 < when < latest:
                    ordinal = number if index is None else index.expect(number, line, fresh)
                    if ordinal is not None:
                        rewinds.highest = highest = step
                        rows.append(Row(ordinal, data, step, when, line, end))
                        continue
            self._row = rows[-1] if rows else self._row
            rows += self._number_one(number, line, end, data, fresh)
            highest = self._highest_if(simple)
        if index is not None and index.extend(len(index), fresh):
            for row in rows:  # another process was first: its times hold
                known = index.record(row.ordinal)
                if known is not None and known[1] == known[1] and row.fault != CUT:
                    row.time = known[1]
        self._last_line, self._newline_due = block.lines[-1], not block.whole
        self._offset = end
        self._lines = number + 1
        self._row = rows[-1]
        return rows

    def _highest_if(self, simple: bool) -> int | None:
        """The highest step so far when a row above it needs no more thought, else None."""
        simple = simple and self.has_steps and self._rewinds.last is None and not (self._resumes or self._was_cut)
        return self._rewinds.highest if simple else None

    def _number_one(
        self, number: int, line: bytes, end: int, data: dict[str, Any] | None, fresh: list[tuple[bytes, float]]
    ) -> list[Row]:
        ordinal, frozen, mark = number, NO_TIME, b""
        if self.index is not None:
            mark = line_digest(line)
            ordinal = self.index.ordinal(number)
            known = self.index.record(ordinal)
            if known is not None and known[0] not in (mark, ANY):
                ordinal, known = self.index.cut(number), None
            if known is not None:
                frozen = known[1]
        last = self._row
        self._was_cut = self._was_cut or ordinal > last.ordinal + 1
        fault = ""
        if type(data) is not dict:
            fault = f"{self.metrics}:{number + 1}: " + ("broken line" if line.strip() else "blank line")
            self._note_broken(fault)
            data = {}
        elif self._adapt is not None:
            data = self._adapt(data)
        step, summary = self._step(data, ordinal, fault)
        rewind = None if summary or fault else self._rewind(step, data, number, end - len(line))
        when = row_time(data)
        if fault:
            when = self._row.time if self._row.ordinal >= 0 else 0.0
        elif when is None:
            when = frozen = self._note_source("inferred", frozen) if frozen == frozen else self._infer(number)
        if self.index is not None and ordinal >= len(self.index) + len(fresh):
            fresh.append((mark, frozen))
        self._row = Row(ordinal, data, step, when, line, end, summary, rewind, fault)
        if ordinal == last.ordinal + 1:
            return [self._row]
        gone = replace(last if last.ordinal >= 0 else self._row, data={}, rewind=None, fault=CUT)
        first = max(last.ordinal + 1, self._wanted)
        return [*(replace(gone, ordinal=lost) for lost in range(first, ordinal)), self._row]

    def _step(self, data: dict[str, Any], ordinal: int, fault: str) -> tuple[int, bool]:
        """(step, whether the row is a summary)."""
        step = find_step(data, self._step_keys)
        if step is not None:
            self.has_steps = True
            return step, False
        if fault or self.has_steps:
            return self._rewinds.highest or 0, not fault
        return ordinal, False

    def _rewind(self, step: int, data: dict[str, Any], number: int, start: int) -> int | None:
        highest = self._rewinds.highest
        resumed = bool(self._resumes) and start >= self._resumes[0]
        while self._resumes and start >= self._resumes[0]:
            self._resumes.pop(0)
        rewind = self._rewinds.observe(step, data, resumed)
        if not self._was_cut:
            return rewind
        self._was_cut = False
        kept = highest + 1 if highest is not None and number else 0  # the lines that are still there stay valid
        return kept if rewind is None else min(kept, rewind)

    def _replay(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(step, data) of every row before the current one, without numbering them."""
        for step, data, start in self._decoded():
            if start >= self._row.end:
                return
            yield step, data

    def _decoded(self) -> Iterator[tuple[int, dict[str, Any], int]]:
        """(step, data, start) of every line, without numbering them; a line without a step has the last one."""
        step = 0
        for block in self._blocks(0):
            start = block.start
            for line in block.lines:
                data = decode(line) or {}
                data = self._adapt(data) if self._adapt is not None else data
                found = find_step(data, self._step_keys)
                step = step if found is None else found
                yield step, data, start
                start += len(line) + 1

    def _infer(self, number: int) -> float:
        """The time of a row that carries none and that no earlier reading has fixed."""
        latest = self._row.time if self._row.ordinal >= 0 else -math.inf
        if number >= len(self._inferred):
            if time.time() - self._at_end < ARRIVAL_WINDOW:
                return max(latest, self._note_source("arrival", time.time()))
            self._infer_all()
        here = number < len(self._inferred)  # else the log shrank while it was read
        return max(latest, self._inferred[number] if here else self._modified())

    def _infer_all(self) -> None:
        rows = [(step, duration(data), row_time(data)) for step, data, _ in self._decoded()]
        starts = report_starts(self.storage, self._zone) if self.metrics == layout.METRICS else {}
        self._inferred, source = infer_times(rows, starts, self._modified())
        self._note_source(source, 0.0)

    def _modified(self) -> float:
        stat = self.storage.stat(self.metrics)
        return stat.mtime if stat else time.time()

    def _note_source(self, source: TimeSource, when: float) -> float:
        self.time_source = max(self.time_source, source, key=TIME_SOURCES.index)
        return when

    def _note_broken(self, what: str) -> None:
        self.broken_count += 1
        self.broken += [what] if len(self.broken) < 100 else []

    # -- the rest of a Source

    def info(self) -> RunInfo:
        """What is known of the run now."""
        journal = read_journal(self.storage) if self.identity.own else []
        stat = self.storage.stat(self.metrics)
        ended = bool(journal) and journal[-1].event == "finished"
        told = ended or bool(journal and self._row.ordinal >= 0)
        last = {} if told else latest_values(self.storage, self.metrics)
        status, known = run_status(journal, self._checkpoints(), last, stat.mtime if stat else None)
        if self.writer_gone and status == "running":
            status, known = "killed", False
        if not known and self._status_unknown is not None:
            status, known = self._status_unknown, True
        end = None
        if status != "running":
            end = self._row.time if self._row.ordinal >= 0 else row_time(last)
            if ended:
                end = journal[-1].time
        return RunInfo(
            run_id=self.identity.run_id,
            name=self.name,
            start=journal[0].time if journal else self._first_time() if self._start is None else self._start,
            end=end,
            status=status,
            status_known=known,
            config=read_config(self.storage, foreign=not self.identity.own) if self.metrics == layout.METRICS else None,
            source=self.source,
            time_source=self.time_source,
            resumes=read_resumes(self.storage, journal),
        )

    def _checkpoints(self) -> list[Checkpoint]:
        return read_checkpoints(self.storage) if self.metrics == layout.METRICS else []

    def _first_time(self) -> float | None:
        for block in self._blocks(0):
            first = self._start = row_time(decode(block.lines[0]) or {})
            known = self.index.record(self.index.ordinal(0)) if self.index is not None else None
            if first is None and known is not None and known[1] == known[1]:
                return known[1]
            if first is None and not self._inferred:
                self._infer_all()
            return first if first is not None else self._inferred[0] if self._inferred else None
        return None

    def is_complete_at(self, position: Position) -> bool:
        """Whether no row lies behind ``position``, and its last line is still the one it was taken at."""
        return ends_at(self.storage, self.metrics, position)

    def numbered(self) -> int:
        """How many ordinals were ever given out, as far as the log was read and the index remembers."""
        return max(self._row.ordinal + 1, 0 if self.index is None else len(self.index))

    def files(self, kinds: frozenset[Kind]) -> list[LogFile]:
        """The files of these kinds that are there now, sorted by path; versions are the storage's."""
        return list_files(self.storage, kinds, foreign=not self.identity.own) if self.metrics == layout.METRICS else []
