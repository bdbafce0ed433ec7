"""The W&B sink passes the suite that every sink inherits, with a real, unmodified ``wandb`` against the loopback server."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from runmirror.log.rows import Row
from runmirror.sinks.base import RunInfo, Sink
from runmirror.sinks.wandb import WandbOptions, WandbSink
from runmirror.testing.conformance import SinkConformance, a_run
from tests.servers.wandb import WandbServer


@pytest.mark.slow
class TestWandbSink(SinkConformance):
    """A place in the tracker is a project, named after the folder."""

    @pytest.fixture(autouse=True)
    def _place(self, wandb_user: WandbServer) -> None:
        self.server = wandb_user

    def make_sink(self, folder: Path) -> Sink:
        return WandbSink(WandbOptions(project=f"p{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"))

    def deliver(
        self, folder: Path, every: Sequence[Row], run: RunInfo | None = None, end: RunInfo | None = None
    ) -> Sink:
        """As an import does of a run that is over: wandb's process is kept for the next one, and its upload not waited for.
        Runs that go on are in the tests that open the sink themselves."""
        over = replace(run or a_run(), status="finished", end=1_700_000_900.0)
        return super().deliver(folder, every, over, end or over)

    def read_files(self, sink: Sink, run: RunInfo) -> dict[str, bytes] | None:
        project = sink.destination().rpartition("/")[2]
        (held,) = [one for one in self.server.runs.values() if one.project == project]
        return {name: data for name, data in held.files.items() if name not in ("config.yaml", "wandb-summary.json")}
