"""A TensorBoard logdir on gs://: the same bytes as a local one, whatever happened to the process or the machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import runmirror
from runmirror.exceptions import OptionError, Refused
from runmirror.find import ReadOptions
from runmirror.sinks.tensorboard import TensorBoardOptions, TensorBoardSink
from runmirror.storage import storage_from_uri
from tests.cloud import BUCKET, SECRET, URI, Trainer, options, until
from tests.servers.gcs import GcsServer, gcs_server
from tests.sinks.runs import eventful_rows, make_run, make_sink, play, row, the_bytes

LOGDIR = f"gs://{BUCKET}/tb"


@pytest.fixture
def server() -> Iterator[GcsServer]:
    with gcs_server() as found:
        yield found


def sink_to(server: GcsServer, **more: Any) -> TensorBoardSink:
    return TensorBoardSink(TensorBoardOptions(logdir=LOGDIR, storage_options=options(server), **more))


def there(server: GcsServer, run: str = "run") -> dict[str, bytes]:
    prefix = f"{BUCKET}/tb/{run}/"
    names = [name for name in server.names(prefix) if "tfevents" in name]
    return {name.removeprefix(prefix): server.contents(name) or b"" for name in names}


def expected(folder: Path, rows: Any, *ops: Any) -> dict[str, bytes]:
    sink = make_sink(folder)
    opened = sink.open(make_run(), None)
    play(sink, [rows, *ops, make_run(end=2e9, status="finished")])
    return the_bytes(Path(opened.url))


def test_the_objects_are_what_a_local_logdir_holds(server: GcsServer, tmp_path: Path) -> None:
    """Byte for byte; TensorBoard's folder is the URI, and the points read back are the same."""
    rows = eventful_rows()
    sink = sink_to(server)
    opened = sink.open(make_run(), None)
    assert opened.url == f"{LOGDIR}/run"
    assert sink.destination() == LOGDIR
    play(sink, [rows[:9], rows[9:], make_run(end=2e9, status="finished")])
    assert there(server) == expected(tmp_path / "local", rows)
    local = make_sink(tmp_path / "local")
    assert list(sink.read_back(make_run(), None) or ()) == list(local.read_back(make_run(), None) or ())
    assert sink.read_back(make_run("other"), None) is None


@pytest.mark.parametrize("lost", ["nothing", "copy", "home"])
def test_opened_again_it_goes_on(server: GcsServer, tmp_path: Path, lost: str) -> None:
    """Here, here without the local copy, or on another machine: the position is exact, nothing comes twice."""
    rows = eventful_rows()
    sink = sink_to(server)
    sink.open(make_run(), None)
    sink.put(rows[:11])
    sink.close(None, 60)
    home = Path(os.environ["RUNMIRROR_HOME"])
    if lost != "nothing":
        shutil.rmtree(home if lost == "home" else home / "tensorboard")
    sink = sink_to(server)
    assert sink.open(make_run(), "run").position == 11
    play(sink, [rows, make_run(end=2e9, status="finished")])
    assert there(server) == expected(tmp_path / "local", rows)


def test_a_copy_that_is_ahead_is_sent(server: GcsServer, tmp_path: Path) -> None:
    """The process was killed between its file and the spool."""
    rows = eventful_rows()
    sink = sink_to(server)
    sink.open(make_run(), None)
    sink.put(rows[:5])
    sink._writer.put(rows[5:8])  # type: ignore[union-attr]
    sink.close(None, 60)
    sink = sink_to(server)
    assert sink.open(make_run(), None).position == 8
    play(sink, [rows, make_run(end=2e9, status="finished")])
    assert there(server) == expected(tmp_path / "local", rows)


def test_another_machine_went_on(server: GcsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the cloud counts, not the copy that was left behind; the first machine is refused while it still writes."""
    rows = eventful_rows()
    first = sink_to(server)
    first.open(make_run(), None)
    first.put(rows[:4])
    until(lambda: first._cloud and not first._cloud._storage.status().unsynced)  # type: ignore[union-attr]
    first_home = os.environ["RUNMIRROR_HOME"]
    monkeypatch.setenv("RUNMIRROR_HOME", str(tmp_path / "other"))
    second = sink_to(server)
    assert second.open(make_run(), None).position == 4
    second.put(rows[4:9])
    second.close(None, 60)
    monkeypatch.setenv("RUNMIRROR_HOME", first_home)
    first.put([row(4, 4, {"other": 1.0})])

    def refused() -> bool:
        try:
            first.flush(10)
        except Refused:
            return True
        return False

    until(refused)
    first.close(None, 1)
    third = sink_to(server)
    assert third.open(make_run(), None).position == 9
    play(third, [rows, make_run(end=2e9, status="finished")])
    assert there(server) == expected(tmp_path / "local", rows)


def test_a_removed_folder_is_made_anew(server: GcsServer) -> None:
    """Position 0, although the copy is still here; a folder with event files of others is left alone."""
    sink = sink_to(server)
    sink.open(make_run(), None)
    sink.put([row(0, 0, {"a": 1.0})])
    sink.close(None, 60)
    storage = storage_from_uri(f"{LOGDIR}/run", **server.options)
    for entry in list(storage.scan()):
        storage.remove(entry.path)
    server.put(f"{BUCKET}/tb/taken/events.out.tfevents.1", b"theirs")
    sink = sink_to(server)
    assert sink.open(make_run(), "run").position == 0
    sink.close(None, 60)
    opened = sink.open(make_run("taken"), None)
    assert opened.url == f"{LOGDIR}/taken-abcdef"
    sink.close(None, 60)
    assert server.contents(f"{BUCKET}/tb/taken/events.out.tfevents.1") == b"theirs"


def test_a_wrong_logdir_is_an_error() -> None:
    """No bucket, credentials in the URI, options that are no JSON; nothing secret is repeated."""
    for given in ({"logdir": "gs://"}, {"logdir": "gs://u:s3cr3t@bucket/tb"}):
        with pytest.raises(OptionError) as error:
            TensorBoardSink(TensorBoardOptions(**given))
        assert "s3cr3t" not in str(error.value)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_live_killed_and_imported(server: GcsServer, tmp_path: Path) -> None:
    """report_to with a logdir in the same bucket: killed and started again, the objects are what an import makes."""
    code = "for n in range(30): run.log_metrics({'n': n}); time.sleep(0.01)\n"
    given = {"report_to": "tensorboard", "logging_dir": LOGDIR, "resume": True}
    with Trainer(server, tmp_path / "home", code + "go()", **given) as trainer:
        trainer.line()
        until(lambda: there(server))
        trainer.kill()
    with Trainer(server, tmp_path / "home", code + "run.finish(); print(run.status().sinks)", **given) as trainer:
        assert "delivered" in trainer.line()
        code_, err = trainer.end()
        assert code_ == 0, err
    assert SECRET not in err
    read = ReadOptions(storage_options=server.options)
    sink = {"logdir": LOGDIR, "storage_options": server.options}
    result = runmirror.verify([URI], "tensorboard", sink, read=read)
    assert result.ok, result.runs
    assert result.totals()["matching"] == 60
    assert runmirror.import_runs([URI], "tensorboard", {"logdir": str(tmp_path / "tb")}, read=read).ok
    live, fresh = there(server), the_bytes(tmp_path / "tb/run")
    assert live.keys() == fresh.keys()
