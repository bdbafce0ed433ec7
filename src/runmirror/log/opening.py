"""Opening a log_path for writing: who may write, whether a run may go on, and what is written before the first row.

Guarantees:

- :func:`check_resume` writes nothing, so a log_path that is refused stays as it was.
- The first configuration and code of a run stay in config.json and code.diff; those of a resume that differ are kept in
  ``.runmirror/resume_N/``.
"""

from __future__ import annotations

import os
from typing import Any, Literal

from runmirror.exceptions import LogError, LogFinishedError, RunmirrorError
from runmirror.log import layout
from runmirror.log.rows import decode
from runmirror.log.snapshot import code_diff, encode_config
from runmirror.log.status import read_checkpoints, read_config, read_journal, run_status
from runmirror.log.writer import count_lines, last_step, size_of, write_journal
from runmirror.storage import Storage, local_root

Resume = Literal["auto"] | bool
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
"""Never LOCAL_RANK alone: it is 0 once on every host."""


def check_report_to(report_to: Any) -> None:
    named = report_to if isinstance(report_to, (list, tuple)) else [report_to]
    if any(name not in (None, "none") for name in named):
        raise RunmirrorError(
            f"report_to={report_to!r}: live mirroring is not in this version; leave report_to out and run "
            "`runmirror import LOG_PATH --to NAME` afterwards"
        )


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
    root = local_root(storage.url())
    base = (root or storage.url()).rstrip("/")
    number = 2
    while root is not None and os.path.lexists(f"{base}-{number}"):
        number += 1
    return f"{base}-{number}"


def open_log(storage: Storage, config: Any, code: bool | str | os.PathLike[str], step: int | None) -> None:
    """Write config.json, code.diff and the journal's entry for a start or a resume."""
    journal = read_journal(storage)
    resumed = _has_rows(storage)
    ours = bool(journal) and not resumed  # a start that came to nothing: its config is no one's
    number = 1 + sum(entry.event == "resumed" for entry in journal)
    while storage.exists(f"{layout.OWN}/resume_{number}"):
        number += 1
    if config is not None:
        new = encode_config(config)
        if ours or not storage.exists(layout.CONFIG):
            storage.write(layout.CONFIG, new)
        elif read_config(storage) != decode(new):
            storage.write(f"{layout.OWN}/resume_{number}/{layout.CONFIG}", new)
    if code is not False:
        diff = code_diff(None if code is True else code).encode("utf-8", "replace")
        if diff and (ours or not storage.exists(layout.CODE)):
            storage.write(layout.CODE, diff)
        elif diff and storage.read(layout.CODE) != diff:
            storage.write(f"{layout.OWN}/resume_{number}/{layout.CODE}", diff)
    write_journal(storage, "resumed" if resumed else "started", step=step)
