"""The reports and rollouts of one run being written: what ``run.report``, ``run.log_rollouts`` and ``run.evaluation`` do.

Guarantees:

- Nothing here raises for what it is given or for the disk (``strict=True`` does, after the write): what can't be used is
  left out, told once, and kept with the reason in ``.runmirror/rollouts.rejected.jsonl``.
- Files are written whole, atomically, through the run's Storage; the same (iteration, split) replaces them.
- Rendering and writing reports happens in a thread of its own. On a local disk the rollout records are there when
  ``log_rollouts`` returns. The end of the run waits for what is not written yet; reports that are still open are written
  as partial.
"""

from __future__ import annotations

import json
import logging
import tempfile
import threading
from collections.abc import Iterable, Mapping
from hashlib import sha256
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from runmirror.log import layout as files
from runmirror.log.layout import Kind
from runmirror.log.rows import decode, json_line
from runmirror.reports import rollouts
from runmirror.reports.html import render
from runmirror.reports.plain import text_of
from runmirror.reports.rollouts import Checked
from runmirror.reports.tree import Tree
from runmirror.reports.worker import Worker
from runmirror.storage import LocalStorage, Storage

if TYPE_CHECKING:
    from runmirror.run import Run

logger = logging.getLogger("runmirror")

IN_MEMORY = 8 << 20
"""A rendered report up to this size is put together in memory, a larger one in a temporary file."""
LONGEST = 150
"""Characters of an evaluation's name in file names at most."""
REJECTED = f"{files.OWN}/rollouts.rejected.jsonl"
EVALUATIONS = f"{files.OWN}/evaluations.json"
_TYPES: dict[Kind, str] = {
    "report": "text/html; charset=utf-8",
    "logtree": "application/json",
    "rollouts": "application/x-ndjson",
}


class RunReports:
    """The reports of one run.

    Attributes:
        lost: files that could not be written.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._storage = run.storage
        self._worker = Worker(f"runmirror reports of {run.log_path}")
        self._lock = threading.RLock()
        self._open: dict[tuple[int, str], Tree] = {}
        self._written: set[str] = set()
        self._labels: dict[str, str] | None = None
        self._warned: set[str] = set()
        self.lost = 0

    # -- what a Run calls

    def open(self, iteration: int, split: str, title: Any) -> Tree:
        """A report; a second one of the same iteration and split while the first is open is the first."""
        iteration, name, split = self._iteration(iteration), raw_name(split), self.clean(split)
        with self._lock:
            key = (iteration, split)
            if key in self._open:
                return self._open[key]
            about = "Iteration" if name is None else f"Evaluation {name}, iteration"
            path = self._path("report", split, iteration)
            tree = Tree(title or f"{about} {iteration}", path, lambda tree: self._hand_over(tree, iteration, split))
            self._open[key] = tree
            return tree

    def log_rollouts(self, iteration: int, groups: Iterable[Any], split: str, most: int | None) -> dict[str, float]:
        """Records, report and metrics of an iteration's rollouts; the metrics as they were put into the row."""
        iteration, name, clean = self._iteration(iteration), raw_name(split), self.clean(split)
        try:
            checked = rollouts.check(groups, clean, iteration)
        except Exception as error:  # no iterable, or one that raises
            checked = Checked()
            checked.rejected.append((-1, None, f"{type(error).__name__}: {text_of(error)}", b"null"))
        self._write_soon(self._path("rollouts", clean, iteration), b"".join(checked.lines), "rollouts")
        most = self._run.num_groups_to_log if most is None else most
        if most > 0 and checked.records:
            tree = self._open.get((iteration, clean))
            if tree is not None:
                rollouts.write(tree, checked, most)
            else:
                with self.open(iteration, split, None) as tree:
                    rollouts.write(tree, checked, most)
        found = _keys(rollouts.metrics(checked.records), name)
        self._run.suggest(iteration, found)
        if checked.rejected:
            self._reject(checked, clean, iteration)
        return found

    def finish(self, seconds: float) -> None:
        """Write what is open as partial, and wait for everything that is not written yet."""
        for tree in list(self._open.values()):
            tree.close(partial="the run ended before it was finished")
        self.drain(seconds)

    def drain(self, seconds: float) -> None:
        """Wait until what was handed over is written."""
        if not self._worker.drain(seconds):
            logger.warning("%s: some reports were not written within %g s", self._run.log_path, seconds)

    def clean(self, split: str) -> str:
        """A split as records and file names have it: "train", or ``eval/`` and the evaluation's cleaned name. Names that
        would share a file get different ones, the same in every process: which was first is kept in the log_path."""
        name = raw_name(split)
        if name is None:
            return "train"
        with self._lock:
            if self._labels is None:
                self._labels = read_labels(self._storage)
            label = next((label for label, owner in self._labels.items() if owner == name), "")
            if not label:
                label = files.clean_name(name)
                taken = {label.casefold() for label in self._labels}  # some disks don't tell Test from test
                if label.casefold() in taken or len(label) > LONGEST:
                    mark = sha256(name.encode("utf-8", "replace")).hexdigest()[:8]
                    label = f"{label[:LONGEST]}-{mark}"
                self._labels[label] = name
                self._write_soon(EVALUATIONS, json.dumps(self._labels, indent=2).encode() + b"\n", None)
            return f"eval/{label}"

    # -- writing

    def _iteration(self, iteration: Any) -> int:
        step, reason = self._run.check_step(iteration)
        if reason or step < 0:
            logger.warning(
                "%s: an iteration is a whole number from 0 on, not %s: taken as %d",
                self._run.log_path, text_of(iteration)[:60], max(0, step)
            )  # fmt: skip
        return max(0, step)

    def _path(self, kind: Kind, split: str, iteration: int) -> str:
        return files.clean_file(kind, split, iteration, self._run.layout)

    def _hand_over(self, tree: Tree, iteration: int, split: str) -> None:
        """A tree is finished: have it written."""
        with self._lock:
            self._open.pop((iteration, split), None)
            if tree.path in self._written:
                self._warn(
                    tree.path,
                    f"{tree.path}: this report was written before and is replaced; to have both in one, call log_rollouts "
                    "within the `with run.report(...)` block",
                )
            self._written.add(tree.path)
        size = sum(len(part) for part in tree.json())
        logtree = self._path("logtree", split, iteration)
        self._worker.submit(lambda: self._render(tree, logtree), size)

    def _render(self, tree: Tree, logtree: str) -> None:
        self._write_parts(logtree, tree.json(), "logtree")
        self._write_parts(tree.path, (part.encode() for part in render(tree)), "report")

    def _write_parts(self, path: str, parts: Iterable[bytes | bytearray], kind: Kind) -> None:
        try:
            with tempfile.SpooledTemporaryFile(IN_MEMORY) as whole:
                for part in parts:
                    whole.write(part)
                whole.seek(0)
                self._write(path, whole.read(), kind)
        except Exception as error:
            self._warn_write(path, error)

    def _write_soon(self, path: str, data: bytes, kind: Kind | None) -> None:
        """Write now on a local disk; elsewhere training must not wait for it."""
        if isinstance(self._storage, LocalStorage):
            self._write(path, data, kind)
        else:
            self._worker.submit(lambda: self._write(path, data, kind), len(data))

    def _write(self, path: str, data: bytes, kind: Kind | None) -> None:
        try:
            self._storage.write(path, data, content_type=_TYPES[kind] if kind else "application/json")
        except Exception as error:  # a full disk, or whatever a Storage raises
            self._warn_write(path, error)

    def _warn_write(self, path: str, error: Exception) -> None:
        self.lost += 1
        self._warn(
            f"write {type(error).__name__}",
            f"{self._storage.url(path)} could not be written ({type(error).__name__}: {error}): training goes on without "
            "this file, and the next ones are tried",
        )

    def _reject(self, checked: Checked, split: str, iteration: int) -> None:
        reasons = []
        for group, place, reason, given in checked.rejected:
            where = "groups" if group < 0 else f"group {group}" + ("" if place is None else f", trajectory {place}")
            reasons.append(f"{where}: {reason}")
            line = {"split": split, "iteration": iteration, "group_idx": group, "traj_idx": place, "reason": reason}
            try:
                self._storage.append(REJECTED, json_line(line | {"given": given.decode()}))
            except Exception as error:
                self._warn_write(REJECTED, error)
        more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        told = f"iteration {iteration}, {split}: left out of the rollouts: {reasons[0]}{more}; kept in {REJECTED}"
        self._warn("rejected", f"{self._run.log_path}: {told}")
        if self._run.strict:
            raise ValueError(f"{told} (strict=True)")

    def _warn(self, what: str, text: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("%s", text)


class Evaluation:
    """One evaluation at one iteration, made by ``run.evaluation``. As a context manager it is a report that is open, into
    which :meth:`log_rollouts` writes too.

    Attributes:
        name: as it was given; metrics are ``<name>/...``.
        iteration: the training iteration.
        tree: its report while the ``with`` block runs; before and after, one that records nothing.
    """

    def __init__(self, run: Run, name: str, iteration: int, title: str | None = None) -> None:
        self.name = name
        self.iteration = iteration
        self.tree = Tree("", "")
        self._run = run
        self._title = title

    def log_rollouts(self, groups: Iterable[Any], num_groups_to_log: int | None = None) -> dict[str, float]:
        """As ``run.log_rollouts``, for this evaluation."""
        return self._run.log_rollouts(self.iteration, groups, f"eval/{self.name}", num_groups_to_log)

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Add ``<name>/<key>`` to the row of the iteration that is open; a row of its own when none is."""
        prefixed = {f"{self.name}/{text_of(key)}": value for key, value in metrics.items()}
        self._run.log_into(self.iteration, prefixed)

    def __enter__(self) -> Self:
        self.tree = self._run.report(self.iteration, f"eval/{self.name}", self._title)
        self.tree.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.tree.__exit__(kind, error, trace)


def _keys(found: Mapping[str, float], name: str | None) -> dict[str, float]:
    """Metrics with their place in the row: ``env/all/...``; the tokens of a turn of training have none."""
    if name is not None:
        return {f"{name}/env/all/{key}": value for key, value in found.items()}
    return {key if key == "ac_tokens_per_turn" else f"env/all/{key}": value for key, value in found.items()}


def raw_name(split: str) -> str | None:
    """The evaluation that a split means; None for training."""
    split = text_of(split)
    return None if split == "train" else split.removeprefix("eval/")


def read_labels(storage: Storage) -> dict[str, str]:
    """Cleaned name -> name of the evaluations in a log_path that were written by runmirror."""
    try:
        found = decode(storage.read(EVALUATIONS)) or {}
    except OSError:
        return {}
    return {label: name for label, name in found.items() if isinstance(name, str)}
