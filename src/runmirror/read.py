"""Reading a run back: :func:`read_run` gives a :class:`RunView`.

Guarantees:

- Nothing is read before it is asked for, and nothing is ever written.
- Every kind of log is read alike: runmirror's, tinker-cookbook's, and those in :mod:`runmirror.log.foreign`.
- :meth:`RunView.rows` holds a block of the log at a time; the tables hold the whole run.
- NaN and infinities are what they were; a value that a row doesn't have is None (a float column in pandas: NaN).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from runmirror.exceptions import MissingPackageError, NotALogError
from runmirror.find import Found, ReadOptions, find_runs, open_log
from runmirror.log import layout
from runmirror.log.layout import Kind
from runmirror.log.records import Checkpoint, Status
from runmirror.log.rows import START, Row, decode
from runmirror.log.runlog import RunLog
from runmirror.log.sources import RunInfo
from runmirror.log.status import read_checkpoints
from runmirror.reports.reading import Conversation, Rollouts, conversations, records
from runmirror.reports.writing import read_labels
from runmirror.storage import Storage, local_root

if TYPE_CHECKING:
    import pandas
    import polars

Value = float | bool | str | None
"""What a row holds under a key: a number (int or float), a bool, text, or None when it has none."""


def read_run(path: str | os.PathLike[str], *, read: ReadOptions | None = None) -> RunView:
    """The run at ``path``: a log_path, a metrics file, or a log of another framework (as ``runmirror import`` takes them).

    Args:
        path: its folder, file or URI (``gs://bucket/run``).
        read: how the log is read, such as ``ReadOptions(step_key="epoch")``.

    Raises:
        NotALogError: there is no run, or more than one.
    """
    read = read or ReadOptions()
    found = find_runs([path], storage_options=read.storage_options)
    if len(found) > 1:
        names = ", ".join(one.name for one in found[:5]) + (", ..." if len(found) > 5 else "")
        raise NotALogError(f"{os.fspath(path)} holds {len(found)} runs ({names}): name one of them")
    return RunView(found[0], read)


class RunView:
    """One run, read. Made by :func:`read_run`; every attribute is as of when it is asked for.

    Attributes:
        path: the run's folder or file.
        name: its name, as trackers call it.
    """

    def __init__(self, found: Found, read: ReadOptions) -> None:
        self.path = found.path
        self.name = found.name
        self._found = found
        self._read = read

    def __repr__(self) -> str:
        return f"<RunView {self.path!r}>"

    def _log(self) -> RunLog:
        """A reader of its own, so that iterators don't disturb each other."""
        if self._found.view is not None:
            self._found.view.refresh()
        return open_log(self._found, self._read)

    def _info(self) -> RunInfo:
        return self._log().info()

    @property
    def run_id(self) -> str:
        """The id under which mirrors know the run."""
        return self._log().identity.run_id

    @property
    def source(self) -> str:
        """The kind of log: "runmirror", "tinker-cookbook", "transformers", "verl", ..., "metrics" for any other."""
        return self._log().source

    @property
    def status(self) -> Status:
        """How the run is; "killed" also when it stopped writing without saying why."""
        return self._info().status

    @property
    def start(self) -> float | None:
        """Unix seconds of its first sign of life; None when there is none yet."""
        return self._info().start

    @property
    def end(self) -> float | None:
        """Unix seconds of its last sign of life; None while it runs. May read the whole log when rows carry no times."""
        log = self._log()
        info = log.info()
        if info.end is None and info.status != "running":
            for _ in log.rows(START):
                pass
            info = log.info()
        return info.end

    @property
    def config(self) -> dict[str, Any]:
        """The configuration; {} when the log has none."""
        return self._info().config or {}

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """The checkpoints, in the order they were saved."""
        log = self._log()
        return read_checkpoints(log.storage) if log.metrics == layout.METRICS else []

    @property
    def latest_checkpoint(self) -> Checkpoint | None:
        """The last checkpoint with a ``state_path``, the one to resume from; None when there is none."""
        return next((one for one in reversed(self.checkpoints) if one.state_path), None)

    # -- rows

    def rows(self) -> Iterator[Row]:
        """Every row that is there now, in file order: ``row.step``, ``row.time``, ``row.scalars()``, ``row.text()``, and
        ``row.data`` as it stands in the log. ``row.summary`` marks final numbers, ``row.rewind`` a resume from an older
        checkpoint: the step from which on all earlier rows are superseded. Broken lines are left out.
        """
        return (row for row in self._log().rows(START) if not row.fault and not row.data.get("_not_rank0"))

    @property
    def summary(self) -> dict[str, Value]:
        """The run's final numbers: those of the rows without a step."""
        return {key: value for row in self.rows() if row.summary for key, value in _values(row).items()}

    def metrics(self, keys: Iterable[str] | None = None, *, superseded: bool = False) -> dict[str, list[Value]]:
        """Columns of one length: ``step`` (a row's step), ``_timestamp`` (its time, Unix seconds), then the metrics.

        Args:
            keys: only these metrics, and only rows that have one of them; default all.
            superseded: also rows that a resume from an older checkpoint took back.

        Raises:
            KeyError: no row has one of ``keys``.
        """
        wanted = None if keys is None else list(dict.fromkeys([keys] if isinstance(keys, str) else keys))
        wanted = wanted and [key for key in wanted if key not in ("step", "_timestamp")]  # they are always there
        table: list[tuple[int, float, dict[str, Value]]] = []
        known: dict[str, None] = {}
        for row in self.rows():
            if row.rewind is not None and not superseded:
                table = [line for line in table if line[0] < row.rewind]
            values = _values(row)
            known.update(dict.fromkeys(values))
            if wanted is not None:
                values = {key: values[key] for key in wanted if key in values}
            if not row.summary and (values or wanted is None):
                table.append((row.step, row.time, values))
        for key in wanted or ():
            if key not in known:
                close = get_close_matches(key, known, n=3)
                raise KeyError(
                    f"{self.path}: no metric {key!r}" + (f"; did you mean {' or '.join(close)}?" if close else "")
                )
        if wanted is None:
            wanted = list(dict.fromkeys(key for _, _, values in table for key in values))
        columns: dict[str, list[Value]] = {
            "step": [step for step, _, _ in table],
            "_timestamp": [time for _, time, _ in table],
        }
        return columns | {key: [values.get(key) for _, _, values in table] for key in wanted}

    def to_pandas(self, keys: Iterable[str] | None = None, *, superseded: bool = False) -> pandas.DataFrame:
        """:meth:`metrics` as a DataFrame: ``step`` first, int64; floats float64; whole numbers and bools int64 and bool,
        nullable where a row has none; text as text.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        pd = _package("pandas")
        types = {
            float: ("float64", "float64"),
            int: ("int64", "Int64"),
            bool: ("bool", "boolean"),
            str: ("object", "object"),
        }
        columns = self.metrics(keys, superseded=superseded)
        frame: pandas.DataFrame = pd.DataFrame(
            {
                key: pd.Series(_plain(column, kind), dtype=types[kind][None in column])
                for key, column in columns.items()
                for kind in [_kind(column)]
            }
        )
        return frame

    def to_polars(self, keys: Iterable[str] | None = None, *, superseded: bool = False) -> polars.DataFrame:
        """:meth:`metrics` as a polars DataFrame: ``step`` first; Int64, Float64, Boolean and String, null where a row has
        no value.

        Raises:
            MissingPackageError: polars is not installed.
        """
        pl = _package("polars")
        types = {float: pl.Float64, int: pl.Int64, bool: pl.Boolean, str: pl.String}
        columns = self.metrics(keys, superseded=superseded)
        frame: polars.DataFrame = pl.DataFrame(
            [
                pl.Series(key, _plain(column, kind), dtype=types[kind])
                for key, column in columns.items()
                for kind in [_kind(column)]
            ]
        )
        return frame

    # -- rollouts

    @property
    def iterations(self) -> dict[int, IterationFiles]:
        """iteration -> its rollout files, of both layouts, by iteration."""
        log = self._log()
        found: dict[int, dict[str, dict[Kind, str]]] = {}
        for file in log.files(layout.ROLLOUT_KINDS):
            name = layout.parse(file.path)
            if name is not None and name.iteration is not None and name.split is not None:
                found.setdefault(name.iteration, {}).setdefault(name.split, {})[name.kind] = file.path
        return {number: IterationFiles(number, log.storage, found[number]) for number in sorted(found)}

    def rollouts(self, iteration: int | None = None, split: str = "train") -> Rollouts:
        """Trajectories: iterate for the records, or ``.records``, ``.to_pandas()``, ``.to_polars()``.

        Args:
            iteration: which; default all that have some.
            split: "train", or an evaluation's name.

        Raises:
            FileNotFoundError: there are none.
        """
        found = self.iterations
        if iteration is not None:
            found = {iteration: self._iteration(found, iteration)}
            found[iteration].path("rollouts", split)
        some = [one for one in found.values() if one.has("rollouts", split)]
        if not some:
            raise FileNotFoundError(f"{self.path}: no iteration has rollouts of {split!r}")
        return Rollouts(lambda: (record for one in some for record in one.rollouts(split)))

    def logtree(self, iteration: int, split: str = "train") -> dict[str, Any]:
        """The report of an iteration as a tree. Raises FileNotFoundError, or NotALogError when it is no JSON object."""
        return self._iteration(self.iterations, iteration).logtree(split)

    def conversations(self, iteration: int, split: str = "train") -> list[Conversation]:
        """What was said in an iteration, as its report has it. Raises as :meth:`logtree` does."""
        return list(conversations(self.logtree(iteration, split)))

    def _iteration(self, found: dict[int, IterationFiles], iteration: int) -> IterationFiles:
        if iteration not in found:
            raise FileNotFoundError(f"{self.path}: no rollout file of iteration {iteration}; {_there(list(found))}")
        return found[iteration]


@dataclass(frozen=True, slots=True)
class IterationFiles:
    """The rollout files of one iteration; a split is "train" or "eval/<name>".

    Attributes:
        iteration: its number.
        storage: the log_path.
        files: split -> kind ("report", "logtree", "rollouts") -> path below the log_path.
    """

    iteration: int
    storage: Storage
    files: dict[str, dict[Kind, str]]

    @property
    def splits(self) -> list[str]:
        """The splits that have a file, "train" first."""
        return sorted(self.files, key=lambda split: (split != "train", split))

    def path(self, kind: Kind, split: str = "train") -> str:
        """Where a file lies: its local path, or its URI. Raises FileNotFoundError when there is none."""
        uri = self.storage.url(self._find(kind, split))
        return local_root(uri) or uri

    def rollouts(self, split: str = "train") -> Iterator[dict[str, Any]]:
        """The trajectories, one after the other; lines that are broken are left out. Raises FileNotFoundError when there
        are none."""
        return records(self.storage, self._find("rollouts", split))

    def logtree(self, split: str = "train") -> dict[str, Any]:
        """The report as a tree: ``title``, ``started_at``, ``root``. Raises FileNotFoundError when there is none, and
        NotALogError when it is no JSON object."""
        path = self._find("logtree", split)
        tree = decode(self.storage.read(path))
        if tree is None:
            raise NotALogError(f"{self.storage.url(path)} is no JSON object: it is damaged, or still being written")
        return tree

    def has(self, kind: Kind, split: str) -> bool:
        """Whether there is such a file. A split may be named as the evaluation was, or as its files are."""
        return kind in self.files.get(self._clean(split), {})

    def _clean(self, split: str) -> str:
        if split == "train" or split in self.files:
            return split
        name = split.removeprefix("eval/")
        label = next((label for label, owner in read_labels(self.storage).items() if owner == name), None)
        return f"eval/{label or layout.clean_name(name)}"

    def _find(self, kind: Kind, split: str) -> str:
        try:
            return self.files[self._clean(split)][kind]
        except KeyError:
            there = ", ".join(f"{kind} of {split}" for split in self.splits for kind in sorted(self.files[split]))
            raise FileNotFoundError(f"iteration {self.iteration} has no {kind} of {split!r}; it has {there}") from None


def _there(numbers: list[int]) -> str:
    if len(numbers) > 8:
        return f"there are {len(numbers)}, from {numbers[0]} to {numbers[-1]}"
    return f"there are {', '.join(map(str, numbers))}" if numbers else "the run has none at all"


def _values(row: Row) -> dict[str, Value]:
    """key -> number, bool or text, in file order."""
    points: dict[str, Value] = {**row.scalars(), **row.text()}
    values: dict[str, Value] = {}
    for key, raw in row.data.items():
        if key in points and key != "step":
            values[key] = raw if type(raw) is bool else points[key]
    return values


def _kind(column: list[Value]) -> type[float] | type[int] | type[bool] | type[str]:
    """The narrowest type that holds every value of a column."""
    kinds = {type(value) for value in column if value is not None}
    if kinds == {bool}:
        return bool
    if str in kinds:
        return str
    return int if kinds and kinds <= {int, bool} else float


def _plain(column: list[Value], kind: type) -> list[Value]:
    return [None if value is None else kind(value) for value in column]


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPackageError(f"run.to_{name}() needs {name}: pip install {name}") from error
