"""Opening a log_path for writing: :func:`start`.

Guarantees: everything that can be wrong (the log_path, ``resume``, ``report_to`` and its options) is told before anything is
written, and before training spends a second. In a process that is not the main one nothing is written at all.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from runmirror import ending
from runmirror.config import find_log_config
from runmirror.live import Live
from runmirror.log import layout as files
from runmirror.log import writer
from runmirror.log.identity import canonical_url, claim
from runmirror.log.layout import LAYOUTS, Layout
from runmirror.log.opening import Resume, check_resume, not_main, open_log
from runmirror.log.status import read_journal
from runmirror.run import Run
from runmirror.storage import Storage, storage_from_uri
from runmirror.targets import parse_report_to

logger = logging.getLogger("runmirror")


def start(
    log_path: str | os.PathLike[str] | Storage | None = None,
    config: Any = None,
    *,
    report_to: Any = None,
    logging_dir: str | None = None,
    layout: Layout | None = None,
    resume: Resume | None = None,
    total_iterations: int | None = None,
    strict: bool = False,
    is_main_process: bool | None = None,
    code: bool | str | os.PathLike[str] = True,
    fsync: bool = False,
) -> Run:
    """Open a log_path for writing, new or to be continued. What is not passed comes from a
    :class:`~runmirror.config.LogConfig` in ``config``, when there is one.

    Args:
        log_path: a folder, a ``file://`` URI, or a Storage.
        config: anything that holds a configuration. Written to config.json, secrets masked; one given at a resume that
            differs goes to ``.runmirror/resume_N/config.json``.
        report_to: trackers to mirror to while training: a name, a comma list, "all", a dict name -> options, options or sink
            objects, or a list of these; "none" for none; None: what ``RUNMIRROR_REPORT_TO`` says.
        logging_dir: TensorBoard's logdir, for a ``report_to`` that does not name one.
        layout: names of rollout files: "flat" (default) or "nested".
        resume: "auto" (default) continues a run that did not finish and refuses one that did; True continues any; False
            refuses a log_path that has rows or checkpoints.
        total_iterations: how many there will be, for ``progress/done_frac``.
        strict: raise for what is left out of a row, after it was written.
        is_main_process: whether this process writes. None: RANK, else OMPI_COMM_WORLD_RANK, else SLURM_PROCID is 0 or
            unset.
        code: whether to write code.diff, or the folder of the repository instead of the one training runs in.
        fsync: sync every row to the disk (some 0.5 ms each) so that it survives a power cut.

    Raises:
        LogFinishedError: the run in this log_path has finished, and ``resume`` is "auto".
        LogError: the log_path is not empty, and ``resume`` is False.
        LogBusyError: another process writes this log_path.
        UnknownSinkError, MissingPackageError, OptionError: about ``report_to``.
        ValueError: an argument has none of its values, or the log_path a scheme that is not supported.
        OSError: the log_path can't be written.
    """
    given = find_log_config(config)
    log_path = given.log_path if log_path is None else log_path
    if log_path is None:
        raise ValueError("no log_path: pass one, or a config with a LogConfig that has it")
    report_to = given.report_to if report_to is None else report_to
    report_to = os.environ.get("RUNMIRROR_REPORT_TO") if report_to is None else report_to
    logging_dir = logging_dir or given.logging_dir
    layout = layout or given.layout
    resume = given.resume if resume is None else resume
    total_iterations = given.total_iterations if total_iterations is None else total_iterations
    if layout not in LAYOUTS:
        raise ValueError(f"layout is one of {', '.join(LAYOUTS)}, not {layout!r}")
    if resume not in ("auto", True, False):
        raise ValueError(f'resume is "auto", True or False, not {resume!r}')
    if total_iterations is not None and not (isinstance(total_iterations, int) and total_iterations > 0):
        raise ValueError(f"total_iterations is a positive integer or None, not {total_iterations!r}")
    targets = parse_report_to(report_to, {"tensorboard": {"logdir": logging_dir}} if logging_dir else None)
    owned = isinstance(log_path, (str, os.PathLike))
    storage = storage_from_uri(log_path) if isinstance(log_path, (str, os.PathLike)) else log_path
    inactive = not_main(is_main_process)
    if inactive:
        logger.info("%s: this process writes nothing: %s", storage.url(), inactive)
        return Run(storage, layout, total_iterations, inactive=inactive, owned=owned)
    check_resume(storage, resume)
    key = canonical_url(storage)
    first = ending.OPEN.get(key)
    if first is not None:
        logger.warning("%s was started again in this process: the first Run ends here, the log goes on", storage.url())
        first.finish("killed", 0.0)
    lock = writer.lock_writer(storage)
    try:
        check_resume(storage, resume)
        for path in (files.METRICS, files.CHECKPOINTS, files.JOURNAL):
            writer.repair(storage, path)
        run_id = claim(storage).run_id
        step = writer.last_step(storage)
        open_log(storage, config, code, step)
    except BaseException:
        if lock is not None:
            lock.release()
        raise
    run = Run(storage, layout, total_iterations, strict, fsync, run_id=run_id, last_step=step, lock=lock, owned=owned)
    ending.OPEN[key] = run
    ending.hook(sigterm=bool(targets))
    if targets:
        starts = sum(entry.event != "finished" for entry in read_journal(storage))
        run.live = Live(storage, targets, starts)
    return run
