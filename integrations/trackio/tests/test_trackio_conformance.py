"""The contract of a sink, checked from outside: the suite that runmirror ships, on a real Trackio."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.register_assert_rewrite("runmirror.testing.conformance")

from runmirror_trackio import TrackioOptions, TrackioSink  # noqa: E402
from trackio import sqlite_storage  # noqa: E402

from runmirror.sinks.base import Sink  # noqa: E402
from runmirror.testing.conformance import SinkConformance  # noqa: E402


@pytest.fixture(autouse=True)
def _no_other_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trackio's folder is read from the environment once, when it is imported."""
    monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", tmp_path / "trackio")


class TestTrackio(SinkConformance):
    def make_sink(self, folder: Path) -> Sink:
        sqlite_storage.TRACKIO_DIR = folder / "trackio"
        return TrackioSink(TrackioOptions(project="tests"))
