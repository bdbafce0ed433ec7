"""What training code calls: :func:`start`, :class:`Run`, :class:`Iteration`.

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
from runmirror.config import find_log_config
from runmirror.iteration import Iteration
from runmirror.live import FINISH_DEADLINE, Live, SinkStatus
from runmirror.log import layout as files
from runmirror.log import writer
from runmirror.log.identity import canonical_url, claim, read_record
from runmirror.log.layout import LAYOUTS, Layout
from runmirror.log.locks import Lock
from runmirror.log.opening import Resume, check_resume, not_main, open_log
from runmirror.log.records import Checkpoint, Status
from runmirror.log.rows import coerce, encode
from runmirror.log.status import read_journal
from runmirror.log.steps import HIGHEST, LOWEST
from runmirror.log.writer import Appender, size_of
from runmirror.storage import Storage, local_root, storage_from_uri
from runmirror.targets import parse_report_to

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


def start(
    log_path: str | os.PathLike[str] | Storage | None = None,
    config: Any = None,
    *,
    report_to: Any = None,
    logging_dir: str | None = None,
    layout: Layout | None = None,
    resume: Resume | None = None,
    total_iterations: int | None = None,
    strict: bool = False,
    is_main_process: bool | None = None,
    code: bool | str | os.PathLike[str] = True,
    fsync: bool = False,
) -> Run:
    """Open a log_path for writing, new or to be continued. What is not passed comes from a
    :class:`~runmirror.config.LogConfig` in ``config``, when there is one.

    Args:
        log_path: a folder, a ``file://`` URI, or a Storage.
        config: anything that holds a configuration. Written to config.json, secrets masked; one given at a resume that
            differs goes to ``.runmirror/resume_N/config.json``.
        report_to: trackers to mirror to while training: a name, a comma list, "all", a dict name -> options, options or sink
            objects, or a list of these; "none" for none; None: what ``RUNMIRROR_REPORT_TO`` says.
        logging_dir: TensorBoard's logdir, for a ``report_to`` that does not name one.
        layout: names of rollout files: "flat" (default) or "nested".
        resume: "auto" (default) continues a run that did not finish and refuses one that did; True continues any; False
            refuses a log_path that has rows or checkpoints.
        total_iterations: how many there will be, for ``progress/done_frac``.
        strict: raise for what is left out of a row, after it was written.
        is_main_process: whether this process writes. None: RANK, else OMPI_COMM_WORLD_RANK, else SLURM_PROCID is 0 or
            unset.
        code: whether to write code.diff, or the folder of the repository instead of the one training runs in.
        fsync: sync every row to the disk (some 0.5 ms each) so that it survives a power cut.

    Raises:
        LogFinishedError: the run in this log_path has finished, and ``resume`` is "auto".
        LogError: the log_path is not empty, and ``resume`` is False.
        LogBusyError: another process writes this log_path.
        UnknownSinkError, MissingPackageError, OptionError: about ``report_to``.
        ValueError: an argument has none of its values, or the log_path a scheme that is not supported.
        OSError: the log_path can't be written.
    """
    given = find_log_config(config)
    log_path = given.log_path if log_path is None else log_path
    if log_path is None:
        raise ValueError("no log_path: pass one, or a config with a LogConfig that has it")
    report_to = given.report_to if report_to is None else report_to
    report_to = os.environ.get("RUNMIRROR_REPORT_TO") if report_to is None else report_to
    logging_dir = logging_dir or given.logging_dir
    layout = layout or given.layout
    resume = given.resume if resume is None else resume
    total_iterations = given.total_iterations if total_iterations is None else total_iterations
    if layout not in LAYOUTS:
        raise ValueError(f"layout is one of {', '.join(LAYOUTS)}, not {layout!r}")
    if resume not in ("auto", True, False):
        raise ValueError(f'resume is "auto", True or False, not {resume!r}')
    if total_iterations is not None and not (isinstance(total_iterations, int) and total_iterations > 0):
        raise ValueError(f"total_iterations is a positive integer or None, not {total_iterations!r}")
    targets = parse_report_to(report_to, {"tensorboard": {"logdir": logging_dir}} if logging_dir else None)
    owned = isinstance(log_path, (str, os.PathLike))
    storage = storage_from_uri(log_path) if isinstance(log_path, (str, os.PathLike)) else log_path
    inactive = not_main(is_main_process)
    if inactive:
        logger.info("%s: this process writes nothing: %s", storage.url(), inactive)
        return Run(storage, layout, total_iterations, inactive=inactive, owned=owned)
    check_resume(storage, resume)
    key = canonical_url(storage)
    first = ending.OPEN.get(key)
    if first is not None:
        logger.warning("%s was started again in this process: the first Run ends here, the log goes on", storage.url())
        first.finish("killed", 0.0)
    lock = writer.lock_writer(storage)
    try:
        check_resume(storage, resume)
        for path in (files.METRICS, files.CHECKPOINTS, files.JOURNAL):
            writer.repair(storage, path)
        run_id = claim(storage).run_id
        step = writer.last_step(storage)
        open_log(storage, config, code, step)
    except BaseException:
        if lock is not None:
            lock.release()
        raise
    run = Run(storage, layout, total_iterations, strict, fsync, run_id=run_id, last_step=step, lock=lock, owned=owned)
    ending.OPEN[key] = run
    ending.hook(sigterm=bool(targets))
    if targets:
        starts = sum(entry.event != "finished" for entry in read_journal(storage))
        run.live = Live(storage, targets, starts)
    return run


def _list_rejected(left_out: dict[str, str], step: int | None) -> str:
    named = "; ".join(f"{key!r}: {reason}" for key, reason in left_out.items())
    return f"left out of the row at step {step}, which is written without them (strict=True): {named}"
