"""Pieces of work for other processes, which find them by name; little is imported here, for they wait for that."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any


def double(number: int, *, stop: Any, tell: Any) -> int:
    tell(number, 1)
    return number * 2


def die_once(folder: str, number: int, *, stop: Any, tell: Any) -> int:
    mark = Path(folder, str(number))
    if number % 3 == 0 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def die_always(number: int, *, stop: Any, tell: Any) -> int:
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def wait_for_stop(folder: str, number: int, *, stop: Any, tell: Any) -> int:
    if number == 0:  # done alone, before the others
        return number
    Path(folder, f"began{number}").write_text(str(os.getpid()))
    stop.wait(60)
    Path(folder, f"ended{number}").touch()
    return number


def never(number: int, why: str = "") -> int:
    raise AssertionError(number)
