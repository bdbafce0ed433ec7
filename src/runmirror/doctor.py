"""``runmirror doctor``: would an import or a mirror of these runs work here?

Guarantees:

- Nothing is written: no folder is made, no state changed, nothing sent to a tracker.
- Whatever is wrong is a :class:`~runmirror.sinks.base.Check` with the one thing to do about it, never an exception.
- Every log is read to its end, so broken lines are found before an import meets them.
"""

from __future__ import annotations

import logging
import os
import platform
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from runmirror.exceptions import MissingPackageError, NotALogError, RunmirrorError, StateError, UnknownSinkError
from runmirror.fence import Fence, OverdueError
from runmirror.find import Found, ReadOptions, find_runs, open_log
from runmirror.find_remote import is_remote
from runmirror.log.layout import OWN
from runmirror.log.rows import START
from runmirror.log.runlog import RunLog
from runmirror.openers import has_links
from runmirror.sinks.base import Check, Checks, Sink, SinkOptions
from runmirror.sinks.checks import check_disk, check_folder, existing
from runmirror.sinks.describe import describe_sink
from runmirror.sinks.registry import make_sink
from runmirror.state import HEARTBEAT, peek, state_path
from runmirror.storage import LocalStorage
from runmirror.storage.home import homes

SINK_SECONDS = 30.0
"""Seconds that a sink's own checks may take."""
log = logging.getLogger("runmirror")


def examine(
    paths: Iterable[str | os.PathLike[str]],
    to: str,
    options: Mapping[str, Any] | SinkOptions | None = None,
    *,
    read: ReadOptions | None = None,
) -> list[Check]:
    """Every check, in the order in which to mend things: this machine, the sink, the runs, the state.

    Args:
        paths: runs, folders of runs, globs, as for :func:`runmirror.importer.import_runs`.
        to: a sink's name.
        options: its options.
        read: how the logs are read.
    """
    read = read or ReadOptions()
    checks = [_python(), Check("runmirror", True, f"version {_version()}")]
    sink, told = _check_sink(to, options)
    checks += told
    runs: list[RunLog] = []
    for path in paths:
        checks += _check_path(os.fspath(path), read, runs)
    checks += _check_state(runs, read)
    if sink is not None:
        checks += _check_mirrors(runs, sink, read)
    return checks


def _python() -> Check:
    found = f"{platform.python_version()} on {platform.system()} ({sys.executable})"
    return Check("python", sys.version_info >= (3, 11), found, "use Python 3.11 or newer")


def _version() -> str:
    try:
        return metadata.version("runmirror")
    except metadata.PackageNotFoundError:
        return "unknown: not installed as a package"


# -- the sink


def _check_sink(to: str, options: Mapping[str, Any] | SinkOptions | None) -> tuple[Sink | None, list[Check]]:
    try:
        described = describe_sink(to)
    except UnknownSinkError as error:
        return None, [Check("sink", False, str(error), "name one that `runmirror sinks` lists, or install its package")]
    if not described.usable:
        return None, [Check("sink", False, described.error, described.fix)]
    checks = [Check("sink", True, f"{to}, of {described.package} {described.version}")]
    for need in described.requirements:
        found = f"{need.installed or 'not installed'} (needs {need.wanted or 'any'})"
        checks.append(Check(need.package, need.ok, found, f"pip install --upgrade '{need.package}{need.wanted}'"))
    try:
        sink = make_sink(to, options)
        where = sink.destination()
    except Exception as error:  # RunmirrorError as a rule
        fix = f"`runmirror sinks {to}` tells every option"
        return None, [*checks, Check("options", False, _message(error), fix)]
    return sink, [*checks, Check("options", True, f"valid; to {where}"), *_ask(sink)]


def _ask(sink: Sink) -> list[Check]:
    """The sink's own checks, within a deadline."""
    if not isinstance(sink, Checks):
        return []
    fence = Fence(sink.name)
    try:
        return fence.call("check", SINK_SECONDS, sink.check)
    except OverdueError as error:
        return [Check("tracker", False, str(error), "see whether the tracker and the network to it are up")]
    except Exception as error:
        log.debug("check of %s", sink.name, exc_info=True)
        return [Check("tracker", False, _message(error), f"see the documentation of the sink {sink.name}")]
    finally:
        fence.close()


# -- the runs


def _check_path(path: str, read: ReadOptions, runs: list[RunLog]) -> Iterator[Check]:
    try:
        found = find_runs([path], storage_options=read.storage_options)
    except MissingPackageError as error:
        yield Check("runs", False, str(error), "install that package")
        return
    except NotALogError as error:
        yield Check("runs", False, str(error), "name a run, a folder with runs below it, or a glob")
        return
    except Exception as error:  # OSError as a rule, or what the package of a cloud raises
        fix = "see that it can be reached and read: credentials by --storage-option or fsspec's configuration"
        yield Check("runs", False, _message(error), fix if is_remote(path) else "make it readable")
        return
    opened: list[RunLog] = []
    faults: list[Check] = []
    rows = 0
    for one in found:
        try:
            source = open_log(one, read)
            rows += sum(not row.fault for row in source.rows(START))
        except Exception as error:  # OSError or RunmirrorError as a rule; a log nobody thought of is no reason to stop
            log.debug("looking at %s", one.path, exc_info=True)
            faults.append(Check("log", False, f"{one.name}: {_message(error)}", f"make {one.path} readable"))
            continue
        opened.append(source)
        if source.broken_count:
            faults.append(_broken(one, source))
    kinds = Counter(source.source for source in opened)
    named = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "none can be read"
    yield Check("runs", True, f"{len(found)} below {path}: {named}; {rows:,} rows")
    yield from faults
    if not faults:
        yield Check("logs", True, "no broken line")
    runs += opened


def _broken(found: Found, source: RunLog) -> Check:
    fix = f"mend or remove the lines in {found.path}; an import leaves them out and goes on"
    more = f" and {source.broken_count - 3:,} more" if source.broken_count > 3 else ""
    return Check("log", False, f"{found.name}: {', '.join(source.broken[:3])}{more}", fix)


# -- the state


def _home() -> Path:
    """Where :func:`runmirror.state.home` would look first; made by nobody here."""
    return Path(os.path.abspath(homes()[0]))


def _state_folder(source: RunLog, read: ReadOptions) -> Path:
    """What :func:`runmirror.state.run_folder` would answer."""
    storage = source.storage
    if isinstance(storage, LocalStorage) and (source.identity.own or read.state_in_log):
        folder = Path(storage.root) / OWN / "mirror"
        if os.access(existing(folder), os.W_OK) and not (folder.is_dir() and has_links(folder)):
            return folder
    return _home() / "runs" / source.identity.run_id


def _check_state(runs: list[RunLog], read: ReadOptions) -> Iterator[Check]:
    home = _home()
    folders = {_state_folder(source, read) for source in runs}
    inside = sum(home not in folder.parents for folder in folders)
    if not runs or inside < len(folders):
        check = check_folder("state", home, "another folder: export RUNMIRROR_HOME=DIR")
        yield check
    if inside:
        yield Check("state in logs", True, f"{inside} of {len(folders)} runs keep it in <run>/{OWN}/mirror")
    disks: dict[int, Path] = {}
    for folder in folders or {home}:
        place = existing(folder)
        disks.setdefault(place.stat().st_dev, place)
    for place in disks.values():
        yield check_disk("disk", place)


def _check_mirrors(runs: list[RunLog], sink: Sink, read: ReadOptions) -> Iterator[Check]:
    """Whether another mirror brings one of the runs there right now, and whether the state can be read."""
    free = True
    for source in runs:
        folder = _state_folder(source, read)
        for policy in ("last", "all"):
            place = (folder, sink.name, source.identity.run_id, sink.destination(), policy)
            try:
                record = peek(*place, source.state_in)
            except StateError as error:
                yield Check("cursor", False, str(error), "pip install --upgrade runmirror")
                continue
            owner = record.owner if record else None
            elsewhere = owner is not None and owner.host != socket.gethostname()
            alive = owner is not None and elsewhere and abs(time.time() - owner.heartbeat) < HEARTBEAT
            if alive or _is_locked(state_path(*place).with_suffix(".lock")):
                who = f"process {owner.pid} on {owner.host}" if owner else "another process"
                free = False
                fix = "wait for it or stop it; a second one is refused"
                yield Check("other mirrors", False, f"{source.name}: {who} mirrors it to {sink.destination()} now", fix)
    if free:
        yield Check("other mirrors", True, "none at work on these runs")


def _is_locked(path: Path) -> bool:
    """Whether a process holds a lock file. It is shared for an instant, not written."""
    try:
        import fcntl
    except ImportError:  # Windows
        return False
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no locks on this file system
        return False
    finally:
        os.close(descriptor)
    return False


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, RunmirrorError) else f"{type(error).__name__}: {error}"
