"""Processes that are at work at once: forked from one that has imported what they need, so that a kill meets them at work."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

PRELOAD = [
    "runmirror.cli",
    "runmirror.sinks.tensorboard",
    "runmirror.sinks.event_writer",
    "runmirror.sinks.event_rollouts",
]
PRELOAD += ["runmirror.sinks.mlflow", "mlflow.tracking", "mlflow.entities", "gcsfs.core", "google_crc32c"]
PRELOAD += ["tests.storage.cloud_writer", "tests.test_mlflow_kill"]
"""Of all tests that fork: there is one such process, and it is made once."""


def forked(function: Callable[..., None], *arguments: Any, **named: Any) -> BaseProcess:
    """A process that runs the function, which must be importable by name, started."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=function, args=arguments, kwargs=named)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")  # it would have a thread, which a fork is no good for
        process.start()
    return process


def command(arguments: list[str], home: Path, said: Path, **environment: str) -> None:
    """In a process of its own: ``runmirror`` with these arguments. What it says is in the file ``said``."""
    from runmirror.cli import main

    os.environ |= {"RUNMIRROR_HOME": str(home)} | environment
    output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = ["runmirror", *arguments]
    main()
