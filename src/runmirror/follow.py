"""``runmirror mirror``: keep trackers equal to a growing folder of runs, from another process.

Guarantees:

- New runs are found, and every new row is sent, as they appear; one look at each run per interval, nothing else. With
  thousands of runs the looks are further apart, so that they take a tenth of a core at most.
- A tracker that fails, for one run or all, holds up no other run or sink: each (run, sink) pair has its own pauses, and
  each sink its own threads.
- Open sinks are bounded (``max_open``): the least recently active are closed, by a thread of their sink, and opened again
  when their run grows. So are calls that hang (:data:`MAX_HANGING`).
- A run that has ended is closed with its status; when it grows again it is opened again. One that was removed is said so
  once and let go; found again, it is a new one.
- What is wrong with a run (:mod:`runmirror.catalogue`) is told once, as it shows.
- Stopping at any moment loses nothing: it goes on where the cursors are.
"""

from __future__ import annotations

import glob
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

from runmirror.exceptions import MirrorBusyError, NotALogError, Retry, RunmirrorError
from runmirror.fence import OverdueError, hanging
from runmirror.find import Finder, Found, ReadOptions, open_run, told_apart
from runmirror.find_remote import is_remote
from runmirror.importer import group_name
from runmirror.lane import MISSING, Check, Lane, is_there, signature
from runmirror.log.identity import identify
from runmirror.log.status import SILENT_AFTER
from runmirror.mirror import Mirror, Policy
from runmirror.sinks.base import Sink
from runmirror.storage import LocalStorage
from runmirror.targets import Target

WORKERS = 8
"""Threads per sink: so many runs are brought to a tracker at the same time."""
LOOKING = 0.1
"""The share of the time that looking for new runs and rows may take."""
MAX_OPEN = 1024
"""(run, sink) pairs kept open at once, where the limit of open files allows it (an eighth of that)."""
MAX_PROCESSES = 8
"""(run, sink) pairs kept open at once of a sink that takes a process for each."""
MAX_HANGING = 50
"""Calls of one sink that never returned, each in a thread that is given up: with more of them no run is opened there."""
STATUS_EVERY = 30.0
"""Seconds after which a run that rests is asked whether it has ended."""
KEPT_ROWS = 50_000
"""Rows of a run that is remembered, at 16 bytes a row, while its sink is closed."""
_SCARCE = ("Too many open files", "can't start new thread")
log = logging.getLogger("runmirror")


@dataclass(slots=True)
class Follower:
    """Follows every run below ``paths`` to every target. :meth:`run` blocks until it is stopped or idle.

    Args:
        paths: as for :func:`runmirror.importer.import_runs`; a folder may be empty or missing at first.
        targets: from :func:`runmirror.targets.parse_targets`.
        policy: what of superseded points a tracker gets that can't take points back.
        read: how logs are read.
        interval: seconds between two looks; None: 1, and 10 between two listings of a cloud.
        exit_idle: stop after this many seconds without a new row; None: never.
        max_open: (run, sink) pairs kept open, shared out among the sinks; default: what the limit of open files allows,
            :data:`MAX_OPEN` at most, and 8 of a sink that takes a process for each. Those that are worked on come on top.
        tell: called with a line for people when something changes: a run found, behind, caught up, ended.
    """

    paths: Sequence[str | os.PathLike[str]]
    targets: Sequence[Target]
    policy: Policy = "all"
    read: ReadOptions = field(default_factory=ReadOptions)
    interval: float | None = None
    exit_idle: float | None = None
    max_open: int | None = None
    tell: Callable[[str], None] = log.info
    lanes: list[Lane] = field(default_factory=list)
    _known: dict[str, str] = field(default_factory=dict)  # a run's real place -> its path
    _finders: dict[str, Finder] = field(default_factory=dict)
    _listed: float = 0.0
    _out_of_reach: set[str] = field(default_factory=set)
    _last_row: float = 0.0
    _group: str | None = None
    _checks: dict[str, Check] = field(default_factory=dict)
    _limits: dict[int, int] = field(default_factory=dict)  # by the target's id
    _using: dict[int, dict[int, Lane]] = field(default_factory=dict)  # open lanes, the least recently used first
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, stop: threading.Event) -> bool:
        """Follow until ``stop`` is set or nothing came for ``exit_idle`` seconds.

        Returns:
            Whether every row that the logs hold is in every tracker.
        """
        self._last_row = time.monotonic()
        self._discover()
        runs = len(self.lanes) // len(self.targets)
        sinks = [(target, target.make(self._group or "")) for target in self.targets]
        where = ", ".join(f"{target.name} ({sink.destination()})" for target, sink in sinks)
        self._limits = {id(target): self._most_open(sink) for target, sink in sinks}
        self._using = {id(target): {} for target in self.targets}
        for path in self.paths:
            if (
                "://" not in os.fspath(path)
                and not glob.has_magic(os.fspath(path))
                and not os.path.exists(os.path.expanduser(path))
            ):
                self.tell(f"{os.fspath(path)} does not exist yet")
        self.tell(f"following {runs} {'run' if runs == 1 else 'runs'} to {where}; new ones are found as they appear")
        with ExitStack() as stack:
            pools = {
                id(target): stack.enter_context(ThreadPoolExecutor(WORKERS, f"runmirror-{target.name}"))
                for target in self.targets
            }
            while not stop.is_set():
                began = time.thread_time()  # of this thread: waiting for a cloud is no work
                self._tick(pools, stop)
                busy = time.thread_time() - began
                idle = time.monotonic() - self._last_row
                if self.exit_idle is not None and idle >= self.exit_idle and not any(lane._busy for lane in self.lanes):
                    break
                stop.wait(max(self.interval or 1.0, busy / LOOKING))
            for lane in self.lanes:
                if lane._busy or lane._mirror is not None:
                    pools[id(lane.target)].submit(self._end, lane, end=not stop.is_set())
        return all(lane.state in ("current", "ended") for lane in self.lanes)

    def _tick(self, pools: Mapping[int, ThreadPoolExecutor], stop: threading.Event) -> None:
        """One look: find new runs, and set to work on those that changed."""
        self._discover()
        now = time.monotonic()
        gone: set[str] = set()
        for lane in self.lanes:
            if lane._busy or now < lane._next:
                continue
            seen = signature(lane.found)
            changed = seen != lane._seen or lane.state in ("new", "behind")
            if seen[0] == MISSING and not is_there(lane.found):
                gone.add(lane.found.path)
                continue
            if seen[0] == MISSING and lane._seen[:1] not in ((), (MISSING,)):
                continue  # it is being removed, and nothing is written into it
            every = STATUS_EVERY if lane.found.view is None else SILENT_AFTER  # each look at a cloud is billed
            if changed or (lane.state == "current" and now - lane._checked >= every):
                lane._seen, lane._busy = seen, True
                pools[id(lane.target)].submit(self._work, lane, stop)
        if gone:
            self._let_go(gone, pools)

    def _let_go(self, gone: set[str], pools: Mapping[int, ThreadPoolExecutor]) -> None:
        """Say once that runs were removed, and forget them."""
        late: dict[str, list[str]] = {}
        for lane in [lane for lane in self.lanes if lane.found.path in gone]:
            late.setdefault(lane.found.name, []).extend([lane.target.name] * (lane.state in ("new", "behind")))
            pools[id(lane.target)].submit(self._end, lane, end=False, removed=True)
        self.lanes = [lane for lane in self.lanes if lane.found.path not in gone]
        self._known = {place: path for place, path in self._known.items() if path not in gone}
        for path in gone:
            self._checks.pop(path, None)
        for name, sinks in late.items():
            why = f" before all of it was in {', '.join(sinks)}" if sinks else ""
            self.tell(f"{name}: removed{why}; it is no longer followed")

    def _discover(self) -> None:
        now = time.monotonic()
        list_clouds = not self._listed or now - self._listed >= (10.0 if self.interval is None else self.interval)
        self._listed = now if list_clouds else self._listed
        there: dict[str, Found] = {}
        for path in [os.fspath(path) for path in self.paths]:
            if is_remote(path) and not list_clouds:
                continue
            if path not in self._finders:
                self._finders[path] = Finder([path], storage_options=self.read.storage_options)
            try:
                found = self._finders[path].find()
                self._out_of_reach.discard(path)
            except NotALogError:
                continue  # not there yet
            except OSError as error:  # a cloud; what is known of its runs stays
                if path not in self._out_of_reach:
                    self._out_of_reach.add(path)
                    self.tell(f"{path} can't be listed, trying again: {error}")
                continue
            for one in found:
                there.setdefault(one.path if one.view is not None else os.path.realpath(one.path), one)
        new = [
            (place, one)
            for place, one in zip(there, told_apart([*there.values()]), strict=True)
            if place not in self._known
        ]
        for place, one in new:
            self._known[place] = one.path
            self._last_row = time.monotonic()
            self.lanes += [Lane(one, target) for target in self.targets]
        if new or self._group is None:
            self._group = group_name(self.paths, [lane.found for lane in self.lanes])

    def _work(self, lane: Lane, stop: threading.Event) -> None:
        with lane._lock:
            try:
                if not stop.is_set():
                    self._deliver(lane, stop)
            except MirrorBusyError as error:
                self._failed(lane, error, again_in=10.0)
            except (OSError, RunmirrorError) as error:
                self._failed(lane, error)
            except Exception as error:  # a bug in a sink: this lane waits, the others go on
                log.debug("mirroring %s", lane.found.path, exc_info=True)
                self._failed(lane, error)
            finally:
                self._note_use(lane)
                lane._busy = False
        self._make_room(lane.target)

    def _most_open(self, sink: Sink) -> int:
        """How many lanes of a sink are kept open."""
        share = max(1, (self.max_open or _open_limit()) // len(self.targets))
        heavy = sink.capabilities.process_per_run and self.max_open is None
        return min(share, MAX_PROCESSES) if heavy else share

    def _make_room(self, target: Target) -> None:
        """Close lanes of a sink that has too many open. Done by the thread that opened one, which takes no work meanwhile."""
        with self._lock:
            using = self._using[id(target)]
            over = len(using) - self._limits[id(target)]
            some = sorted(using.values(), key=lambda one: one._busy) if over > 0 else []
        for one in some:  # those that wait for nothing first
            if over > 0 and one._lock.acquire(blocking=False):
                try:
                    self._close(one, end=False, keep=KEPT_ROWS)
                finally:
                    one._lock.release()
                over -= 1

    def _note_use(self, lane: Lane) -> None:
        """Note that a lane was used last of all, or is not open any more."""
        with self._lock:
            using = self._using[id(lane.target)]
            using.pop(id(lane), None)
            if lane._mirror is not None:
                using[id(lane)] = lane

    def _end(self, lane: Lane, *, end: bool, removed: bool = False) -> None:
        with lane._lock:
            if removed and lane._mirror is not None:
                lane._mirror.state.abandon()
            self._close(lane, end=end)

    def _deliver(self, lane: Lane, stop: threading.Event) -> None:
        known = lane._read[0] if lane._read is not None and lane.found.view is None else None
        if known is not None and known.identity.own:
            identity = identify(known.storage, metrics=known.metrics)
            if not identity.own:
                return  # removed; made anew it would be another run
            if identity != known.identity:
                self._close(lane, end=False)
                lane.state = "new"
        if lane._mirror is None:
            if (stuck := hanging(lane.target.name)) >= MAX_HANGING:
                raise Retry(
                    f"{stuck} calls of {lane.target.name} never returned: once the tracker is well, start this again"
                )
            source, folder = lane._read = lane._read or open_run(lane.found, self.read)
            sink = lane.target.make(self._group or "")
            lane._mirror = Mirror(source, sink, folder, options=lane.target.options, policy=self.policy)
        mirror = lane._mirror
        done = mirror.deliver(patience=0, stop=stop)
        lane._checked = time.monotonic()
        lane.rows += done.rows
        lane.url = mirror.url
        if done.rows:
            self._last_row = lane._checked
        if lane.state == "new" and mirror.url:
            self.tell(f"{lane.found.name}: at {mirror.url}")
        elif lane.state == "behind":
            self.tell(f"{lane.found.name}: {lane.target.name} has caught up")
        if done.rows or lane.state == "new":
            self._check(lane.found)
        lane.state, lane.error, lane._tries, lane._next = "current", None, 0, 0.0
        if stop.is_set() and not mirror.is_current():
            lane.state, lane.error = "behind", "stopped on the way"
        status = mirror.source.info().status
        if status != "running" and not stop.is_set():
            lane.rows += mirror.deliver(patience=0, stop=stop).rows  # what was written since, before the end
            lane._mirror = lane._read = None
            mirror.close(end=True)  # when that fails the run is behind, and it is tried again
            lane.state = "ended"
            if check := self._checks.get(lane.found.path):
                check.rest()
            self.tell(f"{lane.found.name}: {status}, all of it is in {lane.target.name}")

    def _check(self, found: Found) -> None:
        """Tell what is wrong with a run now; that never holds up its mirrors."""
        try:
            with self._lock:
                check = self._checks.get(found.path) or self._checks.setdefault(found.path, Check(found, self.read))
            check.tell(self.tell)
        except Exception:
            log.debug("checking %s", found.path, exc_info=True)

    def _failed(self, lane: Lane, error: Exception, again_in: float | None = None) -> None:
        if not is_there(lane.found):
            return  # the next look says so
        if any(what in str(error) for what in _SCARCE):
            with self._lock:
                fewer = max(WORKERS, len(self._using[id(lane.target)]) * 3 // 4)
                self._limits[id(lane.target)] = min(self._limits[id(lane.target)], fewer)
        if isinstance(error, OverdueError) or lane.state == "new":
            self._close(lane, end=False)
        if lane.state != "behind":
            self.tell(f"{lane.found.name}: {lane.target.name} is behind, trying again: {error}")
        lane.state, lane.error = "behind", f"{type(error).__name__}: {error}"
        pause = again_in if again_in is not None else min(60.0, 2.0 ** min(lane._tries, 6))
        lane._tries += 1
        lane._next = time.monotonic() + pause * random.uniform(0.5, 1.0)

    def _close(self, lane: Lane, *, end: bool, keep: int = 0) -> None:
        """Let go of a lane's sink, and of what was read of its run unless that is a small log on this machine: then it is not
        read anew, from its start, for each new row. The caller has its lock."""
        mirror, lane._mirror = lane._mirror, None
        source = lane._read[0] if lane._read is not None else None
        if source is not None and not (type(source.storage) is LocalStorage and source.numbered() <= keep):
            lane._read = None
        self._note_use(lane)
        if mirror is not None:
            try:
                mirror.close(end=end)
            except Exception as error:
                log.warning("%s: closing %s: %s", lane.found.name, lane.target.name, error)
        if lane.found.view is not None:
            lane.found.view.forget()


def _open_limit() -> int:
    try:
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    except (ImportError, OSError):
        return 64
    return MAX_OPEN if soft == resource.RLIM_INFINITY else max(8, min(MAX_OPEN, soft // 8))
