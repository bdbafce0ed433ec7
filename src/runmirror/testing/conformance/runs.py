"""Several runs beside each other, and real mirrors."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from runmirror.exceptions import Retry
from runmirror.sinks.base import Sink
from runmirror.testing.conformance.base import DEADLINE, Harness, a_row, a_run, rows, write_log


class RunTests(Harness):
    """Several runs beside each other, and real mirrors."""

    # -- several runs

    def test_two_runs_do_not_mix(self, tmp_path: Path) -> None:
        """Written in turns, by two sinks (one after the other where a process takes one run only)."""
        left, right = a_run("left"), a_run("right")
        ones, others = rows(6), [a_row(n, {"loss": 100.0 + n, "other": 1.0}) for n in range(6)]
        if self.make_sink(tmp_path).capabilities.process_per_run:
            self.deliver(tmp_path, ones, left)
            self.deliver(tmp_path, others, right)
        else:
            sinks = [self.make_sink(tmp_path), self.make_sink(tmp_path)]
            sinks[0].open(left, None)
            sinks[1].open(right, None)
            for start in (0, 2, 4):
                sinks[0].put(ones[start : start + 2])
                sinks[1].put(others[start : start + 2])
            for sink in sinks:
                assert sink.flush(DEADLINE) == 6
                sink.close(None, DEADLINE)
        self.holds(self.make_sink(tmp_path), ones, left)
        self.holds(self.make_sink(tmp_path), others, right)

    def test_one_sink_takes_runs_in_turn(self, tmp_path: Path) -> None:
        """Closed and opened for another run, it keeps nothing of the first one."""
        sink = self.make_sink(tmp_path)
        for name in ("left", "right", "left"):
            opened = sink.open(a_run(name), None)
            sink.put(rows(3)[opened.position or 0 :])
            assert sink.flush(DEADLINE) == 3
            sink.close(None, DEADLINE)
        for name in ("left", "right"):
            self.holds(sink, rows(3), a_run(name))

    def test_runs_of_one_name_stay_apart(self, tmp_path: Path) -> None:
        """The id tells runs apart, not the name; a name inside another one is a name like any."""
        runs = [replace(a_run(run_id), name=name) for run_id, name in (("1", "run"), ("2", "run"), ("3", "run/sub"))]
        for number, run in enumerate(runs):
            self.deliver(tmp_path, [a_row(n, {"loss": number * 10.0 + n}) for n in range(3)], run)
        for number, run in enumerate(runs):
            self.holds(self.make_sink(tmp_path), [a_row(n, {"loss": number * 10.0 + n}) for n in range(3)], run)

    def test_any_name_stays_in_its_place(self, tmp_path: Path) -> None:
        """Names with ``..``, a leading slash, unicode, 300 characters, or nothing: delivered, and nothing outside."""
        inside = tmp_path / "a" / "b"
        inside.mkdir(parents=True)
        for number, name in enumerate(("../../out", "/rooted", "naïve ключ 🙂", "n" * 300, "", "a b/c:d", ".")):
            run = replace(a_run(f"run{number}"), name=name)
            self.holds(self.deliver(inside, rows(2), run), rows(2), run)
        outside = [
            path for path in tmp_path.rglob("*") if inside not in path.parents and path not in (inside, inside.parent)
        ]
        assert outside == []

    # -- through a mirror

    def test_a_mirror_that_restarts_at_every_row(self, tmp_path: Path) -> None:
        """A new sink and a new Mirror per row of a growing log: each row once, nothing again in the end."""
        every = rows(5)
        for end in range(1, 6):
            write_log(tmp_path, every[:end])
            assert self.mirror(tmp_path).rows == 1
        assert self.mirror(tmp_path).rows == 0
        self.holds(self.make_sink(tmp_path / "tracker"), every, self.run_of(tmp_path))

    def test_a_mirror_that_lost_its_state(self, tmp_path: Path) -> None:
        """Started again without a cursor: each row once."""
        write_log(tmp_path, rows(5))
        self.mirror(tmp_path)
        for path in (tmp_path / "state").glob("*.json"):
            path.unlink()
        write_log(tmp_path, rows(9))
        self.mirror(tmp_path)
        self.holds(self.make_sink(tmp_path / "tracker"), rows(9), self.run_of(tmp_path))

    def test_an_answer_that_got_lost(self, tmp_path: Path) -> None:
        """The first open, put, put_file and flush is applied and then fails: each row once."""
        write_log(tmp_path, rows(6))
        sink = _LosesAnswers(self.make_sink(tmp_path / "tracker"))
        done = self.mirror(tmp_path, sink, batch_rows=2)
        assert sink.lost >= {"open", "put", "flush"}
        assert done.rejected == 0
        self.holds(self.make_sink(tmp_path / "tracker"), rows(6), self.run_of(tmp_path))

    def test_leaves_the_process_as_it_was(self, tmp_path: Path, capfd: Any) -> None:
        """No environment variable, working directory or output changes by delivering a run."""
        write_log(tmp_path, rows(3))
        environment, folder = dict(os.environ), os.getcwd()
        capfd.readouterr()
        self.mirror(tmp_path)
        changed = {name for name in environment.keys() | os.environ if environment.get(name) != os.environ.get(name)}
        assert changed - {"PYTEST_CURRENT_TEST"} == set()
        assert os.getcwd() == folder
        assert tuple(capfd.readouterr()) == ("", "")


class _LosesAnswers:
    """A sink whose calls are applied and then fail, once each."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.lost: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._sink, name)
        if name not in ("open", "put", "put_file", "flush") or name in self.lost:
            return found

        def call(*arguments: Any) -> Any:
            found(*arguments)
            self.lost.add(name)
            raise Retry("the answer was lost", after=0.001)

        return call
