"""What ``runmirror mirror`` keeps of runs and sinks: bounded, off the main loop, and let go when a run is removed."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import runmirror
from runmirror import follow, mirror
from runmirror.find import Found, ReadOptions, find_runs, open_run
from runmirror.follow import WORKERS, Follower
from runmirror.lane import MISSING, is_there, signature
from runmirror.log.rows import Row
from runmirror.log.runlog import RunLog
from runmirror.sinks.base import Opened, Rejected, RunInfo
from runmirror.testing import MemorySink
from tests.foreign_logs import output_dir, ray_trial
from tests.logs import flat_log, train_row, write_rows
from tests.test_follow import append, following, memory, steps, until


def growing(runs: Path, count: int) -> list[Path]:
    """Runs that go on, with a row each."""
    files = [runs / f"{number:03d}" / "metrics.jsonl" for number in range(count)]
    for file in files:
        file.parent.mkdir(parents=True)
        append(file, train_row(0))
    return files


@pytest.mark.parametrize("own", [True, False], ids=["ours", "foreign"])
def test_a_removed_run_is_said_once_and_let_go(own: bool, tmp_path: Path) -> None:
    """One line for two sinks, no lane left, nothing behind; moved back it is followed on."""
    told: list[str] = []
    one, two = memory(), memory()
    log = tmp_path / "runs" / "a"
    if own:
        run = runmirror.start(log, code=False)
        run.log_metrics({"loss": 1.0})
        run.finish("killed")
        append(log / ".runmirror" / "journal.jsonl", {"event": "resumed", "time": 4e9, "offset": 0})  # goes on
    else:
        growing(tmp_path / "runs", 1)
        (tmp_path / "runs" / "000").rename(log)
    follower = Follower([tmp_path / "runs"], [one, two], interval=0.02, tell=told.append)
    stop, whole = threading.Event(), list[bool]()
    thread = threading.Thread(target=lambda: whole.append(follower.run(stop)))
    thread.start()
    try:
        until(lambda: [lane.state for lane in follower.lanes] == ["current"] * 2)
        log.rename(tmp_path / "away")
        until(lambda: not follower.lanes)
        until(lambda: "a: removed; it is no longer followed" in told)
        (tmp_path / "away").rename(log)
        append(log / "metrics.jsonl", train_row(1))
        until(lambda: len(steps(one, "a")) == len(steps(two, "a")) == 2)
        until(lambda: not any(lane._busy for lane in follower.lanes))
        shutil.rmtree(log)
        until(lambda: sum("removed" in line for line in told) == 2)
    finally:
        stop.set()
        thread.join(30)
    assert whole == [True]
    assert not any("behind" in line for line in told)
    assert not follower._checks
    assert not any(follower._using.values())


def test_a_run_that_was_removed_before_all_of_it_arrived_is_named(tmp_path: Path) -> None:
    """With the sink that has not everything."""

    class Down(MemorySink):
        def open(self, run: RunInfo, tracker_run_id: str | None) -> Opened:
            raise runmirror.exceptions.Retry("no route")

    told: list[str] = []
    growing(tmp_path / "runs", 1)
    with following([tmp_path / "runs"], memory(Down), tell=told.append) as follower:
        until(lambda: [lane.state for lane in follower.lanes] == ["behind"])
        follower.lanes[0]._next = 0.0
        shutil.rmtree(tmp_path / "runs" / "000")
        until(lambda: "000: removed before all of it was in memory; it is no longer followed" in told)


def test_what_counts_as_there(tmp_path: Path) -> None:
    """A folder, a file, a run of Ray and of transformers; not what is gone, nor a folder without a log."""
    for log in (flat_log(tmp_path / "a"), ray_trial(tmp_path / "b"), output_dir(tmp_path / "c")):
        (found,) = find_runs([log])
        assert is_there(found)
        assert signature(found)[0] != MISSING
    file = write_rows(tmp_path / "d.jsonl", [train_row(0)])
    assert is_there(Found(str(file), "d"))
    assert not is_there(Found(str(tmp_path / "none"), "none"))
    (tmp_path / "a" / "metrics.jsonl").unlink()
    assert not is_there(Found(str(tmp_path / "a"), "a"))


def test_a_new_row_of_ray_is_noticed_at_once(tmp_path: Path) -> None:
    """Not only when the run is asked whether it has ended."""
    target = memory()
    ray_trial(tmp_path / "runs" / "trial")
    with following([tmp_path / "runs"], target) as follower:
        until(lambda: len(steps(target, "trial")) == 4)
        until(lambda: not follower.lanes[0]._busy)
        append(tmp_path / "runs" / "trial" / "result.json", {"training_iteration": 5, "timesteps_total": 500})
        until(lambda: len(steps(target, "trial")) == 5, 10)


def test_runs_of_one_name_below_two_paths_are_told_apart(tmp_path: Path) -> None:
    """As an import of both calls them."""
    target = memory()
    for folder in ("x", "y"):
        write_rows(tmp_path / folder / "a" / "metrics.jsonl", [train_row(0)])
    with following([tmp_path / "x", tmp_path / "y"], target):
        until(lambda: steps(target, "x/a") == steps(target, "y/a") == [0])


def test_open_sinks_are_bounded_at_every_moment(tmp_path: Path) -> None:
    """A hundred runs at once, four may be open: never more than those and the ones that are worked on."""
    lock = threading.Lock()
    opened, most = set[int](), list[int]()

    class Counted(MemorySink):
        def open(self, run: RunInfo, tracker_run_id: str | None) -> Opened:
            with lock:
                opened.add(id(self))
                most.append(len(opened))
            return super().open(run, tracker_run_id)

        def close(self, run: RunInfo | None, deadline: float) -> None:
            super().close(run, deadline)
            with lock:
                opened.discard(id(self))

    target = memory(Counted)
    files = growing(tmp_path / "runs", 100)
    with following([tmp_path / "runs"], target, max_open=4, interval=0.2):
        for step in range(1, 4):
            until(lambda step=step: all(len(steps(target, file.parent.name)) == step for file in files))  # type: ignore[misc]
            for file in files:
                append(file, train_row(step))
    assert max(most) <= 4 + WORKERS
    assert not opened


def test_a_slow_close_holds_up_nobody(tmp_path: Path) -> None:
    """A sink of one run that does not come back from close: all other runs go on, new ones are found."""
    release = threading.Event()

    class Slow(MemorySink):
        def close(self, run: RunInfo | None, deadline: float) -> None:
            if self.run is not None and self.run.name == "000":
                release.wait(60)
            super().close(run, deadline)

    target = memory(Slow)
    files = growing(tmp_path / "runs", 3)
    try:
        with following([tmp_path / "runs"], target, max_open=1):
            for step in range(1, 6):
                for file in files[1:]:
                    append(file, train_row(step))
                until(lambda step=step: all(len(steps(target, file.parent.name)) == step + 1 for file in files[1:]))  # type: ignore[misc]
            growing(tmp_path / "runs" / "later", 1)
            until(lambda: steps(target, "later/000") == [0])
            release.set()
    finally:
        release.set()


def test_sinks_are_closed_side_by_side_at_the_end(tmp_path: Path) -> None:
    """Each close waits for that of the others."""
    together = threading.Barrier(WORKERS, timeout=30)

    class Waits(MemorySink):
        def close(self, run: RunInfo | None, deadline: float) -> None:
            if self.run is not None:
                together.wait()
            super().close(run, deadline)

    target = memory(Waits)
    files = growing(tmp_path / "runs", WORKERS)
    with following([tmp_path / "runs"], target):
        until(lambda: all(steps(target, file.parent.name) for file in files))
    assert not together.broken


def test_calls_that_hang_for_ever_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their threads too; it is said what to do, and when they come back the runs go on."""
    release = threading.Event()
    hung: list[int] = []

    class Hangs(MemorySink):
        name = "hangs"

        def put(self, rows: Sequence[Row]) -> list[Rejected]:
            if not release.is_set():
                hung.append(1)
                release.wait(60)
                return []
            return super().put(rows)

    told: list[str] = []
    monkeypatch.setattr(mirror, "CALL_DEADLINE", 0.1)
    monkeypatch.setattr(follow, "MAX_HANGING", 3)
    target = memory(Hangs)
    object.__setattr__(target, "name", "hangs")
    growing(tmp_path / "runs", 20)
    try:
        with following([tmp_path / "runs"], target, tell=told.append) as follower:
            until(lambda: any("calls of hangs never returned" in line for line in told))
            until(lambda: sum("never returned: once" in (lane.error or "") for lane in follower.lanes) > 5)
            assert len(hung) <= 3 + WORKERS
            monkeypatch.setattr(mirror, "CALL_DEADLINE", 30.0)
            release.set()
            until(lambda: all(lane.state == "current" for lane in follower.lanes))
    finally:
        release.set()


@pytest.mark.slow
def test_too_many_open_files_are_answered_by_fewer(tmp_path: Path) -> None:
    """A system that gives no more files: fewer runs are open from then on, and all rows arrive."""

    class Scarce(MemorySink):
        opened = 0

        def open(self, run: RunInfo, tracker_run_id: str | None) -> Opened:
            if type(self).opened >= WORKERS + 2:
                raise OSError(24, "Too many open files")
            type(self).opened += 1
            return super().open(run, tracker_run_id)

        def close(self, run: RunInfo | None, deadline: float) -> None:
            type(self).opened -= self.run is not None
            super().close(run, deadline)

    target = memory(Scarce)
    files = growing(tmp_path / "runs", 30)
    with following([tmp_path / "runs"], target, max_open=100) as follower:
        until(lambda: all(steps(target, file.parent.name) == [0] for file in files), 60)
        assert follower._limits[id(target)] < 100


def test_the_command_may_have_more_files_open(tmp_path: Path) -> None:
    """As many as the system allows it; without a limit as many runs are open as at most."""
    code = (
        "import resource\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))\n"
        "from runmirror.cli.follow import raise_file_limit\n"
        "raise_file_limit()\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert int(done.stdout) == (8192 if hard == resource.RLIM_INFINITY else min(8192, hard))


@pytest.mark.parametrize(
    ("soft", "pairs"), [(16, 8), (1024, 128), (8192, 1024), (1 << 20, 1024), (resource.RLIM_INFINITY, 1024)]
)
def test_how_many_are_kept_open(soft: int, pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An eighth of the files, within bounds."""

    def limit(kind: Any) -> tuple[int, int]:
        return soft, soft

    monkeypatch.setattr(resource, "getrlimit", limit)
    assert follow._open_limit() == pairs


@pytest.mark.parametrize(("rows", "often"), [(follow.KEPT_ROWS, False), (0, True)])
def test_a_small_log_is_not_read_anew_when_its_sink_is_opened_again(
    rows: int, often: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One reader for each of three runs of which one may be open; a new one each time where they are too large to keep."""
    opened: list[str] = []

    def counted(found: Found, options: ReadOptions) -> tuple[RunLog, Path]:
        opened.append(found.name)
        return open_run(found, options)

    monkeypatch.setattr(follow, "open_run", counted)
    monkeypatch.setattr(follow, "KEPT_ROWS", rows)
    target = memory()
    files = growing(tmp_path / "runs", 3)
    with following([tmp_path / "runs"], target, max_open=1):
        for step in range(1, 5):
            until(lambda step=step: all(len(steps(target, file.parent.name)) == step for file in files))  # type: ignore[misc]
            for file in files:
                append(file, train_row(step))
        until(lambda: all(steps(target, file.parent.name) == list(range(5)) for file in files))
    assert (len(opened) > 3) == often
    assert set(opened) == {"000", "001", "002"}
