"""Finding runs below the paths people name, and opening one as a Source."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, tzinfo
from pathlib import Path
from typing import Any

from runmirror.exceptions import NotALogError
from runmirror.find_remote import Tree, is_remote
from runmirror.log import layout, rl, trainer
from runmirror.log.foreign import Form, detect, detect_in
from runmirror.log.identity import identify, read_record
from runmirror.log.index import LineIndex
from runmirror.log.listed import Listed
from runmirror.log.records import Status
from runmirror.log.rows import decode
from runmirror.log.runlog import RunLog
from runmirror.log.steps import STEP_KEYS, find_step
from runmirror.state import run_folder
from runmirror.storage import LocalStorage, local_root

MAX_DEPTH = 8
"""Folders below a named one that are searched for runs."""


@dataclass(frozen=True, slots=True)
class Found:
    """A run that was found: the folder or metrics file (a path or a URI), and its name in trackers. A run in a cloud has its
    ``view`` too, and the name of its metrics file."""

    path: str
    name: str
    view: Listed | None = field(default=None, repr=False, compare=False)
    metrics: str = layout.METRICS


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How logs are read: what ``import`` and ``mirror`` take from the command line.

    Attributes:
        step_key: the key that is the step, instead of the usual ones.
        zone: the zone of times that name none.
        by_content: know foreign logs by their content, for archives that move.
        status_unknown: what a run counts as that stopped without saying how it ended; None: "killed".
        state_in_log: keep state in the log_path even when runmirror did not write it.
        storage_options: for the fsspec file system of logs in a cloud, such as credentials. Written nowhere.
    """

    step_key: str | None = None
    zone: tzinfo = UTC
    by_content: bool = False
    status_unknown: Status | None = None
    state_in_log: bool = False
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)


def find_runs(
    paths: Iterable[str | os.PathLike[str]],
    max_depth: int = MAX_DEPTH,
    storage_options: Mapping[str, Any] | None = None,
) -> list[Found]:
    """Every run below ``paths``, sorted by name within each, each once.

    A path, or a URI such as ``gs://bucket/runs``, is a run's folder, a metrics file (``*.jsonl``), a trainer_state.json, a
    folder that is searched in depth, or a glob. A checkpoint of transformers stands for the run above it. The name of a run
    is its folder relative to the path given (or to the fixed part of a glob), or its own folder's when it is named itself;
    runs that would have one name get as much of the way to them as tells them apart.

    Raises:
        NotALogError: a path that doesn't exist, or below which no run was found.
    """
    return Finder(paths, max_depth, storage_options).find()


class Finder:
    """Finds the runs below paths again and again; arguments and errors as of :func:`find_runs`. What lies in a cloud is listed
    once each time, and a run there keeps its view."""

    def __init__(
        self,
        paths: Iterable[str | os.PathLike[str]],
        max_depth: int = MAX_DEPTH,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._paths = list(paths)
        self._max_depth = max_depth
        self._options = storage_options
        self._trees: dict[str, Tree] = {}

    def find(self) -> list[Found]:
        """The runs that are there now."""
        found: dict[str, Found] = {}
        for path in self._paths:
            some = self._remote(os.fspath(path)) if is_remote(os.fspath(path)) else self._local(os.fspath(path))
            for one in some:
                found.setdefault(one.path if one.view else os.path.realpath(one.path), one)
        return told_apart(list(found.values()))

    def _local(self, path: str) -> list[Found]:
        try:
            root = local_root(path)
        except ValueError as error:
            raise NotALogError(str(error)) from error
        assert root is not None  # is_remote  # noqa: S101
        some = list(_below(root, self._max_depth))
        if not some:
            there = os.path.lexists(root) or glob.has_magic(root)
            raise NotALogError(f"{path} {'holds no run' if there else 'does not exist'}: {_A_RUN}")
        return some

    def _remote(self, uri: str) -> list[Found]:
        try:
            if uri not in self._trees:
                self._trees[uri] = Tree(uri, self._options, self._max_depth)
            tree = self._trees[uri]
            some = [Found(path, name, view, metrics) for path, name, metrics, view in tree.find()]
        except ValueError as error:
            raise NotALogError(str(error)) from error
        if not some:
            hint = _A_RUN if not tree.trainers else "runs of transformers are read from local folders: copy them first"
            raise NotALogError(f"{uri} holds no run: {hint}")
        return some


_A_RUN = f"a run is a folder with {layout.METRICS} or {trainer.STATE} in it, or a metrics file (*.jsonl)"


def told_apart(found: list[Found]) -> list[Found]:
    """The runs with names that differ: where several have one, the way to them below their common folder."""
    names = Counter(one.name for one in found)
    if len(names) == len(found):
        return found
    shared = {
        name: os.path.commonpath([os.path.dirname(_place(one)) for one in found if one.name == name])
        for name, count in names.items()
        if count > 1
    }
    told = [replace(one, name=_name(_place(one), shared[one.name])) if one.name in shared else one for one in found]
    if len({one.name for one in told}) < len(told):  # a longer name is another's short one, or x stands beside x.jsonl
        top = os.path.commonpath([os.path.dirname(_place(one)) for one in found])
        told = [replace(one, name=_name(_place(one), top, whole=True)) for one in found]
    return told


def _place(one: Found) -> str:
    """A path that stands for the run among the others: a URI's begins with its scheme."""
    return one.path if one.view is None else "/" + one.path.replace("://", "/")


def _name(path: str, above: str, *, whole: bool = False) -> str:
    """The name of a run below a folder, with ``/``; text that every tracker takes, whatever the bytes of the path are."""
    path = path if whole or not os.path.isfile(path) else path.removesuffix(".jsonl").removesuffix(".json")
    return os.fsencode(Path(os.path.relpath(path, above)).as_posix()).decode("utf-8", "replace")


def _below(root: str, max_depth: int) -> Iterator[Found]:
    root = trainer.run_path(root)
    if glob.has_magic(root) and not os.path.lexists(root):
        parts = Path(root).parts
        fixed = os.path.join(*parts[: next(n for n, part in enumerate(parts) if glob.has_magic(part))])
        for match in sorted(glob.glob(root, recursive=True)):
            for one in _below(os.path.normpath(match), max_depth):
                below = one.path.startswith(os.path.join(fixed, ""))
                yield Found(one.path, _name(one.path, fixed) if below else one.name)
    elif os.path.isfile(root) and (os.path.basename(root) == layout.METRICS or rl.kind_of(root)):
        yield from _below(os.path.dirname(root), max_depth)
    elif os.path.isfile(root):
        if root.endswith(".jsonl") or trainer.is_trainer_state(root):
            yield Found(root, _name(root, os.path.dirname(root)))
    elif is_run(root):
        yield from _run(root, _own_name(root))
    else:
        yield from _search(root, root, max_depth)


def _run(folder: str, name: str) -> Iterator[Found]:
    """A run's folder; when it is another framework's, and an integration of ours writes in it, the logs of that instead."""
    logs = (
        [] if os.path.isfile(os.path.join(folder, layout.RUN)) else glob.glob(f"{glob.escape(folder)}/{layout.INSIDE}*")
    )
    logs = [log for log in logs if os.path.isfile(os.path.join(log, layout.RUN))]
    for log in sorted(logs, key=lambda log: (len(log), log)):
        yield Found(log, name + os.path.basename(log).removeprefix(layout.INSIDE))
    if not logs:
        yield Found(folder, name)


def _own_name(root: str) -> str:
    """The name of a run that is named itself: what its writer calls it, else its folder's."""
    record = read_record(LocalStorage(root))
    return (record.name if record else None) or _name(root, os.path.dirname(root))


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
        if trainer.is_checkpoint(child.path):  # of the run above it
            continue
        if is_run(child.path):
            yield from _run(child.path, _name(child.path, root))
        if depth > 1 and not child.is_symlink():
            yield from _search(root, child.path, depth - 1)


def other_logs(paths: Iterable[str | os.PathLike[str]]) -> list[str]:
    """Metrics files right in the folders given, and one folder below, that :func:`find_runs` leaves alone because of their
    names: ``*.jsonl`` whose first line has a step, and trainer states. To be named, as some of ``paths`` may be, to be read."""
    found: list[str] = []
    roots = [os.path.expanduser(os.fspath(path)) for path in paths]
    named = {os.path.realpath(one) for root in roots for one in (root, *glob.glob(root))}
    for root in roots:
        if os.path.isdir(root) and not is_run(root):
            files = [file for depth in ("*", "*/*") for file in sorted(glob.glob(f"{glob.escape(root)}/{depth}"))]
            files = [file for file in files if os.path.realpath(file) not in named]
            found += [file for file in files if not is_run(os.path.dirname(file)) and _may_be_log(file)]
    return found


def _may_be_log(file: str) -> bool:
    if file.endswith(".json"):
        return os.path.basename(file) != trainer.STATE and trainer.is_trainer_state(file)
    try:
        with open(file, "rb") as opened:
            line = opened.readline(1 << 20) if file.endswith(".jsonl") else b""
    except OSError:
        return False
    return find_step(decode(line) or {}, STEP_KEYS) is not None


def is_run(folder: str) -> bool:
    """Whether a folder is a run's: it has metrics, runmirror's mark, the states of a transformers trainer, or the log of Ray
    or Stable-Baselines3."""
    return trainer.is_log_path(folder) or trainer.is_output_dir(folder) or rl.log_in(folder) is not None


def open_run(found: Found, options: ReadOptions | None = None) -> tuple[RunLog, Path]:
    """A run as a Source, and the folder in which mirrors keep its state.

    Raises:
        NotALogError: nothing is there any more.
        OSError: it can't be read.
    """
    options = options or ReadOptions()
    form = _form(found)
    identity = identify(form.storage, metrics=form.metrics, by_content=options.by_content)
    state = run_folder(form.storage, identity, in_log=options.state_in_log)
    index = LineIndex(
        state if form.metrics == layout.METRICS else state / form.metrics
    )  # a folder may hold several logs
    source = _open(form, found, options, index)
    if options.state_in_log and found.view is not None:
        source.state_in = form.storage
    return source, state


def open_log(found: Found, options: ReadOptions | None = None) -> RunLog:
    """A run as a Source, with no state: nothing is written anywhere. Raises as :func:`open_run` does."""
    return _open(_form(found), found, options or ReadOptions(), None)


def _form(found: Found) -> Form:
    if found.view is not None:
        if not found.view.exists(found.metrics) and not found.view.exists(layout.RUN):
            raise NotALogError(f"{found.path} is gone")
        return detect_in(found.view, found.metrics)
    if not os.path.exists(found.path):
        raise NotALogError(f"{found.path} is gone")
    form = detect(found.path)
    if isinstance(form.storage, trainer.TrainerOutput) and not form.storage.exists(form.metrics):
        raise NotALogError(
            f"{found.path}: no {trainer.STATE} in it can be read; it is damaged, or being written: try again"
        )
    return form


def _open(form: Form, found: Found, options: ReadOptions, index: LineIndex | None) -> RunLog:
    return form.open(
        found.name,
        index,
        step_key=options.step_key,
        zone=options.zone,
        by_content=options.by_content,
        status_unknown=options.status_unknown,
    )
