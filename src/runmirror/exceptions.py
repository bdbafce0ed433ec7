"""Every error runmirror raises, in one tree.

::

    RunmirrorError
    ├── LogError                     a log_path can't be used as asked
    │   ├── LogBusyError             another process writes this log_path
    │   ├── LogFinishedError         the run in this log_path has finished; name another or pass resume=True
    │   └── NotALogError             no run of a known format at this path
    ├── StateError                   state that this version can't read (written by a newer one), or no place for it
    ├── MirrorBusyError              another mirror delivers to this destination right now
    ├── CatalogueError (ValueError)  a file of metric meanings that can't be read
    ├── OptionError (ValueError)     an option of a sink that doesn't exist or has the wrong type
    ├── UnknownSinkError (ValueError)
    ├── MissingPackageError (ImportError)
    └── SinkError                    a tracker refused or failed
        ├── Retry                    transient: the mirror tries again, for ever, with growing pauses
        │   └── Throttled            the tracker asks all of us to slow down
        └── Refused                  terminal for this run: trying again can't help until someone acts

A message says what was found, where (path, line, key), and what to do next.
"""

from __future__ import annotations


class RunmirrorError(Exception):
    """Base of every error that runmirror raises on purpose."""


class LogError(RunmirrorError):
    """A log_path can't be used as asked."""


class LogBusyError(LogError):
    """Another process writes this log_path."""


class LogFinishedError(LogError):
    """The run in this log_path has finished, and ``resume`` was not asked for."""


class NotALogError(LogError):
    """No run of a known format was found at a path."""


class StateError(RunmirrorError):
    """State can't be read by this version, or no folder can hold it."""


class MirrorBusyError(RunmirrorError):
    """Another mirror delivers to this destination right now."""


class CatalogueError(RunmirrorError, ValueError):
    """A file of metric meanings can't be read, or says something that is no catalogue."""


class OptionError(RunmirrorError, ValueError):
    """An option that a sink doesn't have, or a value it can't take."""


class UnknownSinkError(RunmirrorError, ValueError):
    """A sink name that is neither built in nor installed."""


class MissingPackageError(RunmirrorError, ImportError):
    """A sink needs a package that is not installed; the message names the extra."""


class SinkError(RunmirrorError):
    """A tracker refused or failed."""


class Retry(SinkError):
    """Transient failure: nothing is wrong with the rows, try them again later.

    Args:
        reason: what the tracker said, one line.
        after: seconds the tracker asked us to wait, or None for the mirror's own backoff.
    """

    def __init__(self, reason: str, after: float | None = None) -> None:
        super().__init__(reason)
        self.after = after


class Throttled(Retry):
    """The tracker has too much to do (HTTP 429, for example): every mirror on this machine that sends to the same
    destination holds back, for ``after`` seconds or for the mirror's own backoff."""


class Refused(SinkError):
    """Terminal for this run and destination: a person has to act before it can go on."""
