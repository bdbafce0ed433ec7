"""Lightning as a writer of a log_path: :class:`RunMirrorLogger`.

Guarantees: only rank zero writes. ``report_to`` is checked when the logger is made; a log that can't be opened is told
before the first step.

Source: lightning/pytorch/loggers/logger.py (the methods), lightning/pytorch/callbacks/model_checkpoint.py (checkpoints lie in
``save_dir/name/version/checkpoints``); ``finalize`` comes after each of fit, validate and test.
"""

from __future__ import annotations

import os
from argparse import Namespace
from typing import Any

from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only

import runmirror

__all__ = ["RunMirrorLogger"]
_ENDS: dict[str, Any] = {"success": "finished", "failed": "failed"}


class RunMirrorLogger(Logger):
    """Write a log_path: ``Trainer(logger=RunMirrorLogger("runs/first", report_to="mlflow"))``.

    A log that finished is not continued unless ``resume=True``: ``runs/first-2`` is begun beside it. What is logged after
    the end of a fit at its last step, as by ``trainer.test``, belongs to the final numbers.

    Args:
        log_path: where the log is written; Lightning's checkpoints go to ``checkpoints`` in it unless told otherwise.
        **options: those of :func:`runmirror.start`, such as ``report_to`` and ``resume``.

    Raises:
        UnknownSinkError, MissingPackageError, OptionError: about ``report_to``.
    """

    def __init__(self, log_path: str | os.PathLike[str], **options: Any) -> None:
        super().__init__()
        runmirror.check_report_to(options.get("report_to"))
        place = os.fspath(log_path)
        self._log_path = place.rstrip("/") if "://" in place else os.path.abspath(place)
        self._options = {"numbered": True, **options}
        self._run: runmirror.Run | None = None
        self._ended = False

    @property
    @rank_zero_experiment
    def experiment(self) -> runmirror.Run:
        """The :class:`runmirror.Run`, for its other methods; on other ranks an object that does nothing."""
        if self._run is None:
            options = self._options | ({"resume": True} if self._ended else {})
            self._run = runmirror.start(self._log_path, is_main_process=True, **options)
        return self._run

    @property
    def name(self) -> str:
        return os.path.basename(self._log_path)

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return os.path.dirname(self._log_path)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        self.experiment.log_config(params)

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        run = self.experiment
        last = run.status().last_step
        self._ended = self._ended and step is not None and last is not None and step <= last
        if self._ended:
            run.log_summary(metrics)
        else:
            run.log_metrics(metrics, step)

    @rank_zero_only
    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        path = getattr(checkpoint_callback, "_last_checkpoint_saved", "") or checkpoint_callback.best_model_path
        step = getattr(checkpoint_callback, "_last_global_step_saved", None)
        if path:
            self.experiment.log_checkpoint(os.path.basename(path), batch=step, state_path=path)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._run is not None:
            self._run.finish(_ENDS.get(status, "killed"))
            self._run, self._ended = None, True
