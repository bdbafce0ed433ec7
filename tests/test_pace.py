"""The pace of a destination: shared by all mirrors on a machine, and never able to stop them for good."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from runmirror.exceptions import Throttled
from runmirror.log.runlog import RunLog
from runmirror.mirror import Mirror
from runmirror.pace import LONGEST, Pace
from runmirror.storage import LocalStorage
from runmirror.testing import MemoryOptions, MemorySink
from tests.logs import flat_log


class Waits(threading.Event):
    """A stop event that notes how long it was waited for, and doesn't wait."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.append(timeout or 0.0)
        if len(self.seconds) > 100:
            self.set()
        return self.is_set()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RUNMIRROR_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_the_rate_is_shared() -> None:
    """Five times 100 rows at 100 a second, by three who share: the last go 4 s after the first."""
    waits = Waits()
    for _ in range(5):
        Pace("mlflow", "http://one", 100.0).wait(100, waits)
    assert waits.seconds[0] == pytest.approx(0.0, abs=0.01)
    assert 3.0 < waits.seconds[-1] <= 4.0
    other = Waits()
    Pace("mlflow", "http://other", 100.0).wait(100, other)
    assert other.seconds == [pytest.approx(0.0, abs=0.01)]


def test_all_hold_back_when_one_is_told_to() -> None:
    """Also those without a rate; another destination goes on."""
    Pace("mlflow", "http://one").hold(50.0)
    Pace("mlflow", "http://one").hold(5.0)  # a shorter one does not end it
    waits, other = Waits(), Waits()
    Pace("mlflow", "http://one").wait(10, waits)
    Pace("mlflow", "http://other").wait(10, other)
    assert waits.seconds
    assert 45.0 < waits.seconds[0] <= 50.0
    assert not other.seconds


@pytest.mark.parametrize("text", ["", "nan", "x", "1e300", "\0"])
def test_a_damaged_file_holds_nobody(text: str, home: Path) -> None:
    """What can't be a time near now counts as none."""
    pace = Pace("mlflow", "http://one")
    pace.hold(1.0)
    next(home.glob("pace/*.hold")).write_text(text)
    waits = Waits()
    pace.wait(10, waits)
    assert not waits.seconds


def test_nobody_waits_for_ever() -> None:
    """A tracker that asks for a year gets five minutes."""
    Pace("mlflow", "http://one").hold(3e7)
    waits = Waits()
    Pace("mlflow", "http://one").wait(1, waits)
    assert max(waits.seconds) <= LONGEST


def test_looking_makes_no_file(home: Path) -> None:
    """Without a rate and a tracker that complains nothing is written."""
    Pace("tensorboard", "/tb").wait(10, Waits())
    assert not home.exists()


def test_a_throttled_mirror_holds_the_others(tmp_path: Path) -> None:
    """And delivers every row itself, once the tracker takes them."""

    class Strained(MemorySink):
        refusals = 1

        def put(self, rows):  # type: ignore[no-untyped-def]
            if Strained.refusals:
                Strained.refusals -= 1
                raise Throttled("too many requests", after=0.05)
            return super().put(rows)

    root = flat_log(tmp_path / "run", 30)
    options = MemoryOptions(tracker=str(tmp_path))
    sink = Strained(options)
    before = time.time()
    with Mirror(RunLog(LocalStorage(root)), sink, tmp_path / "state", options=options, rate=1000.0) as mirror:
        assert mirror.deliver(patience=30).rows == 30
        held = Pace(sink.name, sink.destination())._read("hold")
    assert before < held < time.time() + LONGEST
