"""TRL and transformers' Trainer as writers of a log_path: :class:`RunMirrorCallback`, and :func:`enable`.

Guarantees: what a Trainer hands to its callbacks is read, never changed. Only the main process writes. Once training has
begun nothing is raised: a log that can't be opened is told as an error, tried again at the next row, and training goes on.

Source: transformers/trainer_callback.py (the events), transformers/trainer.py (when they come: the final numbers before
``on_train_end``; an evaluation also before training or after it), transformers/integrations/integration_utils.py (names).
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

import runmirror
from runmirror_trl.completions import Completions

__all__ = ["RunMirrorCallback", "enable"]
logger = logging.getLogger("runmirror")


class RunMirrorCallback(TrainerCallback):
    """Write the log of a Trainer and mirror it: ``Trainer(..., callbacks=[RunMirrorCallback(report_to="mlflow")])``.

    A training that continues from a checkpoint continues its log; any other one in the same folder begins a numbered log
    beside it once the earlier one has finished. A step whose NaN loss transformers reports as 0.0 has
    ``runmirror/hidden_nan``: 1. An evaluation after the end of training belongs to the final numbers.

    Args:
        log_path: where the log is written; default: ``runmirror`` in the Trainer's output_dir.
        report_to: trackers, as for :func:`runmirror.start`; None: what ``RUNMIRROR_REPORT_TO`` says.
        prefixes: spell keys as transformers' own TensorBoard and W&B callbacks do (``train/loss``, ``eval/loss``).
        **options: more of :func:`runmirror.start`'s, such as ``logging_dir``.

    Raises:
        UnknownSinkError, MissingPackageError, OptionError: about ``report_to``.
    """

    def __init__(self, log_path: Any = None, report_to: Any = None, prefixes: bool = False, **options: Any) -> None:
        self._sinks = runmirror.check_report_to(report_to)
        self._log_path = log_path
        self._prefixes = prefixes
        self._options = {"report_to": report_to, "numbered": True, **options}
        self._ended = False
        self._error = ""
        self._completions = Completions()
        self.run: runmirror.Run | None = None

    def _start(self, args: Any, state: Any, model: Any) -> None:
        folder = os.path.abspath(args.output_dir)
        named = args.run_name if args.run_name not in (None, "", args.output_dir) else os.path.basename(folder)
        given = {"name": named} | self._options
        given.setdefault("resume", bool(self._ended or state.global_step) or "auto")
        try:
            config = args.to_dict() | {"model_config": getattr(model, "config", None)}
            path = self._log_path or os.path.join(folder, "runmirror")
            self.run = runmirror.start(path, config, is_main_process=state.is_world_process_zero, **given)
        except Exception as error:
            if self._error != str(error):
                logger.error("this training is not logged (tried again at every row): %s", error)
            self._error = str(error)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        twice = sorted({*self._sinks} & {*(args.report_to or [])})
        if twice and state.is_world_process_zero:
            logger.warning("%s gets two runs: one of the Trainer's report_to, one of runmirror's", ", ".join(twice))
        self._ended, self._completions.expected = False, None  # a training that broke off may have left one
        self._start(args, state, model)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, model: Any = None, **kwargs: Any) -> None:
        logs = given = dict(logs or {})
        final = self._ended or ("train_runtime" in logs and "loss" not in logs)
        grad_norm = logs.get("grad_norm")
        if logs.get("loss") == 0.0 and isinstance(grad_norm, float) and not math.isfinite(grad_norm):
            logs["runmirror/hidden_nan"] = 1
        if self._prefixes:
            logs = {_prefixed(key): value for key, value in logs.items()}
        self._write(
            args, state, model, lambda run: run.log_summary(logs) if final else run.log_metrics(logs, state.global_step)
        )
        self._completions.expect(args, state, given, kwargs.get("processing_class"))

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self._completions.expected:
            self._write(args, state, model, lambda run: None)

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        name, step = f"checkpoint-{state.global_step}", state.global_step
        path = os.path.join(args.output_dir, name)
        self._write(args, state, model, lambda run: run.log_checkpoint(name, batch=step, state_path=path))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._ended = True
        if self.run is not None:
            self._completions.take(self.run)
            self.run.finish()
        self.run = None

    def _write(self, args: Any, state: Any, model: Any, write: Callable[[runmirror.Run], None]) -> None:
        """Write to the run, opened when it is not; PPO saves after the end of training, and people evaluate then."""
        if self.run is None:
            self._start(args, state, model)
        if self.run is not None:
            self._completions.take(self.run)
            write(self.run)
        if self._ended:
            self.on_train_end(args, state, None)


def _prefixed(key: str) -> str:
    head, _, rest = str(key).partition("_")
    return f"{head}/{rest}" if rest and head in ("eval", "test") else f"train/{key}"


def enable() -> None:
    """Make ``report_to="runmirror"`` work in transformers' and TRL's configs; trackers come from ``RUNMIRROR_REPORT_TO``."""
    from transformers.integrations import integration_utils

    integration_utils.INTEGRATION_TO_CALLBACK["runmirror"] = RunMirrorCallback
