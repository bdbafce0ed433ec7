"""Which files of a run a mirror has still to send."""

from __future__ import annotations

import time
from collections.abc import Mapping

from runmirror.log.layout import ROLLOUT_KINDS, Kind
from runmirror.log.sources import LogFile, Source, warn_outside
from runmirror.sinks.base import Capabilities, SinkOptions

LISTING_SHARE = 20.0
"""Rollouts are looked for again after so many times what that took."""


class DueFiles:
    """The files of a run that a sink wants.

    Attributes:
        left: rollouts were not looked for at the last look; ask again with ``every`` before the end.
    """

    def __init__(self, source: Source, capabilities: Capabilities, options: SinkOptions) -> None:
        self._source = source
        wanted = options.records if options.records is not None else capabilities.default_records
        self._derives = capabilities.derives
        self._kinds: frozenset[Kind] = frozenset(wanted & capabilities.records) | capabilities.derives
        self._next_listing = 0.0
        self.left = False

    def look_again(self) -> None:
        """Look for rollouts next time in any case: not all that were found could be sent."""
        self._next_listing = 0.0

    def due(self, sent: Mapping[str, str], *, every: bool = False) -> list[LogFile]:
        """Those that were not sent in their present version, path -> version. Rollouts of a long run are not looked for
        every time, but for ``every``."""
        kinds = self._kinds
        began = time.monotonic()
        self.left = not every and bool(kinds & ROLLOUT_KINDS) and began < self._next_listing
        if self.left:
            kinds -= ROLLOUT_KINDS
        found = []
        for file in self._source.files(kinds):
            if file.outside:
                warn_outside(file.outside)
            else:
                found.append(file)
        if kinds & ROLLOUT_KINDS:
            from runmirror.reports.budget import within_budget  # only what sends rollouts waits for it

            self._next_listing = began + LISTING_SHARE * (time.monotonic() - began)
            ended = self._source.info().status != "running"
            found = within_budget(found, sent, ended=ended, free=self._derives)
        return [file for file in found if sent.get(file.path) != file.version]
