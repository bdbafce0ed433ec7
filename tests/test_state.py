"""What a mirror remembers of one run at one destination, and where."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import runmirror.storage.home as home_module
from runmirror.exceptions import MirrorBusyError, StateError
from runmirror.log.records import Identity
from runmirror.log.rows import Position
from runmirror.state import HEARTBEAT, MirrorState, StateRecord, home, peek, run_folder, state_path
from runmirror.storage import LocalStorage

KEY = ("dummy", "run-1", "https://tracker/x", "last")


def open_state(folder: Path) -> MirrorState:
    return MirrorState(folder, *KEY)


def write_state(folder: Path, content: dict[str, Any] | bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = state_path(folder, *KEY)
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


# -- the record


def test_a_saved_state_comes_back(tmp_path: Path) -> None:
    """Every field, through a file that begins with its format."""
    first = open_state(tmp_path)
    first.record.position = Position(7, 420, "ab" * 8)
    first.record.tracker_run_id, first.record.url, first.record.closed = "t-1", "https://x/1", "failed"
    first.record.files = {"config.json": "v1", "ü/日本 x.html": "v2"}
    first.record.name, first.record.rejected, first.record.last_error = "grüße", 2, "Retry: later"
    first.save()
    saved = first.record
    first.close()
    assert first.path.read_bytes().startswith(b'{"format": 1')
    second = open_state(tmp_path)
    assert second.record == saved
    assert second.record.position == Position(7, 420, "ab" * 8)
    second.close()


def test_a_new_state_is_at_the_start(tmp_path: Path) -> None:
    """Position 0, nothing sent; no file before the first save, and peek finds none."""
    made = open_state(tmp_path / "deep" / "folder")
    assert (made.record.position, made.record.files, made.record.policy) == (Position(0, 0, ""), {}, "last")
    assert not made.path.exists()
    assert peek(tmp_path / "deep" / "folder", *KEY) is None
    made.close()


def test_run_destination_and_policy_have_a_file_each(tmp_path: Path) -> None:
    """Four different names; two such states are open at once."""
    keys = [KEY, ("dummy", "run-2", *KEY[2:]), ("dummy", "run-1", "https://tracker/y", "last"), (*KEY[:3], "all")]
    assert len({state_path(tmp_path, *key) for key in keys}) == 4
    states = [MirrorState(tmp_path, *key) for key in keys]
    for made in states:
        made.close()


def test_the_owner_is_there_while_saved_with_one(tmp_path: Path) -> None:
    """This process and a heartbeat of now; None after a save without."""
    made = open_state(tmp_path)
    made.save()
    found = peek(tmp_path, *KEY)
    assert found is not None
    assert found.owner is not None
    assert (found.owner.pid, found.owner.host) == (os.getpid(), socket.gethostname())
    assert abs(found.owner.heartbeat - time.time()) < 60
    made.save(owner=False)
    found = peek(tmp_path, *KEY)
    assert found is not None
    assert found.owner is None
    made.close()


def test_fields_of_a_newer_minor_version_are_kept(tmp_path: Path) -> None:
    """Also those that are null, after load and save."""
    extra = {"later": {"a": [1, None]}, "empty": None}
    path = write_state(tmp_path, {"format": 1, "run_id": "run-1", "destination": "d"} | extra)
    made = open_state(tmp_path)
    made.save()
    made.close()
    saved = json.loads(path.read_bytes())
    assert {key: saved.get(key, "gone") for key in extra} == extra


DAMAGE = [b"", b"{", b"\0" * 100, b"\xff\xfe", b"null", b"[1]", b'{"format": 1}', b"[" * 100_000]
DAMAGE += [b'{"format": 1, "run_id": "r", "destination": "d", "ordinal": "many"}']


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: repr(damage[:20]))
def test_a_damaged_state_is_moved_aside(tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """A fresh state, a warning, and the damaged bytes beside it; peek takes it for none."""
    path = write_state(tmp_path, damage)
    assert peek(tmp_path, *KEY) is None
    made = open_state(tmp_path)
    assert made.record.ordinal == 0
    assert "damaged" in caplog.text
    assert not path.exists()
    (aside,) = tmp_path.glob("*.damaged-*")
    assert aside.read_bytes() == damage
    made.save()
    made.close()
    assert peek(tmp_path, *KEY) is not None


def test_a_state_of_a_newer_format_is_left_alone(tmp_path: Path) -> None:
    """An error that names the file, both formats and what to do; the file stays, the lock is free again."""
    content = {"format": 2, "of": "the future"}
    path = write_state(tmp_path, content)
    for _ in range(2):
        with pytest.raises(StateError, match=r"state format 2.*up to 1.*upgrade runmirror") as error:
            open_state(tmp_path)
        assert str(path) in str(error.value)
    with pytest.raises(StateError):
        peek(tmp_path, *KEY)
    assert json.loads(path.read_bytes()) == content


def test_text_that_is_no_utf8_can_be_saved(tmp_path: Path) -> None:
    """A name from a path with a stray byte: saved and read back, with a substitute for it."""
    made = open_state(tmp_path)
    made.record.name = os.fsdecode(b"run-\xff")
    made.save()
    made.close()
    found = peek(tmp_path, *KEY)
    assert found is not None
    assert str(found.name).startswith("run-")


def test_a_save_that_fails_leaves_the_old_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OSError, the old bytes, and no temporary file."""
    made = open_state(tmp_path)
    made.save()
    before = made.path.read_bytes()

    def full(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    made.record.ordinal = 5
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space"):
            made.save()
    assert made.path.read_bytes() == before
    assert not list(tmp_path.glob(".tmp-*"))
    made.close()


def test_rejected_rows_lie_beside_the_state(tmp_path: Path) -> None:
    """A JSON line each, appended, and counted in the record."""
    made = open_state(tmp_path)
    made.reject([{"ordinal": 3, "key": "a", "reason": "no"}])
    made.reject([{"ordinal": 4, "key": None, "reason": "ungültig"}, {"ordinal": 5, "key": None, "reason": "no"}])
    lines = [json.loads(line) for line in made.rejected_path.read_bytes().splitlines()]
    assert [line["ordinal"] for line in lines] == [3, 4, 5]
    assert made.record.rejected == 3
    assert made.rejected_path.parent == tmp_path
    made.close()


# -- one mirror at a time


def test_a_second_mirror_in_this_process_is_refused(tmp_path: Path) -> None:
    """An error that names destination and holder; free after close."""
    first = open_state(tmp_path)
    first.save()
    with pytest.raises(MirrorBusyError, match=rf"https://tracker/x.*process {os.getpid()}"):
        open_state(tmp_path)
    first.close()
    first.close()
    open_state(tmp_path).close()


def test_a_lock_can_be_let_go_of_in_another_thread(tmp_path: Path) -> None:
    """Free for the next mirror."""
    made = open_state(tmp_path)
    thread = threading.Thread(target=made.close)
    thread.start()
    thread.join()
    open_state(tmp_path).close()


def test_a_mirror_that_has_not_saved_yet_holds_its_lock(tmp_path: Path) -> None:
    """Refused, with the process that holds it, though it has written no state."""
    first = open_state(tmp_path)
    with pytest.raises(MirrorBusyError, match=rf"process {os.getpid()} on host"):
        open_state(tmp_path)
    first.close()


def test_another_process_holds_its_lock_until_it_is_killed(tmp_path: Path) -> None:
    """Refused while it lives, free at once when it was killed, though its heartbeat is fresh."""
    code = (
        "import sys; from pathlib import Path; from runmirror.state import MirrorState\n"
        "made = MirrorState(Path(sys.argv[1]), *sys.argv[2:]); made.save(); print('held', flush=True)\n"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path), *KEY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline().strip() == b"held"
            with pytest.raises(MirrorBusyError, match=f"process {other.pid}"):
                open_state(tmp_path)
        finally:
            other.kill()
    made = open_state(tmp_path)
    assert made.record.owner is not None
    assert made.record.owner.pid == other.pid
    made.close()


def owned(host: str, age: float) -> dict[str, Any]:
    owner = {"host": host, "pid": 4711, "heartbeat": time.time() - age}
    return {"format": 1, "run_id": "run-1", "destination": "d", "owner": owner}


def test_an_owner_on_another_host_with_a_fresh_heartbeat_holds_the_run(tmp_path: Path) -> None:
    """Refused, named by host and process; the local lock is free again."""
    path = write_state(tmp_path, owned("elsewhere", 5))
    with pytest.raises(MirrorBusyError, match="4711 on elsewhere"):
        open_state(tmp_path)
    path.unlink()
    open_state(tmp_path).close()


@pytest.mark.parametrize(
    ("host", "age"), [("elsewhere", HEARTBEAT + 60), ("elsewhere", -1e6), (socket.gethostname(), 5)]
)
def test_an_owner_that_is_gone_holds_nothing(tmp_path: Path, host: str, age: float) -> None:
    """A heartbeat too old, one from the far future (a wrong clock), and a process of this host without the lock."""
    write_state(tmp_path, owned(host, age))
    made = open_state(tmp_path)
    made.save()
    assert made.record.owner is not None
    assert made.record.owner.pid == os.getpid()
    made.close()


# -- where it lies


def test_home_is_where_the_variable_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An absolute folder that is made, with ~ resolved; the same after the working directory changed."""
    monkeypatch.setenv("RUNMIRROR_HOME", str(tmp_path / "new" / "home"))
    assert home() == tmp_path / "new" / "home"
    assert home().is_dir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RUNMIRROR_HOME", "~/mine")
    assert home() == tmp_path / "mine"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUNMIRROR_HOME", "relative")
    assert home() == tmp_path / "relative"


def test_home_is_the_users_state_directory_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What platformdirs says, also when the variable is empty."""
    monkeypatch.setattr(home_module.platformdirs, "user_state_path", lambda name: tmp_path / "state" / name)
    for value in (None, ""):
        if value is None:
            monkeypatch.delenv("RUNMIRROR_HOME")
        else:
            monkeypatch.setenv("RUNMIRROR_HOME", value)
        assert home() == tmp_path / "state" / "runmirror"


@pytest.mark.parametrize("wanted", ["file/below", "~nobody-of-this-name/x"])
def test_an_unusable_home_is_a_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wanted: str
) -> None:
    """Below the temporary folder, with one warning that names both and the variable; only for the user's eyes."""
    (tmp_path / "file").write_text("")
    wanted = wanted if wanted.startswith("~") else str(tmp_path / wanted)
    monkeypatch.setenv("RUNMIRROR_HOME", wanted)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(home_module, "_warned", set())
    with caplog.at_level(logging.WARNING):
        found = [home(), home()]
    assert found[0] == found[1]
    assert found[0].parent == tmp_path
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert wanted in message
    assert str(found[0]) in message
    assert "RUNMIRROR_HOME" in message
    assert found[0].stat().st_mode & 0o777 == 0o700


def test_no_folder_at_all_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """StateError that names both folders and the variable to set."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RUNMIRROR_HOME", str(tmp_path / "file/a"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file/b"))
    with pytest.raises(StateError, match=r"file/a.*file/b.*set RUNMIRROR_HOME"):
        home()


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no user ids here")
def test_a_temporary_folder_of_someone_else_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """StateError: anyone may have made a folder of this name."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RUNMIRROR_HOME", str(tmp_path / "file/a"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(StateError, match="belongs to someone else"):
        home()


OWN, FOREIGN = Identity(run_id="r" * 32, own=True), Identity(run_id="f" * 32, own=False)


def test_our_own_runs_keep_their_state_in_the_log_path(tmp_path: Path) -> None:
    """.runmirror/mirror; a foreign run only when asked, else below RUNMIRROR_HOME and nothing in its log_path."""
    storage = LocalStorage(tmp_path / "run")
    (tmp_path / "run").mkdir()
    assert run_folder(storage, FOREIGN) == tmp_path / "home/runs" / ("f" * 32)
    assert list((tmp_path / "run").iterdir()) == []
    assert run_folder(storage, OWN) == tmp_path / "run/.runmirror/mirror"
    assert run_folder(LocalStorage(tmp_path / "other"), FOREIGN, in_log=True) == tmp_path / "other/.runmirror/mirror"


def test_an_archive_that_cant_be_written_keeps_its_state_at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RUNMIRROR_HOME, whether the folder can't be made or can't be written."""
    storage = LocalStorage(tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.runmirror").write_text("in the way")
    assert run_folder(storage, OWN) == tmp_path / "home/runs" / OWN.run_id
    (tmp_path / "run/.runmirror").unlink()
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "mirror" not in str(path) and real(path, mode))
    assert run_folder(storage, OWN) == tmp_path / "home/runs" / OWN.run_id


@pytest.mark.parametrize(
    "run_id", ["../../escape", "/escape", "..", ".", "", "a/b", "a\\b", "x" * 5000, "\udcff", "a\n"]
)
def test_a_run_id_cant_lead_out_of_home(tmp_path: Path, run_id: str) -> None:
    """A run.json that someone else wrote: one folder directly below runs, another for every id."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.runmirror").write_text("in the way")
    folder = run_folder(LocalStorage(tmp_path / "run"), Identity.model_construct(run_id=run_id, own=True))
    assert folder.parent == tmp_path / "home/runs"
    assert len(folder.name) == 32
    MirrorState(folder, *KEY).close()


def test_a_link_in_a_log_path_cant_lead_out_of_it(tmp_path: Path) -> None:
    """State goes home when .runmirror or its mirror folder points elsewhere; nothing is written there."""
    for number, link in enumerate((".runmirror", ".runmirror/mirror")):
        target = tmp_path / f"private-{number}"
        target.mkdir()
        path = tmp_path / f"run-{number}" / link
        path.parent.mkdir(parents=True)
        path.symlink_to(target)
        assert run_folder(LocalStorage(tmp_path / f"run-{number}"), OWN) == tmp_path / "home/runs" / OWN.run_id
        assert list(target.iterdir()) == []


def test_a_record_knows_its_cursor() -> None:
    """ordinal, offset and digest are the position."""
    record = StateRecord(run_id="r", destination="d")
    record.position = Position(3, 9, "x")
    assert (record.ordinal, record.offset, record.digest) == (3, 9, "x")


@pytest.mark.parametrize("name", ["lines.bin", "lines.lock", "dummy-1.lock", "tensorboard.log", "sub/lines.bin"])
def test_a_link_among_the_state_files_sends_the_state_home(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """RUNMIRROR_HOME instead of the log_path, with a warning; the file that the link leads to keeps its bytes."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    link = tmp_path / "run/.runmirror/mirror" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(victim)
    folder = run_folder(LocalStorage(tmp_path / "run"), OWN)
    assert folder == tmp_path / "home/runs" / OWN.run_id
    assert "symbolic link" in caplog.text
    open_state(folder).close()
    assert victim.read_bytes() == b"precious"


def test_rejected_rows_are_not_written_through_a_link(tmp_path: Path) -> None:
    """OSError, and the link's target is as it was."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    made = open_state(tmp_path / "state")
    made.rejected_path.symlink_to(victim)
    with pytest.raises(OSError, match="symbolic"):
        made.reject([{"ordinal": 0}])
    made.close()
    assert victim.read_bytes() == b"precious"
