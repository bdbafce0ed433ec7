"""What the training process tells people. Whatever becomes of a notice, telling never raises."""

from __future__ import annotations

import logging
import os
import sys

logger = logging.getLogger("runmirror")


def say(line: str, level: int = logging.INFO) -> None:
    """A notice for people, as :func:`warn` tells it; ``RUNMIRROR_QUIET=1`` silences it."""
    if os.environ.get("RUNMIRROR_QUIET", "") in ("", "0"):
        _tell(line, level)


def warn(line: str) -> None:
    """Something was left out or lost: through logging when that is set up, else on stderr without breaking a progress bar."""
    _tell(line, logging.WARNING)


def _tell(line: str, level: int) -> None:
    try:
        if logger.hasHandlers():
            logger.log(level, "%s", line)
            return
        bar = getattr(sys.modules.get("tqdm"), "tqdm", None)
        if bar is not None:
            bar.write(f"runmirror: {line}", file=sys.stderr)
        else:
            sys.stderr.write(f"runmirror: {line}\n")
    except Exception:  # no stderr any more, a signal in the midst of a write, a handler of the user's that fails
        pass
