"""tinker-cookbook as a writer of a log_path: :func:`attach`, and :class:`RunMirrorLogger` for loops of your own.

Guarantees: tinker-cookbook's own files stay as they are. Once a logger is made nothing is raised: a log that can't be opened
is told as an error, tried again at the next row, and training goes on.

Source: tinker_cookbook/utils/ml_log.py (``Logger`` and its methods up to 0.6.1; ``setup_logging``, which every train module
calls as ``ml_log.setup_logging`` and which logs the configuration itself).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from tinker_cookbook.utils import ml_log

import runmirror

__all__ = ["RunMirrorLogger", "attach"]
logger = logging.getLogger("runmirror")


class RunMirrorLogger(ml_log.Logger):
    """A child for ``ml_log.MultiplexLogger([..., RunMirrorLogger("runs/first", report_to="mlflow")])``.

    A log_path that holds a run is continued, as tinker-cookbook continues a folder that has checkpoints.

    Args:
        log_path: where the log is written.
        **options: those of :func:`runmirror.start`, such as ``report_to``.

    Raises:
        UnknownSinkError, MissingPackageError, OptionError: about ``report_to``.
    """

    def __init__(self, log_path: str, **options: Any) -> None:
        runmirror.check_report_to(options.get("report_to"))
        self._log_path = log_path
        self._options = {"resume": True, **options}
        self._error = ""
        self._config: Any = None
        self.run: runmirror.Run | None = None

    def _write(self, write: Callable[[runmirror.Run], None]) -> None:
        try:
            if self.run is None:
                self.run = runmirror.start(self._log_path, self._config, **self._options)
        except Exception as error:
            if self._error != str(error):
                logger.error("%s is not written (tried again at every row): %s", self._log_path, error)
            self._error = str(error)
        else:
            write(self.run)

    def log_hparams(self, config: Any) -> None:
        self._config = config
        self._write(lambda run: None)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """One row; without a step it holds final numbers."""
        self._write(lambda run: run.log_summary(metrics) if step is None else run.log_metrics(metrics, step))

    def enable_event_steps(self) -> None:
        """Rows may come late, with an earlier step: a log_path takes them as they are."""

    def log_metrics_event(
        self, metrics: dict[str, Any], step: int, step_metric: str, metric_axes: dict[str, str] | None = None
    ) -> None:
        self.log_metrics(metrics | {step_metric: step}, step)

    def log_summary(self, metrics: dict[str, Any]) -> None:
        self.log_metrics(metrics)

    def close(self) -> None:
        if self.run is not None:
            self.run.finish()

    def get_logger_url(self) -> str | None:
        return next(iter(self.run.urls.values()), None) if self.run is not None else None


def attach(**options: Any) -> None:
    """Let every run that tinker-cookbook starts from now on write ``<its log_path>/runmirror`` too, before ``train.main``.

    Args:
        **options: those of :func:`runmirror.start`, such as ``report_to``. Attaching again replaces them.

    Raises:
        UnknownSinkError, MissingPackageError, OptionError: about ``report_to``.
    """
    runmirror.check_report_to(options.get("report_to"))
    setup = getattr(ml_log.setup_logging, "__wrapped__", ml_log.setup_logging)

    @functools.wraps(setup)
    def setup_logging(
        log_dir: str, wandb_project: Any = None, wandb_name: Any = None, config: Any = None, *rest: Any, **more: Any
    ) -> ml_log.Logger:
        made = setup(log_dir, wandb_project, wandb_name, config, *rest, **more)
        place = str(log_dir).rstrip("/")
        ours = RunMirrorLogger(f"{place}/runmirror", **{"name": wandb_name or place.rpartition("/")[2], **options})
        ours.log_hparams(config)
        made.loggers.append(ours)
        return made

    ml_log.setup_logging = setup_logging
