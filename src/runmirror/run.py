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

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self, get_args

from runmirror import ending
from runmirror.iteration import Iteration
from runmirror.live import FINISH_DEADLINE, Live
from runmirror.log import layout as files
from runmirror.log import writer
from runmirror.log.identity import read_record
from runmirror.log.layout import Layout
from runmirror.log.locks import Lock
from runmirror.log.opening import add_config
from runmirror.log.records import Checkpoint, Status
from runmirror.log.rows import encode, list_rejected
from runmirror.log.steps import HIGHEST, LOWEST, as_step, take_step
from runmirror.log.writer import Appender, size_of
from runmirror.notices import warn
from runmirror.runstatus import RunStatus
from runmirror.storage import CloudStorage, Storage, local_root

if TYPE_CHECKING:
    from runmirror.catalogue.findings import Finding
    from runmirror.catalogue.live import LiveHealth
    from runmirror.reports.tree import Tree
    from runmirror.reports.writing import Evaluation, RunReports

_MAX_WARNED = 1000
_ENDS = tuple(status for status in get_args(Status) if status != "running")


class Run:
    """One run being written; made by :func:`start`. Use it as a context manager, or call :meth:`finish`.

    Attributes:
        storage: the files below the log_path.
        url: the log_path as a URI.
        log_path: the local folder, or the URI of another place.
        layout: how rollout files are named, "flat" or "nested".
        num_groups_to_log: groups of rollouts that a report shows in full.
        strict: whether what is left out raises, after the write.
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
        num_groups_to_log: int = 4,
    ) -> None:
        self.storage = storage
        self.url = storage.url()
        self.log_path = local_root(self.url) or self.url
        self.layout = layout
        self.total_iterations = total_iterations
        self.num_groups_to_log = num_groups_to_log
        self.strict = strict
        self._fsync = fsync
        self._inactive = inactive  # why nothing is written; "" while this Run writes
        self._ignore_quietly = bool(inactive)
        self._state: Status = "running"
        self._run_id = run_id
        self._last = last_step
        self._file_lock = lock
        self._owned = owned
        self.in_cloud = isinstance(storage, CloudStorage)
        self._lock = threading.RLock()  # a signal handler may log while its own thread is in here
        self.rows = Appender(storage, files.METRICS)
        self._checkpoints = Appender(storage, files.CHECKPOINTS)
        self._warned: set[str] = set()  # keys left out, to warn once for each
        self._flush_failed = False
        self._size = 0
        self.last_error = ending.last_error()
        self.live: Live | None = None
        self._health: LiveHealth | None = None
        self.iterations: dict[int, Iteration] = {}  # those whose ``with`` block runs, by step
        self._reports: RunReports | None = None

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
                jax scalars, 0-d arrays). NaN and infinities are kept. Other values, keys that are no text, and keys with
                ``_`` in front are left out, named in the row's ``_rejected``, and warned about once per key. ``step`` among
                them is the row's step when no other is given, else it is left out too.
            step: an integer; one more than the last row's when omitted, 0 in an empty log. What is no integer counts as
                omitted.

        Raises:
            ValueError: with ``strict=True`` only, after the write: something was left out.
            TypeError: with ``strict=True`` only, after the write: ``metrics`` is no mapping.
        """
        self._log(metrics, step)

    def log_config(self, config: Any) -> None:
        """Add to config.json what is known only after the start; ``config`` as for :func:`start`, by its top keys. What an
        earlier start of the log wrote stays, and a value that differs goes to ``.runmirror/resume_N/``. Nothing raises.
        """
        if self._inactive:
            return self._ignored()
        try:
            with self._lock:
                add_config(self.storage, config)
        except Exception as error:
            warn(f"{self.log_path}: the configuration could not be written: {error}")
        return None

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
                step, metrics = take_step(metrics)
                step = self._next() if step is None else step
            else:
                step, reason = self.check_step(step)
                if reason:
                    rejected = {**(rejected or {}), "step": reason}
            try:
                line, left_out = encode(step, metrics, time.time(), rejected=rejected, extra=extra)
            except Exception as error:  # no mapping at all, or one that can't be read
                mapping = isinstance(metrics, Mapping)
                what = f", which can't be read: {type(error).__name__}" if mapping else ""
                reason = f"expected a mapping of key to value, found {type(metrics).__name__}{what}"
                line, left_out = encode(step, {}, time.time(), rejected={**(rejected or {}), "*": reason}, extra=extra)
            self.rows.append(line)
            if not summary:
                self._last = step
            if left_out:
                self._warn_rejected(left_out)
        if self._fsync:
            self._flush()
        if left_out and self.strict:
            raise (ValueError if mapping else TypeError)(list_rejected(left_out, step))
        return None

    def _next(self) -> int:
        return 0 if self._last is None else min(self._last + 1, HIGHEST)

    def check_step(self, step: Any) -> tuple[int, str]:
        """(the step as an int, or the next one when it is no integer, and then why)."""
        found, reason = as_step(step)
        return self._next() if found is None else found, reason

    def _warn_rejected(self, left_out: dict[str, str]) -> None:
        for key, reason in left_out.items():
            if key not in self._warned and len(self._warned) < _MAX_WARNED:
                self._warned.add(key)
                warn(f"{self.log_path}: {key!r} is left out of the row: {reason}")

    def iteration(self, i: int | None = None) -> Iteration:
        """One training iteration as one row, timed: ``with run.iteration(i) as it: it["loss"] = loss``.

        ``i`` is the row's step; one more than the last when omitted.
        """
        if i is None:
            return Iteration(self, self._next(), {})
        step, reason = self.check_step(i)
        return Iteration(self, step, {"step": reason} if reason else {})

    # -- reports and rollouts (:mod:`runmirror.reports.writing`)

    def report(self, iteration: int, split: str = "train", title: str | None = None) -> Tree:
        """The report of an iteration: ``with run.report(i) as tree: tree.text(...)`` writes an HTML file for people and the
        same tree as JSON when the block ends, also when it raised (marked as partial).

        Args:
            iteration: which; its files are replaced when they are there.
            split: "train", or an evaluation's name.
            title: default "Iteration 10".
        """
        from runmirror.reports.tree import Tree

        reports = self._get_reports()
        return Tree("", "") if reports is None else reports.open(iteration, split, title)

    def log_rollouts(
        self, iteration: int, groups: Iterable[Any], split: str = "train", num_groups_to_log: int | None = None
    ) -> dict[str, float]:
        """Write the rollouts of an iteration: a record per trajectory (``..._rollout_summaries.jsonl``) and the report, or
        within ``with run.report(iteration)`` a part of that one.

        Args:
            iteration: which.
            groups: :class:`~runmirror.reports.rollouts.Group` objects, mappings or objects like them, or lists of
                trajectories. A trajectory that is not as it should be is left out, told once, and kept with the reason.
            split: "train", or an evaluation's name.
            num_groups_to_log: groups that the report shows in full; default that of ``start`` (4). All are in its Trajectory
                Details. 0: no report.

        Returns:
            ``env/all/reward/total``, ``env/all/<metric>`` and ``ac_tokens_per_turn`` (``<name>/env/all/...`` for an
            evaluation). Within ``with run.iteration(iteration)`` they are put into its row, where it has no such key.

        Raises:
            ValueError: with ``strict=True`` only, after the write: something was left out.
        """
        reports = self._get_reports()
        return {} if reports is None else reports.log_rollouts(iteration, groups, split, num_groups_to_log)

    def evaluation(self, name: str, iteration: int, title: str | None = None) -> Evaluation:
        """An evaluation: ``with run.evaluation("test", i) as ev: ev.log_rollouts(groups)``. Its files have the cleaned name,
        its metrics the name as it is."""
        from runmirror.reports.writing import Evaluation

        return Evaluation(self, name, iteration, title)

    def suggest(self, iteration: int, metrics: Mapping[str, Any]) -> None:
        """Metrics for the row of an iteration whose ``with`` block runs, for keys that it has not."""
        if iteration in self.iterations:
            self.iterations[iteration].suggest(metrics)

    def log_into(self, iteration: int, metrics: Mapping[str, Any]) -> None:
        """Metrics for the row of an iteration: that of its ``with`` block while that runs, else a row of its own."""
        if iteration in self.iterations:
            self.iterations[iteration].log(metrics)
        else:
            self.log_metrics(metrics, iteration)

    def _get_reports(self) -> RunReports | None:
        """None when nothing is written."""
        if self._inactive:
            self._ignored()
            return None
        with self._lock:
            if self._reports is None:
                from runmirror.reports.writing import RunReports

                self._reports = RunReports(self)
            return self._reports

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
        """Add a line to checkpoints.jsonl, on the disk for good (fsync) when this returns, as are the rows before it. Reports
        before it are written then too.

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
        if self._reports is not None:
            self._reports.drain(10.0)  # training may go on from here: nothing before it is written again
        with self._lock:
            if self._inactive:
                return self._ignored()
            self._checkpoints.append(line)
        self._flush(upload=True)  # outside the lock: a slow disk must not hold up the rows of other threads
        return None

    def latest_checkpoint(self) -> Checkpoint | None:
        """The last checkpoint with a ``state_path``, or None: what to resume from. Works in every process."""
        with self._lock:
            return writer.latest_checkpoint(self.storage, self._checkpoints.waiting())

    def status(self) -> RunStatus:
        """How the run is doing, without reading the log (``findings`` reads it when it is looked at)."""
        with self._lock:
            rows = self.rows
            if not (self.in_cloud and self._inactive):  # after the end that would ask the cloud
                with contextlib.suppress(Exception):
                    self._size = size_of(self.storage, files.METRICS)
            status = RunStatus(
                state=self._state,
                rows=rows.written,
                last_step=self._last,
                bytes=self._size,
                rejected=len(self._warned),
                waiting=rows.held,
                lost=rows.lost,
                error=rows.error or self._checkpoints.error,
                sinks=self.live.status() if self.live is not None else {},
                lost_files=self._reports.lost if self._reports is not None else 0,
                cloud=self.storage.status() if isinstance(self.storage, CloudStorage) else None,
            )
        status.__dict__["_check"] = self._findings
        return status

    def _findings(self) -> tuple[Finding, ...]:
        if self._inactive and self._state == "running":  # a process that doesn't write
            return ()
        if self._health is None:
            from runmirror.catalogue.live import LiveHealth  # not before somebody asks

            self._health = LiveHealth(self.storage)
        return self._health.findings()

    def finish(self, status: Status = "finished", deadline: float | None = None) -> None:
        """End the run: write what waits, note ``status`` in the journal, let go of the log_path, and wait until the trackers
        of ``report_to``, and the cloud that the log_path is in, have it all. Again: nothing happens.

        Args:
            status: "finished", "failed" or "killed". Only a finished run is not resumed by ``resume="auto"``.
            deadline: seconds to wait at most, 60 when None; not more than 5 for a cloud that is out of reach, and not for a
                tracker that has been out of reach for 30 s. What is left is delivered in the background, or later, by the
                command that is named then.

        Raises:
            ValueError: another status.
        """
        until = time.monotonic() + (FINISH_DEADLINE if deadline is None else deadline)
        if status not in _ENDS:
            raise ValueError(f"a run ends as one of {', '.join(_ENDS)}, not as {status!r}")
        if self._reports is not None and not self._inactive:
            # before the end is noted, so that mirrors send these files too
            self._reports.finish(60.0 if deadline is None else max(5.0, deadline))
        with self._lock:
            if self._inactive:
                return
            self._state = status
            for appender in (self.rows, self._checkpoints):
                if not appender.retry():
                    warn(
                        f"{self.log_path}: the last {appender.held} lines of {appender.path} could not be written and are "
                        f"lost ({appender.error})"
                    )
                    appender.give_up()
            try:
                writer.write_journal(
                    self.storage, "finished", step=self._last, status=status, lost=self.rows.lost or None
                )
                self._size = size_of(self.storage, files.METRICS)
                if isinstance(self.storage, CloudStorage):
                    self.storage.flush(0)  # waited for below, while the trackers are
                else:
                    (self.storage.close if self._owned else self.storage.flush)()
            except Exception as error:
                warn(f"{self.log_path}: the end of the run could not be noted: {error}")
            self._inactive = f"the run has ended ({status})"
            if self._file_lock is not None:
                self._file_lock.release()
            live = self.live
        try:
            if live is not None:
                live.finish(0.0 if deadline == 0 else max(1.0, until - time.monotonic()))
            if isinstance(self.storage, CloudStorage):
                ending.close_cloud(self.storage, until)
        finally:
            ending.forget(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.finish(ending.status_of(error))

    def _flush(self, *, upload: bool = False) -> None:
        try:
            if not isinstance(self.storage, CloudStorage):
                self.storage.flush()
            elif upload:
                self.storage.flush(0)
            else:
                self.storage.sync()
        except Exception as error:
            self.rows.error = f"{type(error).__name__}: {error}"
            if not self._flush_failed:
                self._flush_failed = True
                warn(f"{self.log_path}: what was written may not survive a power cut: {error}")

    def _ignored(self) -> None:
        if not self._ignore_quietly:
            self._ignore_quietly = True
            warn(f"{self.log_path}: {self._inactive}, what is logged now is ignored")

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
        self._reports = None
        if not self._inactive:
            self._inactive = "this process was forked from the one that writes the run"
