"""Runs that are written into a cloud: start, crash, resume elsewhere, an outage, the end of the process."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import runmirror
from runmirror.exceptions import LogBusyError, LogError, LogFinishedError
from runmirror.log.status import read_journal
from runmirror.run import Run
from runmirror.storage import CloudStorage, push_spool, spools, storage_from_uri
from tests.cloud import BUCKET, SECRET, URI, Trainer, options, rows_of, until
from tests.servers.gcs import GcsServer, gcs_server

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals")


@pytest.fixture
def server() -> Iterator[GcsServer]:
    with gcs_server() as found:
        yield found


def start(server: GcsServer, uri: str = URI, **more: Any) -> Run:
    return runmirror.start(uri, {"lr": 1}, **{"storage_options": options(server), "code": False, **more})


def test_a_run_is_written_as_a_local_one(server: GcsServer, tmp_path: Path) -> None:
    """The same files with the same content, but for times and ids; a row is readable here before it is uploaded."""
    with runmirror.start(tmp_path / "local", {"lr": 1}, code=False) as local:
        local.log_metrics({"loss": 0.5})
        local.log_checkpoint("one", state_path="s/1")
    with start(server, storage_options=options(server, interval=60)) as run:
        run.log_metrics({"loss": 0.5})
        assert b'"loss":0.5' in run.storage.read("metrics.jsonl")
        assert run.log_path == run.url == URI
        run.log_checkpoint("one", state_path="s/1")
        until(lambda: server.contents(f"{BUCKET}/exp/run/checkpoints.jsonl"))  # a checkpoint is not waited for
    there = {name.removeprefix(f"{BUCKET}/exp/run/") for name in server.names(f"{BUCKET}/exp/run/")}
    here = {
        path.relative_to(tmp_path / "local").as_posix() for path in (tmp_path / "local").rglob("*") if path.is_file()
    }
    assert there == here - {".runmirror/writer.lock"}
    assert server.contents(f"{BUCKET}/exp/run/config.json") == (tmp_path / "local/config.json").read_bytes()
    assert [row["loss"] for row in rows_of(server)] == [0.5]
    assert server.stored(f"{BUCKET}/exp/run/metrics.jsonl").content_type == "application/x-ndjson"
    assert spools() == []


@pytest.mark.slow
def test_status_tells_how_the_uploads_are_doing(server: GcsServer) -> None:
    """Bytes that wait, when the last upload was, the last error; None once all is up."""
    run = start(server)
    run.log_metrics({"loss": 0.5})
    until(lambda: run.status().cloud and run.status().cloud.unsynced == 0)  # type: ignore[union-attr]
    cloud = run.status().cloud
    assert cloud is not None
    assert cloud.last_upload is not None
    assert abs(cloud.last_upload - time.time()) < 60
    assert cloud.error == ""
    server.faults.down = True
    run.log_metrics({"loss": 0.25})
    until(lambda: run.status().cloud.error)  # type: ignore[union-attr]
    assert run.status().cloud.unsynced > 0  # type: ignore[union-attr]
    server.faults.down = False
    size = run.status().bytes
    run.finish()
    assert run.status().cloud is None
    assert run.status().bytes == size == len(server.contents(f"{BUCKET}/exp/run/metrics.jsonl") or b"")


def test_options_are_written_nowhere(server: GcsServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither given to start nor inside a LogConfig that is part of the config: not in the log_path, the state, the spool or
    what is logged and printed."""
    log = runmirror.LogConfig(log_path=URI, storage_options=options(server), report_to="dummy")
    with caplog.at_level(logging.DEBUG, "runmirror"):
        run = runmirror.start(config={"log": log}, report_to={"dummy": {"folder": str(tmp_path / "dummy")}}, code=False)
        run.log_metrics({"loss": 0.5})
        repr(run), repr(log), repr(run.storage)
        left = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
        command = run.live._children[0].finish_command if run.live else ""
        run.finish()
    left += [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    left += [server.contents(name) or b"" for name in server.names()]
    assert len(left) > 10
    assert not any(SECRET.encode() in data for data in left)
    assert SECRET not in caplog.text + repr(log) + command
    assert "--storage-option 'default_location=***'" in command


def test_the_second_writer_here_is_refused(server: GcsServer) -> None:
    """LogBusyError that names the first; one that finds the log_path not empty says that first, and both leave it alone."""
    with start(server) as run:
        run.log_metrics({"a": 1})
        with pytest.raises(LogBusyError, match="is being written by process"):
            storage_from_uri(URI, **options(server)).claim()  # type: ignore[attr-defined]
        with pytest.raises(LogError, match="is not empty"):
            start(server, resume=False)
        run.log_metrics({"a": 2})
    with pytest.raises(LogFinishedError, match="resume=True"):
        start(server)
    assert [row["a"] for row in rows_of(server)] == [1, 2]


@pytest.mark.slow
def test_a_refused_start_takes_nothing_over(server: GcsServer, tmp_path: Path) -> None:
    """resume=False on another machine ends in an error, and the writer goes on."""
    other = Trainer(
        server, tmp_path / "other", "run.log_metrics({'a': 1}); go(); run.log_metrics({'a': 2}); run.finish()"
    )
    assert other.line() == "ready"
    until(lambda: len(rows_of(server)) == 1)
    with pytest.raises(LogError, match="is not empty"):
        start(server, resume=False)
    other.say()
    assert other.end()[0] == 0
    assert [row["a"] for row in rows_of(server)] == [1, 2]
    assert read_journal(storage_from_uri(URI, **server.options))[-1].status == "finished"


@pytest.mark.slow
def test_killed_and_started_again_it_is_exact(server: GcsServer, tmp_path: Path) -> None:
    """Five SIGKILLs under errors and lost answers: every row that returned is there once, in order."""
    server.faults.error_rate, server.faults.lost_rate = 0.03, 0.05
    code = "n = 0\nwhile True:\n    run.log_metrics({'n': n}); print(n, flush=True); n += 1; time.sleep(0.004)\n"
    told: list[tuple[int, int]] = []
    for life in range(5):
        trainer = Trainer(server, tmp_path / "home", code)
        told += [(life, int(trainer.line())) for _ in range(25 + 10 * life)]
        trainer.kill()
    for info in spools_of(tmp_path / "home"):
        push_spool(info, options(server))
    lives, life = [], -1
    for row in rows_of(server):
        life += row["n"] == 0
        lives.append((life, row["n"]))
    assert set(told) <= set(lives)
    assert len(set(lives)) == len(lives)
    assert [row["step"] for row in rows_of(server)] == list(range(len(lives)))


def spools_of(home: Path) -> Any:
    os.environ["RUNMIRROR_HOME"] = str(home)
    return spools()


@pytest.mark.slow
def test_another_machine_goes_on(server: GcsServer, tmp_path: Path) -> None:
    """The same run id, the next step, one object; the first machine is fenced, says so, and keeps what it has."""
    first = Trainer(server, tmp_path / "one", "run.log_metrics({'a': 0}); print(run.run_id, flush=True); go()\n"
                    "for n in range(3): run.log_metrics({'lost': n})\n"
                    "while not run.status().cloud.fenced: time.sleep(0.05)\n"
                    "run.log_metrics({'lost': 9}); go(); run.finish('killed')\n")  # fmt: skip
    run_id = first.line()
    assert first.line() == "ready"
    until(lambda: len(rows_of(server)) == 1)
    with start(server) as run:
        assert run.run_id == run_id
        run.log_metrics({"a": 1})
        first.say()
        assert first.line() == "ready"
        run.log_metrics({"a": 2})
    first.say()
    code, err = first.end()
    assert code == 0
    assert "took" in err or "taken over" in err
    assert [(row["step"], row["a"]) for row in rows_of(server)] == [(0, 0), (1, 1), (2, 2)]
    assert [entry.event for entry in read_journal(storage_from_uri(URI, **server.options))] == [
        "started", "resumed", "finished"
    ]  # fmt: skip
    (left,) = spools_of(tmp_path / "one")
    assert left.taken_by
    assert left.unsynced > 0


@pytest.mark.slow
def test_a_network_that_is_down_all_the_time(server: GcsServer, caplog: pytest.LogCaptureFixture) -> None:
    """start, rows, checkpoints and finish work; when it is back, a push brings everything, byte for byte."""
    server.faults.down = True
    run = start(server)
    for n in range(20):
        run.log_metrics({"n": n})
    run.log_checkpoint("c", state_path="s")
    assert run.latest_checkpoint().state_path == "s"  # type: ignore[union-attr]
    metrics = run.storage.read("metrics.jsonl")
    run.finish(deadline=1.0)
    assert "runmirror push" in caplog.text
    assert run.status().cloud.unsynced > 0  # type: ignore[union-attr]
    server.faults.down = False
    (info,) = spools()
    assert push_spool(info, options(server)).unsynced == 0
    assert server.contents(f"{BUCKET}/exp/run/metrics.jsonl") == metrics
    assert read_journal(storage_from_uri(URI, **server.options))[-1].status == "finished"
    assert spools() == []


@pytest.mark.slow
@pytest.mark.parametrize("how", ["return", "raise", "sigterm"])
def test_the_end_of_the_process_uploads(server: GcsServer, tmp_path: Path, how: str) -> None:
    """Without finish: at the end of the interpreter, after an exception, and at SIGTERM; with the status each means."""
    end = {"return": "", "raise": "raise ValueError('no')", "sigterm": "go()"}[how]
    given = {"storage_options": options(server, interval=60)}
    trainer = Trainer(server, tmp_path / "home", "for n in range(5): run.log_metrics({'n': n})\n" + end, **given)
    if how == "sigterm":
        assert trainer.line() == "ready"
        trainer.process.send_signal(signal.SIGTERM)
    code, err = trainer.end()
    assert code == {"return": 0, "raise": 1, "sigterm": -signal.SIGTERM}[how], err
    assert [row["n"] for row in rows_of(server)] == [0, 1, 2, 3, 4]
    status = {"return": "finished", "raise": "failed", "sigterm": "killed"}[how]
    assert read_journal(storage_from_uri(URI, **server.options))[-1].status == status
    assert ("Traceback" in err) == (how == "raise")


def test_leftovers_of_other_runs_are_named(server: GcsServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One warning, at the next start on this machine, that says what to do."""
    other = Trainer(server, Path(os.environ["RUNMIRROR_HOME"]), "run.log_metrics({'a': 1}); go()", uri=f"{URI}-2",
                    storage_options=options(server, interval=60))  # fmt: skip
    assert other.line() == "ready"
    other.kill()
    with start(server):
        pass
    assert [text for text in caplog.messages if "runmirror push" in text and f"{URI}-2" in text]


@pytest.mark.slow
def test_started_again_in_one_process(server: GcsServer, caplog: pytest.LogCaptureFixture) -> None:
    """The first Run ends, the log goes on; also while the network is down."""
    first = start(server)
    first.log_metrics({"n": 0})
    server.faults.down = True
    second = start(server)
    first.log_metrics({"n": -1})
    second.log_metrics({"n": 1})
    server.faults.down = False
    second.finish()
    assert [row["n"] for row in rows_of(server)] == [0, 1]
    assert "was started again in this process" in caplog.text


@pytest.mark.slow
def test_rows_cost_no_request(server: GcsServer) -> None:
    """1,000 rows between two uploads: nothing is asked of the store, and fsync=True syncs the spool alone."""
    with start(server, storage_options=options(server, interval=60), fsync=True) as run:
        until(lambda: run.status().cloud.unsynced == 0)  # type: ignore[union-attr]
        run.log_metrics({"n": 0})
        time.sleep(0.3)
        server.reset_counters()
        for n in range(200):
            run.log_metrics({"n": n})
        assert dict(server.calls) == {}
    assert len(rows_of(server)) == 201


def test_any_scheme_of_fsspec() -> None:
    """memory://, as a store that can't extend objects: the log is whole when the run ends."""
    uri = f"memory://bucket-{time.time_ns()}/run"
    with runmirror.start(uri, code=False, storage_options={"upload_interval": 0.05}) as run:
        for n in range(50):
            run.log_metrics({"n": n})
    assert runmirror.read_run(uri).metrics(["n"])["n"] == list(range(50))
    assert isinstance(run.storage, CloudStorage)
