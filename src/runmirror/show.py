"""What runs hold and how far their mirrors got, told from the logs and the state files alone.

Guarantees:

- Nothing is written, nothing is locked and no tracker is asked: no state folder is made, not even in RUNMIRROR_HOME.
- A log is read once; a :class:`Watch` reads on where it stopped, and from the start when the log was cut or replaced.
- A run that can't be read is a :class:`ShownRun` with the reason in ``error``, never an exception.
- Secrets in configurations and credentials in URLs are ``***``.
"""

from __future__ import annotations

import json
import logging
import math
import os
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

from runmirror.catalogue.entries import Catalogue
from runmirror.catalogue.live import usable
from runmirror.cursors import SinkState, sink_states, unchanged
from runmirror.find import Finder, Found, open_log
from runmirror.log import layout
from runmirror.log.masking import mask_text
from runmirror.log.records import Status
from runmirror.log.rows import START, Row
from runmirror.log.runlog import RunLog
from runmirror.log.snapshot import dump_config
from runmirror.log.status import read_checkpoints, read_journal
from runmirror.storage import spools

CURVE = 120
"""Points of a reward's curve at most; more rows are averaged."""
LATEST = 8
"""Metrics whose last value is shown."""
log = logging.getLogger("runmirror")


@dataclass(frozen=True, slots=True)
class Uploads:
    """What of a run in a cloud is on this machine only: ``unsynced`` bytes, whether its writer still runs (``alive``), when the
    ``last_upload`` was (Unix seconds, None: never), and the last ``error``, "" when all is well."""

    unsynced: int
    alive: bool
    last_upload: float | None
    error: str


@dataclass(frozen=True, slots=True)
class ShownRun:
    """One run. Times are Unix seconds, None when the log tells none.

    Attributes:
        path, name: the log_path or metrics file, and what the run is called.
        error: why it can't be read; then nothing below is set.
        run_id, source, status, status_known: as :class:`~runmirror.log.sources.RunInfo` has them.
        rows, broken_lines: lines with and without a row.
        lost: rows that a full disk cost, as the journal tells.
        last_step: the highest step since the last rewind.
        start, end, last_row: of the run, and of its last row.
        reward_key, reward, curve: the main reward's key, last value and course (at most CURVE points).
        reward_unit: its unit, "" when that is not known.
        latest: metric -> last value of some that tell how training goes, with its unit in ``units`` where it has one.
        keys, groups: metric keys, and how many of them begin with each first part (``env``, ``time``).
        config: config.json without secrets.
        checkpoints, latest_checkpoint: how many, and the name of the last.
        rollout_files: files by kind, only counted with ``details``.
        sinks: every destination that a mirror on this machine knows, of runs in a cloud also those of others.
        uploads: of a run in a cloud that is written on this machine, or of which something waits here; else None.
    """

    path: str
    name: str
    error: str | None = None
    run_id: str = ""
    source: str = ""
    status: Status | None = None
    status_known: bool = True
    rows: int = 0
    broken_lines: int = 0
    lost: int = 0
    last_step: int | None = None
    start: float | None = None
    end: float | None = None
    last_row: float | None = None
    reward_key: str | None = None
    reward: float | None = None
    curve: list[float] = field(default_factory=list)
    reward_unit: str = ""
    latest: dict[str, float] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)
    keys: int = 0
    groups: dict[str, int] = field(default_factory=dict)
    config: dict[str, Any] | None = None
    checkpoints: int = 0
    latest_checkpoint: str | None = None
    rollout_files: dict[str, int] = field(default_factory=dict)
    sinks: list[SinkState] = field(default_factory=list)
    uploads: Uploads | None = None

    @property
    def duration(self) -> float | None:
        """Seconds from the start to the last sign of life, None without one."""
        last = self.end if self.end is not None else self.last_row
        return None if self.start is None or last is None else max(0.0, last - self.start)

    def as_dict(self) -> dict[str, Any]:
        """The run as data that is strict JSON: NaN and infinities are text."""
        shown: dict[str, Any] = _finite(asdict(self) | {"duration": self.duration})
        return shown


def show_runs(
    paths: Iterable[str | os.PathLike[str]],
    *,
    key: str | None = None,
    details: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> list[ShownRun]:
    """Every run below ``paths`` (see :func:`runmirror.find.find_runs`), as it is now.

    Args:
        paths: runs, folders of runs, metrics files, globs.
        key: the main reward, instead of the first of the usual keys that is there.
        details: count rollout files too, which lists every folder; None: when there is one run only.
        storage_options: for the fsspec file system of runs in a cloud.

    Raises:
        NotALogError: a path holds no run.
    """
    return Watch(paths, key=key, details=details, storage_options=storage_options).read()


class Watch:
    """Runs read again and again, at the cost of what is new. Arguments as :func:`show_runs` has them."""

    def __init__(
        self,
        paths: Iterable[str | os.PathLike[str]],
        *,
        key: str | None = None,
        details: bool | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._finder = Finder(paths, storage_options=storage_options)
        self._key = key
        self._details = details
        self._catalogue = usable()
        self._readers: dict[str, _Reader] = {}

    def read(self) -> list[ShownRun]:
        """The runs that are there now. Raises NotALogError when a path holds none any more."""
        found = self._finder.find()
        details = len(found) == 1 if self._details is None else self._details
        return [self._read(one, details) for one in found]

    def _read(self, found: Found, details: bool) -> ShownRun:
        try:
            if found.path not in self._readers:
                self._readers[found.path] = _Reader(found, self._key, self._catalogue)
            return self._readers[found.path].read(found.name, details)
        except Exception as error:  # whatever one log has in it, the others are shown
            log.debug("reading %s", found.path, exc_info=True)
            self._readers.pop(found.path, None)
            return ShownRun(found.path, found.name, error=f"{type(error).__name__}: {error}")


class _Reader:
    """One log: what its rows added up to, and how far they were read."""

    def __init__(self, found: Found, key: str | None, catalogue: Catalogue) -> None:
        self.found = found
        self.path = found.path
        self._wanted = key
        self._catalogue = catalogue
        self._start()

    def _start(self) -> None:
        self.source = open_log(replace(self.found, name=""))
        self.position = START
        self.rows = 0
        self.last_step: int | None = None
        self.last_row: float | None = None
        self.ends = array("q")  # where each line ends
        self.keys: set[str] = set()
        self.reward_key, self.rank = self._wanted, 0 if self._wanted else self._rank("")
        self.last: Row | None = None  # with a reward
        self.rewards: list[tuple[int, float]] = []

    def read(self, name: str, details: bool) -> ShownRun:
        if self.position == START or not unchanged(self.source, self.position):
            self._start()
        row = None
        for row in self.source.rows(self.position):
            self._add(row)
        if row is not None:
            self.position = row.position
        return self._shown(name, details)

    def _add(self, row: Row) -> None:
        self.ends.append(row.end)
        if row.fault:
            return
        self.rows += 1
        self.last_row = row.time
        data = row.data
        if not data.keys() <= self.keys:
            self._add_keys([key for key in data if key not in self.keys])
        if row.rewind is not None:
            self.rewards = [point for point in self.rewards if point[0] < row.rewind]
            self.last_step = row.step
        elif not row.summary:
            self.last_step = row.step if self.last_step is None else max(self.last_step, row.step)
        if self.reward_key in data:
            value = data[self.reward_key]
            value = value if type(value) is float else row.scalars().get(self.reward_key)
            if value is not None:
                self.rewards.append((row.step, float(value)))
                self.last = row

    def _add_keys(self, new: Sequence[str]) -> None:
        self.keys.update(new)
        best = min(new, key=self._rank)
        if self._rank(best) < self.rank:  # a key seen for the first time has no earlier points to miss
            self.reward_key, self.rank, self.rewards = best, self._rank(best), []

    def _rank(self, key: str) -> int:
        """How much a key looks like the main reward, lowest best: those of the catalogue, then any that ends with
        ``reward/total``, then any with ``reward`` in it."""
        known = self._catalogue.main_rewards
        if key in known:
            return known.index(key)
        name = key.lower()
        likely = (name.endswith("reward/total"), "reward" in name and "std" not in name, "reward" in name)
        return next((len(known) + n for n, true in enumerate(likely) if true and key[:1] != "_"), len(known) + 3)

    def _latest(self) -> tuple[dict[str, float], dict[str, str]]:
        """Last values of metrics that health watches, and their units."""
        points = {} if self.last is None else self.last.scalars()
        known = {key: self._catalogue.describe(key) for key in points if key != self.reward_key}
        watched = {key: one for key, one in known.items() if one and one.better and one.metric.checks}
        shown = dict(list(watched.items())[:LATEST])
        return {key: float(points[key]) for key in shown}, {key: one.unit for key, one in shown.items() if one.unit}

    def _shown(self, name: str, details: bool) -> ShownRun:
        source, info = self.source, self.source.info()
        foreign = source.metrics != layout.METRICS
        checkpoints = [] if foreign else read_checkpoints(source.storage)
        keys = sorted(key for key in self.keys if key[:1] != "_" and key != "step")
        groups = Counter(key.partition("/")[0] for key in keys if "/" in key)
        rewards = [value for _, value in self.rewards]
        reward = self._catalogue.describe(self.reward_key) if self.reward_key else None
        latest, units = self._latest()
        return ShownRun(
            path=self.path,
            name=name,
            run_id=info.run_id,
            source=info.source,
            status=info.status,
            status_known=info.status_known,
            rows=self.rows,
            broken_lines=source.broken_count,
            lost=sum(entry.lost or 0 for entry in read_journal(source.storage)) if source.identity.own else 0,
            last_step=self.last_step,
            start=info.start,
            end=info.end,
            last_row=self.last_row,
            reward_key=self.reward_key,
            reward=rewards[-1] if rewards else None,
            curve=shorten(rewards, CURVE),
            reward_unit=reward.unit if reward else "",
            latest=latest,
            units=units,
            keys=len(keys),
            groups=dict(groups.most_common()),
            config=None if info.config is None else dump_config(info.config),
            checkpoints=len(checkpoints),
            latest_checkpoint=checkpoints[-1].name if checkpoints else None,
            rollout_files=_count_files(source) if details and not foreign else {},
            sinks=sink_states(source, self.ends),
            uploads=_uploads(source) if self.found.view is not None else None,
        )


def _uploads(source: RunLog) -> Uploads | None:
    url = source.storage.url()
    for info in spools():
        if info.url == url and not info.taken_by:
            return Uploads(info.unsynced, info.alive, info.last_upload, mask_text(info.error))
    return None


def _count_files(source: RunLog) -> dict[str, int]:
    paths = source.storage.list_dir("")
    for folder in filter(layout.is_iteration, list(paths)):
        paths += [f"{folder}/{name}" for name in source.storage.list_dir(folder)]
    kinds = [found.kind for found in map(layout.parse, paths) if found is not None]
    return dict(Counter(kind for kind in kinds if kind in layout.ROLLOUT_KINDS))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def flatten(config: dict[str, Any], above: str = "") -> dict[str, Any]:
    """A configuration as ``a.b.c`` -> value; lists and empty objects are values."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= flatten(value, f"{above}{key}.") if isinstance(value, dict) and value else {f"{above}{key}": value}
    return flat


def differences(runs: Iterable[ShownRun]) -> dict[str, dict[str, Any]]:
    """``a.b.c`` -> run's name -> value, of the config keys that not all runs agree on; a run without a key isn't in its
    mapping. Runs that can't be read are left out; one without a config has no key."""
    configs = {run.name: flatten(run.config or {}) for run in runs if run.error is None}
    keys = dict.fromkeys(key for config in configs.values() for key in config)
    found = {key: {name: config[key] for name, config in configs.items() if key in config} for key in keys}
    return {
        key: values
        for key, values in found.items()
        if len(values) < len(configs) or len({json.dumps(value, sort_keys=True) for value in values.values()}) > 1
    }


def shorten(values: Sequence[float], length: int) -> list[float]:
    """At most ``length`` values: means over equal stretches, of the finite ones where there are any."""
    if len(values) <= length:
        return list(values)
    bounds = [n * len(values) // length for n in range(length + 1)]
    parts = [values[start:end] for start, end in pairwise(bounds)]
    finite = [[value for value in part if math.isfinite(value)] for part in parts]
    return [math.fsum(good) / len(good) if good else part[-1] for good, part in zip(finite, parts, strict=True)]
