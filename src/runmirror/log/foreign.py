"""Logs of other frameworks, read as log_paths: told apart by :func:`detect`.

Guarantees:

- Metric keys stay as the framework wrote them. Only what a row says about itself is translated: its step, its time, and
  whether it holds the run's final numbers.
- Telling logs apart reads names and the first 64 KB, and never raises for bad content. A log that could be more than one
  thing is read as plain metrics.
- Nothing is ever written.

What is known, and from where:

- transformers and TRL, ``trainer_state.json``: :mod:`runmirror.log.trainer`.
- A dump of a transformers callback's ``on_log``: JSON lines of the dict with ``_global_step``; ``_not_rank0`` marks what
  another rank logged too, ``_types`` names values that JSON can't hold.
- prime-rl's ``FileMonitor`` (src/prime_rl/utils/monitor/file.py): JSON lines that begin with ``step`` and ``time``, the
  latter in Unix seconds.
- Ray's ``result.json`` and Stable-Baselines3's ``progress.json``: :mod:`runmirror.log.rl`.
- verl's ``file`` logger (verl/utils/tracking.py, ``FileLogger``): JSON lines of ``step`` and ``data``, an object.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from runmirror.log import layout, rl
from runmirror.log.index import LineIndex
from runmirror.log.rows import decode
from runmirror.log.runlog import RunLog
from runmirror.log.sources import RunInfo
from runmirror.log.status import TAIL, latest_values
from runmirror.log.steps import step_value
from runmirror.log.times import LATEST, row_time
from runmirror.log.trainer import (
    HEAD,
    Data,
    TrainerOutput,
    adapt_trainer,
    ends_with_final,
    is_log_path,
    is_output_dir,
    is_trainer_state,
    run_path,
)
from runmirror.storage import LocalStorage, Storage

TRANSFORMERS, ON_LOG, PRIME_RL, VERL = "transformers", "transformers on_log", "prime-rl", "verl"
MAX_HEAD_ROWS = 64
_EARLIEST = 1e9
"""Unix seconds (2001) below which a number called "time" is a duration."""

Adapt = Callable[[Data], Data]


@dataclass(frozen=True, slots=True)
class Form:
    """How a log is read: what of a :class:`runmirror.log.runlog.RunLog` depends on its kind. ``finished`` tells whether
    the log itself says that the run has ended."""

    storage: Storage
    metrics: str = layout.METRICS
    source: str | None = None
    adapt: Adapt | None = None
    finished: Callable[[], bool] | None = None

    def open(self, name: str, index: LineIndex | None = None, **options: Any) -> RunLog:
        """The log as a Source; ``options`` are RunLog's."""
        options |= {"metrics": self.metrics, "source": self.source}
        if self.adapt is None:
            return RunLog(self.storage, name, index, **options)
        return ForeignLog(self.storage, name, index, adapt=self.adapt, finished=self.finished, **options)


class ForeignLog(RunLog):
    """A RunLog whose rows are translated before anything is told from them."""

    def __init__(
        self,
        storage: Storage,
        name: str,
        index: LineIndex | None,
        *,
        adapt: Adapt,
        finished: Callable[[], bool] | None,
        **options: Any,
    ) -> None:
        super().__init__(storage, name, index, adapt=adapt, **options)
        self._translate = adapt
        self._finished = finished

    def info(self) -> RunInfo:
        """What is known of the run now."""
        info = super().info()
        if self._finished is not None and self._finished():
            info = replace(info, status="finished", status_known=True)
        if info.status == "running" or info.end is not None:
            return info
        if self._row.ordinal >= 0:
            return replace(info, end=self._row.time)
        return replace(info, end=row_time(self._translate(latest_values(self.storage, self.metrics))))

    def _first_time(self) -> float | None:
        for block in self._blocks(0):
            first = row_time(self._translate(decode(block.lines[0]) or {}))
            return super()._first_time() if first is None else first
        return None


def detect(path: str) -> Form:
    """How to read the run at ``path``: a run's folder, a metrics file, or a trainer_state.json of any name."""
    path = run_path(path)
    if os.path.isdir(path):
        if not is_log_path(path) and is_output_dir(path):
            return _trainer(TrainerOutput(path))
        name = None if is_log_path(path) else rl.log_in(path)
        return _by_name(path, name) if name else detect_in(LocalStorage(path))
    folder, name = os.path.split(path)
    if rl.kind_of(path):
        return _by_name(folder, name)
    return _trainer(TrainerOutput(folder, name)) if is_trainer_state(path) else detect_in(LocalStorage(folder), name)


def detect_in(storage: Storage, metrics: str = layout.METRICS) -> Form:
    """How to read the JSON lines of a metrics file in any storage. Raises OSError for one that is out of reach."""
    if metrics == layout.METRICS and storage.stat(layout.RUN) is not None:
        return Form(storage)
    return _by_head(storage, metrics)


def _trainer(view: TrainerOutput) -> Form:
    return Form(view, view.metrics, TRANSFORMERS, adapt_trainer, view.finished)


def _by_name(folder: str, name: str) -> Form:
    """A log of Ray or Stable-Baselines3."""
    storage = rl.Renamed(folder, {layout.METRICS: name, layout.CONFIG: rl.PARAMS})
    if rl.NAMES[name] == rl.SB3:
        return Form(storage, source=rl.SB3, adapt=rl.adapt_sb3)
    return Form(storage, source=rl.RAY, adapt=rl.adapt_ray, finished=partial(_is_done, storage))


def _is_done(storage: LocalStorage) -> bool:
    return rl.is_done(latest_values(storage, layout.METRICS))


def _by_head(storage: Storage, name: str) -> Form:
    """A log of JSON lines, by the rows at its start."""
    try:
        head = storage.read_range(name, 0, HEAD)
    except (ConnectionError, TimeoutError):
        raise
    except OSError:
        head = b""
    lines = head.split(b"\n")
    if len(head) == HEAD:
        lines.pop()  # cut
    rows = [row for row in map(decode, lines[:MAX_HEAD_ROWS]) if row is not None]
    if not rows:
        return Form(storage, name, adapt=None if head.strip() else _Later())
    source, adapt = _kind(rows)
    finished = partial(_has_ended, storage, name) if source == ON_LOG else None
    return Form(storage, name, source, adapt, finished)


def _kind(rows: list[Data]) -> tuple[str | None, Adapt | None]:
    """(what wrote these rows, how to translate them), or two Nones for plain metrics."""
    for source, fits, adapt in (
        (ON_LOG, _is_on_log, adapt_on_log),
        (VERL, _is_verl, adapt_verl),
        (PRIME_RL, _is_prime_rl, adapt_prime_rl),
    ):
        if all(map(fits, rows)):
            return source, adapt
    return None, None


class _Later:
    """For a log that has no row yet: its first one decides."""

    def __init__(self) -> None:
        self._adapt: Adapt | None = None

    def __call__(self, row: Data) -> Data:
        if self._adapt is None and row:
            self._adapt = _kind([row])[1] or dict
        return self._adapt(row) if self._adapt is not None else row


def _is_on_log(row: Data) -> bool:
    return step_value(row.get("_global_step")) is not None


def _is_verl(row: Data) -> bool:
    return step_value(row.get("step")) is not None and type(row.get("data")) is dict


def _is_prime_rl(row: Data) -> bool:
    when = row.get("time")
    in_order = list(row)[:2] == ["step", "time"] and "_timestamp" not in row
    return in_order and isinstance(when, (float, int)) and _EARLIEST <= when < LATEST


def adapt_on_log(row: Data) -> Data:
    """A row of an on_log dump; what another rank logged too keeps its step and loses its values."""
    if not _is_on_log(row):
        return row
    step = {"step": row["_global_step"]}
    if row.get("_not_rank0"):
        return step | {"_not_rank0": True}
    return adapt_trainer(step | {key: value for key, value in row.items() if key not in ("step", "_global_step")})


def adapt_verl(row: Data) -> Data:
    """A row of verl's file logger with its values at the top; what stands beside ``data`` stays."""
    if not _is_verl(row):
        return row
    beside = {key: value for key, value in row.items() if key != "data"}
    return beside | {key: value for key, value in row["data"].items() if key != "step"}


def adapt_prime_rl(row: Data) -> Data:
    """A row of prime-rl with its ``time`` as the row's time."""
    if not _is_prime_rl(row):
        return row
    return {"step": row["step"], "_timestamp": row["time"]} | {
        key: value for key, value in row.items() if key not in ("step", "time")
    }


def _has_ended(storage: Storage, name: str) -> bool:
    """Whether the last rows of an on_log dump are the final numbers."""
    stat = storage.stat(name)
    start = max(0, stat.size - TAIL) if stat else 0
    tail = storage.read_range(name, start).split(b"\n")[1 if start else 0 :] if stat else []
    return ends_with_final(row for row in map(decode, tail) if row and not row.get("_not_rank0"))
