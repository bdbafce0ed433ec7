"""Waiting for a log to grow without looking at it all the time.

Guarantees: a change of metrics or journal ends :meth:`Watch.wait` at once where the system tells of changes (inotify,
FSEvents, kqueue; through the watchdog package), else within :data:`LOOK_EVERY`. A waiting process costs next to nothing.
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
"""Seconds between two looks where the system tells of no changes."""
CHECK_EVERY = 1.0
"""Seconds between two checks of anything else: whether the writer lives, and a look all the same."""
log = logging.getLogger("runmirror")
Sizes = tuple[int, int]


class Watch:
    """Watches one log_path. ``close`` it."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._changed = threading.Event()
        self._observer: Any = None
        if isinstance(storage, LocalStorage):
            try:
                self._observe(storage)
            except Exception as error:  # no such service, or its limit is reached
                log.debug("%s is looked at every %g s: %s", storage.url(), LOOK_EVERY, error)

    def _observe(self, storage: LocalStorage) -> None:
        from watchdog.events import FileCreatedEvent, FileModifiedEvent, FileSystemEventHandler
        from watchdog.observers import Observer

        handler = FileSystemEventHandler()
        handler.on_any_event = lambda event: self._changed.set()  # type: ignore[method-assign]
        observer = Observer()
        kinds = [FileModifiedEvent, FileCreatedEvent]  # not "opened": reading the log must not wake its reader
        for folder in (storage.path(), storage.path(layout.OWN)):
            observer.schedule(handler, folder, recursive=False, event_filter=kinds)
        observer.start()
        self._observer = observer

    def sizes(self) -> Sizes:
        """Bytes of the metrics and of the journal now."""
        metrics, journal = self._storage.stat(layout.METRICS), self._storage.stat(layout.JOURNAL)
        return (metrics.size if metrics else 0, journal.size if journal else 0)

    def wait(self, seen: Sizes | None, seconds: float, wake: Callable[[], bool]) -> None:
        """Until the sizes are no longer ``seen`` (None: don't look), ``seconds`` are over, or ``wake()`` holds, which is
        asked about once a second."""
        until = time.monotonic() + seconds
        pause = CHECK_EVERY if self._observer is not None or seen is None else LOOK_EVERY
        while True:
            self._changed.clear()
            if (seen is not None and self.sizes() != seen) or wake():
                return
            left = until - time.monotonic()
            if left <= 0:
                return
            self._changed.wait(min(pause, left))

    def wake(self) -> None:
        """End a :meth:`wait` early."""
        self._changed.set()

    def close(self) -> None:
        """Let go of the system's service."""
        observer, self._observer = self._observer, None
        if observer is not None:
            observer.stop()
            observer.join(5)
