"""The W&B sink passes the suite that every sink inherits, with a real, unmodified ``wandb`` against the loopback server."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from runmirror.sinks.base import RunInfo, Sink
from runmirror.sinks.wandb import WandbOptions, WandbSink
from runmirror.testing.conformance import SinkConformance
from tests.servers.wandb import WandbServer


@pytest.mark.slow
class TestWandbSink(SinkConformance):
    """A place in the tracker is a project, named after the folder."""

    @pytest.fixture(autouse=True)
    def _place(self, wandb_user: WandbServer) -> None:
        self.server = wandb_user

    def make_sink(self, folder: Path) -> Sink:
        return WandbSink(WandbOptions(project=f"p{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"))

    def read_files(self, sink: Sink, run: RunInfo) -> dict[str, bytes] | None:
        project = sink.destination().rpartition("/")[2]
        (held,) = [one for one in self.server.runs.values() if one.project == project]
        return {name: data for name, data in held.files.items() if name not in ("config.yaml", "wandb-summary.json")}
