"""How the process that writes a run ends, and what that means for the run.

Guarantees: a run that nobody finished is finished at a normal exit, failed when an exception, or ``sys.exit``, ``exit`` or
``quit`` with an error, ended the interpreter, and killed at SIGTERM (when it mirrors live, in the main thread, and nobody
else handles the signal; all of them together get the grace period).
A forked copy of the process leaves the runs to the one that started them. Runs in a cloud are finished before the
interpreter lets go of threads: later no connection can be made.

Python does not tell at its end what ``sys.exit`` was called with, so that call of the main thread is noted on its way (in
another thread it ends that thread only). A plain ``raise SystemExit(1)``, and a ``sys.exit`` that was imported by name
before the first run, can't be seen: that run counts as finished. ``with runmirror.start(...)`` sees them all.
"""

from __future__ import annotations

import _sitebuiltins
import atexit
import builtins
import contextlib
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any, NoReturn, Protocol

from runmirror.exceptions import LogError
from runmirror.log.records import Status
from runmirror.storage import CloudStorage


class Writer(Protocol):
    """What this module needs of a Run."""

    last_error: Any
    in_cloud: bool
    rows: Any

    def finish(self, status: Status = ..., deadline: float | None = ...) -> None: ...

    def leave_after_fork(self) -> None: ...


OPEN: dict[str, Writer] = {}
"""The runs this process writes, by the place of their log_path."""
PATIENCE = 5.0
"""Seconds for which the end of a run waits for a cloud that is out of reach."""
_hooked = False
_hooked_early = False
_real_exit = sys.exit
_exited: tuple[Any, dict[int, int]] | None = None
"""What ``sys.exit`` was last called with, and the rows that each open run had then, by its id in memory."""


def forget(run: Writer) -> None:
    """A run has ended."""
    for key in [key for key, one in OPEN.items() if one is run]:
        del OPEN[key]


def status_of(error: BaseException | None) -> Status:
    """How a run ended that ``error`` ended."""
    if isinstance(error, SystemExit):
        return "finished" if error.code in (None, 0) else "failed"
    if error is None:
        return "finished"
    return "failed" if isinstance(error, Exception) else "killed"


def last_error() -> Any:
    """The exception the interpreter last reported as unhandled."""
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


def close_cloud(storage: CloudStorage, until: float) -> None:
    """Upload the rest until then (monotonic seconds), less long when the cloud is out of reach."""
    with contextlib.suppress(OSError, LogError):
        storage.flush(max(1.0, min(PATIENCE, until - time.monotonic())))
    status = storage.status()
    storage.close(1.0 if status is not None and status.error else max(1.0, until - time.monotonic()))


def hook(*, sigterm: bool, early: bool = False) -> None:
    """See to it that open runs end with the process; with ``sigterm`` also when it is asked to end; with ``early`` runs in a
    cloud while threads can still be used."""
    global _hooked, _hooked_early
    register = getattr(threading, "_register_atexit", None)
    if early and not _hooked_early and register is not None:
        _hooked_early = True
        register(_finish_in_cloud)
    if not _hooked:
        _hooked = True
        atexit.register(_finish_all)
        sys.exit = _noted_exit
        for name in ("exit", "quit"):
            real = getattr(builtins, name, None)
            if type(real) is _sitebuiltins.Quitter:  # not there with -S; an interactive shell has its own
                setattr(builtins, name, _NotedQuitter(real.name, real.eof))
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_after_fork)
    in_main = threading.current_thread() is threading.main_thread()
    if sigterm and in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminated)


def _noted_exit(status: Any = None, /) -> NoReturn:
    """``sys.exit``, noted."""
    _note_exit(status)
    _real_exit(status)


class _NotedQuitter(_sitebuiltins.Quitter):
    """The builtin ``exit`` or ``quit``, noted."""

    def __call__(self, code: Any = None) -> NoReturn:
        _note_exit(code)
        super().__call__(code)


def _note_exit(status: Any) -> None:
    global _exited
    if threading.current_thread() is threading.main_thread():
        _exited = status, {id(run): run.rows.written for run in OPEN.values()}


def _left_by(run: Writer) -> SystemExit | None:
    """The call of ``sys.exit`` after which a run got no row any more: training did not go on."""
    if _exited is None or _exited[1].get(id(run)) != run.rows.written:
        return None
    return SystemExit(_exited[0])


def _finish_all(*, in_cloud: bool = False) -> None:
    """At the end of the interpreter: an exception that ended it makes the run failed; in a notebook it does not end it."""
    interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)
    for run in [run for run in OPEN.values() if run.in_cloud or not in_cloud]:
        error = last_error()
        run.finish("finished" if interactive else status_of(_left_by(run) if error is run.last_error else error))


def _finish_in_cloud() -> None:
    _finish_all(in_cloud=True)


def _terminated(signum: int, frame: FrameType | None) -> None:
    """SIGTERM: end the runs within the grace period, then end as the signal would have."""
    from runmirror.live import grace

    runs, until = list(OPEN.values()), time.monotonic() + grace()
    try:
        for number, run in enumerate(runs):
            run.finish("killed", max(0.0, until - time.monotonic()) / (len(runs) - number))
    finally:
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)


def _after_fork() -> None:
    for run in OPEN.values():
        run.leave_after_fork()
    OPEN.clear()
    if signal.getsignal(signal.SIGTERM) is _terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
