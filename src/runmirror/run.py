"""What training code calls: :class:`Run`, made by :func:`runmirror.start`.

Guarantees:

- A row whose ``log_metrics`` returned is in metrics.jsonl, whole: one append per row and nothing else on this path. It
  survives the death of the process; with ``fsync=True`` also a power cut. The one exception, a disk that is full, is
  warned about, and what it costs is counted in ``run.status()``.
- No method of a Run raises for a value it is given (with ``strict=True`` it does, after the write), nor for the disk.
- Rows are in the file in the order of their calls, from any number of threads. One process writes a log_path at a time,
  and only the main one of a distributed job; in the others, and in a forked child, a Run does nothing.
- An opened log_path holds whole lines only, whatever happened to its last writer.
- Importing this module imports no tracker, no array library, and starts nothing.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, get_args

from runmirror import ending
from runmirror.iteration import Iteration
from runmirror.live import FINISH_DEADLINE, Live, SinkStatus
from runmirror.log import layout as files
from runmirror.log import writer
from runmirror.log.identity import read_record
from runmirror.log.layout import Layout
from runmirror.log.locks import Lock
from runmirror.log.records import Checkpoint, Status
from runmirror.log.rows import coerce, encode
from runmirror.log.steps import HIGHEST, LOWEST
from runmirror.log.writer import Appender, size_of
from runmirror.storage import Storage, local_root

logger = logging.getLogger("runmirror")

_MAX_WARNED = 1000
_ENDS = tuple(status for status in get_args(Status) if status != "running")


@dataclass(frozen=True, slots=True)
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


class Run:
    """One run being written; made by :func:`start`. Use it as a context manager, or call :meth:`finish`.

    Attributes:
        storage: the files below the log_path.
        url: the log_path as a URI.
        log_path: the local folder, or the URI of another place.
        layout: how rollout files are named, "flat" or "nested".
    """

    def __init__(
        self,
        storage: Storage,
        layout: Layout = "flat",
        total_iterations: int | None = None,
        strict: bool = False,
        fsync: bool = False,
        *,
        inactive: str = "",
        run_id: str = "",
        last_step: int | None = None,
        lock: Lock | None = None,
        owned: bool = True,
    ) -> None:
        self.storage = storage
        self.url = storage.url()
        self.log_path = local_root(self.url) or self.url
        self.layout = layout
        self.total_iterations = total_iterations
        self._strict = strict
        self._fsync = fsync
        self._inactive = inactive  # why nothing is written; "" while this Run writes
        self._ignore_quietly = bool(inactive)
        self._state: Status = "running"
        self._run_id = run_id
        self._last = last_step
        self._file_lock = lock
        self._owned = owned
        self._lock = threading.RLock()  # a signal handler may log while its own thread is in here
        self._rows = Appender(storage, files.METRICS)
        self._checkpoints = Appender(storage, files.CHECKPOINTS)
        self._warned: set[str] = set()  # keys left out, to warn once for each
        self._flush_failed = False
        self.last_error = ending.last_error()
        self.live: Live | None = None

    def __repr__(self) -> str:
        return f"<Run {self.log_path!r} {self._state}, last step {self._last}>"

    @property
    def run_id(self) -> str:
        """The run's id; "" in a process that doesn't write, until the main one has made the log."""
        if not self._run_id and (record := read_record(self.storage)) is not None:
            self._run_id = record.run_id
        return self._run_id

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write one row; it is in the file when this returns.

        Args:
            metrics: key -> bool, int, float, text, None, or anything with ``.item()`` for one number (numpy, torch and
                jax scalars, 0-d arrays). NaN and infinities are kept. Other values, keys that are no text, ``step`` and
                keys with ``_`` in front are left out, named in the row's ``_rejected``, and warned about once per key.
            step: an integer; one more than the last row's when omitted, 0 in an empty log. What is no integer counts as
                omitted.

        Raises:
            ValueError: with ``strict=True`` only, after the write: something was left out.
            TypeError: with ``strict=True`` only, after the write: ``metrics`` is no mapping.
        """
        self._log(metrics, step)

    def log_summary(self, metrics: Mapping[str, Any]) -> None:
        """Write a row without a step: final numbers of the run, shown by each tracker as such. Else as log_metrics."""
        self._log(metrics, None, summary=True)

    def _log(
        self,
        metrics: Mapping[str, Any],
        step: Any,
        *,
        summary: bool = False,
        rejected: dict[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        mapping = True
        with self._lock:
            if self._inactive:
                return self._ignored()
            if summary or (type(step) is int and LOWEST <= step < HIGHEST):
                pass
            elif step is None:
                step = self._next()
            else:
                step, reason = self._check_step(step)
                if reason:
                    rejected = {**(rejected or {}), "step": reason}
            try:
                line, left_out = encode(step, metrics, time.time(), rejected=rejected, extra=extra)
            except Exception as error:  # no mapping at all, or one that can't be read
                mapping = isinstance(metrics, Mapping)
                what = f"which can't be read: {type(error).__name__}" if mapping else "which is none"
                reason = f"expected a mapping of key to value, found {type(metrics).__name__}, {what}"
                line, left_out = encode(step, {}, time.time(), rejected={**(rejected or {}), "*": reason}, extra=extra)
            self._rows.append(line)
            if not summary:
                self._last = step
            if left_out:
                self._warn_rejected(left_out)
        if self._fsync:
            self._flush()
        if left_out and self._strict:
            raise (ValueError if mapping else TypeError)(_list_rejected(left_out, step))
        return None

    def _next(self) -> int:
        return 0 if self._last is None else min(self._last + 1, HIGHEST)

    def _check_step(self, step: Any) -> tuple[int, str]:
        """(the step as an int, or the next one when it is no integer, and then why)."""
        value = step if type(step) is bool else coerce(step)
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is int and LOWEST <= value < HIGHEST:
            return value, ""
        shown = repr(value)[:60] if type(value) in (bool, float, str) else type(step).__name__
        return self._next(), f"a step is an integer of 64 bits, not {shown}: the next one was taken"

    def _warn_rejected(self, left_out: dict[str, str]) -> None:
        for key, reason in left_out.items():
            if key not in self._warned and len(self._warned) < _MAX_WARNED:
                self._warned.add(key)
                logger.warning("%s: %r is left out of the row: %s", self.log_path, key, reason)

    def iteration(self, i: int | None = None) -> Iteration:
        """One training iteration as one row, timed: ``with run.iteration(i) as it: it["loss"] = loss``.

        ``i`` is the row's step; one more than the last when omitted.
        """
        if i is None:
            return Iteration(self, self._next(), {})
        step, reason = self._check_step(i)
        return Iteration(self, step, {"step": reason} if reason else {})

    def log_checkpoint(
        self,
        name: str,
        batch: int | None = None,
        epoch: int | None = None,
        state_path: str | os.PathLike[str] | None = None,
        sampler_path: str | os.PathLike[str] | None = None,
        loop_state: Mapping[str, Any] | None = None,
        final: bool | None = None,
        **extra: Any,
    ) -> None:
        """Add a line to checkpoints.jsonl, on the disk for good (fsync) when this returns, as are the rows before it.

        Args:
            name: such as the zero-padded batch, or "final".
            batch, epoch: where training was.
            state_path: what to resume from; a checkpoint without it is never :meth:`latest_checkpoint`.
            sampler_path: weights to sample from.
            loop_state: more fields of the line, as tinker-cookbook keeps its loop state; never over one given here.
            final: True for the last checkpoint of the run.
            **extra: more fields. Values that are no JSON are described, secrets masked; nothing raises.
        """
        if self._inactive:
            return self._ignored()
        known = {"batch": batch, "epoch": epoch, "final": final}
        paths = {"state_path": state_path, "sampler_path": sampler_path}
        line = writer.checkpoint_line(name, known, paths, loop_state, extra)
        with self._lock:
            if self._inactive:
                return self._ignored()
            self._checkpoints.append(line)
        self._flush()  # outside the lock: a slow disk must not hold up the rows of other threads
        return None

    def latest_checkpoint(self) -> Checkpoint | None:
        """The last checkpoint with a ``state_path``, or None: what to resume from. Works in every process."""
        with self._lock:
            return writer.latest_checkpoint(self.storage, self._checkpoints.waiting())

    def status(self) -> RunStatus:
        """How the run is doing, without reading the log."""
        with self._lock:
            rows = self._rows
            try:
                size = size_of(self.storage, files.METRICS)
            except Exception:
                size = 0
            return RunStatus(
                state=self._state,
                rows=rows.written,
                last_step=self._last,
                bytes=size,
                rejected=len(self._warned),
                waiting=rows.held,
                lost=rows.lost,
                error=rows.error or self._checkpoints.error,
                sinks=self.live.status() if self.live is not None else {},
            )

    def finish(self, status: Status = "finished", deadline: float | None = None) -> None:
        """End the run: write what waits, note ``status`` in the journal, let go of the log_path, and wait until the trackers
        of ``report_to`` have it all. Again: nothing happens.

        Args:
            status: "finished", "failed" or "killed". Only a finished run is not resumed by ``resume="auto"``.
            deadline: seconds to wait for the trackers at most, 60 when None; one that has been out of reach for 30 s is not
                waited for. What is left is delivered in the background, or later, by the command that is named then.

        Raises:
            ValueError: another status.
        """
        if status not in _ENDS:
            raise ValueError(f"a run ends as one of {', '.join(_ENDS)}, not as {status!r}")
        with self._lock:
            if self._inactive:
                return
            self._state = status
            for appender in (self._rows, self._checkpoints):
                if not appender.retry():
                    logger.warning(
                        "%s: the last %d lines of %s could not be written and are lost (%s)",
                        self.log_path, appender.held, appender.path, appender.error
                    )  # fmt: skip
                    appender.give_up()
            try:
                writer.write_journal(self.storage, "finished", step=self._last, status=status)
                (self.storage.close if self._owned else self.storage.flush)()
            except Exception as error:
                logger.warning("%s: the end of the run could not be noted: %s", self.log_path, error)
            self._inactive = f"the run has ended ({status})"
            if self._file_lock is not None:
                self._file_lock.release()
            ending.forget(self)
            live = self.live
        if live is not None:
            live.finish(FINISH_DEADLINE if deadline is None else deadline)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish(ending.status_of(error))

    def _flush(self) -> None:
        try:
            self.storage.flush()
        except Exception as error:
            self._rows.error = f"{type(error).__name__}: {error}"
            if not self._flush_failed:
                self._flush_failed = True
                logger.warning("%s: what was written may not survive a power cut: %s", self.log_path, error)

    def _ignored(self) -> None:
        if not self._ignore_quietly:
            self._ignore_quietly = True
            logger.warning("%s: %s, what is logged now is ignored", self.log_path, self._inactive)

    @property
    def urls(self) -> dict[str, str]:
        """Sink -> where people find the run; empty until a tracker has answered."""
        return self.live.urls if self.live is not None else {}

    def leave_after_fork(self) -> None:
        """In a forked child: the parent writes on, this copy doesn't."""
        if self.live is not None:
            self.live.forget()
            self.live = None
        self._lock = threading.RLock()  # the thread that may have held it is not here
        if not self._inactive:
            self._inactive = "this process was forked from the one that writes the run"


def _list_rejected(left_out: dict[str, str], step: int | None) -> str:
    named = "; ".join(f"{key!r}: {reason}" for key, reason in left_out.items())
    return f"left out of the row at step {step}, which is written without them (strict=True): {named}"
