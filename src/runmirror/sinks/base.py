"""The contract between the mirror and a tracker.

A sink has few verbs and keeps no promises of its own: batching, retries, deadlines, cursors and state are the mirror's.

- The mirror calls ``open``, then any mix of ``put``, ``put_file`` and ``flush``, then ``close``, from one thread.
- Rows come in the order of their ordinals, without a gap. After a failure they may come again from the position that
  ``open`` (or, when that is None, the cursor) gave: a sink must recognise by its tracker's own means what it has.
- An SDK's return is no acknowledgement: only what ``flush`` and ``open`` answer counts as delivered.
- ``put`` raises only :class:`~runmirror.exceptions.Retry` (nothing is wrong with the rows) or
  :class:`~runmirror.exceptions.Refused` (a person has to act first); anything else counts as transient until it
  happened three times on one row alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, get_args, get_origin, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, model_validator

from runmirror.log.layout import Kind
from runmirror.log.rows import Row
from runmirror.log.sources import LogFile, RunInfo

__all__ = [
    "Capabilities",
    "Check",
    "Checks",
    "LogFile",
    "Opened",
    "Point",
    "ReadsBack",
    "RefusesKeys",
    "Rejected",
    "RunInfo",
    "Sink",
    "SinkOptions",
    "env_field",
]


@dataclass(frozen=True, slots=True)
class Opened:
    """What ``open`` found: the run's place for people (URL or folder), its id in the tracker, and the ordinal up to which
    the tracker itself holds rows, or None when it can't tell. ``note`` is a line for people about how the run is mirrored."""

    url: str
    tracker_run_id: str | None = None
    position: int | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A row (``key`` None) or one key of it that the tracker can never take."""

    ordinal: int
    key: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that ``runmirror doctor`` looked at: its name, whether it is as it should be, what was found, and, when
    it is not, the one thing to do about it."""

    name: str
    ok: bool
    found: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Point:
    """One number as a tracker shows it: ``key`` as the log spells it (a sink that renames keys gives the old name back),
    ``time`` in Unix seconds."""

    key: str
    step: int
    time: float
    value: float


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a tracker can do, as data.

    Attributes:
        max_rows: rows in one ``put`` at most.
        precision: of a value, "float32" or "float64".
        keys: the rule for metric keys, for people.
        nonfinite: what of NaN and infinities it keeps.
        rewinds: "native" when the sink itself takes superseded points back; "append" when points stay for ever, so that
            an import leaves superseded rows empty under the policy "last".
        records: kinds of files it can show.
        default_records: those it gets unless ``records`` says otherwise.
        derives: kinds that it makes numbers of (such as a histogram of rewards): it gets these files always, and keeps none.
        process_per_run: whether each open run takes a process of its own, so that only a few should be open at once.
        test_only: left out of ``report_to="all"``.
        time_precision: seconds by which a time it shows may differ from the one it was given.
        equal_points: whether it keeps two points of one key, step, time and value as two, or "once".
    """

    max_rows: int = 1000
    precision: Literal["float32", "float64"] = "float64"
    keys: str = "any text"
    nonfinite: Literal["all", "nan", "none"] = "all"
    rewinds: Literal["native", "append"] = "append"
    records: frozenset[Kind] = frozenset()
    default_records: frozenset[Kind] = frozenset()
    derives: frozenset[Kind] = frozenset()
    process_per_run: bool = False
    test_only: bool = False
    time_precision: float = 0.0
    equal_points: Literal["all", "once"] = "all"


class SinkOptions(BaseModel):
    """Options every sink has. A field made with :func:`env_field` takes its default from an environment variable."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    include: tuple[str, ...] = Field(default=(), description="only metric keys that match one of these globs")
    exclude: tuple[str, ...] = Field(default=(), description="no metric keys that match one of these globs")
    records: frozenset[Kind] | None = Field(
        default=None,
        description="kinds of files to send (config, code, checkpoints, reports, rollouts); default: what the sink says",
    )

    def to_deliver(self) -> dict[str, Any]:
        """What of the options a command has to name that delivers later what was left behind: field -> plain value."""
        return self.model_dump(mode="json", exclude_defaults=True)

    @model_validator(mode="before")
    @classmethod
    def _from_environment(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        filled = dict(given)
        for name, option in cls.model_fields.items():
            extra = option.json_schema_extra
            variable = extra.get("env") if isinstance(extra, dict) else None
            if name not in filled and isinstance(variable, str) and os.environ.get(variable):
                filled[name] = os.environ[variable]
            if isinstance(filled.get(name), str) and _is_collection(option.annotation):
                filled[name] = [part.strip() for part in filled[name].split(",") if part.strip()]
        records = filled.get("records")
        if (
            isinstance(records, list | tuple | set | frozenset) and "reports" in records
        ):  # a report is a page and its tree
            filled["records"] = {*records, "report", "logtree"} - {"reports"}
        return filled


def _is_collection(annotation: Any) -> bool:
    """Whether a field holds several values, so that text for it is a comma list."""
    origin = get_origin(annotation)
    return origin in (tuple, frozenset, list, set) or any(map(_is_collection, get_args(annotation) if origin else ()))


def env_field(default: Any, env: str, description: str) -> Any:
    """A field of :class:`SinkOptions` whose default is the environment variable ``env`` when that is set."""
    return Field(default, description=description, json_schema_extra={"env": env})


@runtime_checkable
class Sink(Protocol):
    """What a Mirror writes to: one run in one tracker."""

    name: ClassVar[str]
    Options: ClassVar[type[SinkOptions]]
    capabilities: ClassVar[Capabilities]

    def __init__(self, options: Any) -> None:
        """Check the options; touch neither network nor disk."""
        ...

    def destination(self) -> str:
        """Names the place (no credentials), such as a logdir or "https://host/project": state is kept per destination."""
        ...

    def open(self, run: RunInfo, tracker_run_id: str | None) -> Opened:
        """Create or resume the tracker's run. ``tracker_run_id`` is what an earlier ``open`` answered, if one did. Called
        again without a ``close`` when something failed right after it: what was open before is let go of then."""
        ...

    def put(self, rows: Sequence[Row]) -> list[Rejected]:
        """Hand over rows, in order. Returns what can never be accepted."""
        ...

    def put_file(self, file: LogFile) -> None:
        """Send a file, again when its version changed. Idempotent."""
        ...

    def flush(self, deadline: float) -> int:
        """The ordinal below which every row is safe in the tracker, perhaps less than was put. ``deadline`` is in seconds
        from now; 0 when more rows follow, and nothing has to be waited for."""
        ...

    def close(self, run: RunInfo | None, deadline: float) -> None:
        """Let go of the run. With ``run``, tell the tracker that it ended with ``run.status``; with None it goes on."""
        ...


@runtime_checkable
class Checks(Protocol):
    """A sink that ``runmirror doctor`` asks: are the credentials there, does the tracker answer, can the folder be written."""

    def check(self) -> list[Check]:
        """Look, write nothing, take a few seconds at most. What is wrong is a Check, not an error."""
        ...


@runtime_checkable
class ReadsBack(Protocol):
    """A sink whose tracker can be read, so that ``runmirror verify`` works."""

    def read_back(self, run: RunInfo, tracker_run_id: str | None) -> Iterator[Point] | None:
        """Every point the tracker shows of a run now, in any order; None when it has no such run. ``tracker_run_id`` is
        what ``open`` answered, None when that is not known. Called on a sink that is not open; changes nothing."""
        ...


@runtime_checkable
class RefusesKeys(Protocol):
    """A sink whose tracker can't take every metric key, and that can tell which without being asked to ``put``: when a process
    was killed before it listed them, and for ``verify``."""

    def refuses(self, key: str) -> str | None:
        """Why the tracker can never take a metric of this name; None when it can."""
        ...
