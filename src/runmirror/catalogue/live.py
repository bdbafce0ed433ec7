"""The findings of a run that is being written, worked out when somebody asks.

Guarantees: nothing here raises, nothing is done before the first question, and the writer's lock is not taken.
"""

from __future__ import annotations

import logging
import threading

from runmirror.catalogue.entries import Catalogue, shipped
from runmirror.catalogue.findings import Finding
from runmirror.catalogue.runs import RunWatch
from runmirror.exceptions import CatalogueError
from runmirror.log.runlog import RunLog
from runmirror.storage import Storage

log = logging.getLogger("runmirror")


class LiveHealth:
    """The health of the run in a log_path, read on from question to question.

    Args:
        storage: the log_path.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._lock = threading.Lock()
        self._watch: RunWatch | None = None

    def findings(self) -> tuple[Finding, ...]:
        """What is wrong by now; nothing when the log can't be read."""
        with self._lock:
            try:
                if self._watch is None:
                    self._watch = RunWatch(lambda: RunLog(self._storage), usable())
                return (*self._watch.read(), *self._watch.mirrors("running"))
            except Exception:
                log.debug("checking %s", self._storage.url(), exc_info=True)
                return ()


def usable() -> Catalogue:
    """The catalogue with the user's files, or, with a warning, without them when one can't be read."""
    try:
        return Catalogue.load()
    except CatalogueError as error:
        log.warning("%s; it is left out", error)
        return shipped()
