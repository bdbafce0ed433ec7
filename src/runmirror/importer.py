"""Bringing runs that exist into a tracker: find, plan, deliver, summarise.

Guarantees:

- Idempotent and resumable: each run goes through a :class:`~runmirror.mirror.Mirror`, so a second import sends nothing,
  and one that was killed anywhere is finished by the next.
- ``workers`` processes share the runs, or any Executor (Dask's, for many machines); a worker that dies costs nothing but
  time (:mod:`runmirror.workers`).
- A run that can't be read or delivered is a line in the summary, never the end of the import.
- Nothing is written into a log_path that runmirror did not create (unless ``state_in_log``).
"""

from __future__ import annotations

import contextlib
import glob
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

from runmirror.delivered import Delivered
from runmirror.exceptions import Refused, Retry, RunmirrorError
from runmirror.find import Found, ReadOptions, find_runs, is_run, open_run
from runmirror.find_remote import is_remote
from runmirror.log import layout
from runmirror.log.runlog import RunLog
from runmirror.mirror import Mirror, Policy
from runmirror.sinks.base import Sink, SinkOptions
from runmirror.sinks.registry import check_options, load_sink
from runmirror.state import peek
from runmirror.targets import grouped
from runmirror.workers import spread, spread_over

PATIENCE = 60.0
"""Seconds for which a tracker may fail without progress before an import goes on to the next run."""
log = logging.getLogger("runmirror")

_given_up: set[str] = set()
"""Destinations that this process last waited for in vain."""

PlanState = Literal["new", "behind", "complete", "broken"]
RunState = Literal["complete", "running", "behind", "broken"]


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run as the plan sees it, from the log and the cursor alone: the tracker isn't asked. ``rows`` and ``size`` (bytes)
    are what would be read, ``source`` the kind of log: "runmirror", "tinker-cookbook", "transformers", ..., "metrics"."""

    path: str
    name: str
    state: PlanState
    rows: int = 0
    size: int = 0
    source: str = ""
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ImportedRun:
    """What became of a run.

    ``state``: complete (all of it is in the tracker), running (all there is; the run goes on), behind (the tracker failed:
    import again), broken (it can't be read, or the tracker refuses it: someone has to act first). Counts are of this import.
    """

    path: str
    name: str
    state: RunState
    rows: int = 0
    points: int = 0
    files: int = 0
    rejected: int = 0
    broken_lines: int = 0
    time_source: str = "row"
    numbered: bool = False
    source: str = ""
    url: str | None = None
    error: str | None = None


@dataclass(slots=True)
class Summary:
    """The result of an import: a line per run, how long it took in seconds, and, for a sink that tags runs with it, the
    import's id."""

    sink: str
    destination: str
    runs: list[ImportedRun] = field(default_factory=list)
    seconds: float = 0.0
    import_id: str | None = None

    def count(self, state: RunState) -> int:
        """How many runs ended in this state."""
        return sum(run.state == state for run in self.runs)

    @property
    def ok(self) -> bool:
        """Whether every run is in the tracker, and every row and key of it."""
        return all(run.state in ("complete", "running") and not run.rejected for run in self.runs)

    def as_dict(self) -> dict[str, Any]:
        """The summary as plain data, for ``--json``."""
        totals = {
            name: sum(getattr(run, name) for run in self.runs) for name in ("rows", "points", "files", "rejected")
        }
        return asdict(self) | {"totals": totals, "ok": self.ok}


@dataclass(frozen=True, slots=True)
class Progress:
    """Where an import is: run number ``number`` (from 0) of ``total``, and the rows and points just sent."""

    number: int
    total: int
    name: str
    rows: int
    points: int


@dataclass(frozen=True, slots=True)
class Selection:
    """Which of the runs below the paths are meant: those whose name matches one of the globs ``only`` (none: all), and whose
    log changed at ``since`` (Unix seconds) or later."""

    only: tuple[str, ...] = ()
    since: float | None = None

    def of(self, found: list[Found]) -> list[Found]:
        """Those of ``found`` that are meant."""
        return [one for one in found if self._wants(one)]

    def _wants(self, one: Found) -> bool:
        if self.only and not any(fnmatchcase(one.name, glob) for glob in self.only):
            return False
        return self.since is None or _changed(one) >= self.since


def _changed(one: Found) -> float:
    """When a run's log changed last: its file's time, or that of the newest file in its folder."""
    if one.view is not None:
        return one.view.changed()
    path = one.path
    with contextlib.suppress(OSError):
        files = list(os.scandir(path)) if os.path.isdir(path) else []
        return max([os.path.getmtime(path)] * (not files) + [file.stat().st_mtime for file in files if file.is_file()])
    return math.inf  # what is wrong with it is said later


def plan(
    paths: Iterable[str | os.PathLike[str]],
    to: str,
    options: Mapping[str, Any] | SinkOptions | None = None,
    *,
    rewinds: Policy = "last",
    read: ReadOptions | None = None,
    select: Selection | None = None,
) -> list[PlannedRun]:
    """What :func:`import_runs` would do, with nothing written and no tracker asked. Raises as it does."""
    sink = _sink(to, options)
    read = read or ReadOptions()
    found = (select or Selection()).of(find_runs(paths, storage_options=read.storage_options))
    return [_plan_one(one, sink, _policy(sink, rewinds), read) for one in found]


def _plan_one(found: Found, sink: Sink, policy: Policy, read: ReadOptions) -> PlannedRun:
    try:
        source, folder = open_run(found, read)
        record = peek(folder, sink.name, source.identity.run_id, sink.destination(), policy, source.state_in)
        stat = source.storage.stat(source.metrics)
        size = stat.size if stat else 0
        start = 0
        state: PlanState = "new"
        if record is not None and record.ordinal:
            complete = source.is_complete_at(record.position)
            state = "complete" if complete else "behind"
            start = record.offset if 0 <= record.offset <= size else 0
        rows = _count_lines(source, start)
        return PlannedRun(found.path, found.name, state, rows, size - start, source.source)
    except (OSError, RunmirrorError) as error:
        return PlannedRun(found.path, found.name, "broken", error=f"{type(error).__name__}: {error}")


def _count_lines(source: RunLog, offset: int) -> int:
    lines, last = 0, b"\n"
    while (
        chunk := source.storage.read_range(source.metrics, offset, 1 << 20)
        if source.storage.exists(source.metrics)
        else b""
    ):
        lines += chunk.count(b"\n")
        offset += len(chunk)
        last = chunk[-1:]
    return lines + (last != b"\n")


def import_runs(
    paths: Iterable[str | os.PathLike[str]],
    to: str,
    options: Mapping[str, Any] | SinkOptions | None = None,
    *,
    rewinds: Policy = "last",
    read: ReadOptions | None = None,
    patience: float | None = PATIENCE,
    select: Selection | None = None,
    workers: int = 1,
    executor: Executor | None = None,
    rate: float | None = None,
    per_folder: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> Summary:
    """Bring every run below ``paths`` into the tracker called ``to``.

    Args:
        paths: runs, folders of runs, globs (see :func:`runmirror.find.find_runs`).
        to: a sink's name.
        options: the sink's options; its own defaults and environment variables for the rest.
        rewinds: what of superseded points a tracker gets that can't take points back: "last" or "all".
        read: how the logs are read.
        patience: seconds for which the tracker may fail without progress; None: for ever. When it was out of reach for so
            long, the runs that follow are tried once each.
        select: which of the runs; default all.
        workers: processes that share the runs; one is this process.
        executor: shares the runs instead, and is left running: ``distributed.Client(address).get_executor()`` of Dask, a
            ``ProcessPoolExecutor``, ... Its workers see the same paths, and have runmirror and the sink's packages.
        rate: rows a second at most, over all workers of one machine; None: as fast as the tracker takes them.
        per_folder: one group (an MLflow experiment) per folder of runs, instead of one named after what ``paths`` name.
        on_progress: called now and then.

    Raises:
        NotALogError: a path holds no run.
        UnknownSinkError, MissingPackageError, OptionError: about ``to`` and ``options``.
    """
    read = read or ReadOptions()
    sink_options = options if isinstance(options, SinkOptions) else None
    if sink_options is None:
        sink_options = check_options(to, load_sink(to).Options, options if isinstance(options, Mapping) else {})
    paths = list(paths)
    found = (select or Selection()).of(find_runs(paths, storage_options=read.storage_options))
    sink_options, import_id = _tagged(sink_options)
    summary = Summary(to, _sink(to, sink_options).destination(), import_id=import_id)
    _given_up.clear()
    began = time.monotonic()
    top = group_name(paths, found)
    work = [
        (one, to, grouped(sink_options, _group(top, one, per_folder)), rewinds, read, patience, rate) for one in found
    ]

    def tell(number: int, rows: int, points: int) -> None:
        if on_progress is not None:
            on_progress(Progress(number, len(found), found[number].name, rows, points))

    def gave_up(number: int, why: str) -> ImportedRun:
        return ImportedRun(found[number].path, found[number].name, "behind", error=why)

    if executor is not None:

        def done(number: int, run: ImportedRun) -> None:
            summary.runs.append(run)
            if on_progress is not None:
                on_progress(Progress(len(summary.runs), len(found), run.name, run.rows, run.points))

        calls = [(_sink(to, one[2]).destination(), *one) for one in work]
        summary.runs = spread_over(executor, _import_there, calls, done=done, gave_up=gave_up)
    elif workers > 1 and len(work) > 1:
        summary.runs = spread(_import_one, work, workers, tell=tell, gave_up=gave_up)
    else:
        for number, arguments in enumerate(work):
            tell(number, 0, 0)
            summary.runs.append(_import_one(*arguments, stop=None, tell=partial(tell, number)))
    summary.seconds = time.monotonic() - began
    return summary


def _tagged(options: SinkOptions) -> tuple[SinkOptions, str | None]:
    """The options with an id for this import, where the sink takes one, and that id."""
    if "import_id" not in type(options).model_fields:
        return options, None
    given: str | None = getattr(options, "import_id", None)
    import_id = given or f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"
    return options.model_copy(update={"import_id": import_id}), import_id


def group_name(paths: Iterable[str | os.PathLike[str]], found: Iterable[Found] = ()) -> str:
    """What an import of these paths is called: the name of the folder they are, or are in. Of URIs only the runs ``found``
    tell which name a run itself."""
    tops = []
    runs = {one.path for one in found if one.view is not None}
    for path in paths:
        if is_remote(os.fspath(path)):
            top = os.fspath(path).rstrip("/").removesuffix(f"/{layout.METRICS}")
            while glob.has_magic(top) or top in runs:
                top = os.path.dirname(top)
            tops.append("/" + top.replace("://", "/"))
            continue
        top = os.path.abspath(os.path.expanduser(os.fspath(path).removeprefix("file://")))
        while glob.has_magic(top) or os.path.isfile(top) or (os.path.isdir(top) and is_run(top)):
            top = os.path.dirname(top)
        tops.append(top)
    return os.path.basename(os.path.commonpath(tops)) if tops else ""


def _group(top: str, one: Found, per_folder: bool) -> str:
    below = os.path.dirname(one.name) if per_folder else ""
    return "/".join(part for part in (top, below) if part)


def _import_there(
    destination: str, found: Found, to: str, options: SinkOptions, *rest: Any, **more: Any
) -> ImportedRun:
    """:func:`_import_one` on a worker that may have another working directory or environment."""
    here = _sink(to, options).destination()
    if here != destination:
        error = f"{to} is {here} on a worker, and {destination} where the import was started: give an absolute path or a URL"
        return ImportedRun(found.path, found.name, "behind", error=error)
    return _import_one(found, to, options, *rest, **more)


def _import_one(
    found: Found,
    to: str,
    options: SinkOptions,
    rewinds: Policy,
    read: ReadOptions,
    patience: float | None,
    rate: float | None,
    *,
    stop: threading.Event | None,
    tell: Callable[[int, int], None],
) -> ImportedRun:
    sink = load_sink(to)(options)
    if sink.destination() in _given_up:
        patience = 0  # it was waited for with another run, in vain: one try
    source: RunLog | None = None
    mirror: Mirror | None = None
    done: Delivered | None = None
    error: Exception | None = None
    running = False
    try:
        source, folder = open_run(found, read)
        mirror = Mirror(source, sink, folder, options=options, policy=rewinds, on_progress=tell, rate=rate)
        try:
            done = mirror.deliver(patience=patience, stop=stop)
        finally:
            mirror.close(end=done is not None and (stop is None or not stop.is_set()))
        _given_up.discard(sink.destination())
        running = source.info().status == "running"
    except (OSError, RunmirrorError) as failure:
        error = failure
        if isinstance(failure, Retry):
            _given_up.add(sink.destination())
    except Exception as failure:  # a bug in a sink or a log nobody thought of: one line, and on to the next run
        log.debug("import of %s", found.path, exc_info=True)
        error = failure
    if found.view is not None:
        found.view.forget()
    state: RunState = "complete"
    if error is not None:
        state = "broken" if mirror is None or isinstance(error, Refused) else "behind"
    elif stop is not None and stop.is_set():
        state = "behind"
    elif running:
        state = "running"
    return ImportedRun(
        path=found.path,
        name=found.name,
        state=state,
        rows=done.rows if done else 0,
        points=done.points if done else 0,
        files=done.files if done else 0,
        rejected=done.rejected if done else 0,
        broken_lines=source.broken_count if source else 0,
        time_source=source.time_source if source else "row",
        numbered=bool(source and done and done.rows and not source.has_steps),
        source=source.source if source else "",
        url=mirror.url if mirror else None,
        error=None
        if error is None
        else str(error)
        if isinstance(error, RunmirrorError)
        else f"{type(error).__name__}: {error}",
    )


def _sink(to: str, options: Mapping[str, Any] | SinkOptions | None) -> Sink:
    sink = load_sink(to)
    return sink(options if isinstance(options, SinkOptions) else check_options(to, sink.Options, options or {}))


def _policy(sink: Sink, rewinds: Policy) -> Policy:
    return "last" if sink.capabilities.rewinds == "native" else rewinds
