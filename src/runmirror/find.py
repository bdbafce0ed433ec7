"""Finding runs below the paths people name, and opening one as a Source."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, tzinfo
from pathlib import Path

from runmirror.exceptions import NotALogError
from runmirror.log import layout
from runmirror.log.identity import identify
from runmirror.log.index import LineIndex
from runmirror.log.records import Status
from runmirror.log.runlog import RunLog
from runmirror.state import run_folder
from runmirror.storage import LocalStorage, local_root

MAX_DEPTH = 8
"""Folders below a named one that are searched for runs."""


@dataclass(frozen=True, slots=True)
class Found:
    """A run that was found: the folder or metrics file, and its name in trackers."""

    path: str
    name: str


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How logs are read: what ``import`` and ``mirror`` take from the command line.

    Attributes:
        step_key: the key that is the step, instead of the usual ones.
        zone: the zone of times that name none.
        by_content: know foreign logs by their content, for archives that move.
        status_unknown: what a run counts as that stopped without saying how it ended; None: "killed".
        state_in_log: keep state in the log_path even when runmirror did not write it.
    """

    step_key: str | None = None
    zone: tzinfo = UTC
    by_content: bool = False
    status_unknown: Status | None = None
    state_in_log: bool = False


def find_runs(paths: Iterable[str | os.PathLike[str]], max_depth: int = MAX_DEPTH) -> list[Found]:
    """Every run below ``paths``, sorted by name within each, each once.

    A path is a run's folder, a metrics file (``*.jsonl``), a folder that is searched in depth, or a glob. The name of a
    run is its folder relative to the path given (or to the fixed part of a glob); a run that is named itself is called by
    its folder, with as much of the way to it as tells it from the others.

    Raises:
        NotALogError: a path that doesn't exist, or below which no run was found.
    """
    found: dict[str, Found] = {}
    named: list[str] = []
    for path in paths:
        text = os.fspath(path)
        root = local_root(text)
        if root is None:
            raise NotALogError(f"{text}: runs on {text.split('://')[0]}:// can't be read yet; copy or mount them")
        before = len(found)
        for one in _below(root, max_depth):
            if one.path == root:
                named.append(root)
            found.setdefault(os.path.realpath(one.path), one)
        if len(found) == before and not any(key.startswith(os.path.realpath(root)) for key in found):
            what = "does not exist" if not os.path.lexists(root) and not glob.has_magic(root) else "holds no run"
            raise NotALogError(f"{text} {what}: a run is a folder with {layout.METRICS} in it, or a metrics file")
    if len({Path(path).name for path in named}) < len(named):
        shared = os.path.commonpath([os.path.dirname(path) for path in named])
        for path in named:
            found[os.path.realpath(path)] = Found(path, Path(os.path.relpath(path, shared)).as_posix())
    return list(found.values())


def _below(root: str, max_depth: int) -> Iterator[Found]:
    if glob.has_magic(root) and not os.path.lexists(root):
        parts = Path(root).parts
        fixed = os.path.join(*parts[: next(n for n, part in enumerate(parts) if glob.has_magic(part))])
        for match in sorted(glob.glob(root, recursive=True)):
            for one in _below(match, max_depth):
                yield Found(one.path, Path(os.path.relpath(_stem(one.path), fixed)).as_posix())
    elif os.path.isfile(root):
        if root.endswith(".jsonl"):
            yield Found(root, Path(root).stem)
    elif is_run(root):
        yield Found(root, os.path.basename(root))
    else:
        yield from _search(root, root, max_depth)


def _search(root: str, folder: str, depth: int) -> Iterator[Found]:
    try:
        children = sorted(os.scandir(folder), key=lambda child: child.name)
    except OSError:
        return
    for child in children:
        if child.name.startswith(".") or layout.is_iteration(child.name):
            continue
        try:
            if not child.is_dir():
                continue
        except OSError:
            continue
        if is_run(child.path):
            yield Found(child.path, Path(os.path.relpath(child.path, root)).as_posix())
        if depth > 1 and not child.is_symlink():
            yield from _search(root, child.path, depth - 1)


def _stem(path: str) -> str:
    return path.removesuffix(".jsonl")


def is_run(folder: str) -> bool:
    """Whether a folder is a log_path: it has metrics, or runmirror's mark."""
    return os.path.isfile(os.path.join(folder, layout.METRICS)) or os.path.isfile(os.path.join(folder, layout.RUN))


def open_run(found: Found, options: ReadOptions | None = None) -> tuple[RunLog, Path]:
    """A run as a Source, and the folder in which mirrors keep its state.

    Raises:
        NotALogError: nothing is there any more.
        OSError: it can't be read.
    """
    options = options or ReadOptions()
    metrics = layout.METRICS
    folder = found.path
    if os.path.isfile(folder):
        folder, metrics = os.path.split(folder)
    elif not os.path.isdir(folder):
        raise NotALogError(f"{folder} is gone")
    storage = LocalStorage(folder)
    identity = identify(storage, metrics=metrics, by_content=options.by_content)
    state = run_folder(storage, identity, in_log=options.state_in_log)
    source = RunLog(
        storage,
        found.name,
        LineIndex(state),
        metrics=metrics,
        step_key=options.step_key,
        zone=options.zone,
        by_content=options.by_content,
        status_unknown=options.status_unknown,
    )
    return source, state
