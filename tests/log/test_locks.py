"""Locks: one holder, known by name, gone with its process."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runmirror.log import locks
from runmirror.log.locks import acquire, holder

HOLD = """
import sys
from runmirror.log.locks import acquire
lock = acquire(sys.argv[1], lambda holder: SystemExit(f"busy: {holder}"))
print("held", flush=True)
sys.stdin.read()
"""


class BusyError(Exception):
    """What the tests ask for when a lock is taken."""


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

    def refuse(_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locks, "_lock", refuse)
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
