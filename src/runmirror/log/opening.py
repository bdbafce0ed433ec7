"""Opening a log_path for writing: who may write, whether a run may go on, and what is written before the first row.

Guarantees:

- :func:`check_resume` writes nothing, so a log_path that is refused stays as it was.
- The first configuration and code of a run stay in config.json and code.diff; those of a resume that differ are kept in
  ``.runmirror/resume_N/``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any, Literal

from runmirror.exceptions import LogError, LogFinishedError
from runmirror.log import layout
from runmirror.log.rows import decode
from runmirror.log.snapshot import code_diff, dump_config, encode_config
from runmirror.log.status import read_checkpoints, read_journal, run_status
from runmirror.log.writer import count_lines, last_step, size_of, write_journal
from runmirror.storage import Storage, local_root

Resume = Literal["auto"] | bool
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
"""Never LOCAL_RANK alone: it is 0 once on every host."""


def not_main(is_main_process: bool | None) -> str:
    """Why this process doesn't write, or "" when it does."""
    if is_main_process is not None:
        return "" if is_main_process else "is_main_process=False"
    for variable in _RANKS:
        text = os.environ.get(variable, "").strip()
        if text.lstrip("+-").isdigit():
            return "" if int(text) == 0 else f"{variable}={text}, and only 0 writes (is_main_process= overrides)"
    return ""


def _has_rows(storage: Storage) -> bool:
    return size_of(storage, layout.METRICS) > 0 or size_of(storage, layout.CHECKPOINTS) > 0


def check_resume(storage: Storage, resume: Resume) -> None:
    """Raise when the log_path may not be continued. Writes nothing."""
    if resume is True or not _has_rows(storage):
        return
    if resume is False:
        kind: type[LogError] = LogError
        what = "is not empty"
    elif run_status(read_journal(storage), read_checkpoints(storage), {}, None)[0] == "finished":
        kind, what = LogFinishedError, "has finished"
    else:
        return
    raise kind(
        f"the run in {storage.url()} {what}: {count_lines(storage)} rows, last step {last_step(storage)}. "
        f"Start with the free log_path {_free_sibling(storage)}, or continue this one with resume=True"
    )


def _free_sibling(storage: Storage) -> str:
    number = 2
    while local_root(storage.url()) is not None and os.path.lexists(_sibling(storage, number)):
        number += 1
    return _sibling(storage, number)


def _sibling(storage: Storage, number: int) -> str:
    return f"{(local_root(storage.url()) or storage.url()).rstrip('/')}-{number}"


def newest_sibling(storage: Storage, resume: Resume, make: Callable[[str], Storage]) -> tuple[Storage, int]:
    """Of ``log_path``, ``log_path-2``, ``log_path-3`` and so on, the last that has rows, or, where ``resume`` does not let
    that one be continued, the next; and its number. ``make`` opens a place. Writes nothing."""
    first, number = storage, 1
    while _has_rows(following := make(_sibling(first, number + 1))):
        storage, number = following, number + 1
    try:
        check_resume(storage, resume)
    except LogError:
        return following, number + 1
    return storage, number


def open_log(storage: Storage, config: Any, code: bool | str | os.PathLike[str], step: int | None) -> list[str]:
    """Write the journal's entry for a start or a resume, then config.json and code.diff.

    Returns:
        What a resume has changed, for people: ``lr 0.1 -> 0.2``, ``the code``; nothing for a start.

    A file that is there already stays, and a different new one goes to ``.runmirror/resume_N/``; unless it is ours and
    the log has no row and no checkpoint yet: a start that came to nothing is replaced.
    """
    journal = read_journal(storage)
    resumed = _has_rows(storage)
    replaceable = set() if resumed else {path for entry in journal for path in entry.wrote or ()}
    number = 1 + sum(entry.event == "resumed" for entry in journal)
    while storage.exists(f"{layout.OWN}/resume_{number}"):
        number += 1
    found: dict[str, bytes] = {}
    if config is not None:
        found[layout.CONFIG] = encode_config(config)
    if code is not False and (diff := code_diff(None if code is True else code)):
        found[layout.CODE] = diff.encode("utf-8", "replace")
    planned: dict[str, bytes] = {}
    for name, data in found.items():
        if name in replaceable or not storage.exists(name):
            planned[name] = data
        elif not _is_same(name, storage.read(name), data):
            planned[f"{layout.OWN}/resume_{number}/{name}"] = data
    write_journal(storage, "resumed" if resumed else "started", step=step, wrote=list(planned) or None)
    for path, data in planned.items():
        storage.write(path, data)
    if not resumed:
        return []
    config_changed = f"{layout.OWN}/resume_{number}/{layout.CONFIG}" in planned
    changes = _changes(decode(storage.read(layout.CONFIG)), decode(found[layout.CONFIG])) if config_changed else []
    return changes + ["the code"] * (f"{layout.OWN}/resume_{number}/{layout.CODE}" in planned)


def _changes(old: Any, new: Any, at: str = "config") -> list[str]:
    """Where two configurations differ, as ``a.b 1 -> 2``."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return [] if old == new else [f"{at} {_shown(old)} -> {_shown(new)}"]
    keys = dict.fromkeys([*old, *new])
    above = "" if at == "config" else f"{at}."
    return [one for key in keys for one in _changes(old.get(key), new.get(key), f"{above}{key}")]


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:37]}..."


def add_config(storage: Storage, config: Any) -> None:
    """Add to the configuration what is told after the start: the keys of ``config``, in config.json, or, where that was
    made by an earlier start and would change, beside it as for a start."""
    journal = read_journal(storage)
    starts = [entry for entry in journal if entry.event != "finished"]
    added = dump_config(config)
    first = _read_config(storage, layout.CONFIG)
    if storage.exists(layout.CONFIG) and starts and layout.CONFIG not in (starts[-1].wrote or ()) and len(starts) > 1:
        if first | added == first:
            return
        number = sum(entry.event == "resumed" for entry in starts)
        path = f"{layout.OWN}/resume_{number}/{layout.CONFIG}"
        storage.write(path, encode_config((_read_config(storage, path) or first) | added))
    elif first | added != first or not storage.exists(layout.CONFIG):
        storage.write(layout.CONFIG, encode_config(first | added))


def _read_config(storage: Storage, path: str) -> dict[str, Any]:
    return (decode(storage.read(path)) or {}) if storage.exists(path) else {}


def _is_same(name: str, old: bytes, new: bytes) -> bool:
    return old == new or (name == layout.CONFIG and decode(old) == decode(new))
