"""``runmirror mirror``: keep trackers equal to a growing folder of runs, from another process.

Guarantees:

- New runs are found, and every new row is sent, as they appear; one look at each run per interval, nothing else. With
  thousands of runs the looks are further apart, so that they take a tenth of a core at most.
- A tracker that fails, for one run or all, holds up no other run or sink: each (run, sink) pair has its own pauses, and
  each sink its own threads.
- Open sinks are bounded (``max_open``): the least recently active are closed and opened again when their run grows.
- A run that has ended is closed with its status; when it grows again it is opened again.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

from runmirror.catalogue.live import usable
from runmirror.catalogue.runs import RunWatch
from runmirror.exceptions import MirrorBusyError, NotALogError, RunmirrorError
from runmirror.fence import OverdueError
from runmirror.find import Finder, Found, ReadOptions, open_log, open_run
from runmirror.find_remote import is_remote
from runmirror.importer import group_name
from runmirror.log import layout, trainer
from runmirror.log.identity import identify
from runmirror.log.runlog import RunLog
from runmirror.log.status import SILENT_AFTER
from runmirror.mirror import Mirror, Policy
from runmirror.targets import Target

WORKERS = 8
"""Threads per sink: so many runs are brought to a tracker at the same time."""
LOOKING = 0.1
"""The share of the time that looking for new runs and rows may take."""
MAX_PROCESSES = 8
"""(run, sink) pairs kept open at once of a sink that takes a process for each."""
STATUS_EVERY = 30.0
"""Seconds after which a run that rests is asked whether it has ended."""
WATCHED = (layout.METRICS, layout.JOURNAL, layout.CONFIG, layout.CHECKPOINTS, layout.CODE)
"""Files whose change makes a run worth a look."""
log = logging.getLogger("runmirror")

Signature = tuple[tuple[int, int | str], ...]


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


class _Check:
    """The health of one run, for all of its lanes: tells each finding once."""

    def __init__(self, found: Found, read: ReadOptions) -> None:
        self._name = found.name
        self._watch = RunWatch(lambda: open_log(found, read), usable())
        self._lock = threading.Lock()
        self._told: set[tuple[str, str, str | None]] = set()

    def tell(self, tell: Callable[[str], None]) -> None:
        with self._lock:
            for finding in self._watch.read():
                mark = (finding.level, finding.rule, finding.key)  # what got worse is told again
                if mark not in self._told:
                    self._told.add(mark)
                    tell(f"{self._name}: {finding.level} {finding.rule}: {finding}. Often: {finding.means}")


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
        max_open: (run, sink) pairs kept open; default: what the limit of open files allows, 256 at most, and 8 of a sink
            that takes a process for each.
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
    _known: set[str] = field(default_factory=set)
    _finders: dict[str, Finder] = field(default_factory=dict)
    _listed: float = 0.0
    _out_of_reach: set[str] = field(default_factory=set)
    _last_row: float = 0.0
    _checks: dict[str, _Check] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, stop: threading.Event) -> bool:
        """Follow until ``stop`` is set or nothing came for ``exit_idle`` seconds.

        Returns:
            Whether every row that the logs hold is in every tracker.
        """
        self._last_row = time.monotonic()
        self._discover()
        runs = len(self.lanes) // len(self.targets)
        where = ", ".join(f"{target.name} ({target.make(self._group()).destination()})" for target in self.targets)
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
            self._close(lane, end=not stop.is_set())
        return all(lane.state in ("current", "ended") for lane in self.lanes)

    def _tick(self, pools: Mapping[int, ThreadPoolExecutor], stop: threading.Event) -> None:
        """One look: find new runs, and set to work on those that changed."""
        self._discover()
        now = time.monotonic()
        for lane in self.lanes:
            if lane._busy or now < lane._next:
                continue
            signature = _signature(lane.found)
            changed = signature != lane._seen or lane.state in ("new", "behind")
            every = STATUS_EVERY if lane.found.view is None else SILENT_AFTER  # each look at a cloud is billed
            if changed or (lane.state == "current" and now - lane._checked >= every):
                lane._seen, lane._busy = signature, True
                pools[id(lane.target)].submit(self._work, lane, stop)
        self._close_idle()

    def _discover(self) -> None:
        now = time.monotonic()
        list_clouds = not self._listed or now - self._listed >= (10.0 if self.interval is None else self.interval)
        self._listed = now if list_clouds else self._listed
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
                key = one.path if one.view is not None else os.path.realpath(one.path)
                if key not in self._known:
                    self._known.add(key)
                    self._last_row = time.monotonic()
                    self.lanes += [Lane(one, target) for target in self.targets]

    def _group(self) -> str:
        return group_name(self.paths, [lane.found for lane in self.lanes])

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
        known = lane._mirror.source if lane._mirror is not None and lane.found.view is None else None
        if isinstance(known, RunLog) and known.identity.own:
            identity = identify(known.storage, metrics=known.metrics)
            if not identity.own:
                return  # removed; made anew it would be another run
            if identity != known.identity:
                self._close(lane, end=False)
                lane.state = "new"
        if lane._mirror is None:
            source, folder = open_run(lane.found, self.read)
            sink = lane.target.make(self._group())
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
        if done.rows or lane.state == "new":
            self._check(lane.found)
        lane.state, lane.error, lane._tries, lane._next = "current", None, 0, 0.0
        if stop.is_set() and not mirror.is_current():
            lane.state, lane.error = "behind", "stopped on the way"
        status = mirror.source.info().status
        if status != "running" and not stop.is_set():
            lane.rows += mirror.deliver(patience=0, stop=stop).rows  # what was written since, before the end
            lane._mirror = None
            mirror.close(end=True)  # when that fails the run is behind, and it is tried again
            lane.state = "ended"
            self.tell(f"{lane.found.name}: {status}, all of it is in {lane.target.name}")

    def _check(self, found: Found) -> None:
        """Tell what is wrong with a run now; that never holds up its mirrors."""
        try:
            with self._lock:
                check = self._checks.get(found.path) or self._checks.setdefault(found.path, _Check(found, self.read))
            check.tell(self.tell)
        except Exception:
            log.debug("checking %s", found.path, exc_info=True)

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
        if lane.found.view is not None:
            lane.found.view.forget()

    def _close_idle(self) -> None:
        opened = sorted(
            (lane for lane in self.lanes if lane._mirror is not None and not lane._busy), key=lambda o: o._active
        )
        heavy = [lane for lane in opened if lane._mirror and lane._mirror.sink.capabilities.process_per_run]
        for some, limit in ((heavy, self.max_open or MAX_PROCESSES), (opened, self.max_open or _open_limit())):
            for lane in some[: max(0, len(some) - limit)]:
                self._close(lane, end=False)


def _signature(run: Found) -> Signature:
    """Size and time of the files of a run that matter; () when it is gone."""
    if run.view is not None:
        stats = map(run.view.stat, WATCHED if run.metrics == layout.METRICS else (run.metrics,))
        return tuple((-1, 0) if stat is None else (stat.size, stat.version) for stat in stats)
    path = run.path
    names: Iterable[str] = [os.path.join(path, name) for name in WATCHED] if os.path.isdir(path) else [path]
    found: list[tuple[int, int | str]] = []
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
