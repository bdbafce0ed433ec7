"""``report_to``: children and threads that mirror while training runs, and what training never notices of them."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import runmirror
from runmirror import live as live_module
from runmirror.exceptions import MissingPackageError, OptionError, Retry, UnknownSinkError
from runmirror.log import layout
from runmirror.log.rows import Row
from runmirror.loop import RunLoop
from runmirror.run import Run
from runmirror.sinks.base import Rejected
from runmirror.sinks.event_reader import read_points
from runmirror.sinks.tensorboard import TensorBoardOptions
from runmirror.storage import LocalStorage
from runmirror.targets import Target, parse_report_to
from runmirror.testing import DummyOptions, MemoryOptions, MemorySink
from runmirror.testing.dummy import DummyRun, read_dummy

pytestmark = pytest.mark.skipif(os.name != "posix", reason="process groups")
_names = itertools.count()


def until(holds: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.01)


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(report_to: Any, log_path: Path = tmp_path / "run", **options: Any) -> Run:
        runs.append(runmirror.start(log_path, report_to=report_to, code=False, **options))
        return runs[-1]

    yield start
    for run in runs:
        run.finish("killed", 5)
        if run.live is not None:
            for child in run.live._children:
                if child.process is not None:
                    child.process.kill()


@pytest.fixture
def dummy(tmp_path: Path) -> Callable[[], DummyRun]:
    """What the dummy tracker holds of the one run."""

    def read() -> DummyRun:
        found = read_dummy(tmp_path / "dummy") if (tmp_path / "dummy").exists() else {}
        return found.get("run", DummyRun())

    return read


def options(tmp_path: Path, **faults: Any) -> dict[str, Any]:
    return {"dummy": {"folder": str(tmp_path / "dummy"), **faults}}


def values(held: DummyRun) -> list[float]:
    return [points["i"] for *_, points in held.rows if points]


# What report_to may be


def test_report_to_takes_every_form(tmp_path: Path) -> None:
    """Names, comma lists, lists, dicts, options, sink objects and mixtures, as targets and objects."""
    chosen = TensorBoardOptions(logdir=str(tmp_path))
    sink = MemorySink(MemoryOptions(tracker="x"))
    plain = parse_report_to("tensorboard")
    assert [target.name for target in plain if isinstance(target, Target)] == ["tensorboard"]
    for form in (
        ["tensorboard"],
        ("tensorboard",),
        "tensorboard,",
        "none,tensorboard",
        ["none", "tensorboard"],
        {"tensorboard": {}},
    ):
        assert parse_report_to(form) == plain, form
    assert parse_report_to({"tensorboard": {"logdir": str(tmp_path)}}) == [Target("tensorboard", chosen)]
    assert parse_report_to({"tensorboard": {"logging_dir": str(tmp_path)}}) != plain
    assert parse_report_to([chosen, sink]) == [Target("tensorboard", chosen), sink]
    assert [one.name for one in parse_report_to("dummy, tensorboard")] == ["dummy", "tensorboard"]
    assert parse_report_to(None) == parse_report_to("none") == parse_report_to([]) == parse_report_to(["none"]) == []


def test_all_means_the_installed_real_trackers(caplog: pytest.LogCaptureFixture) -> None:
    """mlflow, tensorboard and wandb, not the dummy; it is said."""
    caplog.set_level(logging.INFO, "runmirror")
    found = [target.name for target in parse_report_to("all") if isinstance(target, Target)]
    assert [name for name in found if name != "trackio"] == ["mlflow", "tensorboard", "wandb"]
    assert 'report_to="all" means mlflow, tensorboard' in caplog.text


def test_a_wrong_report_to_says_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """ValueError with a did-you-mean; ImportError with the extra; a wrong option named."""
    with pytest.raises(UnknownSinkError, match="did you mean 'tensorboard'"):
        parse_report_to("tensorbord")
    with pytest.raises(OptionError, match="did you mean 'logdir'"):
        parse_report_to({"tensorboard": {"logdri": "x"}})
    with pytest.raises(OptionError, match="twice, with different options"):
        parse_report_to(["tensorboard", {"tensorboard": {"logdir": "/elsewhere"}}])
    with pytest.raises(OptionError, match="can't be 3"):
        parse_report_to(3)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'runmirror\[tensorboard\]'"):
        parse_report_to("tensorboard")


def test_the_environment_sets_report_to(
    begin: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RUNMIRROR_REPORT_TO counts when report_to is not given, and only then."""
    monkeypatch.setenv("RUNMIRROR_REPORT_TO", "tensorboard")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tb"))
    run = begin(None)
    run.log_metrics({"i": 0})
    run.finish()
    assert run.urls == {"tensorboard": str(tmp_path / "tb" / "run")}
    assert begin("none", tmp_path / "other").status().sinks == {}


# A healthy tracker


def test_rows_arrive_while_training(begin: Callable[..., Run], tmp_path: Path, dummy: Callable[[], DummyRun]) -> None:
    """Each row is in the tracker before the next is logged; finished and delivered at the end."""
    run = begin(options(tmp_path))
    for i in range(10):
        run.log_metrics({"i": i})
        until(lambda i=i: values(dummy()) == list(range(i + 1)))  # type: ignore[misc]
    run.finish()
    (status,) = run.status().sinks.values()
    assert (status.state, status.error, status.restarts) == ("delivered", None, 0)
    assert dummy().statuses == ["finished"]


def test_two_sinks_get_the_same(begin: Callable[..., Run], tmp_path: Path, dummy: Callable[[], DummyRun]) -> None:
    """100 rows in a file tracker and in TensorBoard, with config; their places in ``run.urls``."""
    run = begin(options(tmp_path) | {"tensorboard": {"logdir": str(tmp_path / "tb")}}, config={"lr": 1})
    for i in range(100):
        run.log_metrics({"i": i})
    run.finish()
    assert values(dummy()) == list(range(100))
    assert [value for *_, value in read_points(tmp_path / "tb" / "run")["i"]] == list(range(100))
    assert set(run.urls) == {"dummy", "tensorboard"}
    assert "config.json" in dict(dummy().files)


def test_a_run_is_called_what_it_was_named(begin: Callable[..., Run], tmp_path: Path) -> None:
    """Live, and by an import afterwards, which finds it complete."""
    run = begin({"tensorboard": {"logdir": str(tmp_path / "tb")}}, name="mine")
    run.log_metrics({"i": 1})
    run.finish()
    assert [value for *_, value in read_points(tmp_path / "tb" / "mine")["i"]] == [1]
    assert runmirror.import_runs([run.log_path], "tensorboard", {"logdir": str(tmp_path / "tb")}).count("complete") == 1
    assert [path.name for path in (tmp_path / "tb").iterdir()] == ["mine"]


def test_a_sink_object_runs_in_a_thread(begin: Callable[..., Run]) -> None:
    """100 rows once in the object's tracker, and its status."""
    tracker = f"live-{next(_names)}"
    run = begin(MemorySink(MemoryOptions(tracker=tracker)))
    for i in range(100):
        run.log_metrics({"i": i})
    run.finish()
    (held,) = MemorySink.trackers[tracker].values()
    assert [points["i"] for *_, points in held.rows] == list(range(100))
    assert held.status == "finished"


def test_a_resumed_run_goes_on_in_the_same_place(
    begin: Callable[..., Run], tmp_path: Path, dummy: Callable[[], DummyRun]
) -> None:
    """The rows of both starts, once each, in one run of the tracker."""
    for part in range(3):
        run = begin(options(tmp_path))
        for i in range(part * 10, part * 10 + 10):
            run.log_metrics({"i": i})
        run.finish("failed")
    assert values(dummy()) == list(range(30))
    assert dummy().statuses[-1] == "failed"


def test_a_second_start_in_the_process_takes_over(
    begin: Callable[..., Run], tmp_path: Path, dummy: Callable[[], DummyRun]
) -> None:
    """A notebook that starts again: every row once, though nobody waited for the first child."""
    for part in range(3):
        run = begin(options(tmp_path))
        for i in range(part * 10, part * 10 + 10):
            run.log_metrics({"i": i})
    run.finish()
    assert values(dummy()) == list(range(30))
    assert dummy().statuses[-1] == "finished"


# A tracker that fails


@pytest.mark.slow
def test_a_flaky_tracker_gets_every_row_once(
    begin: Callable[..., Run], tmp_path: Path, dummy: Callable[[], DummyRun]
) -> None:
    """300 rows once each through failed calls, lost answers and crashes of the child."""
    run = begin(options(tmp_path, transient=0.1, late=0.1, crash=0.05, retry_after=0.01, seed=3))
    for i in range(300):
        run.log_metrics({"i": i})
        time.sleep(0.002)
    run.finish()
    assert values(dummy()) == list(range(300))


def test_a_dead_tracker_costs_training_nothing(
    begin: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Behind is told once; finish gives up on it at the limit and names the command; that command delivers."""
    monkeypatch.setattr(live_module, "UNREACHABLE_AFTER", 0.5)
    monkeypatch.setattr(live_module.logger, "hasHandlers", lambda: False)
    run = begin(options(tmp_path, transient=1.0) | {"tensorboard": {"logdir": str(tmp_path / "tb")}})
    for i in range(50):
        run.log_metrics({"i": i})
    until(lambda: run.status().sinks["dummy"].state == "behind")
    run.finish()
    assert run.status().sinks["tensorboard"].state == "delivered"
    told = capfd.readouterr().err
    assert told.count("dummy is behind, trying again") == 1
    (line,) = [line for line in told.splitlines() if "To deliver it later" in line]
    assert "nothing is lost" in line
    command = line.split("To deliver it later: ")[1].replace("transient=1.0", "transient=0").split()
    for child in run.live._children if run.live else []:
        if child.process is not None:
            child.process.kill()
            until(lambda child=child: child.process is None)  # type: ignore[misc]
    done = subprocess.run(
        [sys.executable, "-m", *command, "--json"], capture_output=True, text=True, timeout=60, check=False
    )
    assert json.loads(done.stdout)["totals"]["rows"] == 50
    assert values(read_dummy(tmp_path / "dummy")["run"]) == list(range(50))


@pytest.mark.slow
def test_a_hanging_tracker_does_not_hold_up_the_end(
    begin: Callable[..., Run], tmp_path: Path, dummy: Callable[[], DummyRun]
) -> None:
    """finish returns at its deadline; the other sink has everything."""
    run = begin(options(tmp_path, hang=1.0, calls=["put"]) | {"tensorboard": {"logdir": str(tmp_path / "tb")}})
    for i in range(50):
        run.log_metrics({"i": i})
    run.finish(deadline=3)
    assert run.status().sinks["tensorboard"].state == "delivered"
    assert run.status().sinks["dummy"].state != "delivered"
    assert len(read_points(tmp_path / "tb" / "run")["i"]) == 50


@pytest.mark.parametrize("verb", ["open", "put", "flush", "close"])
@pytest.mark.parametrize("fault", [RuntimeError("boom"), Retry("down"), SystemExit(1), "hang"])
def test_a_broken_sink_object_reaches_nobody(
    begin: Callable[..., Run], verb: str, fault: BaseException | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training logs and ends by its deadline whatever the object does in its thread."""
    release = threading.Event()

    class Broken(MemorySink):
        pass

    def broken(self: MemorySink, *args: Any) -> Any:
        if isinstance(fault, BaseException):
            raise fault
        release.wait(30)
        raise Retry("late")

    setattr(Broken, verb, broken)
    run = begin(Broken(MemoryOptions(tracker=f"live-{next(_names)}")))
    for i in range(20):
        run.log_metrics({"i": i})
    run.finish(deadline=0.3)
    release.set()
    assert run.status().rows == 20


# Processes


def processes_of(folder: Path) -> list[int]:
    """Processes that have ``folder`` in their stdin order's reach: children keep their log file open below it."""
    found = []
    for entry in Path("/proc").iterdir() if Path("/proc").is_dir() else []:
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                targets = [os.readlink(link) for link in (entry / "fd").iterdir()]
                if any(target.startswith(str(folder)) for target in targets) and int(entry.name) != os.getpid():
                    found.append(int(entry.name))
    return found


def test_a_killed_child_is_started_again(
    begin: Callable[..., Run], tmp_path: Path, dummy: Callable[[], DummyRun]
) -> None:
    """Every row once; one restart is counted."""
    run = begin(options(tmp_path))
    run.log_metrics({"i": 0})
    until(lambda: len(values(dummy())) == 1)
    assert run.live is not None
    process = run.live._children[0].process
    assert process is not None
    process.kill()
    until(lambda: run.status().sinks["dummy"].restarts == 1)
    for i in range(1, 20):
        run.log_metrics({"i": i})
    run.finish()
    assert values(dummy()) == list(range(20))


def test_a_removed_log_path_ends_its_mirror(begin: Callable[..., Run], tmp_path: Path) -> None:
    """No process goes on for a log that is gone, though its tracker is down."""
    run = begin(options(tmp_path, transient=1.0))
    run.log_metrics({"i": 0})
    until(lambda: run.status().sinks["dummy"].state == "behind")
    run.finish(deadline=0.1)
    shutil.rmtree(tmp_path / "run")
    assert run.live is not None
    until(lambda: run.live is not None and all(child.process is None for child in run.live._children))
    assert not (tmp_path / "run").exists()


def test_a_forked_copy_leaves_the_children_alone(
    begin: Callable[..., Run], tmp_path: Path, dummy: Callable[[], DummyRun]
) -> None:
    """A fork that outlives the run neither logs, nor starts children, nor keeps the child alive."""
    run = begin(options(tmp_path))
    run.log_metrics({"i": 0})
    until(lambda: len(values(dummy())) == 1)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writing)
        run.log_metrics({"i": 99})
        run.finish()
        os.read(reading, 1)
        os._exit(0)
    try:
        run.log_metrics({"i": 1})
        run.finish()
        until(lambda: run.live is None or all(child.process is None for child in run.live._children))
        assert values(dummy()) == [0, 1]
        assert run.status().sinks["dummy"].state == "delivered"
    finally:
        os.close(writing)
        os.waitpid(pid, 0)
        os.close(reading)


MANY = """
import os, sys, threading, time
from pathlib import Path
import runmirror

def begin(name, report_to):
    with runmirror.start(name, report_to=report_to, code=False) as run:
        run.log_metrics({"i": 0})
    return run

def held():
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    return len(os.listdir("/proc/self/fd")), threading.active_count(), children.read_text().split()

def settle():
    until = time.monotonic() + 20
    while held()[1:] != (1, []) and time.monotonic() < until:
        time.sleep(0.01)
    return held()

begin("warm up", {"dummy": {"folder": "dummy"}})
before = settle()
for number in range(30):
    assert begin(str(number), {"dummy": {"folder": "dummy"}}).status().sinks["dummy"].state == "delivered"
assert settle() == before, (held(), before)
assert before[1:] == (1, []), before
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts through /proc")
def test_many_runs_leave_nothing_behind(tmp_path: Path) -> None:
    """30 runs in one process, each delivered: no child, zombie, thread, descriptor or temporary file is left."""
    environment = os.environ | {"TMPDIR": str(tmp_path / "tmp"), "RUNMIRROR_QUIET": "1"}
    (tmp_path / "tmp").mkdir()
    command = [sys.executable, "-c", MANY]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(read_dummy(tmp_path / "dummy")) == 31
    assert list((tmp_path / "tmp").iterdir()) == []


TRAIN = """
import os, signal, sys, time
import runmirror
run = runmirror.start("run", report_to={"dummy": {"folder": "dummy"}}, code=False)
for i in range(int(sys.argv[2]) if len(sys.argv) > 2 else 20):
    run.log_metrics({"i": i})
HOW = sys.argv[1]
"""
ENDS = {
    "finish": ("run.finish()", 0, "finished"),
    "exit": ("pass", 0, "finished"),
    "exception": ("raise ValueError('boom')", 1, "failed"),
    "sys.exit": ("sys.exit(3)", 3, "failed"),
    "sys.exit in with": ("with run: sys.exit('no')", 1, "failed"),
    "sys.exit(0)": ("sys.exit(0)", 0, "finished"),
    "a caught sys.exit": ("try: sys.exit(3)\nexcept SystemExit: run.log_metrics({})", 0, "finished"),
    "SIGTERM": ("signal.raise_signal(signal.SIGTERM)", -signal.SIGTERM, "killed"),
    "SIGINT": ("signal.raise_signal(signal.SIGINT)", -signal.SIGINT, "killed"),
    "os._exit": ("os._exit(5)", 5, "killed"),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, "killed"),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ENDS)
def test_however_training_ends_every_row_arrives(how: str, tmp_path: Path, dummy: Callable[[], DummyRun]) -> None:
    """20 rows once, the status by how it ended, the exit code its own, and no process left."""
    ending, code, status = ENDS[how]
    done = subprocess.run(
        [sys.executable, "-c", TRAIN + ending, how],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr
    until(lambda: dummy().statuses[-1:] == [status])
    assert values(dummy()) == list(range(20))
    until(lambda: processes_of(tmp_path) == [])


@pytest.mark.slow
def test_notices_go_to_stderr_or_logging_or_nowhere(tmp_path: Path) -> None:
    """One line with the tracker's place on stderr; through logging when that is set up; none with RUNMIRROR_QUIET=1."""
    logged = "import logging; logging.basicConfig(level=logging.INFO, format='LOG %(message)s')\n"
    cases: Sequence[tuple[str, dict[str, str], str]] = [
        ("", {}, "runmirror: dummy: "),
        (logged, {}, "LOG dummy: "),
        ("", {"RUNMIRROR_QUIET": "1"}, ""),
    ]
    for number, (prefix, environment, told) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        done = subprocess.run(
            [sys.executable, "-c", prefix + TRAIN + "run.finish()", "x"],
            cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        lines = done.stderr.splitlines()
        assert len(lines) == (1 if told else 0), done.stderr
        assert all(line.startswith(told) for line in lines)


def test_works_from_a_read_only_folder_full_of_traps(tmp_path: Path, dummy: Callable[[], DummyRun]) -> None:
    """A working directory that can't be written and holds files named like standard modules."""
    traps = tmp_path / "traps"
    traps.mkdir()
    for name in ("json.py", "logging.py", "random.py"):
        (traps / name).write_text("raise RuntimeError('the wrong module')\n")
    traps.chmod(0o555)
    code = TRAIN.replace('"run"', repr(str(tmp_path / "run"))).replace('"dummy"}', repr(str(tmp_path / "dummy")) + "}")
    done = subprocess.run(
        [sys.executable, "-P", "-c", code + "run.finish()", "x"],
        cwd=traps,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert values(dummy()) == list(range(20))


def test_options_are_on_no_command_line(begin: Callable[..., Run], tmp_path: Path) -> None:
    """The child's command line names the module and nothing else."""
    run = begin(options(tmp_path, seed=271828))
    assert run.live is not None
    (child,) = run.live._children
    until(lambda: child.process is not None)
    assert child.process is not None
    assert "271828" not in " ".join(map(str, child.process.args))  # type: ignore[arg-type]
    assert DummyOptions(folder="x", seed=271828).seed == 271828


class Rejecting(MemorySink):
    """Takes no key "i"."""

    def put(self, rows: Sequence[Row]) -> list[Rejected]:
        super().put(rows)
        return [Rejected(row.ordinal, "i", "no i") for row in rows]


def test_rejected_rows_do_not_stop_the_rest(begin: Callable[..., Run]) -> None:
    """All rows are delivered, and what was refused is in the rejected file."""
    run = begin(Rejecting(MemoryOptions(tracker=f"live-{next(_names)}")))
    for i in range(5):
        run.log_metrics({"i": i})
    run.finish()
    assert run.status().sinks["memory"].state == "delivered"
    (path,) = Path(run.log_path).rglob("*.rejected.jsonl")
    assert len(path.read_text().splitlines()) == 5


# What an independent look at it found


def test_a_log_path_made_anew_is_another_run(begin: Callable[..., Run], tmp_path: Path) -> None:
    """Removed and started again in one process: the first mirror gets none of the new rows."""
    first, second = MemorySink(MemoryOptions(tracker="anew-1")), MemorySink(MemoryOptions(tracker="anew-2"))
    old = begin(first)
    old.log_metrics({"i": 0})
    until(lambda: old.status().sinks["memory"].state == "current" and len(next(iter(first.runs.values())).rows) == 1)
    shutil.rmtree(tmp_path / "run")
    new = begin(second)
    for i in range(20):
        new.log_metrics({"i": 100 + i})
    new.finish()
    assert [len(run.rows) for run in first.runs.values()] == [1]
    assert [len(run.rows) for run in second.runs.values()] == [20]


def test_the_order_names_the_run(begin: Callable[..., Run], tmp_path: Path) -> None:
    """A loop made for another run_id hands over."""
    run = begin(None)
    run.log_metrics({"i": 0})
    sink = MemorySink(MemoryOptions(tracker="named"))
    loop = RunLoop(LocalStorage(tmp_path / "run"), sink, sink.options, 1, run_id="another")
    assert loop.run(threading.Event()) == "handed over"
    assert not sink.runs


def test_a_sink_object_is_for_one_open_run(begin: Callable[..., Run], tmp_path: Path) -> None:
    """A second open run is refused before anything is written; after the end of the first it is taken."""
    sink = MemorySink(MemoryOptions(tracker="one-run"))
    first = begin(sink)
    with pytest.raises(OptionError, match="one run at a time"):
        begin(sink, tmp_path / "second")
    assert not (tmp_path / "second").exists()
    first.log_metrics({"i": 0})
    first.finish()
    second = begin(sink, tmp_path / "second")
    second.log_metrics({"i": 1})
    second.finish()
    assert [len(run.rows) for run in sink.runs.values()] == [1, 1]


def test_a_stumbling_file_system_ends_no_delivery(begin: Callable[..., Run], tmp_path: Path) -> None:
    """One OSError while the log is looked at: behind, then every row."""

    class Stumbling(LocalStorage):
        bad = False

        def read(self, path: str) -> bytes:
            if self.bad and path == layout.JOURNAL and threading.current_thread().name.startswith("runmirror-live"):
                self.bad = False
                raise OSError(116, "stale file handle")
            return super().read(path)

    storage, sink = Stumbling(tmp_path / "run"), MemorySink(MemoryOptions(tracker="stale"))
    run = begin(sink, storage)
    run.log_metrics({"i": 0})
    until(lambda: run.status().sinks["memory"].state == "current")
    storage.bad = True
    run.log_metrics({"i": 1})
    until(lambda: not storage.bad)
    run.log_metrics({"i": 2})
    run.finish()
    assert [len(one.rows) for one in sink.runs.values()] == [3]


def test_a_dead_child_is_noticed_though_its_pipe_is_held(begin: Callable[..., Run], tmp_path: Path) -> None:
    """Another process has the writing end: the child's death shows all the same."""
    run = begin(options(tmp_path))
    assert run.live is not None
    child = run.live._children[0]
    reading, writing = os.pipe()
    until(lambda: run.status().sinks["dummy"].state == "current")
    assert child.events is not None
    assert child.process is not None
    os.dup2(reading, child.events)  # a pipe whose writing end stays open here
    os.set_blocking(child.events, False)
    try:
        child.process.kill()
        until(lambda: run.status().sinks["dummy"].restarts == 1)
    finally:
        os.close(reading)
        os.close(writing)


def test_a_restarted_child_keeps_the_folder_of_the_start(
    begin: Callable[..., Run], tmp_path: Path, dummy: Callable[[], DummyRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative folder means the same after training has gone elsewhere."""
    monkeypatch.chdir(tmp_path)
    run = begin({"dummy": {"folder": "dummy"}})
    run.log_metrics({"i": 0})
    until(lambda: len(values(dummy())) == 1)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert run.live is not None
    assert run.live._children[0].process is not None
    run.live._children[0].process.kill()
    until(lambda: run.status().sinks["dummy"].restarts == 1)
    run.log_metrics({"i": 1})
    run.finish()
    assert values(dummy()) == [0, 1]
    assert not list((tmp_path / "other").iterdir())


def test_the_finish_command_tells_no_password_and_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials in a URL are masked; a default folder is named in full."""
    monkeypatch.chdir(tmp_path)
    storage = LocalStorage(tmp_path / "run")
    (target,) = parse_report_to({"mlflow": {"tracking_uri": "http://me:hunter2@mlflow.example"}})
    assert isinstance(target, Target)
    command = live_module._command(target, storage)
    assert "hunter2" not in command
    assert "mlflow.example" in command
    board = live_module._command(Target("tensorboard", TensorBoardOptions()), storage)
    assert f"logdir={os.path.abspath(TensorBoardOptions().logdir)}" in board


def test_a_tracker_that_moves_is_not_out_of_reach() -> None:
    """Rows taken between failures begin the wait anew; an old error does not outlive the delivery."""
    worker = live_module._Worker("x", "command")
    worker.note("behind", "down")
    worker.behind_since = time.monotonic() - 2 * live_module.UNREACHABLE_AFTER
    assert worker.unreachable()
    worker.note("moving", "")
    assert not worker.unreachable()
    assert worker.state == "behind"
    worker.note("ended", "done")
    assert (worker.state, worker.error) == ("delivered", None)


@pytest.mark.parametrize("how", ["exit(1)", "quit(1)", "exit()"])
def test_the_builtin_exit_is_noted(how: str, tmp_path: Path) -> None:
    """As sys.exit is."""
    code = f"import runmirror\nrun = runmirror.start({str(tmp_path / 'run')!r}, code=False)\nrun.log_metrics({{'a': 1}})\n{how}"
    subprocess.run([sys.executable, "-c", code], timeout=60)
    last = json.loads((tmp_path / "run" / layout.JOURNAL).read_text().splitlines()[-1])
    assert last["status"] == ("finished" if how == "exit()" else "failed")


def test_hurrying_takes_no_lock(tmp_path: Path) -> None:
    """A signal handler runs in a thread that may hold the lock of the wait."""
    sink = MemorySink(MemoryOptions(tracker="hurry"))
    loop = RunLoop(LocalStorage(tmp_path), sink, sink.options, 1)
    with loop._watch._changed._cond:  # type: ignore[attr-defined]
        thread = threading.Thread(target=loop.hurry, args=(1.0,), daemon=True)
        thread.start()
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("threading.Thread(target=sys.exit, args=(1,)).start()", "finished"),
        ("with runmirror.start('other', code=False): sys.exit(1)", "failed"),
    ],
    ids=["in a thread", "within another run"],
)
def test_sys_exit_counts_for_the_runs_it_ends(end: str, status: str, tmp_path: Path) -> None:
    """In a thread it ends that thread only; from another run's block it ends this one too."""
    code = f"import runmirror, sys, threading\nrun = runmirror.start('run', code=False)\nrun.log_metrics({{'a': 1}})\n{end}"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=60, capture_output=True)
    last = json.loads((tmp_path / "run" / layout.JOURNAL).read_text().splitlines()[-1])
    assert last["status"] == status


def test_all_runs_share_the_grace_of_a_sigterm(tmp_path: Path) -> None:
    """Each gets its share of what is left, and one that fails keeps no other from ending, nor the process."""
    code = """
    import os, signal
    from runmirror import ending

    class One:
        in_cloud = False
        def finish(self, status, deadline):
            print(status, round(deadline), flush=True)
            if deadline > 20: raise RuntimeError("x")

    ending.OPEN.update(a=One(), b=One())
    ending.hook(sigterm=True)
    os.kill(os.getpid(), signal.SIGTERM)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"RUNMIRROR_GRACE": "40"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["killed 20", "killed 40"]
    assert done.returncode == -signal.SIGTERM


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_child_whose_log_is_full_delivers(
    begin: Callable[..., Run], tmp_path: Path, dummy: Callable[[], DummyRun]
) -> None:
    """What it can't note on a full disk keeps nothing from the tracker."""
    run = begin(None)
    run.log_metrics({"i": 0})
    run.finish()
    order = {
        "log_path": run.url, "storage": None, "sink": "dummy", "options": options(tmp_path)["dummy"], "starts": 1,
        "run_id": run.run_id, "parent": os.getpid(), "drain_timeout": 10.0, "grace": 10.0, "events": None,
    }  # fmt: skip
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "runmirror.child"]
        done = subprocess.run(command, input=json.dumps(order).encode(), stderr=full, timeout=60)
    assert done.returncode in (0, 120)  # 120: Python could not flush stderr at its end
    assert values(dummy()) == [0]


def test_a_system_that_gives_no_threads_stops_no_training(
    begin: Callable[..., Run],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    dummy: Callable[[], DummyRun],
) -> None:
    """The run is written, the sinks are left behind, and how to deliver it is said."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("runmirror-live"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    caplog.set_level(logging.INFO, "runmirror")
    run = begin([options(tmp_path), MemorySink(MemoryOptions(tracker="no threads"))])
    run.log_metrics({"i": 0})
    run.finish()
    assert {sink.state for sink in run.status().sinks.values()} == {"left behind"}
    assert run.status().rows == 1
    assert "can't start new thread" in caplog.text
    assert "To deliver it later: runmirror import" in caplog.text
    assert run.live is not None
    for child in run.live._children:  # the process was there before the thread that would look after it, and delivers
        assert child.process is not None
        assert child.process.wait(60) == 0
    assert values(dummy()) == [0]
