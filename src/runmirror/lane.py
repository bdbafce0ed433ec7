"""One run on its way to one sink, as :mod:`runmirror.follow` keeps it, and what can be seen of a run from outside."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from runmirror.catalogue.live import usable
from runmirror.catalogue.runs import RunWatch
from runmirror.find import Found, ReadOptions, is_run, open_log
from runmirror.log import layout, rl, trainer
from runmirror.log.runlog import RunLog
from runmirror.mirror import Mirror
from runmirror.targets import Target

WATCHED = (layout.METRICS, layout.JOURNAL, layout.CONFIG, layout.CHECKPOINTS, layout.CODE)
"""Files whose change makes a run worth a look."""
MISSING: tuple[int, int | str] = (-1, 0)

Signature = tuple[tuple[int, int | str], ...]


@dataclass(slots=True)
class Lane:
    """One run on its way to one sink.

    Attributes:
        state: "new", "current", "behind" (the tracker fails), "ended".
        rows: rows sent since the follower started.
        error: the last one, None when all is well.
    """

    found: Found
    target: Target
    state: str = "new"
    rows: int = 0
    url: str | None = None
    error: str | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)  # whoever has it may use the mirror
    _mirror: Mirror | None = None
    _read: tuple[RunLog, Path] | None = None  # the run as far as it was read, and where its state is
    _seen: Signature = ()
    _busy: bool = False  # work is waiting for a thread, or done
    _tries: int = 0
    _next: float = 0.0
    _checked: float = 0.0


class Check:
    """The health of one run, for all of its lanes: tells each finding once."""

    def __init__(self, found: Found, read: ReadOptions) -> None:
        self._name = found.name
        self._open: Callable[[], RunWatch] = lambda: RunWatch(lambda: open_log(found, read), usable())
        self._watch: RunWatch | None = None
        self._lock = threading.Lock()
        self._told: set[tuple[str, str, str | None]] = set()

    def tell(self, tell: Callable[[str], None]) -> None:
        """Tell what is new."""
        with self._lock:
            self._watch = self._watch or self._open()
            for finding in self._watch.read():
                mark = (finding.level, finding.rule, finding.key)  # what got worse is told again
                if mark not in self._told:
                    self._told.add(mark)
                    tell(f"{self._name}: {finding.level} {finding.rule}: {finding}. Often: {finding.means}")

    def rest(self) -> None:
        """The run has ended: give back the memory of its rows."""
        with self._lock:
            self._watch = None


def signature(run: Found) -> Signature:
    """Size and time of the files of a run that matter, its log first; of those that are missing, :data:`MISSING`."""
    if run.view is not None:
        stats = map(run.view.stat, WATCHED if run.metrics == layout.METRICS else (run.metrics,))
        return tuple(MISSING if stat is None else (stat.size, stat.version) for stat in stats)
    path = run.path
    names: Iterable[str] = [os.path.join(path, name) for name in WATCHED] if os.path.isdir(path) else [path]
    found = list(map(_stamp, names))
    if found[0] == MISSING:  # perhaps the log of Ray or Stable-Baselines3, or a trainer's output_dir
        others = [stamp for name in rl.NAMES if (stamp := _stamp(os.path.join(path, name))) != MISSING]
        others += [(state.size, state.mtime_ns) for state in trainer.states(path)]
        found[:1] = others or [MISSING]
    return tuple(found)


def _stamp(path: str) -> tuple[int, int | str]:
    try:
        stat = os.stat(path)
    except OSError:
        return MISSING
    return stat.st_size, stat.st_mtime_ns


def is_there(run: Found) -> bool:
    """Whether a run still is where it was found. One that can't be looked at counts as there."""
    if run.view is not None:
        return run.view.exists(run.metrics) or run.view.exists(layout.RUN)
    try:
        os.stat(run.path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return not (os.path.isdir(run.path) and os.access(run.path, os.X_OK)) or is_run(run.path)
