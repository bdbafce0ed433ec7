"""CloudStorage against a Google Cloud Storage with faults: what is uploaded, when, in which order, and who may."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runmirror.exceptions import LogBusyError, LogError
from runmirror.storage import CloudStorage, LocalStorage, TakenError, push_spool, remote, spools, upload, uploader
from runmirror.storage import cloud as cloud_module
from tests.servers.gcs import GcsServer, gcs_server

ROOT = "runs-bucket/exp/1"
URI = f"gs://{ROOT}"
METRICS, CHECKPOINTS = "metrics.jsonl", "checkpoints.jsonl"


@pytest.fixture
def server() -> Iterator[GcsServer]:
    with gcs_server() as server:
        yield server


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No distance between two writes of one object, for the server has no limit here; and short pauses."""
    monkeypatch.setattr(upload, "GAP", 0.0)
    monkeypatch.setattr(uploader, "HURRY", 0.1)
    monkeypatch.setattr(uploader, "FIRST", 0.1)
    monkeypatch.setattr(remote, "PAUSES", (0.02, 0.05, 0.1))


Open = Callable[..., CloudStorage]


@pytest.fixture
def opened(server: GcsServer, quick: None) -> Iterator[Open]:
    """Makes storages that are closed at the end."""
    made: list[CloudStorage] = []

    def make(interval: float = 0.02, **more: Any) -> CloudStorage:
        made.append(CloudStorage(URI, {**server.options, "upload_interval": interval, **more}))
        return made[-1]

    yield make
    server.faults.down = False
    for storage in made:
        storage.close(5.0)


def wait(until: Callable[[], object], seconds: float = 30) -> None:
    """Return as soon as ``until()`` holds, or after ``seconds``: the test's own assert then says what is missing."""
    deadline = time.monotonic() + seconds
    while not until() and time.monotonic() < deadline:
        time.sleep(0.01)


def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """From here on, this process is another machine to runmirror."""
    monkeypatch.setenv("RUNMIRROR_HOME", str(tmp_path / name))


def row(number: int, size: int = 100) -> bytes:
    return json.dumps({"step": number, "text": "x" * size}).encode() + b"\n"


# -- uploading


def test_rows_are_uploaded_without_being_asked(server: GcsServer, opened: Open) -> None:
    """The object is the log soon after, and the status says so."""
    storage = opened()
    storage.append(METRICS, row(1))
    wait(lambda: server.contents(f"{ROOT}/{METRICS}") == row(1))
    assert server.contents(f"{ROOT}/{METRICS}") == row(1)
    wait(lambda: (status := storage.status()) is not None and status.last_upload is not None)
    status = storage.status()
    assert status is not None
    assert (status.unsynced, status.pending_files, status.error, status.fenced) == (0, 0, "", "")
    assert status.last_upload == pytest.approx(time.time(), abs=30)


def test_a_growing_file_is_composed_from_its_new_bytes(server: GcsServer, opened: Open) -> None:
    """Above 256 KiB only the tail goes up; the object has the right content, type, no cache, and no part is left."""
    storage = opened(interval=600)
    pieces = [os.urandom(200 << 10) for _ in range(5)]
    for piece in pieces:
        storage.append(METRICS, piece)
        storage.flush()
    assert server.contents(f"{ROOT}/{METRICS}") == b"".join(pieces)
    assert server.bytes_up < 1.3 * sum(map(len, pieces))
    assert server.bytes_down == 0
    storage.close()
    stored = server.stored(f"{ROOT}/{METRICS}")
    assert (stored.content_type, stored.cache_control) == ("application/x-ndjson", "no-cache")
    assert server.names() == [f"{ROOT}/{METRICS}"]


def test_large_content_goes_up_in_parts(server: GcsServer, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole file appears at once, composed of parts; a long tail, as an outage leaves, in steps. No part stays."""
    from runmirror.storage import gcs

    monkeypatch.setattr(gcs, "WHOLE", 100_000)
    report, pieces = os.urandom(3_500_001), [os.urandom(300 << 10), os.urandom(950_000)]
    storage = opened(interval=600)
    storage.claim()
    storage.write("train_iteration_000001.html", report)
    for piece in pieces:
        storage.append(METRICS, piece)
        storage.flush()
    storage.close()
    assert server.contents(f"{ROOT}/train_iteration_000001.html") == report
    assert server.stored(f"{ROOT}/train_iteration_000001.html").content_type == "text/html; charset=utf-8"
    assert len(server.history[f"{ROOT}/train_iteration_000001.html"]) == 1
    assert server.contents(f"{ROOT}/{METRICS}") == b"".join(pieces)
    assert server.names() == [f"{ROOT}/{METRICS}", f"{ROOT}/train_iteration_000001.html"]


def test_content_types_make_reports_open_in_a_browser(server: GcsServer, opened: Open) -> None:
    """By the name, claimed or not; what is given wins."""
    with opened() as storage:
        storage.write("by-name.html", b"")
        storage.claim()
        storage.write("train_iteration_000001.html", b"<p>")
        storage.write("config.json", b"{}")
        storage.write("code.diff", b"")
    kinds = {name.rpartition("/")[2]: server.stored(name).content_type for name in server.names()}
    assert kinds == {
        "by-name.html": "text/html; charset=utf-8",
        "train_iteration_000001.html": "text/html; charset=utf-8",
        "config.json": "application/json",
        "code.diff": "text/plain; charset=utf-8",
    }
    assert all(server.stored(name).cache_control == "no-cache" for name in server.names())


def test_files_come_before_the_rows_and_checkpoints_last(server: GcsServer, opened: Open) -> None:
    """However they were written, a reader never sees a row whose report is missing, nor a checkpoint before its row."""
    storage = opened(interval=600)
    storage.claim()
    storage.append(CHECKPOINTS, b"{}\n")
    storage.append(METRICS, row(1))
    storage.write("train_iteration_000001.html", b"<p>")
    storage.flush()
    order = sorted(server.history, key=lambda name: server.history[name][-1][0])
    names = [name.rpartition("/")[2] for name in order if not name.endswith("writer.json")]
    assert names == ["train_iteration_000001.html", METRICS, CHECKPOINTS]


def test_the_journal_keeps_its_place_among_the_rows(server: GcsServer, opened: Open) -> None:
    """Whenever its last line is there, so are the rows before it; a row after a line is never there without the line."""
    journal = ".runmirror/journal.jsonl"
    storage = opened(interval=600)
    storage.append(METRICS, row(0))
    storage.append(journal, b"resumed\n")
    storage.append(METRICS, row(1))
    storage.append(CHECKPOINTS, b"{}\n")
    storage.append(journal, b"finished\n")
    storage.flush()
    made = [
        (when, name.removeprefix(f"{ROOT}/"), stored.data)
        for name, versions in server.history.items()
        for when, stored in versions
        if not name.endswith("writer.json")
    ]
    assert [(name, data) for _, name, data in sorted(made)] == [
        (METRICS, row(0)),
        (journal, b"resumed\n"),
        (METRICS, row(0) + row(1)),
        (CHECKPOINTS, b"{}\n"),
        (journal, b"resumed\nfinished\n"),
    ]


def test_nothing_to_do_costs_nothing(server: GcsServer, opened: Open) -> None:
    """After the last row no request is made, whatever the interval; nor by reading on the writer's machine."""
    storage = opened()
    storage.append(METRICS, row(1))
    storage.flush()
    server.reset_counters()
    other = opened()
    for one in (storage, other):
        assert one.read(METRICS) == row(1)
        assert one.list_dir("") == [".runmirror", METRICS]
        assert one.exists(METRICS)
        assert not one.exists("none")
    time.sleep(0.2)
    storage.flush()
    assert sum(server.calls.values()) == 0


def test_the_interval_grows_with_the_log(server: GcsServer, opened: Open) -> None:
    """10 s up to 2 MiB, 5 s per MiB above, 60 s at most; other stores, to which all is sent again, up to 300 s."""
    storage = opened()
    storage.append(METRICS, b"")
    thread = storage._uploader
    assert thread is not None
    thread._interval = None
    spacing = []
    for mib in (0, 1, 4, 10, 40):
        thread.uploads.ends = {METRICS: mib << 20}
        spacing.append(thread._spacing())
    assert spacing == [10.0, 10.0, 20.0, 50.0, 60.0]
    assert thread.uploads.extends
    thread.uploads.extends = False
    assert thread._spacing() == uploader.LONGEST_WHOLE
    thread.uploads.ends = {METRICS: 0}


def test_every_reader_sees_whole_lines_only(server: GcsServer, opened: Open) -> None:
    """Every version that ever was is a prefix of the log that ends with a line."""
    rng = random.Random(1)
    storage = opened(interval=0.0)
    written = b""
    for number in range(300):
        line = row(number, rng.randrange(4000))
        storage.append(METRICS, line)
        written += line
        time.sleep(0.001)
    storage.close()
    versions = [stored.data for _, stored in server.history[f"{ROOT}/{METRICS}"]]
    assert len(versions) > 3
    assert all(written.startswith(data) and data[-1:] in (b"\n", b"") for data in versions)
    assert versions[-1] == written


# -- faults


def test_damaged_new_bytes_never_get_into_the_object(
    server: GcsServer, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that arrived damaged is not composed; every version of the object is a prefix of the log."""
    insert = server.insert
    storage = opened(interval=600)
    big = row(0, 300 << 10)
    storage.append(METRICS, big)
    storage.flush()
    damage = [True]

    def damaged(name: str, query: dict[str, str], data: bytes, resource: dict[str, Any]) -> Any:
        if "/parts/" in name and damage:
            damage.pop()
            data = b"?" + data[1:]
        return insert(name, query, data, resource)

    monkeypatch.setattr(server, "insert", damaged)
    storage.append(METRICS, row(1))
    storage.flush()
    assert not damage
    assert [stored.data for _, stored in server.history[f"{ROOT}/{METRICS}"]] == [big, big + row(1)]


@pytest.mark.parametrize("size", [1000, 60_000])
def test_faults_neither_lose_nor_double_a_row(server: GcsServer, opened: Open, size: int) -> None:
    """10 % errors and 15 % lost answers: exact content, small (whole) and large (composed)."""
    server.faults.error_rate, server.faults.lost_rate = 0.10, 0.15
    storage = opened(interval=600)
    written = []
    for number in range(25):
        written.append(row(number, size))
        storage.append(METRICS, written[-1])
        storage.write(f"train_iteration_{number:06}.html", b"<p>%d" % number)
        storage.flush(60)
    server.faults.error_rate = server.faults.lost_rate = 0.0
    storage.close()
    assert server.contents(f"{ROOT}/{METRICS}") == b"".join(written)
    assert server.contents(f"{ROOT}/train_iteration_000024.html") == b"<p>24"
    assert len(server.names(f"{ROOT}/train_")) == 25


@pytest.mark.parametrize("operation", ["insert", "compose"])
def test_a_lost_answer_is_recognised_as_ones_own(server: GcsServer, opened: Open, operation: str) -> None:
    """Done, answer lost, tried again, refused: the row is there once, and nobody is accused."""
    storage = opened(interval=600)
    big = row(0, 300 << 10)
    storage.append(METRICS, big)
    storage.flush()
    server.faults.next = {operation: ["lost"]}
    storage.append(METRICS, row(1))
    storage.flush()
    assert server.contents(f"{ROOT}/{METRICS}") == big + row(1)


@pytest.mark.slow
def test_more_than_one_object_a_second_is_never_asked_for(server: GcsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three flushes in a row keep the limit by themselves."""
    server.faults.one_per_second = True
    with CloudStorage(URI, server.options) as storage:
        for number in range(3):
            storage.append(METRICS, row(number))
            storage.flush()
    assert server.limited == 0
    assert server.contents(f"{ROOT}/{METRICS}") == row(0) + row(1) + row(2)


def test_an_outage_is_said_once_and_made_up_for(
    server: GcsServer, opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows of the outage are there after it, in order; two lines of log; the status names the error meanwhile."""
    storage = opened(interval=0.05)
    storage.append(METRICS, row(0))
    storage.flush()
    server.faults.down = True
    for number in range(1, 50):
        storage.append(METRICS, row(number))
    wait(lambda: (found := storage.status()) is not None and found.error)
    status = storage.status()
    assert status is not None
    assert status.unsynced == sum(len(row(number)) for number in range(1, 50))
    assert status.error
    with pytest.raises(TimeoutError, match=f"{status.unsynced} bytes"):
        storage.flush(0.05)
    server.faults.down = False
    storage.flush(60)
    assert server.contents(f"{ROOT}/{METRICS}") == b"".join(map(row, range(50)))
    assert storage.status().error == ""  # type: ignore[union-attr]
    said = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert [("can't be uploaded now" in text, "uploaded again" in text) for text in said] == [
        (True, False),
        (False, True),
    ]


def test_a_store_that_is_dead_from_the_start_is_caught_up_with(
    server: GcsServer, opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """claim, rows and files work; reading one's own too; all is uploaded when the store comes back."""
    server.faults.down = True
    storage = opened(interval=0.05)
    storage.claim((METRICS, CHECKPOINTS))
    assert "out of reach" in caplog.text
    storage.write("config.json", b"{}")
    for number in range(20):
        storage.append(METRICS, row(number))
    assert storage.read("config.json") == b"{}"
    assert storage.stat("none") is None
    assert opened().read(METRICS) == b"".join(map(row, range(20)))
    server.faults.down = False
    storage.flush(60)
    assert server.contents(f"{ROOT}/{METRICS}") == b"".join(map(row, range(20)))
    assert server.contents(f"{ROOT}/config.json") == b"{}"


def test_a_store_that_refuses_is_an_error_at_once(server: GcsServer, opened: Open) -> None:
    """PermissionError from claim: wrong credentials are told before training begins; the log_path is free again."""
    server.faults.next = {"list": ["403", "403"]}
    storage = opened()
    with pytest.raises(PermissionError, match="access refused"):
        storage.claim()
    with pytest.raises(PermissionError):
        opened().claim()
    assert not storage.claimed
    storage.claim()


def test_bytes_that_arrive_damaged_are_sent_again(
    server: GcsServer, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CRC that differs is noticed in the answer; the object is exact in the end."""
    insert = server.insert
    damage = [True]

    def damaged(name: str, query: dict[str, str], data: bytes, resource: dict[str, Any]) -> Any:
        if name.endswith(METRICS) and damage:
            damage.pop()
            data = b"?" + data[1:]
        return insert(name, query, data, resource)

    monkeypatch.setattr(server, "insert", damaged)
    storage = opened()
    storage.append(METRICS, row(1))
    storage.flush()
    assert not damage
    assert server.contents(f"{ROOT}/{METRICS}") == row(1)


def test_one_refused_file_does_not_hold_up_the_rows(
    server: GcsServer, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error is in the status, and it is tried again."""
    put = server.insert

    def picky(name: str, query: dict[str, str], data: bytes, resource: dict[str, Any]) -> Any:
        from tests.servers.gcs import Refusal

        if name.endswith("bad.html") and refusing:
            raise Refusal(400, "no such file, please")
        return put(name, query, data, resource)

    refusing = [True]
    monkeypatch.setattr(server, "insert", picky)
    storage = opened()
    storage.claim()
    storage.write("bad.html", b"<p>")
    storage.append(METRICS, row(1))
    wait(lambda: server.contents(f"{ROOT}/{METRICS}"))
    assert server.contents(f"{ROOT}/{METRICS}") == row(1)
    wait(lambda: "bad.html" in (storage.status().error or ""))  # type: ignore[union-attr]
    assert "bad.html" in storage.status().error  # type: ignore[union-attr]
    refusing.clear()
    storage.flush(30)
    assert server.contents(f"{ROOT}/bad.html") == b"<p>"


# -- one writer


def test_a_second_writer_on_this_machine_is_refused(server: GcsServer, opened: Open) -> None:
    """LogBusyError that names the process; free again after close."""
    first, second = opened(), opened()
    first.claim()
    with pytest.raises(LogBusyError, match=f"process {os.getpid()} on host {socket.gethostname()}"):
        second.append(METRICS, row(1))
    first.close()
    second.append(METRICS, row(1))


def test_a_writer_elsewhere_takes_over_and_fences_the_first(
    server: GcsServer, opened: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What the first had uploaded stays; what it writes later never arrives, is kept, and is said, once."""
    first = opened(interval=600)
    first.claim((METRICS, CHECKPOINTS))
    first.append(METRICS, row(0))
    first.flush()
    elsewhere(monkeypatch, tmp_path, "other machine")
    second = opened(interval=600)
    second.claim((METRICS, CHECKPOINTS))
    assert f"taken over from process {os.getpid()}" in caplog.text
    second.append(METRICS, row(10))
    second.flush()
    first.append(METRICS, row(1))
    first.append(CHECKPOINTS, b'{"name": "late"}\n')
    first.write("config.json", b"late")
    with pytest.raises(LogError, match="was taken over by process"):
        first.flush()
    first.append(METRICS, row(2))
    status = first.status()
    assert status is not None
    assert status.fenced.startswith("process ")
    first.close()
    second.append(METRICS, row(11))
    second.close()
    assert server.contents(f"{ROOT}/{METRICS}") == row(0) + row(10) + row(11)
    assert not server.contents(f"{ROOT}/{CHECKPOINTS}")
    kept = [info for info in _spools_of(tmp_path / "home", monkeypatch) if info.taken_by]
    assert len(kept) == 1
    assert kept[0].unsynced == len(row(1) + row(2) + b'{"name": "late"}\n') + len(b"late")
    assert LocalStorage(kept[0].folder / "rows/0").read(METRICS) == row(0) + row(1) + row(2)
    with pytest.raises(TakenError, match="never uploaded"):
        push_spool(kept[0], server.options)
    assert sum("was taken over by" in record.message for record in caplog.records if record.levelname == "ERROR") == 1


def _spools_of(home: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setenv("RUNMIRROR_HOME", str(home))
    return spools()


def test_a_resume_elsewhere_downloads_nothing(
    server: GcsServer, opened: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The head stays where it is; positions are those of the object; the head can be read all the same."""
    head = row(0, 400 << 10)
    with opened() as first:
        first.append(METRICS, head)
    elsewhere(monkeypatch, tmp_path, "other machine")
    server.reset_counters()
    second = opened(interval=600)
    second.append(METRICS, row(1))
    second.flush()
    assert server.bytes_down == 0
    assert server.bytes_up < 2000
    assert server.contents(f"{ROOT}/{METRICS}") == head + row(1)
    for reader in (second, opened()):
        found = reader.stat(METRICS)
        assert found is not None
        assert found.size == len(head + row(1))
        assert reader.read_range(METRICS, len(head)) == row(1)
        assert reader.read_range(METRICS, len(head) - 2, 4) == head[-2:] + row(1)[:2]
        assert reader.read(METRICS) == head + row(1)
    server.reset_counters()
    assert reader.read_range(METRICS, 100, 50) == head[100:150]
    assert sum(server.calls.values()) == 0


def test_rows_added_while_being_fenced_stay_in_front(
    server: GcsServer, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program put its row in after we looked: ours goes behind it, and positions follow."""
    storage = opened(interval=600)
    storage.append(METRICS, row(0))
    storage.flush()
    server.put(f"{ROOT}/{METRICS}", row(0) + row(99))
    storage.append(METRICS, row(1))
    storage.flush()
    assert server.contents(f"{ROOT}/{METRICS}") == row(0) + row(99) + row(1)
    assert storage.read(METRICS) == row(0) + row(99) + row(1)
    assert opened().read_range(METRICS, len(row(0) + row(99))) == row(1)


def test_an_object_that_was_removed_is_written_anew(
    server: GcsServer, opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody deleted it while it was written: the spool still has it all."""
    storage = opened(interval=600)
    storage.append(METRICS, row(0))
    storage.flush()
    server.delete(f"{ROOT}/{METRICS}", {})
    storage.append(METRICS, row(1))
    storage.flush()
    assert server.contents(f"{ROOT}/{METRICS}") == row(0) + row(1)


def test_a_file_can_be_cut(server: GcsServer, opened: Open) -> None:
    """A torn foreign tail: cut it, append behind; the object follows."""
    server.put(f"{ROOT}/{METRICS}", row(0) + b'{"torn')
    storage = opened()
    storage.claim((METRICS,))
    storage.truncate(METRICS, len(row(0)))
    storage.append(METRICS, row(1))
    storage.flush()
    assert server.contents(f"{ROOT}/{METRICS}") == row(0) + row(1)


# -- the spool


def abandon(storage: CloudStorage) -> None:
    """Leave a storage as a killed process would: thread and lock gone, nothing tidied up."""
    assert storage._uploader is not None
    assert storage._uploader.stop()
    assert storage._file_lock is not None
    storage._file_lock.release()
    (info,) = spools()
    record = info.folder / "spool.json"
    record.write_text(record.read_text().replace(f'"pid":{os.getpid()}', '"pid":4194305'))  # more than there can be
    storage._reset()


def test_a_left_spool_is_uploaded_by_the_next_writer(server: GcsServer, opened: Open) -> None:
    """With its rows and files, then the new ones; nothing twice."""
    first = opened(interval=600)
    first.claim()
    first.append(METRICS, row(0))
    first.flush()
    server.faults.down = True
    first.append(METRICS, row(1))
    first.write("config.json", b"{}")
    abandon(first)
    server.faults.down = False
    reader = opened()
    assert reader.read(METRICS) == row(0) + row(1)
    second = opened(interval=600)
    second.append(METRICS, row(2))
    assert reader.read(METRICS) == row(0) + row(1) + row(2)
    second.close()
    assert server.contents(f"{ROOT}/{METRICS}") == row(0) + row(1) + row(2)
    assert server.contents(f"{ROOT}/config.json") == b"{}"
    assert spools() == []


def test_a_left_spool_can_be_pushed(server: GcsServer, opened: Open, caplog: pytest.LogCaptureFixture) -> None:
    """spools names it, push_spool uploads it; a torn last line is cut, and kept."""
    first = opened(interval=600)
    first.append(METRICS, row(0))
    first.flush()
    server.faults.down = True
    first.append(METRICS, row(1))
    first.append(METRICS, b'{"step": 2, "te')
    with pytest.raises(LogBusyError):
        push_spool(spools()[0], server.options)
    abandon(first)
    server.faults.down = False
    (info,) = spools()
    assert (info.url, info.unsynced, info.taken_by) == (URI, len(row(1)) + 15, "")
    after = push_spool(info, server.options)
    assert (after.unsynced, after.pending_files) == (0, 0)
    assert server.contents(f"{ROOT}/{METRICS}") == row(0) + row(1)
    assert "cut short" in caplog.text
    assert server.contents(f"{ROOT}/.runmirror/torn-1.txt") == b'{"step": 2, "te'
    assert spools() == []


def test_a_spool_that_was_taken_over_meanwhile_is_kept_aside(
    server: GcsServer, opened: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Killed here, resumed there, started here again: the rows from before are kept and said, and nothing is mixed."""
    first = opened(interval=600)
    first.append(METRICS, row(0))
    first.flush()
    server.faults.down = True
    first.append(METRICS, row(1))
    abandon(first)
    server.faults.down = False
    elsewhere(monkeypatch, tmp_path, "other machine")
    with opened() as second:
        second.append(METRICS, row(10))
    elsewhere(monkeypatch, tmp_path, "home")
    assert opened().read(METRICS) == row(0) + row(10)
    (info,) = spools()
    with pytest.raises(TakenError):
        push_spool(info, server.options)
    with opened() as third:
        third.append(METRICS, row(11))
        assert third.read(METRICS) == row(0) + row(10) + row(11)
    assert server.contents(f"{ROOT}/{METRICS}") == row(0) + row(10) + row(11)
    (kept,) = spools()
    assert kept.taken_by
    assert kept.unsynced == len(row(1))
    assert str(kept.folder) in caplog.text


def test_a_spool_with_nothing_left_is_forgotten_when_another_machine_went_on(
    server: GcsServer, opened: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Killed here when all was uploaded, continued there, continued here: the rows of there are not overwritten."""
    first = opened(interval=600)
    first.append(METRICS, row(0))
    first.flush()
    abandon(first)
    elsewhere(monkeypatch, tmp_path, "other machine")
    second = opened(interval=600)
    second.append(METRICS, row(1))
    second.flush()
    elsewhere(monkeypatch, tmp_path, "home")
    with opened(interval=600) as third:
        third.claim((METRICS,))
        third.append(METRICS, row(2))
    assert server.contents(f"{ROOT}/{METRICS}") == row(0) + row(1) + row(2)


def test_a_log_that_was_out_of_reach_at_the_start_is_continued(
    server: GcsServer, opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """It was taken for new, and is not: its rows and files stay, new rows go behind, a file of the same name beside it."""
    server.put(f"{ROOT}/{METRICS}", row(0) + row(1))
    server.put(f"{ROOT}/config.json", b'{"first": 1}')
    server.put(f"{ROOT}/.runmirror/writer.json", b'{"id": "other", "host": "gpu1", "pid": 7, "since": 0}')
    server.faults.down = True
    storage = opened(interval=0.05)
    storage.claim((METRICS,))
    storage.write("config.json", b'{"second": 2}')
    storage.append(METRICS, row(2) + row(3) + row(4))
    server.faults.down = False
    storage.flush(60)
    assert "taken over from process 7 on host gpu1" in caplog.text
    assert server.contents(f"{ROOT}/{METRICS}") == b"".join(map(row, range(5)))
    assert opened().read(METRICS) == b"".join(map(row, range(5)))
    assert server.contents(f"{ROOT}/config.json") == b'{"first": 1}'
    assert server.contents(f"{ROOT}/.runmirror/late/config.json") == b'{"second": 2}'
    assert storage.read("config.json") == b'{"first": 1}'


def test_a_damaged_record_does_not_stop_a_start(
    server: GcsServer, opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """The spool is kept under another name, and said."""
    first = opened(interval=600)
    first.append(METRICS, row(0))
    first.flush()
    (info,) = spools()
    abandon(first)
    (info.folder / "spool.json").write_bytes(b"{")
    with opened() as second:
        second.append(METRICS, row(1))
    assert "is damaged: it is kept as" in caplog.text
    assert list(info.folder.parent.glob("*.taken-1/rows/0/metrics.jsonl"))
    assert server.contents(f"{ROOT}/{METRICS}") == row(0) + row(1)


def test_a_spool_that_lost_bytes_goes_on_behind_the_object(server: GcsServer, opened: Open) -> None:
    """A power cut took rows that the store has: they are read from there, new ones go behind them."""
    first = opened(interval=600)
    first.append(METRICS, row(0) + row(1))
    first.flush()
    (info,) = spools()
    abandon(first)
    os.truncate(info.folder / "rows/0" / METRICS, 10)
    with opened(interval=600) as second:
        second.append(METRICS, row(2))
        second.flush()
        assert second.read(METRICS) == row(0) + row(1) + row(2)
    assert server.contents(f"{ROOT}/{METRICS}") == row(0) + row(1) + row(2)


def test_a_request_under_way_at_close_does_no_harm(
    server: GcsServer, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closed while an upload hangs, started again at once: the late upload is recognised, nothing is lost or doubled."""
    monkeypatch.setattr(uploader.Uploader.stop, "__defaults__", (0.1,))
    first = opened(interval=0.01)
    first.claim()
    gate = server.faults.gate = threading.Event()
    sent = server.calls["insert"] + server.calls["compose"]
    first.append(METRICS, row(0))
    wait(lambda: server.calls["insert"] + server.calls["compose"] > sent)
    first.close(0.05)
    assert not spools()[0].alive
    server.faults.gate = None
    second = opened(interval=0.01)
    second.append(METRICS, row(1))
    wait(lambda: server.contents(f"{ROOT}/{METRICS}") == row(0) + row(1))
    gate.set()
    wait(lambda: not server.under_way)
    second.close()
    assert server.contents(f"{ROOT}/{METRICS}") == row(0) + row(1)


def test_an_empty_spool_folder_is_no_spool(
    server: GcsServer, opened: Open, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """What some network file systems leave of a removed folder: no word about it."""
    storage = opened()
    storage.append(METRICS, row(0))
    (info,) = spools()
    storage.close()
    (info.folder / "rows/0").mkdir(parents=True)
    assert spools() == []
    with opened() as again:
        again.append(METRICS, row(1))
    assert server.contents(f"{ROOT}/{METRICS}") == row(0) + row(1)
    assert not caplog.records


def test_closing_with_a_dead_store_names_the_command(
    server: GcsServer, opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning with the bytes, the place and `runmirror push`; never an exception."""
    storage = opened(interval=600)
    storage.claim()
    server.faults.down = True
    storage.append(METRICS, row(0))
    storage.close(0.2)
    (said,) = [record.message for record in caplog.records if "runmirror push" in record.message]
    assert f"{len(row(0))} bytes" in said
    assert spools()[0].unsynced == len(row(0))


def test_files_beyond_the_cap_are_dropped_and_counted(
    server: GcsServer, opened: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Reports first, rows never; said once."""
    monkeypatch.setattr(cloud_module, "SPOOL_CAP", 1000)
    storage = opened(interval=600)
    storage.claim()
    server.faults.down = True
    for number in range(5):
        storage.write(f"train_iteration_{number:06}.html", b"x" * 400)
        storage.append(METRICS, row(number, 1000))
    status = storage.status()
    assert status is not None
    assert (status.dropped, status.pending_files) == (3, 2)
    assert sum("is not kept" in record.message for record in caplog.records) == 1
    assert storage.read(METRICS) == b"".join(row(number, 1000) for number in range(5))


def test_a_full_disk_does_not_stop_the_uploads(
    server: GcsServer, opened: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The record can't be written any more: said once; rows are uploaded all the same."""
    from runmirror.storage import spool as module

    storage = opened(interval=600)
    storage.append(METRICS, row(0))

    def full(*args: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "write_atomic", full)
    storage.flush()
    storage.append(METRICS, row(1))
    storage.flush()
    assert server.contents(f"{ROOT}/{METRICS}") == row(0) + row(1)
    assert sum("make room on the disk" in record.message for record in caplog.records) == 1


def test_no_credential_is_written_anywhere(server: GcsServer, opened: Open, tmp_path: Path) -> None:
    """Options stay in memory: neither spool nor objects nor repr have them."""
    storage = opened(interval=600, session_kwargs={"headers": {"X-Secret": "s3cr3t-t0ken"}})
    storage.append(METRICS, row(0))
    storage.write("config.json", b"{}")
    storage.flush()
    texts = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    texts += [server.contents(name) or b"" for name in server.names()]
    assert len(texts) > 4
    assert not any(b"s3cr3t" in text for text in texts)
    assert "s3cr3t" not in repr(storage)


# -- where it has to work


def test_it_works_inside_a_running_event_loop(server: GcsServer, opened: Open) -> None:
    """append, flush and read from a coroutine, twice, in two loops."""

    async def train(number: int) -> bytes:
        storage = opened()
        storage.append(METRICS, row(number))
        storage.flush()
        await asyncio.sleep(0)
        data = CloudStorage(URI, server.options, local=False)
        try:
            return data.read(METRICS)
        finally:
            data.close()
            storage.close()

    assert asyncio.run(train(0)) == row(0)
    assert asyncio.run(train(1)) == row(0) + row(1)


def test_many_threads_append_at_once(server: GcsServer, opened: Open) -> None:
    """Every line whole, each thread's in its order."""
    storage = opened(interval=0.0)
    storage.claim()

    def work(name: int) -> None:
        for number in range(200):
            storage.append(METRICS, b"%d %d\n" % (name, number))

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    storage.close()
    lines = [line.split() for line in (server.contents(f"{ROOT}/{METRICS}") or b"").splitlines()]
    for name in range(4):
        assert [int(line[1]) for line in lines if int(line[0]) == name] == list(range(200))


def test_following_costs_one_read_per_look(server: GcsServer, opened: Open) -> None:
    """A reader elsewhere sees new rows by one range request each, and b"" in between."""
    storage = opened(interval=600)
    reader = CloudStorage(URI, server.options, local=False)
    offset = 0
    for number in range(5):
        storage.append(METRICS, row(number))
        storage.flush()
        server.reset_counters()
        assert reader.read_range(METRICS, offset) == row(number)
        offset += len(row(number))
        assert reader.read_range(METRICS, offset) == b""
        assert dict(server.calls) == {"media": 2}
    reader.close()


def test_many_runs_are_scanned_by_one_listing_per_thousand(server: GcsServer) -> None:
    """Sizes and versions of 2,500 objects by three requests."""
    for number in range(2500):
        server.put(f"runs-bucket/many/{number:05}/metrics.jsonl", b"x" * (number % 7))
    with CloudStorage("gs://runs-bucket/many", server.options) as root:
        found = list(root.scan())
    assert len(found) == 2500
    assert [entry.stat.size for entry in found] == [number % 7 for number in range(2500)]
    assert dict(server.calls) == {"list": 3}


def test_no_cloud_package_is_loaded_before_it_is_used() -> None:
    """Importing runmirror, and naming a place in a cloud, loads neither fsspec nor a client."""
    code = (
        "import sys, runmirror\n"
        "from runmirror.storage import storage_from_uri, spools\n"
        "storage_from_uri('gs://bucket/run').url('a'), spools()\n"
        "print([name for name in ('fsspec', 'gcsfs', 's3fs', 'google_crc32c', 'aiohttp') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
