"""Does a tracker hold what the log holds? The tracker is read back and compared with the log, point by point.

Guarantees:

- Nothing is written, locked or sent: not in the log, not in the state, not in the tracker.
- Every point the tracker has to show by the log and the policy is counted once, as matching, missing, different or known
  (there is a reason, and nothing is wrong); every point it shows beside these is known or extra.
- The cursor is read before the tracker and the tracker before the log, so a run that is being written has missing points
  that are "not sent yet", and nothing worse.
- A run that can't be read is a line in the result, never the end. One run is in memory at a time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from runmirror import takeover
from runmirror.compare import KNOWN, Comparison, Due, Table, VerifiedRun
from runmirror.exceptions import OptionError
from runmirror.find import Found, ReadOptions, find_runs, open_run
from runmirror.importer import group_name
from runmirror.log.index import LineIndex
from runmirror.log.layout import OWN
from runmirror.log.rows import START
from runmirror.mirror import Policy
from runmirror.sinks.base import ReadsBack, Sink, SinkOptions
from runmirror.sinks.registry import check_options, load_sink
from runmirror.state import peek, state_path
from runmirror.storage.home import homes
from runmirror.targets import grouped

EXAMPLES = 5
log = logging.getLogger("runmirror")


@dataclass(slots=True)
class Verification:
    """The result of :func:`verify`: one entry per run."""

    sink: str
    destination: str
    runs: list[VerifiedRun] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every run is in the tracker as it is in the log."""
        return all(run.ok for run in self.runs)

    def totals(self) -> dict[str, Any]:
        """The counts of all runs together."""
        counts = ("points", "matching", "missing", "not_sent", "extra", "different")
        known = {reason: sum(run.known[reason] for run in self.runs) for reason in KNOWN}
        return {name: sum(getattr(run, name) for run in self.runs) for name in counts} | {"known": known}

    def as_dict(self) -> dict[str, Any]:
        """The result as plain data for ``--json``; NaN and infinities as text."""
        data = asdict(self) | {"totals": self.totals(), "ok": self.ok}
        for run in data["runs"]:
            for example in run["examples"]:
                for side in ("expected", "found"):
                    if example[side] is not None and not math.isfinite(example[side]):
                        example[side] = str(example[side])
        return data


def verify(
    paths: Iterable[str | os.PathLike[str]],
    to: str,
    options: Mapping[str, Any] | SinkOptions | None = None,
    *,
    rewinds: Policy | None = None,
    read: ReadOptions | None = None,
    examples: int = EXAMPLES,
) -> Verification:
    """Compare every run below ``paths`` with what the tracker called ``to`` shows of it.

    Args:
        paths: runs, folders of runs, globs (see :func:`runmirror.find.find_runs`).
        to: a sink's name.
        options: the sink's options, as they were given to the import or mirror.
        rewinds: the policy for superseded points; None: the one the run was last mirrored with.
        read: how the logs are read.
        examples: differences to tell of each run at most.

    Raises:
        NotALogError: a path holds no run.
        UnknownSinkError, MissingPackageError, OptionError: about ``to`` and ``options``, or ``to`` can't be read back.
    """
    kind = load_sink(to)
    options = options if isinstance(options, SinkOptions) else check_options(to, kind.Options, options or {})
    if not isinstance(kind(options), ReadsBack):
        raise OptionError(
            f"the sink {to!r} can't be read back, so there is nothing to compare with (it has no read_back)"
        )
    paths, read = list(paths), read or ReadOptions()
    runs = find_runs(paths, storage_options=read.storage_options)
    options = grouped(options, group_name(paths, runs))
    result = Verification(to, kind(options).destination())
    for found in runs:
        run = VerifiedRun(found.path, found.name)
        try:
            _verify_one(run, found, kind(options), options, rewinds, read, examples)
        except Exception as error:  # a log or a tracker nobody thought of: one line, and on to the next run
            log.debug("verify of %s", found.path, exc_info=True)
            run = VerifiedRun(found.path, found.name, "broken", error=f"{type(error).__name__}: {error}")
        if found.view is not None:
            found.view.forget()
        result.runs.append(run)
    return result


def _verify_one(
    run: VerifiedRun,
    found: Found,
    sink: Sink,
    options: SinkOptions,
    rewinds: Policy | None,
    read: ReadOptions,
    examples: int,
) -> None:
    with _no_trace(found):
        source, folder = open_run(found, read)
    place = folder, sink.name, source.identity.run_id, sink.destination()
    policies: list[Policy] = [rewinds] if rewinds else ["last", "all"]
    if sink.capabilities.rewinds == "native":
        policies = ["last"]
    states = [(policy, peek(*place, policy, source.state_in)) for policy in policies]
    policy, record = max(states, key=lambda state: state[1].updated if state[1] else -1.0)
    shown = None
    if isinstance(sink, ReadsBack):
        info = replace(source.info(), name=(record.name if record else None) or found.name, policy=policy)
        shown = sink.read_back(info, record.tracker_run_id if record else None)
    held: Table = {}
    for point in shown or ():
        held.setdefault(point.key, {}).setdefault(point.step, []).append((point.value, point.time, 0))
    sent = record.ordinal if record else 0 if shown is None else math.inf
    due = Due(sink, options, policy, sent, _rejected(state_path(*place, policy)))
    source.index = _Snapshot(source.index)
    if record is not None:
        takeover.adopt(source, record)
    due.taken_over = source.state_in is not None
    for row in source.rows(START):
        due.add(row)
    run.mirrored, run.url = record is not None, record.url if record else None
    Comparison(run, due, sink.capabilities, examples).compare(held)
    run.state = "absent" if shown is None else "equal" if run.ok else "different"


class _Snapshot(LineIndex):
    """A line index as it is on disk now; what is numbered beyond it stays in memory."""

    def __init__(self, index: LineIndex | None) -> None:
        super().__init__(index._folder if index is not None else None)
        self._folder = None


@contextlib.contextmanager
def _no_trace(found: Found) -> Iterator[None]:
    """Opening a run makes the folder for its state: take that away again where it was not there before."""
    home = Path(os.path.abspath(homes()[0]))
    mine = Path(found.path if os.path.isdir(found.path) else os.path.dirname(found.path), OWN, "mirror")
    fresh = [folder for folder in (mine, mine.parent, home, *home.parents) if not os.path.exists(folder)]
    try:
        yield
    finally:
        for folder in fresh:
            with contextlib.suppress(OSError):  # not made, or somebody uses it
                folder.rmdir()


def _rejected(state: Path) -> set[tuple[int, str | None]]:
    """(ordinal, key or None for the whole row) of everything the mirror has put aside."""
    found: set[tuple[int, str | None]] = set()
    try:
        lines = state.with_suffix(".rejected.jsonl").read_bytes().splitlines()
    except OSError:
        return found
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError):  # torn
            entry = json.loads(line)
            found.add((entry["ordinal"], entry["key"]))
    return found
