"""Following one run until it ends: what a child process of ``report_to`` does, and the thread of a sink object.

Guarantees:

- A row is sent within about 0.1 s of being written; under load rows go in batches. A resting log costs next to nothing
  (:mod:`runmirror.watch`).
- A tracker that is down is tried again for ever, with pauses of 1 to 60 s, while training goes on; after the end of the
  run for ``drain_timeout`` at most.
- When a newer start of the same log_path is seen, everything is left to its mirror, without setting a status.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from runmirror.exceptions import MirrorBusyError, Refused, RunmirrorError
from runmirror.fence import OverdueError
from runmirror.log import layout
from runmirror.log.identity import own_name, read_record
from runmirror.log.index import LineIndex
from runmirror.log.runlog import RunLog
from runmirror.log.status import read_journal
from runmirror.mirror import Mirror, Policy
from runmirror.sinks.base import Sink, SinkOptions
from runmirror.state import HEARTBEAT, run_folder
from runmirror.storage import Storage
from runmirror.watch import Sizes, Watch

SAVE_EVERY = 1.0
"""Seconds between two writes of the cursor while rows keep coming; the tracker's own position makes up for the rest."""
DRAIN_TIMEOUT = 600.0
Event = Literal["url", "note", "behind", "moving", "current", "refused"]
Outcome = Literal["done", "handed over", "left behind"]


class RunLoop:
    """Brings one run that is being written into one sink.

    Args:
        storage: the log_path.
        sink, options: where to.
        starts: how often the run had been started when this loop was made; more mean that a newer one took over.
        alive: whether the process that writes the run still lives.
        tell: called with (event, text): the run's URL; why the tracker is behind; that it took more before it
            failed; that it has caught up.
        policy: what a tracker gets of superseded points that can't take points back.
        drain_timeout: seconds to go on for after the end of the run.
        run_id: what run.json said when this loop was made; another one means that the log_path was made anew. None: any.
    """

    def __init__(
        self,
        storage: Storage,
        sink: Sink,
        options: SinkOptions,
        starts: int,
        *,
        alive: Callable[[], bool] = lambda: True,
        tell: Callable[[Event, str], None] = lambda event, text: None,
        policy: Policy = "all",
        drain_timeout: float = DRAIN_TIMEOUT,
        run_id: str | None = None,
    ) -> None:
        self._storage = storage
        self._sink = sink
        self._options = options
        self._starts = starts
        self._run_id = run_id
        self._alive = alive
        self._tell = tell
        self._policy: Policy = policy
        self._drain_timeout = drain_timeout
        self._mirror: Mirror | None = None
        self._tries = 0
        self._behind = False
        self._held = 0  # rows that the tracker had at the last failure
        self._url = ""
        self._ended_at: float | None = None
        self._hurried = False
        self._watch = Watch(storage)

    def run(self, stop: threading.Event) -> Outcome:
        """Follow until the run has ended and all of it is delivered, a newer start takes over, or time is up. ``stop``
        leaves the rest.

        Raises:
            OverdueError: the sink hangs; only a new process (or thread) can go on.
        """
        try:
            while True:
                gone = not self._alive()
                try:
                    seen = self._watch.sizes()  # before the journal is read: what comes in between ends the wait
                    journal = read_journal(self._storage)
                    if not journal and not self._storage.exists(layout.RUN):
                        return "left behind"  # the log_path was removed
                    record = read_record(self._storage)
                except OSError as error:  # a cloud that is out of reach, a file system that stumbles
                    if not self._pause(stop, gone, error):
                        return "left behind"
                    continue
                starts = sum(entry.event != "finished" for entry in journal)
                if starts > self._starts or (record and self._run_id not in (None, record.run_id)):
                    return "handed over"
                ended = gone or (bool(journal) and journal[-1].event == "finished")
                if ended and self._ended_at is None:
                    self._ended_at = time.monotonic()
                if self._deliver(stop):
                    if stop.is_set() and self._mirror is not None and not self._mirror.is_current():
                        return "left behind"
                    if ended:
                        self._finish(gone)
                        return "done"
                    if stop.is_set():
                        return "left behind"
                    self._wait(stop, seen, gone, HEARTBEAT / 2)
                else:
                    if not self._pause(stop, gone):
                        return "left behind"
        finally:
            self._close()

    def _pause(self, stop: threading.Event, gone: bool, error: Exception | None = None) -> bool:
        """Wait for the next try; False when there is none."""
        if error is not None:
            self._failed(error)
        if gone and self._ended_at is None:
            self._ended_at = time.monotonic()
        left = self._time_left()
        if stop.is_set() or left <= 0:
            return False
        pause = min(60.0, 2.0 ** min(self._tries, 6)) * random.uniform(0.5, 1.0)
        self._wait(stop, None, gone, min(pause, left))
        return True

    def _failed(self, error: Exception) -> None:
        if not self._behind or isinstance(error, Refused):
            self._tell("refused" if isinstance(error, Refused) else "behind", str(error) or type(error).__name__)
        elif self._mirror is not None and self._mirror.state.record.ordinal > self._held:
            self._tell("moving", "")
            self._tries = 0
        self._held = self._mirror.state.record.ordinal if self._mirror is not None else self._held
        self._behind = True
        self._tries += 1 if not isinstance(error, MirrorBusyError) else 0

    def _deliver(self, stop: threading.Event) -> bool:
        """Bring what is there; False when that must be tried again later."""
        try:
            if self._mirror is None:
                self._mirror = self._open()
            self._mirror.deliver(patience=0, stop=stop)
        except OverdueError as error:
            self._tell("behind", str(error))
            raise
        except (OSError, RunmirrorError) as error:
            self._failed(error)
            if isinstance(error, Refused):
                self._tries = 6  # a person has to act: look again once a minute
                self._close()
            return False
        if self._mirror.url != self._url:
            self._url = self._mirror.url or ""
            self._tell("url", self._url)
            if self._mirror.note:
                self._tell("note", self._mirror.note)
        if self._behind:
            self._tell("current", "")
        self._behind, self._tries = False, 0
        return True

    def _open(self) -> Mirror:
        identity = RunLog(self._storage).identity
        folder = run_folder(self._storage, identity)
        source = RunLog(self._storage, own_name(self._storage), LineIndex(folder))
        return Mirror(source, self._sink, folder, options=self._options, policy=self._policy, save_every=SAVE_EVERY)

    def _finish(self, gone: bool) -> None:
        mirror, self._mirror = self._mirror, None
        if mirror is not None:
            if gone and isinstance(mirror.source, RunLog):
                mirror.source.writer_gone = True
            try:
                mirror.close(end=True)
            except Exception as error:  # the rows are there; the status follows with the next import
                self._tell("behind", f"{type(error).__name__}: {error}")

    def _close(self) -> None:
        mirror, self._mirror = self._mirror, None
        if mirror is not None:
            try:
                mirror.close(end=False)
            except Exception as error:
                self._tell("behind", f"{type(error).__name__}: {error}")

    def _time_left(self) -> float:
        if self._ended_at is None:
            return float("inf")
        return self._ended_at + self._drain_timeout - time.monotonic()

    def hurry(self, seconds: float) -> None:
        """The end is near: go on for at most this long."""
        self._drain_timeout = seconds
        self._ended_at = time.monotonic()
        self._hurried = True  # no more: a signal handler may wait for no lock; the next look sees it

    def _wait(self, stop: threading.Event, seen: Sizes | None, gone: bool, seconds: float) -> None:
        """Until the log grew (when ``seen`` is given), the writer went away, time is up, or a stop."""
        pressed = self._hurried

        def wake() -> bool:
            return stop.is_set() or self._hurried != pressed or (not gone and not self._alive())

        self._watch.wait(seen, seconds, wake)


def log_folder(storage: Storage) -> Path:
    """Where a child's output goes: beside its state."""
    return run_folder(storage, RunLog(storage).identity)
