"""The W&B sink with a real, unmodified ``wandb`` against the loopback server."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from runmirror.exceptions import Refused, Retry
from runmirror.sinks.base import RunInfo, Sink
from runmirror.sinks.wandb import WandbOptions, WandbSink
from runmirror.testing.conformance import SinkConformance, a_run, rows
from tests.servers.wandb import Fault, WandbServer, wandb_server


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[WandbServer]:
    with wandb_server() as held:
        monkeypatch.setenv("WANDB_BASE_URL", held.url)
        monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
        monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "home"))
        yield held


def make(**options: object) -> WandbSink:
    return WandbSink(WandbOptions.model_validate(options))


@pytest.mark.slow
@pytest.mark.usefixtures("server")
class TestWandbSink(SinkConformance):
    def make_sink(self, folder: Path) -> Sink:
        return make(project=f"p{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}")

    def read_files(self, sink: Sink, run: RunInfo) -> dict[str, bytes] | None:
        return None


def test_a_row_is_a_row(server: WandbServer) -> None:
    """``_step`` is the ordinal, ``step`` the training step, ``_timestamp`` the row's time; the state is the run's."""
    sink, every = make(), rows(3)
    every[1] = every[1].emptied("broken")
    assert sink.open(a_run(), None).position == 0
    sink.put(every)
    assert sink.flush(30) == 3
    sink.close(RunInfo("0123456789abcdef", "run", status="failed"), 30)
    held = server.run()
    shown = [(row["_step"], row.get("step"), row["_timestamp"]) for row in held.history]
    assert shown == [(n, None if n == 1 else n, every[n].time) for n in range(3)]
    assert (held.state, held.values()["model"]) == ("failed", {"name": "tiny"})


def test_a_404_moves_nothing(server: WandbServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry that says how many rows are shown; the next open is at 0, though wandb reported no error."""
    monkeypatch.setattr("runmirror.sinks.wandb.SETTLE_SECONDS", 2.0)
    server.faults.append(Fault("file_stream", status=404))
    sink = make()
    sink.open(a_run(), None)
    sink.put(rows(4))
    with pytest.raises(Retry, match="0 of 4 rows"):
        sink.flush(5)
    server.faults.clear()
    assert sink.open(a_run(), None).position == 0
    sink.put(rows(4))
    assert sink.flush(30) == 4
    sink.close(None, 10)
    assert [row["_step"] for row in server.run().history] == [0, 1, 2, 3]


def test_offline_stays_behind(server: WandbServer) -> None:
    """Refused, with the command that delivers the run; no request."""
    with pytest.raises(Refused, match="runmirror import"):
        make(mode="offline").open(a_run(), None)
    assert server.requests == []
