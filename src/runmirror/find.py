"""Finding runs below the paths people name, and opening one as a Source."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, tzinfo
from pathlib import Path

from runmirror.exceptions import NotALogError
from runmirror.log import layout, rl, trainer
from runmirror.log.foreign import Form, detect
from runmirror.log.identity import identify, read_record
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

    A path is a run's folder, a metrics file (``*.jsonl``), a trainer_state.json, a folder that is searched in depth, or a
    glob. A checkpoint of transformers stands for the run above it. The name of a run is its folder relative to the path
    given (or to the fixed part of a glob), or its own when it is named itself; runs that would have one name get
    as much of the way to them as tells them apart.

    Raises:
        NotALogError: a path that doesn't exist, or below which no run was found.
    """
    found: dict[str, Found] = {}
    for path in paths:
        text = os.fspath(path)
        try:
            root = local_root(text)
        except ValueError as error:
            raise NotALogError(str(error)) from error
        if root is None:
            raise NotALogError(f"{text}: runs on {text.split('://')[0]}:// can't be read yet; copy or mount them")
        some = False
        for one in _below(root, max_depth):
            some = True
            found.setdefault(os.path.realpath(one.path), one)
        if not some:
            what = "does not exist" if not os.path.lexists(root) and not glob.has_magic(root) else "holds no run"
            raise NotALogError(
                f"{text} {what}: a run is a folder with {layout.METRICS} or {trainer.STATE} in it, "
                "or a metrics file (*.jsonl)"
            )
    return _told_apart(list(found.values()))


def _told_apart(found: list[Found]) -> list[Found]:
    """The runs with names that differ: where several have one, the way to them below their common folder."""
    names = Counter(one.name for one in found)
    if len(names) == len(found):
        return found
    shared = {
        name: os.path.commonpath([os.path.dirname(one.path) for one in found if one.name == name])
        for name, count in names.items()
        if count > 1
    }
    told = [replace(one, name=_name(one.path, shared[one.name])) if one.name in shared else one for one in found]
    if len({one.name for one in told}) < len(told):  # a longer name is another's short one, or x stands beside x.jsonl
        top = os.path.commonpath([os.path.dirname(one.path) for one in found])
        told = [replace(one, name=_name(one.path, top, whole=True)) for one in found]
    return told


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
    return _open(form, found, options, index), state


def open_log(found: Found, options: ReadOptions | None = None) -> RunLog:
    """A run as a Source, with no state: nothing is written anywhere. Raises as :func:`open_run` does."""
    return _open(_form(found), found, options or ReadOptions(), None)


def _form(found: Found) -> Form:
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
