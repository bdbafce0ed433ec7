"""Opening a log_path for writing: :func:`start`.

Guarantees: everything that can be wrong (the log_path, ``resume``, ``report_to`` and its options) is told before anything is
written, and before training spends a second. In a process that is not the main one nothing is written at all.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from runmirror import ending
from runmirror.config import find_log_config
from runmirror.exceptions import OptionError
from runmirror.find_remote import is_remote
from runmirror.live import Live
from runmirror.log import layout as files
from runmirror.log import writer
from runmirror.log.identity import canonical_url, claim
from runmirror.log.layout import LAYOUTS, Layout
from runmirror.log.opening import Resume, check_resume, newest_sibling, not_main, open_log
from runmirror.log.status import count_starts
from runmirror.notices import say, warn
from runmirror.run import Run
from runmirror.storage import CloudStorage, Storage, local_root, spools, storage_from_uri
from runmirror.targets import Target, parse_report_to

logger = logging.getLogger("runmirror")


def start(
    log_path: str | os.PathLike[str] | Storage | None = None,
    config: Any = None,
    *,
    report_to: Any = None,
    logging_dir: str | None = None,
    layout: Layout | None = None,
    resume: Resume | None = None,
    name: str | None = None,
    numbered: bool = False,
    total_iterations: int | None = None,
    num_groups_to_log: int | None = None,
    strict: bool = False,
    is_main_process: bool | None = None,
    code: bool | str | os.PathLike[str] = True,
    fsync: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Run:
    """Open a log_path for writing, new or to be continued. What is not passed comes from a
    :class:`~runmirror.config.LogConfig` in ``config``, when there is one.

    Args:
        log_path: a folder, a URI (``gs://bucket/run``, ``s3://...``, any scheme of fsspec), or a Storage.
        config: anything that holds a configuration. Written to config.json, secrets masked; one given at a resume that
            differs goes to ``.runmirror/resume_N/config.json``.
        report_to: trackers to mirror to while training: a name, a comma list, "all", a dict name -> options, options or sink
            objects, or a list of these; "none" for none; None: what ``RUNMIRROR_REPORT_TO`` says.
        logging_dir: TensorBoard's logdir, for a ``report_to`` that does not name one.
        layout: names of rollout files: "flat" (default) or "nested".
        resume: "auto" (default) continues a run that did not finish and refuses one that did; True continues any; False
            refuses a log_path that has rows or checkpoints.
        name: what trackers call the run; default: the name of its folder.
        numbered: instead of refusing, begin ``log_path-2``, ``log_path-3`` and so on (``name`` gets the number too); of
            those, ``resume`` is about the newest. For a framework that is always given the same folder.
        total_iterations: how many there will be, for ``progress/done_frac``.
        num_groups_to_log: groups of rollouts that a report shows in full; default 4, 0 for no reports of rollouts.
        strict: raise for what is left out of a row, after it was written.
        is_main_process: whether this process writes. None: RANK, else OMPI_COMM_WORLD_RANK, else SLURM_PROCID is 0 or
            unset.
        code: whether to write code.diff, or the folder of the repository instead of the one training runs in.
        fsync: sync every row to the disk (some 0.5 ms each) so that it survives a power cut.
        storage_options: for the fsspec file system of a log_path in a cloud: credentials, endpoint. Written nowhere.

    Raises:
        LogFinishedError: the run in this log_path has finished, and ``resume`` is "auto".
        LogError: the log_path is not empty, and ``resume`` is False.
        LogBusyError: another process writes this log_path.
        UnknownSinkError, MissingPackageError, OptionError: about ``report_to``; also for a sink object that another open
            run has.
        ValueError: an argument has none of its values, or the log_path a scheme that is not supported.
        OSError: the log_path can't be written.
    """
    given = find_log_config(config)
    log_path = given.log_path if log_path is None else log_path
    if log_path is None:
        raise ValueError("no log_path: pass one, or a config with a LogConfig that has it")
    report_to = given.report_to if report_to is None else report_to
    report_to = _from_environment(report_to)
    logging_dir = logging_dir or given.logging_dir
    layout = layout or given.layout
    resume = given.resume if resume is None else resume
    total_iterations = given.total_iterations if total_iterations is None else total_iterations
    num_groups_to_log = given.num_groups_to_log if num_groups_to_log is None else num_groups_to_log
    if layout not in LAYOUTS:
        raise ValueError(f"layout is one of {', '.join(LAYOUTS)}, not {layout!r}")
    if resume not in ("auto", True, False):
        raise ValueError(f'resume is "auto", True or False, not {resume!r}')
    if total_iterations is not None and not (isinstance(total_iterations, int) and total_iterations > 0):
        raise ValueError(f"total_iterations is a positive integer or None, not {total_iterations!r}")
    if not (isinstance(num_groups_to_log, int) and num_groups_to_log >= 0):
        raise ValueError(f"num_groups_to_log is a whole number from 0 on, not {num_groups_to_log!r}")
    if numbered and not isinstance(log_path, (str, os.PathLike)):
        raise ValueError("numbered=True needs a log_path that is a path or a URI, not a Storage")
    storage_options = given.storage_options if storage_options is None else storage_options
    tensorboard: dict[str, Any] = {"logdir": logging_dir}
    if logging_dir and is_remote(logging_dir) and storage_options:
        tensorboard["storage_options"] = dict(storage_options)
    targets = parse_report_to(report_to, {"tensorboard": tensorboard} if logging_dir else None)
    owned = isinstance(log_path, (str, os.PathLike))
    storage = log_path
    if isinstance(storage, (str, os.PathLike)):
        storage = storage_from_uri(storage, **(storage_options or {}))
    inactive = not_main(is_main_process)
    if inactive:
        logger.info("%s: this process writes nothing: %s", _place(storage), inactive)
        return Run(storage, layout, total_iterations, inactive=inactive, owned=owned)
    if numbered:
        storage, number = newest_sibling(storage, resume, partial(storage_from_uri, **(storage_options or {})))
        if name and number > 1:
            name = f"{name}-{number}"
    cloud = isinstance(storage, CloudStorage)
    try:
        check_resume(storage, resume)  # before anyone is kept from writing
    except (ConnectionError, TimeoutError):
        if not cloud:
            raise
    key = canonical_url(storage)
    _check_objects(targets, key)
    first = ending.OPEN.get(key)
    if first is not None:
        what = "the log goes on" if cloud or storage.exists(files.RUN) else "its log was removed, a new one begins"
        warn(f"{_place(storage)} was started again in this process: the first Run ends here, {what}")
        first.finish("killed", 0.0)
    lock = writer.lock_writer(storage)
    try:
        check_resume(storage, resume)
        for path in (files.METRICS, files.CHECKPOINTS, files.JOURNAL):
            writer.repair(storage, path)
        run_id = claim(storage, name).run_id
        step = writer.last_step(storage)
        changes = open_log(storage, config, code, step)
    except BaseException:
        if lock is not None:
            lock.release()
        if isinstance(storage, CloudStorage):
            storage.close(0)
        raise
    if cloud:
        _name_leftovers(storage)
    if step is not None:
        _tell_resume(storage, step, changes)
    run = Run(
        storage,
        layout,
        total_iterations,
        strict,
        fsync,
        run_id=run_id,
        last_step=step,
        lock=lock,
        owned=owned,
        num_groups_to_log=num_groups_to_log,
    )
    ending.OPEN[key] = run
    ending.hook(sigterm=bool(targets) or cloud, early=cloud)
    if targets:
        run.live = Live(storage, targets, count_starts(storage), run_id=run_id)
    return run


def _check_objects(targets: Sequence[Any], key: str) -> None:
    """Refuse a sink object that another open run of this process uses: it holds one run at a time."""
    for other, run in ending.OPEN.items():
        live = getattr(run, "live", None)
        for sink in targets if other != key else ():
            if live is not None and live.delivers(sink):
                raise OptionError(
                    f"report_to: this {type(sink).__name__} object is used by the open run {other}, and a sink object holds "
                    "one run at a time: make another object for this run, or name the sink with its options"
                )


def _tell_resume(storage: Storage, step: int, changes: list[str]) -> None:
    """One line for people: where training goes on, from which checkpoint, and what is no longer as it was."""
    checkpoint = writer.latest_checkpoint(storage)
    where = f"latest checkpoint {checkpoint.name}" if checkpoint else "no checkpoint with a state_path"
    more = "" if len(changes) <= 3 else f" and {len(changes) - 3} more"
    what = f"; changed: {', '.join(changes[:3])}{more}" if changes else ""
    say(f"{_place(storage)} goes on behind step {step} ({where}){what}")


def _place(storage: Storage) -> str:
    """A log_path as people write it."""
    return local_root(storage.url()) or storage.url()


def _name_leftovers(storage: Storage) -> None:
    """Say what other runs left on this machine."""
    for info in spools():
        if not info.alive and not info.taken_by and info.unsynced and info.url != storage.url():
            warn(
                f"{info.unsynced} bytes of {info.url} are on this machine only, and its writer is gone: `runmirror push` "
                "uploads them"
            )


def check_report_to(report_to: Any = None) -> list[str]:
    """The names of the sinks that ``report_to`` means, checked as :func:`start` does and before it: for code that starts
    the run later, when an error would stop training. Raises what ``start`` raises about ``report_to``."""
    return [
        one.name if isinstance(one, Target) else getattr(one, "name", type(one).__name__)
        for one in parse_report_to(_from_environment(report_to))
    ]


def _from_environment(report_to: Any) -> Any:
    return os.environ.get("RUNMIRROR_REPORT_TO") if report_to is None else report_to
