"""accelerate as a writer of a log_path: :class:`RunMirrorTracker`, as an instance or, after :func:`enable`, by name.

Guarantees: only the main process writes. What can be wrong is told when the tracker is made or its run is opened; ``log``
raises nothing.

Source: accelerate/tracking.py (``GeneralTracker``: ``start``, then ``store_init_configuration``, then ``log``, ``finish``).
"""

from __future__ import annotations

import os
from typing import Any

from accelerate import PartialState
from accelerate.tracking import GeneralTracker

import runmirror

__all__ = ["RunMirrorTracker", "enable"]


class RunMirrorTracker(GeneralTracker):
    """Write a log_path: ``Accelerator(log_with=RunMirrorTracker("runs/first", report_to="mlflow"))``.

    The log is opened with the configuration that ``init_trackers`` is given, or at the first ``log``. One that finished is
    not continued unless ``resume=True``: ``runs/first-2`` is begun beside it.

    Args:
        log_path: where the log is written; the project's name when the tracker is chosen by name.
        logging_dir: the folder in which ``log_path`` is; accelerate gives it to a tracker that is chosen by name.
        **options: those of :func:`runmirror.start`, such as ``report_to`` and ``resume``. By name:
            ``init_trackers(..., init_kwargs={"runmirror": {"report_to": "mlflow"}})``.

    Raises:
        UnknownSinkError, MissingPackageError, OptionError: about ``report_to``.
    """

    name = "runmirror"
    requires_logging_directory = True
    main_process_only = True

    def __init__(self, log_path: str | os.PathLike[str], logging_dir: Any = None, **options: Any) -> None:
        super().__init__()
        runmirror.check_report_to(options.get("report_to"))
        self._log_path = os.path.join(logging_dir or "", log_path)
        self._options = {"numbered": True, **options}
        self._run: runmirror.Run | None = None

    def _open(self, config: Any = None) -> runmirror.Run:
        if self._run is None:
            main = PartialState().is_main_process
            self._run = runmirror.start(self._log_path, config, is_main_process=main, **self._options)
        return self._run

    @property
    def tracker(self) -> runmirror.Run:
        """The :class:`runmirror.Run`, for its other methods."""
        return self._open()

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._open(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """One row. A dict among the values is spelled as ``key/inner``; other arguments are for other trackers."""
        row: dict[str, Any] = {}
        for key, value in values.items():
            row |= {f"{key}/{inner}": one for inner, one in value.items()} if isinstance(value, dict) else {key: value}
        self._open().log_metrics(row, step)

    def finish(self) -> None:
        if self._run is not None:
            self._run.finish()


def enable() -> None:
    """Make ``Accelerator(log_with="runmirror", project_dir=...)`` work; the log is in ``project_dir/<project name>``."""
    try:
        from accelerate.tracking import register_tracker_class
    except ImportError:
        raise ImportError("names need accelerate 1.15; with an older one pass log_with=RunMirrorTracker(...)") from None
    register_tracker_class(RunMirrorTracker)
