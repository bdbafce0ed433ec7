"""``runmirror mirror``: keep trackers equal to a growing folder of runs, from another process.

Guarantees:

- New runs are found, and every new row is sent, as they appear; one look at each run per interval, nothing else.
- A tracker that fails, for one run or all, holds up no other run or sink: each (run, sink) pair has its own pauses.
- Open sinks are bounded (``max_open``): the least recently active are closed and opened again when their run grows.
- A run that has ended is closed with its status; when it grows again it is opened again.
- Stopping at any moment loses nothing: it goes on where the cursors are.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from runmirror.exceptions import MirrorBusyError, NotALogError, RunmirrorError
from runmirror.fence import OverdueError
from runmirror.find import Found, ReadOptions, find_runs, open_run
from runmirror.importer import group_name
from runmirror.log import layout, trainer
from runmirror.mirror import Mirror, Policy
from runmirror.targets import Target

WORKERS = 8
MAX_PROCESSES = 8
"""(run, sink) pairs kept open at once of a sink that takes a process for each."""
STATUS_EVERY = 30.0
"""Seconds after which a run that rests is asked whether it has ended."""
WATCHED = (layout.METRICS, layout.JOURNAL, layout.CONFIG, layout.CHECKPOINTS, layout.CODE)
"""Files whose change makes a run worth a look."""
log = logging.getLogger("runmirror")

Signature = tuple[tuple[int, int], ...]


@dataclass(slots=True)
class Lane:
    """One run on its way to one sink.

    Attributes:
        state: "new", "current", "behind" (the tracker fails), "ended".
        rows: rows sent since the follower started.
        error: the last one, None when all is well.
    """

    found: Found
    target: Target
    state: str = "new"
    rows: int = 0
    url: str | None = None
    error: str | None = None
    _mirror: Mirror | None = None
    _seen: Signature = ()
    _busy: bool = False
    _tries: int = 0
    _next: float = 0.0
    _checked: float = 0.0
    _active: float = 0.0


@dataclass(slots=True)
class Follower:
    """Follows every run below ``paths`` to every target. :meth:`run` blocks until it is stopped or idle.

    Args:
        paths: as for :func:`runmirror.importer.import_runs`; a folder may be empty or missing at first.
        targets: from :func:`runmirror.targets.parse_targets`.
        policy: what of superseded points a tracker gets that can't take points back.
        read: how logs are read.
        interval: seconds between two looks.
        exit_idle: stop after this many seconds without a new row; None: never.
        max_open: (run, sink) pairs kept open; default: what the limit of open files allows, 256 at most, and 8 of a sink
            that takes a process for each.
        tell: called with a line for people when something changes: a run found, behind, caught up, ended.
    """

    paths: Sequence[str | os.PathLike[str]]
    targets: Sequence[Target]
    policy: Policy = "all"
    read: ReadOptions = field(default_factory=ReadOptions)
    interval: float = 1.0
    exit_idle: float | None = None
    max_open: int | None = None
    tell: Callable[[str], None] = log.info
    lanes: list[Lane] = field(default_factory=list)
    _known: set[str] = field(default_factory=set)
    _last_row: float = 0.0

    def run(self, stop: threading.Event) -> bool:
        """Follow until ``stop`` is set or nothing came for ``exit_idle`` seconds.

        Returns:
            Whether every row that the logs hold is in every tracker.
        """
        self._last_row = time.monotonic()
        self._discover()
        runs = len(self.lanes) // len(self.targets)
        where = ", ".join(
            f"{target.name} ({target.make(group_name(self.paths)).destination()})" for target in self.targets
        )
        self.tell(f"following {runs} {'run' if runs == 1 else 'runs'} to {where}; new ones are found as they appear")
        with ThreadPoolExecutor(WORKERS, thread_name_prefix="runmirror-follow") as pool:
            while not stop.is_set():
                self.tick(pool, stop)
                idle = time.monotonic() - self._last_row
                if self.exit_idle is not None and idle >= self.exit_idle and not any(lane._busy for lane in self.lanes):
                    break
                stop.wait(self.interval)
        for lane in self.lanes:
            self._close(lane, end=not stop.is_set())
        return all(lane.state in ("current", "ended") for lane in self.lanes)

    def tick(self, pool: ThreadPoolExecutor, stop: threading.Event) -> None:
        """One look: find new runs, and set to work on those that changed."""
        self._discover()
        now = time.monotonic()
        for lane in self.lanes:
            if lane._busy or now < lane._next:
                continue
            signature = _signature(lane.found.path)
            changed = signature != lane._seen or lane.state in ("new", "behind")
            if changed or (lane.state == "current" and now - lane._checked >= STATUS_EVERY):
                lane._seen, lane._busy = signature, True
                pool.submit(self._work, lane, stop)
        self._close_idle()

    def _discover(self) -> None:
        for path in self.paths:
            try:
                found = find_runs([path])
            except NotALogError:
                continue  # not there yet
            for one in found:
                key = os.path.realpath(one.path)
                if key not in self._known:
                    self._known.add(key)
                    self._last_row = time.monotonic()
                    self.lanes += [Lane(one, target) for target in self.targets]

    def _work(self, lane: Lane, stop: threading.Event) -> None:
        try:
            self._deliver(lane, stop)
        except MirrorBusyError as error:
            self._failed(lane, error, again_in=10.0)
        except (OSError, RunmirrorError) as error:
            self._failed(lane, error)
        except Exception as error:  # a bug in a sink: this lane waits, the others go on
            log.debug("mirroring %s", lane.found.path, exc_info=True)
            self._failed(lane, error)
        finally:
            lane._busy = False

    def _deliver(self, lane: Lane, stop: threading.Event) -> None:
        if lane._mirror is None:
            source, folder = open_run(lane.found, self.read)
            sink = lane.target.make(group_name(self.paths))
            lane._mirror = Mirror(source, sink, folder, options=lane.target.options, policy=self.policy)
        mirror = lane._mirror
        done = mirror.deliver(patience=0, stop=stop)
        lane._active = lane._checked = time.monotonic()
        lane.rows += done.rows
        lane.url = mirror.url
        if done.rows:
            self._last_row = lane._active
        if lane.state == "new":
            self.tell(f"{lane.found.name}: at {mirror.url}")
        elif lane.state == "behind":
            self.tell(f"{lane.found.name}: {lane.target.name} has caught up")
        lane.state, lane.error, lane._tries, lane._next = "current", None, 0, 0.0
        status = mirror.source.info().status
        if status != "running" and not stop.is_set():
            self._close(lane, end=True)
            lane.state = "ended"
            self.tell(f"{lane.found.name}: {status}, all of it is in {lane.target.name}")

    def _failed(self, lane: Lane, error: Exception, again_in: float | None = None) -> None:
        if isinstance(error, OverdueError) or lane.state == "new":
            self._close(lane, end=False)
        if lane.state != "behind":
            self.tell(f"{lane.found.name}: {lane.target.name} is behind, trying again: {error}")
        lane.state, lane.error = "behind", f"{type(error).__name__}: {error}"
        pause = again_in if again_in is not None else min(60.0, 2.0 ** min(lane._tries, 6))
        lane._tries += 1
        lane._next = time.monotonic() + pause * random.uniform(0.5, 1.0)

    def _close(self, lane: Lane, *, end: bool) -> None:
        mirror, lane._mirror = lane._mirror, None
        if mirror is not None:
            try:
                mirror.close(end=end)
            except Exception as error:
                log.warning("%s: closing %s: %s", lane.found.name, lane.target.name, error)

    def _close_idle(self) -> None:
        opened = sorted(
            (lane for lane in self.lanes if lane._mirror is not None and not lane._busy), key=lambda o: o._active
        )
        heavy = [lane for lane in opened if lane._mirror and lane._mirror.sink.capabilities.process_per_run]
        for some, limit in ((heavy, self.max_open or MAX_PROCESSES), (opened, self.max_open or _open_limit())):
            for lane in some[: max(0, len(some) - limit)]:
                self._close(lane, end=False)


def _signature(path: str) -> Signature:
    """Size and time of the files of a run that matter; () when it is gone."""
    names: Iterable[str] = [os.path.join(path, name) for name in WATCHED] if os.path.isdir(path) else [path]
    found: list[tuple[int, int]] = []
    for name in names:
        try:
            stat = os.stat(name)
            found.append((stat.st_size, stat.st_mtime_ns))
        except OSError:
            found.append((-1, 0))
    if found[0] == (-1, 0):  # no metrics.jsonl: perhaps a trainer's output_dir
        found += [(state.size, state.mtime_ns) for state in trainer.states(path)]
    return tuple(found)


def _open_limit() -> int:
    try:
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    except (ImportError, OSError):
        return 64
    return max(8, min(256, soft // 8))
