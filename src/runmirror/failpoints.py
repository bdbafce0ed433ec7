"""Named places at which a test can kill the process: ``RUNMIRROR_FAILPOINT=after-put:3`` sends SIGKILL at the third hit.

The names are in :data:`NAMES`, in the order a mirror passes them. Without the variable a hit costs one dictionary look-up.
"""

from __future__ import annotations

import os
import signal

NAMES = (
    "opened",
    "before-put",
    "after-put",
    "after-flush",
    "before-state",
    "after-state",
    "before-file",
    "after-file",
    "before-close",
    "after-close",
    "after-closed-state",
)
VARIABLE = "RUNMIRROR_FAILPOINT"
_hits: dict[str, int] = {}


def hit(name: str) -> None:
    """Die here when the environment says so."""
    wanted = os.environ.get(VARIABLE)
    if wanted is None:
        return
    _hits[name] = _hits.get(name, 0) + 1
    if wanted == f"{name}:{_hits[name]}":
        os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
