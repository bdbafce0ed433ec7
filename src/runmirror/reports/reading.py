"""Rollouts and conversations read back, of runmirror's reports and of tinker-cookbook's.

Guarantees: records come one after the other, whatever the size of the file; lines that are broken are left out; NaN and
infinities are what they were; nothing is written.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from html import unescape
from typing import TYPE_CHECKING, Any

from runmirror.exceptions import MissingPackageError
from runmirror.log.rows import decode
from runmirror.reports.rollouts import restore
from runmirror.storage import Storage

if TYPE_CHECKING:
    import pandas
    import polars

CHUNK = 1 << 20
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation of a report: the headings it stands below, outermost first, and its messages."""

    headings: tuple[str, ...]
    messages: list[Any]


class Rollouts:
    """Trajectories of a run: iterate over it for the records, one dict each, as they stand in the file."""

    def __init__(self, read: Callable[[], Iterator[dict[str, Any]]]) -> None:
        self._read = read

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._read()

    @property
    def records(self) -> list[dict[str, Any]]:
        """All of them."""
        return list(self)

    def table(self) -> dict[str, list[Any]]:
        """Columns of one length, a place per trajectory: ``split``, ``iteration``, ``group_idx``, ``traj_idx``, ``tags``
        (joined with commas), ``sampling_client_step``, ``total_reward``, ``final_reward``, ``turns``, ``ac_tokens``,
        ``final_ob_len``, and ``metrics/<name>``: a metric of the trajectory, or the mean over the turns that have it; None
        where there is none."""
        rows = [flat(record) for record in self]
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: [row.get(name) for row in rows] for name in names}

    def to_pandas(self) -> pandas.DataFrame:
        """:meth:`table` as a DataFrame. Raises MissingPackageError when pandas is not installed."""
        frame: pandas.DataFrame = _package("pandas").DataFrame(self.table())
        return frame

    def to_polars(self) -> polars.DataFrame:
        """:meth:`table` as a polars DataFrame. Raises MissingPackageError when polars is not installed."""
        frame: polars.DataFrame = _package("polars").DataFrame(self.table(), strict=False)
        return frame


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPackageError(f"rollouts.to_{name}() needs {name}: pip install {name}") from error


def flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record as one row of :meth:`Rollouts.table`."""
    steps = [step for step in record.get("steps") or () if isinstance(step, Mapping)]
    tags = record.get("tags")
    row = {key: record.get(key) for key in ("split", "iteration", "group_idx", "traj_idx")}
    row["tags"] = ",".join(map(str, tags)) if isinstance(tags, list) else ""
    row |= {key: record.get(key) for key in ("sampling_client_step", "total_reward", "final_reward")}
    row["turns"] = len(steps)
    row["ac_tokens"] = sum(step["ac_len"] for step in steps if type(step.get("ac_len")) is int)
    row["final_ob_len"] = record.get("final_ob_len")
    found: dict[str, list[float]] = {}
    for values in [*(step.get("metrics") for step in steps), record.get("trajectory_metrics")]:
        for name, value in values.items() if isinstance(values, Mapping) else ():
            if isinstance(value, int | float):
                found.setdefault(name, []).append(float(value))
    return row | {f"metrics/{name}": sum(values) / len(values) for name, values in found.items()}


def records(storage: Storage, path: str) -> Iterator[dict[str, Any]]:
    """The records of a ``*_rollout_summaries.jsonl``. Raises FileNotFoundError."""
    offset, pieces, more = 0, [b""], True
    while more:
        chunk = storage.read_range(path, offset, CHUNK)
        offset += len(chunk)
        more = bool(chunk)
        first, *lines = chunk.split(b"\n")
        pieces.append(first)
        if lines or not more:
            whole, pieces = b"".join(pieces), [lines.pop() if lines else b""]
            yield from (restore(record) for record in map(decode, [whole, *lines]) if record is not None)


def conversations(tree: Mapping[str, Any]) -> Iterator[Conversation]:
    """Every conversation of a logtree, in order."""
    yield from _conversations(tree.get("root"), ())


def find_nodes(node: Any, kind: str) -> Iterator[Mapping[str, Any]]:
    """The ``data`` of every node whose data has this type, in order."""
    stack = [node]
    while stack:
        one = stack.pop()
        if isinstance(one, Mapping):
            data = one.get("data")
            if isinstance(data, Mapping) and data.get("type") == kind:
                yield data
            children = one.get("children")
            stack += reversed(children) if isinstance(children, list) else []


def _conversations(root: Any, above: tuple[str, ...]) -> Iterator[Conversation]:
    stack: list[tuple[Any, tuple[str, ...]]] = [(root, above)]
    while stack:
        node, headings = stack.pop()
        if not isinstance(node, Mapping):
            continue
        data = node.get("data")
        if isinstance(data, Mapping) and data.get("type") == "conversation" and isinstance(data.get("messages"), list):
            yield Conversation(headings, data["messages"])
        children = node.get("children")
        children = children if isinstance(children, list) else []
        if node.get("tag") in ("section", "details") and children and isinstance(children[0], Mapping):
            headings = (*headings, _text(children[0]))
            children = children[1:]
        stack += [(child, headings) for child in reversed(children)]


def _text(node: Mapping[str, Any]) -> str:
    children = node.get("children")
    return unescape("".join(child for child in children or () if isinstance(child, str)))
