"""Mirror: from a Source to a Sink. Live mirroring, catching up and importing are this one code path.

Guarantees:

- Rows go to the sink in order and without a gap. Delivery starts at the position the tracker itself tells, else at the
  cursor; the cursor moves only to what ``flush`` answered, and is on disk after that.
- A transient error (``Retry``, or any error the sink does not explain) is tried again after 1 to 60 s with jitter, for as
  long as the caller has patience. A row that fails three times alone, while ``open`` works, is put aside with its reason
  and replaced by an empty one; nothing else is ever passed over.
- Every call of the sink has a deadline and runs in a thread of its own (:mod:`runmirror.fence`).
- Files never hold back rows: they are sent when the rows are.
- Memory does not grow with the log: one batch at a time.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from runmirror import takeover
from runmirror.cursors import check_same_log, outlive_cut, sync_index
from runmirror.delivered import Delivered
from runmirror.duefiles import DueFiles
from runmirror.exceptions import Refused, Retry, Throttled
from runmirror.failpoints import hit
from runmirror.fence import Fence, OverdueError
from runmirror.log.rows import START, Position, Row
from runmirror.log.runlog import RunLog
from runmirror.log.sources import RunInfo, Source
from runmirror.log.status import count_starts
from runmirror.pace import Pace
from runmirror.prepare import Preparer
from runmirror.refused import as_line, refused_unseen
from runmirror.sinks.base import Opened, Rejected, Sink, SinkOptions
from runmirror.state import HEARTBEAT, MirrorState

Policy = Literal["last", "all"]
"""After a rewind: only the last written points, or all of them."""
CALL_DEADLINE = 120.0
"""Seconds that ``open``, ``put``, ``put_file``, ``flush`` and ``close`` may take each."""
FLUSH_ROWS, FLUSH_SECONDS = 5000, 2.0
"""The cursor is brought forward after this many rows or seconds, whichever comes first, and when the log is delivered."""
TRIES = 3
log = logging.getLogger("runmirror")


class Mirror:
    """One run to one destination. Use as a context manager, or call :meth:`close`.

    Args:
        source: the run.
        sink: made with its options, not yet opened.
        options: the sink's options (``include``, ``exclude``, ``records``).
        folder: where state is kept (:func:`runmirror.state.run_folder`).
        policy: what of superseded points to send to a tracker that can't take points back.
        on_progress: called with the rows and points of every batch that was put.
        batch_rows: rows in a batch at most; default: what the sink takes.
        save_every: seconds between two writes of the cursor at least, while rows keep coming.
        rate: rows a second at most, over all mirrors on this machine that send to this destination with a rate.

    Raises:
        MirrorBusyError: another mirror delivers this run there.
        StateError: the state was written by a newer version.
    """

    def __init__(
        self,
        source: Source,
        sink: Sink,
        folder: Path,
        *,
        options: SinkOptions | None = None,
        policy: Policy = "last",
        on_progress: Callable[[int, int], None] | None = None,
        batch_rows: int | None = None,
        save_every: float = 0.0,
        rate: float | None = None,
    ) -> None:
        self.source = source
        self.sink = sink
        self.options = options or SinkOptions()
        self.policy: Policy = "last" if sink.capabilities.rewinds == "native" else policy
        self._on_progress = on_progress or (lambda rows, points: None)
        self._batch_rows = batch_rows or sink.capabilities.max_rows
        if rate is not None:
            self._batch_rows = max(1, min(self._batch_rows, int(rate)))  # a second's worth at a time
        self._limit = self._batch_rows
        self._save_every = save_every
        self._saved = time.monotonic() - save_every
        self._pace = Pace(sink.name, sink.destination(), rate)
        info = source.info()
        copy_in = source.state_in if isinstance(source, RunLog) else None
        self._starts = count_starts(source.storage) if copy_in is not None and isinstance(source, RunLog) else 0
        self.state = MirrorState(
            folder, sink.name, info.run_id, sink.destination(), self.policy, starts=self._starts, copy_in=copy_in
        )
        if isinstance(source, RunLog):
            takeover.adopt(source, self.state.record)
            outlive_cut(source, self.state.record.position)
        self._fence = Fence(sink.name)
        self._opened: Opened | None = None
        self._at = START  # what the sink was given
        self._put: list[Position] = []  # ends of batches that no flush has covered yet
        self._failures: dict[int | str, int] = {}  # ordinal of a row put alone, or path of a file -> times it failed
        keeps = sink.capabilities.rewinds == "native" or self.policy == "all"
        self._preparer = Preparer(self.options, keeps)
        self._files = DueFiles(source, sink.capabilities, self.options)
        self._delivered = Delivered()
        self._refused: list[dict[str, object]] = []  # what is still to be put aside
        self._unsaved = False
        self._tracker_ahead = False
        self._held: int | None = None  # what the tracker told last: parts of a put that failed are progress too

    def __enter__(self) -> Mirror:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close(end=False)

    @property
    def note(self) -> str:
        """What people should know of how the run is mirrored; "" when there is nothing, or it was not opened."""
        return self._opened.note if self._opened else ""

    @property
    def url(self) -> str | None:
        """Where people find the run, once it was opened."""
        return self._opened.url if self._opened else self.state.record.url

    # -- delivery

    def deliver(self, *, patience: float | None = None, stop: threading.Event | None = None) -> Delivered:
        """Bring everything that is in the log now, rows first, then files; then return.

        Args:
            patience: seconds for which a tracker may fail without any progress before its error is raised; None: for ever.
            stop: when set, return at the next batch.

        Raises:
            Retry: patience ran out. The next call goes on where this one stopped.
            Refused: someone has to act first.
            OverdueError: a call did not return; this Mirror can't go on, a new one can.
            OSError: the log or the state can't be read or written.
        """
        stop = stop or threading.Event()
        before, failing_since, tries = self._delivered, None, 0
        while not stop.is_set():
            mark = self._delivered, self._held
            try:
                if self._opened is None:
                    self._pace.wait(0, stop)
                    self._open()
                self._deliver_rows(stop)
                self._deliver_files()
                self._note_error(None)
                break
            except (Refused, OverdueError) as final:
                self._note_error(final)
                raise
            except _Failed as failed:
                error = failed.error
                self._note_error(error)
                self._reset()
                now = time.monotonic()
                if failing_since is None or (self._delivered, self._held) != mark:
                    failing_since, tries = now, 0
                    if patience != 0:
                        until = "" if patience is None else f" for {patience:g} s"
                        log.warning("%s is behind, trying again%s: %s", self.sink.name, until, error)
                wait = min(60.0, 2.0 ** min(tries, 6)) * random.uniform(0.5, 1.0)
                if isinstance(error, Retry) and error.after is not None:
                    wait = error.after
                if isinstance(error, Throttled):
                    self._pace.hold(wait)
                if patience is not None and now - failing_since >= patience:
                    raise error if isinstance(error, Retry) else Retry(f"{type(error).__name__}: {error}") from error
                tries += 1
                if patience is not None:
                    wait = min(wait, max(0.05, failing_since + patience - now))
                stop.wait(wait)
        return self._delivered - before

    def _call(self, what: str, function: Callable[[], Any]) -> Any:
        try:
            return self._fence.call(what, CALL_DEADLINE, function)
        except (Refused, OverdueError):
            raise
        except Exception as error:
            raise _Failed(what, error) from error

    def _open(self) -> None:
        self._write_refused()
        record, info = self.state.record, self._info()
        record.name = info.name
        opened: Opened = self._call("open", lambda: self.sink.open(info, record.tracker_run_id))
        hit("opened")
        if opened.note and opened.note not in _noted:
            _noted.add(opened.note)
            log.warning("%s", opened.note)
        if (opened.tracker_run_id, opened.url) != (record.tracker_run_id, record.url):
            record.tracker_run_id, record.url = opened.tracker_run_id, opened.url
            self._save()
        if isinstance(self.source, RunLog) and self._starts > record.starts:
            held = record.ordinal if opened.position is None else opened.position
            takeover.settle(self.source, record, self._starts, held)
            self.state.save(copy=True)
        self._at = record.position
        if opened.position is not None and opened.position != record.ordinal:
            self._at = Position(opened.position)
            self._tracker_ahead = opened.position > record.ordinal
        if opened.position is not None and opened.position < record.ordinal:
            record.files, record.closed = {}, None  # the tracker lost its end, or its run is a new one
        self._put = []
        self._opened, self._held = opened, opened.position

    def _info(self) -> RunInfo:
        info = self.source.info()
        return replace(info, name=self.state.record.name or info.name, policy=self.policy)

    def _reset(self) -> None:
        """After a failure: let go of the tracker's run, so that ``open`` tells what it really holds."""
        if self._opened is not None and not self._fence.overdue:
            with contextlib.suppress(Exception):
                self._fence.call("close", CALL_DEADLINE, lambda: self.sink.close(None, CALL_DEADLINE))
        self._opened = None
        self._files.look_again()

    def _deliver_rows(self, stop: threading.Event) -> None:
        if self._at == self.state.record.position and self.source.is_complete_at(self._at):
            if time.monotonic() - self._saved >= HEARTBEAT / 2:
                self._save()  # on other hosts a mirror that was not heard of counts as gone
            return
        if self._preparer.needs_rewinds:
            self._preparer.foresee(self.source.rows(START))
        self._place_cursor()
        rows = self.source.rows(self._at)
        flushed, since = time.monotonic(), 0
        while not stop.is_set() and (batch := list(islice(rows, self._limit))):
            self._pace.wait(len(batch), stop)
            self._put_batch(batch)
            since += len(batch)
            if since >= FLUSH_ROWS or time.monotonic() - flushed >= FLUSH_SECONDS:
                self._flush(0.0)
                flushed, since = time.monotonic(), 0
        if self._put:
            self._flush(CALL_DEADLINE)
        if self._put and not stop.is_set():
            left = self._at.ordinal - self.state.record.ordinal
            raise _Failed("flush", Retry(f"{self.sink.name} has not confirmed the last {left} rows"))
        if self._tracker_ahead:
            check_same_log(self.source.numbered(), self._at.ordinal, self.url, uploading=self.state.has_copy)
            self._tracker_ahead = False

    def _place_cursor(self) -> None:
        """The tracker told how many rows it holds: find where the last of them is in the log, and keep that as the cursor
        when it was behind."""
        if self._at.ordinal and not self._at.digest:
            last = next(iter(self.source.rows(Position(self._at.ordinal - 1))), None)
            if last is not None and last.ordinal == self._at.ordinal - 1:
                self._at = last.position
                if self._tracker_ahead:
                    for rejected, rows in refused_unseen(self.source, self.sink, self.state, self._preparer, self._at):
                        self._reject(rejected, rows)
                    self.state.record.position = self._at
                    self._save()

    def _put_batch(self, batch: Sequence[Row]) -> None:
        hit("before-put")
        prepared = self._preparer.prepare(batch)
        try:
            rejected: list[Rejected] = self._call("put", lambda: self.sink.put(prepared))
        except _Failed as failed:
            if not isinstance(failed.error, Retry):
                self._narrow(batch, failed.error)
            raise
        hit("after-put")
        self._limit = min(self._batch_rows, self._limit * 2)
        points = sum(len(row.scalars()) for row in prepared)
        self._delivered += Delivered(len(batch), points, 0, len(rejected))
        self._at = batch[-1].position
        self._put.append(self._at)
        if rejected:
            self._reject(rejected, {row.ordinal: row for row in batch})
        self._on_progress(len(batch), points)

    def _narrow(self, batch: Sequence[Row], error: Exception) -> None:
        """A put failed for no reason we know: try smaller batches, and put a row aside that fails alone."""
        if len(batch) > 1:
            self._limit = max(1, len(batch) // 8)
            return
        ordinal = batch[0].ordinal
        reason = f"{type(error).__name__}: {error}"
        if self._failed_often(ordinal) and self._preparer.refuse(ordinal, reason):
            self._reject([Rejected(ordinal, None, reason)], {ordinal: batch[0]})
            self._delivered += Delivered(rejected=1)

    def _failed_often(self, what: int | str) -> bool:
        self._failures[what] = self._failures.get(what, 0) + 1
        return self._failures[what] >= TRIES

    def _flush(self, deadline: float) -> None:
        safe: int = self._call("flush", lambda: self.sink.flush(deadline))
        hit("after-flush")
        covered = [position for position in self._put if position.ordinal <= safe]
        if covered:
            record = self.state.record
            record.position = covered[-1]
            record.closed, record.last_error = None, None
            self._put = self._put[len(covered) :]
        self._save()

    def _save(self) -> None:
        now = time.monotonic()
        self._unsaved = now - self._saved < self._save_every
        if self._unsaved:
            return
        self._saved = now
        hit("before-state")
        if isinstance(self.source, RunLog) and self.state.has_copy:
            takeover.note(self.source, self.state.record)
        sync_index(self.source)
        self.state.save()
        hit("after-state")

    def _deliver_files(self, *, every: bool = False) -> None:
        sent, taken, saved = self.state.record.files, dict[str, str](), time.monotonic()
        for file in self._files.due(sent, every=every):
            hit("before-file")
            try:
                self._call("put_file", partial(self.sink.put_file, file))
            except _Failed as failed:
                if isinstance(failed.error, Retry) or not self._failed_often(file.path):
                    self._note_files(taken)
                    raise
                log.warning("%s can't take %s (%s): left out until it changes", self.sink.name, file.path, failed.error)
                sent[file.path] = file.version
                self._save()
                continue
            hit("after-file")
            taken[file.path] = file.version
            if time.monotonic() - saved >= FLUSH_SECONDS:  # not after each: the state names every file
                self._note_files(taken)
                saved = time.monotonic()
        self._note_files(taken)

    def _note_files(self, taken: dict[str, str]) -> None:
        """The tracker has these; before that is known they count for nothing."""
        if taken:
            self._flush(CALL_DEADLINE)
            self._delivered += Delivered(files=len(taken))
            self.state.record.files |= taken
            self._save()
            taken.clear()

    def _reject(self, rejected: Sequence[Rejected], rows: dict[int, Row]) -> None:
        self._refused += map(as_line, rejected, (rows.get(one.ordinal) for one in rejected))
        self._write_refused()
        name, aside = self.sink.name, self.state.rejected_path
        what = "a row" if rejected[0].key is None else f"the key {rejected[0].key!r}"
        log.warning("%s refused %s (first reason: %s); put aside in %s", name, what, rejected[0].reason, aside)

    def _write_refused(self) -> None:
        try:
            if self._refused:
                self.state.reject(self._refused)
        except OSError as error:  # later, without putting the rows again
            raise _Failed("reject", error) from error
        self._refused = []

    def _note_error(self, error: Exception | None) -> None:
        """The last error, for people who look at the state; None once all is well."""
        if error is None and self.state.record.last_error is None:
            return
        self.state.record.last_error = None if error is None else f"{type(error).__name__}: {error}"[:500]
        with contextlib.suppress(OSError):
            self.state.save()

    # -- end

    def is_current(self) -> bool:
        """Whether the tracker is known to hold every row that is in the log now."""
        at = self.state.record.position
        return not self._put and self._at == at and self.source.is_complete_at(at)

    def close(self, *, end: bool) -> None:
        """Let go of the tracker's run and of the state's lock.

        Args:
            end: also tell the tracker how the run ended, when it has ended and everything is delivered.
        """
        try:
            if self._opened is not None and not self._fence.overdue:
                try:
                    if end and self._files.left:
                        self._deliver_files(every=True)
                    info = self._info() if end else None
                except BaseException:
                    self._reset()  # let go of the tracker's run all the same
                    raise
                ended = info if info is not None and info.status != "running" and self.is_current() else None
                if ended is not None and self.state.record.closed == ended.status:
                    ended = None
                hit("before-close")
                self._close_sink(ended)
                hit("after-close")
                if ended is not None:
                    self.state.record.closed = ended.status
                if ended is not None or self._unsaved or self.state.record.owner is not None:
                    self.state.save(owner=False)
                hit("after-closed-state")
        except _Failed as failed:
            raise failed.error from failed
        finally:
            self._opened = None
            self._fence.close()
            self.state.close()

    def _close_sink(self, ended: RunInfo | None) -> None:
        """Tell the tracker the end; a failure that may pass is tried again now, for nobody may come back for it."""
        for tries in range(TRIES):
            try:
                if self._opened is None:
                    self._open()
                self._call("close", lambda: self.sink.close(ended, CALL_DEADLINE))
                return
            except _Failed:
                if ended is None or tries == TRIES - 1:
                    raise
                time.sleep(2.0**tries * random.uniform(0.5, 1.0))
                self._opened = None


_noted: set[str] = set()  # notes that were logged, each once


class _Failed(Exception):
    """A call of the sink failed in a way that may pass."""

    def __init__(self, what: str, error: Exception) -> None:
        super().__init__(f"{what}: {error}")
        self.error = error
