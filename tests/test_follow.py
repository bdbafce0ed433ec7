"""``runmirror mirror``: another process writes, a follower keeps trackers equal."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import runmirror
from runmirror import ending
from runmirror.exceptions import OptionError, Retry
from runmirror.follow import WORKERS, Follower
from runmirror.log.rows import Row
from runmirror.sinks.base import Rejected, SinkOptions
from runmirror.sinks.event_reader import read_points
from runmirror.targets import Target, parse_targets
from runmirror.testing import MemoryOptions, MemorySink
from tests.logs import flat_log, train_row, write_rows

_names = itertools.count()


class MemoryTarget(Target):
    """A target that is a sink class in this process, under no registered name."""

    def __init__(self, kind: type[MemorySink], options: SinkOptions) -> None:
        super().__init__("memory", options)
        object.__setattr__(self, "kind", kind)

    __slots__ = ("kind",)

    def make(self, group: str = "") -> Any:
        return self.kind(self.options)  # type: ignore[attr-defined]


def memory(kind: type[MemorySink] = MemorySink) -> MemoryTarget:
    return MemoryTarget(kind, MemoryOptions(tracker=f"follow-{next(_names)}"))


def steps(target: MemoryTarget, name: str) -> list[int]:
    runs = MemorySink.trackers.get(target.options.tracker, {}).values()  # type: ignore[attr-defined]
    return [step for run in runs if run.name == name for _, step, _, _ in run.rows]


def until(holds: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.01)


@contextmanager
def following(paths: Sequence[Path], *targets: Target, **options: Any) -> Iterator[Follower]:
    follower = Follower(paths, targets, **{"interval": 0.02, **options})
    stop = threading.Event()
    thread = threading.Thread(target=follower.run, args=(stop,))
    thread.start()
    try:
        yield follower
    finally:
        stop.set()
        thread.join(30)
        assert not thread.is_alive()


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("events.*"))


def append(path: Path, *rows: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def test_new_rows_and_new_runs_arrive(tmp_path: Path) -> None:
    """Rows appended while following, and a run that did not exist at the start, are all there, once."""
    target = memory()
    with following([tmp_path / "runs"], target):
        metrics = tmp_path / "runs" / "a" / "metrics.jsonl"
        metrics.parent.mkdir(parents=True)
        for step in range(20):
            append(metrics, train_row(step))
        until(lambda: steps(target, "a") == list(range(20)))
        write_rows(tmp_path / "runs" / "deep" / "b" / "metrics.jsonl", [train_row(0)])
        append(metrics, train_row(20))
        until(lambda: steps(target, "deep/b") == [0] and len(steps(target, "a")) == 21)


def test_an_ended_run_is_closed_and_opened_again_when_it_grows(tmp_path: Path) -> None:
    """Status finished in the tracker; a late row still arrives."""
    target = memory()
    log = flat_log(tmp_path / "runs" / "a")
    with following([tmp_path / "runs"], target) as follower:
        until(lambda: [lane.state for lane in follower.lanes] == ["ended"])
        (run,) = MemorySink.trackers[target.options.tracker].values()  # type: ignore[attr-defined]
        assert run.status == "finished"
        append(log / "metrics.jsonl", train_row(12))
        until(lambda: steps(target, "a") == list(range(13)))


def test_a_run_made_anew_is_another_run(tmp_path: Path) -> None:
    """A log_path of ours that was removed and started again: its rows go to a new run."""
    target, log = memory(), tmp_path / "runs" / "a"

    def train(first: int, rows: int) -> runmirror.Run:
        run = runmirror.start(log, code=False)
        for i in range(rows):
            run.log_metrics({"i": first + i})
        return run

    def held() -> list[int]:
        runs = MemorySink.trackers.get(target.options.tracker, {}).values()  # type: ignore[attr-defined]
        return [len(run.rows) for run in runs]

    first = train(0, 5)
    with following([tmp_path / "runs"], target):
        until(lambda: held() == [5])
        ending.forget(first)  # as when its process was killed
        first._file_lock.release()  # type: ignore[union-attr]
        log.rename(tmp_path / "gone")
        train(100, 9).finish()
        until(lambda: held() == [5, 9])


def test_a_failing_tracker_holds_up_no_other(tmp_path: Path) -> None:
    """One sink down, one run poisoned: the other sink and the other runs get everything; it is told once."""

    class Down(MemorySink):
        def put(self, rows: Sequence[Row]) -> list[Rejected]:
            raise Retry("no route")

    told: list[str] = []
    down, up = memory(Down), memory()
    for name in "abc":
        flat_log(tmp_path / "runs" / name)
    with following([tmp_path / "runs"], down, up, tell=told.append) as follower:
        until(lambda: all(steps(up, name) == list(range(12)) for name in "abc"))
        until(lambda: sum(lane.state == "behind" for lane in follower.lanes) == 3)
    assert sum("no route" in line for line in told) == 3


def test_a_sink_that_hangs_for_all_runs_holds_up_no_other(tmp_path: Path) -> None:
    """More hanging puts than a sink has threads: the other sink has every row."""
    release = threading.Event()

    class Hanging(MemorySink):
        def put(self, rows: Sequence[Row]) -> list[Rejected]:
            release.wait(60)
            return super().put(rows)

    for number in range(WORKERS + 3):
        flat_log(tmp_path / f"run{number}", 4)
    stuck, healthy = memory(Hanging), memory()
    try:
        with following([tmp_path], stuck, healthy):
            for number in range(WORKERS + 3):
                until(lambda name=f"run{number}": len(steps(healthy, name)) >= 4)  # type: ignore[misc]
                assert not steps(stuck, f"run{number}")
            release.set()
            until(lambda: all(len(steps(stuck, f"run{number}")) >= 4 for number in range(WORKERS + 3)))
    finally:
        release.set()


def test_catches_up_after_an_outage(tmp_path: Path) -> None:
    """Every row once, and "has caught up", when the tracker is back."""

    class Flaky(MemorySink):
        down = True

        def put(self, rows: Sequence[Row]) -> list[Rejected]:
            if type(self).down:
                raise Retry("no route")
            return super().put(rows)

    told: list[str] = []
    target = memory(Flaky)
    flat_log(tmp_path / "runs" / "a")
    with following([tmp_path / "runs"], target, tell=told.append):
        until(lambda: any("behind" in line for line in told))
        Flaky.down = False
        until(lambda: steps(target, "a") == list(range(12)))
    assert any("caught up" in line for line in told)


def test_a_hundred_runs_with_bounded_files(tmp_path: Path) -> None:
    """100 growing runs, at most 20 open at a time: every row of each, and few descriptors."""
    targets = parse_targets(["tensorboard"], [f"logdir={tmp_path / 'tb'}"])
    files = [tmp_path / "runs" / f"{number:03d}" / "metrics.jsonl" for number in range(100)]
    most = 0
    for file in files:
        write_rows(file, [train_row(0)])
        os.utime(file)
    with following([tmp_path / "runs"], *targets, max_open=20) as follower:
        for step in range(1, 4):
            for file in files:
                append(file, train_row(step))
            until(lambda step=step: sum(lane.rows for lane in follower.lanes) >= 100 * (step + 1), 60)  # type: ignore[misc]
            until(lambda: sum(lane._mirror is not None for lane in follower.lanes) <= 20)
            most = max(most, len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0)
    assert most < 200
    for file in files:
        assert [step for _, step, _ in read_points(tmp_path / "tb" / file.parent.name)["entropy"]] == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_the_command_follows_another_process(tmp_path: Path) -> None:
    """A writer process logs 300 rows; the command brings them all, ends by itself when idle, and exits 0."""
    writer = textwrap.dedent(
        """
        import runmirror, time
        with runmirror.start("runs/live", total_iterations=300) as run:
            for i in range(300):
                run.log_metrics({"loss": 1 / (i + 1)})
                time.sleep(0.002)
        """
    )
    command = [sys.executable, "-m", "runmirror", "mirror", "runs", "--to", "tensorboard", "--logdir", "tb"]
    command += ["--interval", "0.05", "--exit-idle", "2s"]
    follower = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    subprocess.run([sys.executable, "-c", writer], cwd=tmp_path, check=True, timeout=60)
    _, told = follower.communicate(timeout=60)
    assert follower.returncode == 0, told
    assert "live: finished, all of it is in tensorboard" in told
    assert [step for _, step, _ in read_points(tmp_path / "tb" / "live")["loss"]] == list(range(300))


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_the_command_can_be_stopped_at_any_time(tmp_path: Path, end: signal.Signals) -> None:
    """Stopped while rows arrive and started again: every row once; a polite stop exits 0."""
    metrics = tmp_path / "runs" / "a" / "metrics.jsonl"
    metrics.parent.mkdir(parents=True)
    command = [sys.executable, "-m", "runmirror", "mirror", "runs", "--to", "tensorboard", "--logdir", "tb"]
    step = 0
    for _ in range(3):
        follower = subprocess.Popen([*command, "--interval", "0.02"], cwd=tmp_path, stderr=subprocess.DEVNULL)
        before = size(tmp_path / "tb")
        for _ in range(200):
            append(metrics, train_row(step))
            step += 1
        until(lambda before=before: size(tmp_path / "tb") > before)  # type: ignore[misc]
        follower.send_signal(end)
        assert follower.wait(30) == (-signal.SIGKILL if end is signal.SIGKILL else 0)
    done = subprocess.run(
        [*command, "--exit-idle", "1"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [step for _, step, _ in read_points(tmp_path / "tb" / "a")["entropy"]] == list(range(step))


def test_targets_are_parsed(tmp_path: Path) -> None:
    """Shorthands and -o reach the sinks that have the field; ``SINK.FIELD`` one; what fits nobody is an error."""
    (target,) = parse_targets(["tensorboard"], ["exclude=time/*,cost/*", "tensorboard.tombstones=true"], logdir="tb")
    assert target.options.exclude == ("time/*", "cost/*")
    assert target.options.model_dump() | {"tombstones": True} == target.options.model_dump()
    with pytest.raises(OptionError, match="not among the sinks"):
        parse_targets(["tensorboard"], ["wandb.project=x"])
    with pytest.raises(OptionError, match="did you mean 'logdir'"):
        parse_targets(["tensorboard"], ["logdri=x"])
    with pytest.raises(OptionError, match="no sink named"):
        parse_targets([""])


@pytest.mark.slow
def test_a_silent_run_can_stay_open(tmp_path: Path) -> None:
    """For iterations that take hours; without the option it is closed as killed."""
    metrics = write_rows(tmp_path / "runs" / "a" / "metrics.jsonl", [{"step": 0, "loss": 1.0}])
    os.utime(metrics, (time.time() - 3600, time.time() - 3600))
    for option, closed in ((["--status-unknown", "running"], False), ([], True)):
        command = [sys.executable, "-m", "runmirror", "mirror", "runs", "--to", "dummy", "-o", f"folder=d{closed}"]
        done = subprocess.run(
            [*command, *option, "--exit-idle", "1"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert ("a: killed, all of it is in dummy" in done.stderr) == closed, done.stderr
