"""Locks: one holder, known by name, gone with its process."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from runmirror.log import locks
from runmirror.log.index import LineIndex
from runmirror.log.locks import acquire, holder, locked
from runmirror.log.runlog import RunLog
from runmirror.mirror import Mirror
from runmirror.storage import LocalStorage
from runmirror.testing import MemoryOptions, MemorySink
from tests.logs import flat_log

HOLD = """
import sys
from runmirror.log.locks import acquire
lock = acquire(sys.argv[1], lambda holder: SystemExit(f"busy: {holder}"))
print("held", flush=True)
sys.stdin.read()
"""


class BusyError(Exception):
    """What the tests ask for when a lock is taken."""


def every_lock_fails(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """As on a file system whose answer to each lock is this error."""

    def refuse(_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(locks, "_lock", refuse)


def test_a_second_holder_is_told_of_the_first(tmp_path: Path) -> None:
    """The error that was asked for, with this process's id; free again after the release, which may come twice."""
    path = str(tmp_path / "deep/er/lock")
    lock = acquire(path, BusyError)
    with pytest.raises(BusyError, match=rf"process {os.getpid()} on host \S+, since \d{{4}}-"):
        acquire(path, BusyError)
    assert lock.held
    lock.release()
    lock.release()
    assert not lock.held
    acquire(path, BusyError).release()


def test_a_killed_holder_leaves_no_lock(tmp_path: Path) -> None:
    """Taken while the other process lives, free as soon as it is dead."""
    path = str(tmp_path / "lock")
    command = [sys.executable, "-W", "error", "-c", HOLD, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(BusyError, match=f"process {other.pid}"):
            acquire(path, BusyError)
        other.kill()
        other.wait()
    acquire(path, BusyError).release()


def test_a_started_program_does_not_inherit_the_lock(tmp_path: Path) -> None:
    """Free after the release, while a program started under the lock still runs."""
    path = str(tmp_path / "lock")
    lock = acquire(path, BusyError)
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, close_fds=False):
        lock.release()
        acquire(path, BusyError).release()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_neither_holds_nor_frees_it(tmp_path: Path) -> None:
    """Held by the parent after the child released its copy and ended; free after the parent's release."""
    path = str(tmp_path / "lock")
    lock = acquire(path, BusyError)
    pid = os.fork()
    if pid == 0:
        held = lock.held
        lock.release()
        os._exit(1 if held else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    with pytest.raises(BusyError):
        acquire(path, BusyError)
    lock.release()
    acquire(path, BusyError).release()


def test_a_file_system_without_locks_warns_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A lock without effect, and a warning that names the file."""
    every_lock_fails(monkeypatch, errno.ENOLCK)
    with caplog.at_level(logging.WARNING, "runmirror"):
        lock = acquire(str(tmp_path / "lock"), BusyError)
    assert lock.held
    assert str(tmp_path / "lock") in caplog.text
    lock.release()


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"pid": 1}', b'{"pid":1,"host":"h","started":"x"}', b"\xff"])
def test_a_file_that_does_not_say_who_is_another_process(tmp_path: Path, text: bytes) -> None:
    """ "another process", never an exception, also without the file."""
    (tmp_path / "lock").write_bytes(text)
    assert holder(str(tmp_path / "lock")) == holder(str(tmp_path / "none")) == "another process"


def test_a_link_is_not_locked(tmp_path: Path) -> None:
    """OSError; the link's target, on which the holder's text would have gone, keeps its bytes."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious" * 100)
    (tmp_path / "lock").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic"):
        acquire(str(tmp_path / "lock"), BusyError)
    assert victim.read_bytes() == b"precious" * 100


def test_locked_is_for_one_at_a_time(tmp_path: Path) -> None:
    """Eight threads that read, wait and write a number lose no count."""
    path, counter = str(tmp_path / "lock"), tmp_path / "counter"
    counter.write_text("0")

    def count() -> None:
        for _ in range(10):
            with locked(path):
                seen = int(counter.read_text())
                time.sleep(0.0005)
                counter.write_text(str(seen + 1))

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert counter.read_text() == "80"


def test_locked_waits_for_another_process_and_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TimeoutError that names the file while it is held; free once the other one is dead."""
    path = str(tmp_path / "lock")
    with subprocess.Popen([sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        monkeypatch.setattr(locks, "WAIT", 0.1)
        with pytest.raises(TimeoutError, match="lock is held by another process"), locked(path):
            raise AssertionError
        monkeypatch.undo()
        other.kill()
        other.wait()
    with locked(path):
        assert Path(path).exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_forked_meanwhile_does_not_keep_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Free for others while the child, which has the file open too, lives on."""
    path = str(tmp_path / "lock")
    reading, writing = os.pipe()
    with locked(path):
        pid = os.fork()
        if pid == 0:
            os.close(writing)
            os.read(reading, 1)  # until the parent is done
            os._exit(0)
    monkeypatch.setattr(locks, "WAIT", 5.0)
    with locked(path):
        os.close(writing)
    os.close(reading)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_mirror_works_on_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every row, and warnings; never a wait for a lock that can't be had."""
    every_lock_fails(monkeypatch, errno.EOPNOTSUPP)
    sink = MemorySink(MemoryOptions(tracker="no locks"))
    source = RunLog(LocalStorage(flat_log(tmp_path / "run")), "run", LineIndex(tmp_path / "state"))
    with caplog.at_level(logging.WARNING, "runmirror"), Mirror(source, sink, tmp_path / "state", rate=1e6) as mirror:
        mirror.deliver(patience=0)
    assert [len(run.rows) for run in sink.runs.values()] == [12]
    assert "lines.lock: no locks on this file system" in caplog.text


def test_a_lock_that_fails_otherwise_is_not_called_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OSError with its reason and the file."""
    every_lock_fails(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match=r"can't be locked: Input/output error.*lock"):
        acquire(str(tmp_path / "lock"), BusyError)
    with pytest.raises(OSError, match="Input/output"), locked(str(tmp_path / "lock")):
        raise AssertionError
