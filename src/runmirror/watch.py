"""Waiting for a log to grow: cheap for the one who writes it, and nearly free while it rests.

Guarantees: a change of metrics or journal ends :meth:`Watch.wait` within :data:`LOOK_EVERY`. While rows come, their sizes are
looked at; only after :data:`REST_AFTER` without one the system is asked to tell of changes (inotify, FSEvents, kqueue;
through the watchdog package), where it can. Measured: being told of every row costs the writer 25 us a row, more than the
row itself; looking costs it nothing, and the one who looks 0.3 % of a core.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from runmirror.log import layout
from runmirror.storage import LocalStorage, Storage

LOOK_EVERY = 0.08
"""Seconds between two looks while rows come."""
REST_AFTER = 10.0
"""Seconds without a change after which a log counts as resting."""
CHECK_EVERY = 1.0
"""Seconds between two looks at a resting log, and two checks whether its writer lives."""
log = logging.getLogger("runmirror")
Sizes = tuple[int, int]


class Watch:
    """Watches one log_path."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._changed = threading.Event()

    def _observe(self) -> Any:
        """Have :meth:`wait` woken by the system; None where it can't."""
        if not isinstance(self._storage, LocalStorage):
            return None
        try:
            from watchdog.events import FileCreatedEvent, FileModifiedEvent, FileSystemEventHandler
            from watchdog.observers import Observer

            handler = FileSystemEventHandler()
            handler.on_any_event = lambda event: self._changed.set()  # type: ignore[method-assign]
            observer = Observer()
            kinds = [FileModifiedEvent, FileCreatedEvent]  # not "opened": reading the log must not wake its reader
            for folder in (self._storage.path(), self._storage.path(layout.OWN)):
                observer.schedule(handler, folder, recursive=False, event_filter=kinds)
            observer.start()
            return observer
        except Exception as error:  # no such service, or its limit is reached
            log.debug("%s is looked at every %g s: %s", self._storage.url(), LOOK_EVERY, error)
            return None

    def sizes(self) -> Sizes:
        """Bytes of the metrics and of the journal now."""
        metrics, journal = self._storage.stat(layout.METRICS), self._storage.stat(layout.JOURNAL)
        return (metrics.size if metrics else 0, journal.size if journal else 0)

    def wait(self, seen: Sizes | None, seconds: float, wake: Callable[[], bool]) -> None:
        """Until the sizes are no longer ``seen`` (None: don't look), ``seconds`` are over, or ``wake()`` holds, which is
        asked at every look."""
        start = time.monotonic()
        pause = LOOK_EVERY if seen is not None else CHECK_EVERY
        observer, asked = None, seen is None
        try:
            while True:
                self._changed.clear()
                if (seen is not None and self.sizes() != seen) or wake():
                    return
                waited = time.monotonic() - start
                if waited >= seconds:
                    return
                if not asked and waited >= REST_AFTER:
                    asked, observer = True, self._observe()
                    pause = CHECK_EVERY if observer is not None else LOOK_EVERY
                    continue  # it may have grown in between
                self._changed.wait(min(pause, seconds - waited))
        finally:
            if observer is not None:
                observer.stop()
                observer.join(5)
