"""Work over processes: in order, again when a process dies, and nothing left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from runmirror.workers import spread, spread_over
from tests.pieces import die_always, die_once, double, never
from tests.test_live import until

pytestmark = pytest.mark.skipif(os.name != "posix", reason="SIGKILL")


def test_results_come_in_order_and_progress_is_told() -> None:
    """0, 2, 4, ... and what each piece told."""
    told: list[tuple[int, int, int]] = []
    assert spread(double, [(n,) for n in range(9)], 2, tell=lambda *one: told.append(one), gave_up=never) == [
        n * 2 for n in range(9)
    ]
    assert {(n, n, 1) for n in range(9)} <= set(told)


@pytest.mark.slow
def test_a_process_that_dies_costs_nothing(tmp_path: Path) -> None:
    """Every result, though a third of the work kills its process the first time."""
    work = [(str(tmp_path), n) for n in range(7)]
    assert spread(die_once, work, 2, tell=lambda *one: None, gave_up=never) == list(range(7))


@pytest.mark.slow
def test_work_that_always_kills_is_given_up() -> None:
    """After three processes; the rest is done."""
    work = [(n,) for n in range(4)]
    assert spread(die_always, work, 2, tell=lambda *one: None, gave_up=lambda n, why: -1) == [0, -1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_running(number: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C lets the work end by itself; after a kill of the parent the processes are gone all the same."""
    code = (
        "from runmirror.workers import spread\n"
        "from tests.pieces import never, wait_for_stop\n"
        "if __name__ == '__main__':\n"
        f"    spread(wait_for_stop, [({str(tmp_path)!r}, n) for n in range(3)], 2, tell=print, gave_up=never)"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    parent = subprocess.Popen([sys.executable, str(script)], env=environment, stdout=-3, stderr=-3)
    until(lambda: all((tmp_path / f"began{n}").exists() and (tmp_path / f"began{n}").read_text() for n in (1, 2)))
    children = [int((tmp_path / f"began{n}").read_text()) for n in (1, 2)]
    parent.send_signal(number)
    parent.wait(60)

    def gone(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    until(lambda: all(gone(pid) for pid in children), 30)
    assert [(tmp_path / f"ended{n}").exists() for n in (1, 2)] == [number == signal.SIGINT] * 2


class Failing(Executor):
    """Runs the work at once, but the first ``times`` calls of every piece come to nothing, as when a worker dies."""

    def __init__(self, times: int) -> None:
        self.times, self.calls = times, dict[int, int]()

    def submit(self, call: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        number = call.args[0]
        self.calls[number] = self.calls.get(number, 0) + 1
        future: Future[Any] = Future()
        if self.calls[number] <= self.times:
            future.set_exception(OSError("the worker is gone"))
        else:
            future.set_result(call())
        return future


def test_any_executor_shares_the_work() -> None:
    """Results in the order of the work, told as they come."""
    told: list[tuple[int, int]] = []
    with ThreadPoolExecutor(3) as executor:
        got = spread_over(executor, double, [(n,) for n in range(9)], done=lambda *one: told.append(one), gave_up=never)
    assert got == [n * 2 for n in range(9)]
    assert told[0] == (0, 0)
    assert sorted(told) == [(n, n * 2) for n in range(9)]
    assert spread_over(Failing(0), double, [], done=lambda *one: None, gave_up=never) == []


def test_an_executor_is_asked_again() -> None:
    """Twice; then the work is given up, with the reason."""
    failing = Failing(2)
    assert spread_over(failing, double, [(1,), (2,)], done=lambda *one: None, gave_up=never) == [2, 4]
    assert set(failing.calls.values()) == {3}
    why: list[str] = []
    spread_over(Failing(3), double, [(1,)], done=lambda *one: None, gave_up=lambda n, text: why.append(text))
    assert why == ["OSError: the worker is gone"]


@pytest.mark.slow
def test_an_executor_that_breaks_ends_the_work() -> None:
    """Python's own process pool can't go on after a death: what is left is given up, nothing hangs."""
    with ProcessPoolExecutor(1) as executor:
        got = spread_over(
            executor, die_always, [(0,), (1,), (2,)], done=lambda *one: None, gave_up=lambda number, why: -1
        )
    assert got[0] == 0
    assert got[1] == -1


def fail(number: int, *, stop: Any, tell: Any) -> Any:
    if number == 1:
        raise TimeoutError("too late")
    return (lambda: 0) if number == 2 else number


def test_work_that_raises_is_given_up_alone() -> None:
    """With the reason; so is a result that can't be brought back."""
    why: list[str] = []
    got = spread(
        fail,
        [(n,) for n in range(4)],
        2,
        tell=lambda *one: None,
        gave_up=lambda number, text: why.append(text) or -number,  # type: ignore[func-returns-value]
    )
    assert got == [0, -1, -2, 3]
    assert why[0] == "TimeoutError: too late" or "pickle" in why[0]
    assert len(why) == 2
