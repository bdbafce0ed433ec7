"""The logs of Ray and Stable-Baselines3, presented as log_paths: JSON lines under names of their own.

Guarantees: metric keys stay as they were logged, nested ones joined by ``/``; nothing is ever written. A file of one of
these names counts only when its first rows are of its kind.

- Ray Tune and RLlib, ``result.json`` in a trial's folder (ray/tune/logger/json.py, ``JsonLoggerCallback``): nested results;
  ``training_iteration`` is the step, ``timestamp`` the time in Unix seconds, ``done`` says that the trial ended. The
  configuration, which is in every result too, is read from ``params.json``. What names machines and processes is left out.
- Stable-Baselines3, ``progress.json`` (stable_baselines3/common/logger.py, ``JSONOutputFormat``): flat rows;
  ``time/total_timesteps`` is the step.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from runmirror.log.rows import decode
from runmirror.log.steps import step_value
from runmirror.log.trainer import HEAD, Data, read_head
from runmirror.storage import LocalStorage, Stat

RAY, SB3 = "ray", "stable-baselines3"
NAMES = {"result.json": RAY, "progress.json": SB3}
_STEPS = {RAY: "training_iteration", SB3: "time/total_timesteps"}
_LEFT_OUT = frozenset(("config", "date", "hostname", "node_ip", "pid", "timestamp", "trial_id", "experiment_id"))
PARAMS = "params.json"
_MAX_DEPTH = 20


def log_in(folder: str) -> str | None:
    """The name of such a log in a folder, or None."""
    return next((name for name in NAMES if kind_of(os.path.join(folder, name))), None)


def kind_of(path: str) -> str | None:
    """Which of the two a file is by its name and its first row; None when it is neither."""
    kind = NAMES.get(os.path.basename(path))
    if kind is None or not os.path.isfile(path):
        return None
    head = read_head(path)
    line, newline, _ = head.partition(b"\n")
    if not newline and len(head) == HEAD:  # one long first result: its end is not in sight
        return kind if f'"{_STEPS[kind]}"'.encode() in head else None
    row = decode(line)
    return kind if row is not None and step_value(row.get(_STEPS[kind])) is not None else None


def adapt_ray(row: Data) -> Data:
    """A result of Ray, flat, with its step and time."""
    step = step_value(row.get(_STEPS[RAY]))
    if step is None:
        return row
    kept = {key: value for key, value in row.items() if key not in _LEFT_OUT and key != "step"}
    when = row.get("timestamp")
    return {"step": step} | ({} if when is None else {"_timestamp": when}) | dict(_flat("", kept, 0))


def _flat(prefix: str, values: Data, depth: int) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if type(value) is dict and depth < _MAX_DEPTH:
            yield from _flat(f"{prefix}{key}/", value, depth + 1)
        else:
            yield prefix + key, value


def adapt_sb3(row: Data) -> Data:
    """A row of Stable-Baselines3 with its step."""
    step = step_value(row.get(_STEPS[SB3]))
    return row if step is None else {"step": step} | {key: value for key, value in row.items() if key != "step"}


def is_done(row: Data) -> bool:
    """Whether a result of Ray is the last of its trial."""
    return row.get("done") is True


class Renamed(LocalStorage):
    """A folder in which the files of a log_path have other names. Nothing is written.

    Args:
        root: the folder.
        names: file of a log_path -> what it is called here; a file that has its usual name counts first.
    """

    def __init__(self, root: str, names: dict[str, str]) -> None:
        super().__init__(root)
        self._names = names

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"names": self._names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["root"], state["names"])  # type: ignore[misc]

    def _here(self, path: str) -> str:
        return self._names[path] if path in self._names and not super().exists(path) else path

    def read(self, path: str) -> bytes:
        return super().read(self._here(path))

    def read_range(self, path: str, offset: int, length: int | None = None) -> bytes:
        return super().read_range(self._here(path), offset, length)

    def exists(self, path: str) -> bool:
        return super().exists(self._here(path))

    def leads_out(self, path: str) -> bool:
        return super().leads_out(self._here(path))

    def stat(self, path: str) -> Stat | None:
        return super().stat(self._here(path))

    def write(self, path: str, data: bytes, *, content_type: str | None = None) -> None:
        raise PermissionError(
            f"{self.url(path)}: logs of other frameworks are read only; write to a log_path of your own"
        )

    def append(self, path: str, data: bytes) -> None:
        self.write(path, data)

    def remove(self, path: str) -> None:
        self.write(path, b"")
