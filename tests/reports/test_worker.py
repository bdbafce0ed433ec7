"""The thread that writes reports."""

from __future__ import annotations

import logging
import threading

import pytest

from runmirror.reports import worker
from runmirror.reports.worker import Worker


def test_jobs_are_done_in_order_in_another_thread() -> None:
    """All of them, when ``drain`` returns True."""
    done: list[tuple[int, bool]] = []
    main = threading.current_thread()
    jobs = Worker("test")
    for number in range(50):
        jobs.submit(lambda number=number: done.append((number, threading.current_thread() is main)), 1)  # type: ignore[misc]
    assert jobs.drain(10)
    assert done == [(number, False) for number in range(50)]


def test_a_job_that_fails_is_told_and_the_next_is_done(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing stops the thread."""
    done = threading.Event()
    jobs = Worker("test")
    with caplog.at_level(logging.WARNING, "runmirror"):
        jobs.submit(lambda: 1 / 0, 1)  # type: ignore[arg-type, return-value]
        jobs.submit(done.set, 1)
        assert jobs.drain(10)
    assert done.is_set()
    assert "test failed" in caplog.text


def test_drain_gives_up() -> None:
    """False when a job takes longer; it is done all the same."""
    release = threading.Event()
    jobs = Worker("test")
    jobs.submit(lambda: release.wait(30) and None, 1)
    assert not jobs.drain(0.05)
    release.set()
    assert jobs.drain(10)


def test_too_much_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job beyond the bound is taken when the one before it is done; a single one of any size is taken."""
    monkeypatch.setattr(worker, "MAX_WAITING", 100)
    release, taken = threading.Event(), threading.Event()
    jobs = Worker("test")
    jobs.submit(lambda: release.wait(30) and None, 1000)

    def more() -> None:
        jobs.submit(lambda: None, 50)
        taken.set()

    thread = threading.Thread(target=more)
    thread.start()
    assert not taken.wait(0.1)
    release.set()
    assert taken.wait(10)
    thread.join()
    assert jobs.drain(10)


def test_without_a_thread_it_is_done_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of the interpreter no thread can be started."""

    def fail(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", fail)
    done: list[int] = []
    jobs = Worker("test")
    jobs.submit(lambda: done.append(1), 1)
    assert done == [1]
    assert jobs.drain(0)
