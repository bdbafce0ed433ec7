"""Stable-Baselines3 as a writer of a log_path: :class:`RunMirrorWriter`.

Guarantees: everything that can be wrong is told when the writer is made; ``write`` raises nothing. Keys are as they are,
without those that were recorded with ``exclude="runmirror"``.

Source: stable_baselines3/common/logger.py (``KVWriter``; ``step`` is the number of environment steps).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from stable_baselines3.common.logger import KVWriter

import runmirror

__all__ = ["RunMirrorWriter"]


class RunMirrorWriter(KVWriter):
    """Write a log_path: ``model.set_logger(Logger(None, [RunMirrorWriter("runs/ppo", report_to="mlflow")]))``.

    A log that finished is not continued unless ``resume=True``: ``runs/ppo-2`` is begun beside it.

    Args:
        log_path: where the log is written.
        config: anything that holds the run's configuration.
        **options: those of :func:`runmirror.start`, such as ``report_to`` and ``resume``, and what it raises.
    """

    def __init__(self, log_path: str | os.PathLike[str], config: Any = None, **options: Any) -> None:
        self.run = runmirror.start(log_path, config, **{"numbered": True, **options})

    def write(self, key_values: Mapping[str, Any], key_excluded: Mapping[str, Any], step: int = 0) -> None:
        """One row at ``step``."""
        left_out = {key for key, formats in key_excluded.items() if "runmirror" in (formats or ())}
        self.run.log_metrics({key: value for key, value in key_values.items() if key not in left_out}, step)

    def close(self) -> None:
        """End the run; ``model.logger.close()`` does. At the end of the process it happens by itself."""
        self.run.finish()
