"""Write the log of a reinforcement-learning run once, and see it in every tracker.

``import runmirror`` loads nothing but this file: each name is imported when it is first used, and no tracker or cloud
library before a sink or scheme needs it.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runmirror.config import LogConfig
    from runmirror.importer import import_runs, plan
    from runmirror.iteration import Iteration
    from runmirror.read import RunView, read_run
    from runmirror.run import Run
    from runmirror.starting import start
    from runmirror.verifier import verify

__all__ = [
    "Iteration",
    "LogConfig",
    "Run",
    "RunView",
    "__version__",
    "import_runs",
    "plan",
    "read_run",
    "start",
    "verify",
]

_HOMES = {
    "Iteration": "runmirror.iteration",
    "LogConfig": "runmirror.config",
    "Run": "runmirror.run",
    "RunView": "runmirror.read",
    "import_runs": "runmirror.importer",
    "plan": "runmirror.importer",
    "read_run": "runmirror.read",
    "start": "runmirror.starting",
    "verify": "runmirror.verifier",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("runmirror")
    if name not in _HOMES:
        raise AttributeError(f"module 'runmirror' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
