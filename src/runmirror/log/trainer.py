"""The runs of transformers and TRL, presented as log_paths: ``trainer_state.json``.

Guarantees:

- Metric keys stay as they were logged; a history that grows keeps the lines it had, byte for byte.
- Finding runs reads names, and the first 64 KB of a file that is named itself.
- Nothing is ever written: the view refuses it. A file that can't be read, as while it is written, is passed over.

Source: transformers/trainer_callback.py (``TrainerState.save_to_json``): one JSON object whose ``log_history`` lists every
``log`` call, each with its ``step``. It lies in each ``checkpoint-N`` folder, and in the output_dir after
``trainer.save_state()``; all of these are one run. Up to three rows share a step: training, evaluation, and, once at the
end, the final numbers with ``train_runtime`` (transformers/trainer_utils.py, ``speed_metrics``).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from runmirror.log import layout
from runmirror.log.rows import decode, digest, json_line
from runmirror.log.sources import warn_outside
from runmirror.log.steps import step_value
from runmirror.storage import LocalStorage, Stat

STATE = "trainer_state.json"
HEAD = 1 << 16
"""Bytes at the start of a file that tell what it is."""

Data = dict[str, Any]
_CHECKPOINT = re.compile(r"checkpoint-(\d+)|last-checkpoint")
_SETTINGS = (
    "max_steps",
    "num_train_epochs",
    "train_batch_size",
    "logging_steps",
    "eval_steps",
    "save_steps",
    "trial_name",
    "trial_params",
)
"""What a trainer_state.json tells of how the run was set up."""


def run_path(path: str) -> str:
    """Where the run lies that ``path`` belongs to: the output_dir for one of its checkpoints or trainer_state.json."""
    if os.path.basename(path) == STATE and os.path.isfile(path):
        path = os.path.dirname(path)
    return os.path.dirname(path) if is_checkpoint(path) else path


def is_checkpoint(folder: str) -> bool:
    """Whether a folder is a checkpoint of transformers, and so a part of the run above it."""
    named = _CHECKPOINT.fullmatch(os.path.basename(folder)) is not None
    return named and os.path.isfile(os.path.join(folder, STATE)) and not is_log_path(folder)


def is_output_dir(folder: str) -> bool:
    """Whether a folder is the output_dir of a transformers run: a trainer_state.json in it, or in a checkpoint in it."""
    return bool(states(folder, first=True))


def is_trainer_state(path: str) -> bool:
    """Whether a JSON file, whatever its name, begins as a trainer_state.json does."""
    if not path.endswith(".json") or not os.path.isfile(path):
        return False
    head = read_head(path)
    return head.lstrip()[:1] == b"{" and b'"global_step"' in head and b'"log_history"' in head


def is_log_path(folder: str) -> bool:
    """Whether a folder has metrics of its own, which then count, or runmirror's mark."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in (layout.METRICS, layout.RUN))


def read_head(path: str) -> bytes:
    """The first HEAD bytes of a file; b"" when it can't be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(HEAD) or b""
    except OSError:
        return b""


def adapt_trainer(row: Data) -> Data:
    """A row of a log_history; the final numbers lose the step they share with the last row, and so are a summary."""
    return {key: value for key, value in row.items() if key != "step"} if is_final(row) else row


def is_final(row: Data) -> bool:
    """Whether a row holds the final numbers of a training."""
    return "train_runtime" in row and "loss" not in row


def ends_with_final(rows: Iterable[Data]) -> bool:
    """Whether no training came after the final numbers (an evaluation may)."""
    ended = False
    for row in rows:
        ended = is_final(row) or (ended and any(key.startswith(("eval_", "test_")) for key in row))
    return ended


@dataclass(frozen=True, slots=True)
class StateFile:
    """One trainer_state.json on disk; ``number`` is its checkpoint's, or -1."""

    path: str
    number: int
    mtime_ns: int
    size: int


def states(folder: str, first: bool = False) -> list[StateFile]:
    """Every trainer_state.json of an output_dir (with ``first`` at most one)."""
    found: list[StateFile] = []
    names: list[tuple[str, int]] = [(STATE, -1)]
    try:
        with os.scandir(folder) as listing:
            for entry in listing:
                named = _CHECKPOINT.fullmatch(entry.name)
                if named:
                    names.append((f"{entry.name}/{STATE}", int(named[1] or -1)))
    except OSError:
        return []
    for name, number in sorted(names):
        try:
            stat = os.stat(os.path.join(folder, name))
        except OSError:
            continue
        found.append(StateFile(name, number, stat.st_mtime_ns, stat.st_size))
        if first:
            break
    return found


@dataclass(frozen=True, slots=True)
class _State:
    """A trainer_state.json that was read: its object without the history, and the history as JSON lines."""

    file: StateFile
    data: Data
    rows: list[Data]
    lines: bytes = field(repr=False)

    @property
    def step(self) -> int:
        return step_value(self.data.get("global_step")) or 0


class TrainerOutput(LocalStorage):
    """An output_dir of transformers as a log_path: ``log_history`` is its metrics.jsonl, the checkpoint-N folders are its
    checkpoints.jsonl, and what the trainer says of its settings is its config.json, with the model's own under
    ``model_config`` (a config.json that is no model's is taken as the run's).

    Several checkpoints tell the same history to different ends. The furthest one counts, unless another that was written
    later tells another history: then the run went back to an earlier checkpoint, and the later one counts. Histories are
    small, and held in memory. A file that can't be read, as while it is written, is passed over.

    Args:
        root: the folder.
        file: read this trainer_state.json and no other; then there are neither checkpoints nor a config.
    """

    def __init__(self, root: str, file: str | None = None) -> None:
        super().__init__(root)
        self._file = file
        self._seen: list[StateFile] = []
        self._state: _State | None = None
        self._made: dict[str, tuple[bytes, Stat]] = {}

    def __getstate__(self) -> dict[str, str]:
        return super().__getstate__() | {"file": self._file or ""}

    def __setstate__(self, state: dict[str, str]) -> None:
        self.__init__(state["root"], state["file"] or None)  # type: ignore[misc]

    @property
    def metrics(self) -> str:
        """The name under which the history is found."""
        return self._file or layout.METRICS

    def finished(self) -> bool:
        """Whether training reached its last step, or its final numbers are there."""
        self._look()
        if self._state is None:
            return False
        last = step_value(self._state.data.get("max_steps")) or 0
        return 0 < last <= self._state.step or ends_with_final(self._state.rows)

    # what is made instead of read

    def _look(self) -> None:
        """Read what changed since the last look."""
        files = states(self._root) if self._file is None else self._one(self._file)
        if files == self._seen:
            return
        loaded = [self._load(file) for file in _candidates(files)]
        if None in loaded and self._state is not None:  # one is being written: what was read last still holds
            return
        state = _choose(loaded)
        if state is None:
            others = sorted(files, key=lambda file: file.number, reverse=True)
            state = next(filter(None, map(self._load, others)), None)
        self._seen, self._state, self._made = files, state, {}
        if state is not None:
            self._make(self.metrics, state, state.lines)
            if self._file is None:
                self._make(layout.CONFIG, state, json_line(self._config(state)))
                self._make(layout.CHECKPOINTS, state, b"".join(map(json_line, _checkpoints(files))))

    def _make(self, path: str, state: _State, data: bytes) -> None:
        self._made[path] = (data, Stat(len(data), state.file.mtime_ns / 1e9, digest(data)))

    def _one(self, name: str) -> list[StateFile]:
        try:
            stat = os.stat(self.path(name))
        except OSError:
            return []
        return [StateFile(name, -1, stat.st_mtime_ns, stat.st_size)]

    def _load(self, file: StateFile) -> _State | None:
        try:
            data = decode(super().read(file.path)) or {}
        except OSError:
            return None
        history = data.pop("log_history", None)
        if type(history) is not list:
            return None
        lines = b"".join(map(_line, history))
        return _State(file, data, [row for row in history if type(row) is dict], lines)

    def _config(self, state: _State) -> Data:
        config = {key: state.data[key] for key in _SETTINGS if state.data.get(key) is not None}
        beside = os.path.join(os.path.dirname(state.file.path), layout.CONFIG)
        for path in dict.fromkeys((beside, layout.CONFIG)):
            try:
                if super().leads_out(Path(path).as_posix()):
                    warn_outside(self.url(Path(path).as_posix()))
                    continue
                found = decode(super().read(Path(path).as_posix()))
            except OSError:
                continue
            if found is not None:
                is_model = "model_type" in found or "architectures" in found
                return config | ({"model_config": found} if is_model else found)
        return config

    # the Storage

    def _is_made(self, path: str) -> bool:
        if path != self.metrics and (self._file is not None or path not in (layout.CONFIG, layout.CHECKPOINTS)):
            return False
        self._look()
        return True

    def _data(self, path: str) -> bytes:
        if path not in self._made:
            raise FileNotFoundError(f"{self.url()}: no {STATE} that can be read")
        return self._made[path][0]

    def read(self, path: str) -> bytes:
        return self._data(path) if self._is_made(path) else super().read(path)

    def read_range(self, path: str, offset: int, length: int | None = None) -> bytes:
        if not self._is_made(path):
            return super().read_range(path, offset, length)
        return self._data(path)[offset : None if length is None else offset + length]

    def exists(self, path: str) -> bool:
        return path in self._made if self._is_made(path) else super().exists(path)

    def leads_out(self, path: str) -> bool:
        return not self._is_made(path) and super().leads_out(path)

    def stat(self, path: str) -> Stat | None:
        if not self._is_made(path):
            return super().stat(path)
        return self._made[path][1] if path in self._made else None

    def write(self, path: str, data: bytes, *, content_type: str | None = None) -> None:
        raise PermissionError(f"{self.url(path)}: logs of transformers are read only; write to a log_path of your own")

    def append(self, path: str, data: bytes) -> None:
        self.write(path, data)

    def remove(self, path: str) -> None:
        self.write(path, b"")


def _line(row: Any) -> bytes:
    """A row as a line that depends on the row alone; NaN and infinities stay tokens."""
    try:
        line = orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # an integer beyond 64 bits, a lone surrogate
        line = b"null"
    return line if b"null" not in line else json.dumps(row, separators=(",", ":")).encode() + b"\n"


def _candidates(files: list[StateFile]) -> list[StateFile]:
    """The files that can count: the output_dir's own, the highest checkpoint, the one written last."""
    top = [file for file in files if file.path == STATE]
    highest = sorted(files, key=lambda file: file.number)[-1:]
    latest = sorted(files, key=lambda file: (file.mtime_ns, file.number))[-1:]
    return list(dict.fromkeys(top + highest + latest))


def _choose(states: list[_State | None]) -> _State | None:
    """The state that counts (see :class:`TrainerOutput`)."""
    readable = [state for state in states if state is not None]
    if not readable:
        return None
    furthest = max(readable, key=lambda state: (state.step, len(state.lines)))
    latest = max(readable, key=lambda state: (state.file.mtime_ns, state.step))
    return furthest if furthest.lines.startswith(latest.lines) else latest


def _checkpoints(files: list[StateFile]) -> list[Data]:
    """A line of checkpoints.jsonl per checkpoint-N folder, in order."""
    folders = sorted((file.number, os.path.dirname(file.path)) for file in files if file.path != STATE)
    return [{"name": name, "state_path": name} | ({"batch": n} if n >= 0 else {}) for n, name in folders]
