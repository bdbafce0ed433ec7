"""Verify: what a tracker shows against what the log holds, counted exactly, for TensorBoard and for a tracker in memory."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

import runmirror
from runmirror import importer, verifier
from runmirror.compare import KNOWN, VerifiedRun
from runmirror.exceptions import NotALogError, OptionError
from runmirror.find import ReadOptions
from runmirror.importer import import_runs
from runmirror.log.rows import Row
from runmirror.mirror import Policy
from runmirror.sinks import registry
from runmirror.sinks.base import Capabilities, Rejected
from runmirror.sinks.event_file import Scan, event_files, frame
from runmirror.sinks.event_reader import read_points
from runmirror.sinks.registry import SinkEntry
from runmirror.sinks.tensorboard import TensorBoardSink
from runmirror.testing import MemoryOptions, MemorySink
from runmirror.verifier import Verification, verify
from tests.logs import STARTED, flat_log, resumed_rows, train_row, write_rows
from tests.test_importer import make_logs

_names = itertools.count()


class Rig:
    """A log of rows that carry their time, and a tracker: TensorBoard's logdir, or one in memory."""

    def __init__(self, folder: Path, sink: str = "tensorboard", **options: Any) -> None:
        self.log = folder / "logs" / "run" / "metrics.jsonl"
        self.sink = sink
        self.place = {"logdir": str(folder / "tb")} if sink == "tensorboard" else {"tracker": f"verify-{next(_names)}"}
        self.options = self.place | options
        self.events = folder / "tb" / "run"

    def write(self, rows: Iterable[dict[str, Any]]) -> Rig:
        write_rows(self.log, ({"_timestamp": STARTED + number, **row} for number, row in enumerate(rows)))
        return self

    def change(self, change: Callable[[list[dict[str, Any]]], Any]) -> None:
        rows = [json.loads(line) for line in self.log.read_text().splitlines()]
        change(rows)
        write_rows(self.log, rows)

    def import_(self, policy: Policy = "last", **options: Any) -> Rig:
        assert import_runs([self.log.parent], self.sink, self.options | options, rewinds=policy, patience=0).runs[0].url
        return self

    def verify(self, policy: Policy | None = None, **options: Any) -> VerifiedRun:
        (run,) = verify([self.log.parent], self.sink, self.options | options, rewinds=policy).runs
        assert run.matching + run.missing + run.different + run.known["nonfinite"] == run.points
        return run


def counts(run: VerifiedRun) -> dict[str, int]:
    """Every count that is not zero."""
    names = ("matching", "missing", "not_sent", "extra", "different")
    return {name: getattr(run, name) for name in names if getattr(run, name)} | {
        reason: number for reason, number in run.known.items() if number and reason != "rounded"
    }


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    """8 rows of two keys, imported into TensorBoard."""
    return Rig(tmp_path).write({"step": n, "a": n + 0.5, "b": -n} for n in range(8)).import_()


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """The same log and no tracker yet; the sink "memory" is known."""
    add_sink(monkeypatch, MemorySink)
    return Rig(tmp_path, "memory").write({"step": n, "a": n + 0.5, "b": -n} for n in range(8))


def add_sink(monkeypatch: pytest.MonkeyPatch, kind: type[Any]) -> None:
    monkeypatch.setattr(f"{__name__}.Kind", kind, raising=False)
    known = registry.installed_sinks()
    monkeypatch.setattr(
        registry, "installed_sinks", lambda: known | {"memory": SinkEntry("memory", f"{__name__}:Kind", "tests", "0")}
    )


def tb_append(folder: Path, step: int, time: float, **points: float) -> None:
    """One more event, by TensorBoard's own writer."""
    writer = EventFileWriter(str(folder))
    values = [Summary.Value(tag=tag, simple_value=value) for tag, value in points.items()]
    writer.add_event(Event(step=step, wall_time=time, summary=Summary(value=values)))
    writer.close()


def tb_change(folder: Path, tag: str, step: int, value: float | None = None, time: float | None = None) -> None:
    """Another value or time for the point TensorBoard shows at a step: the last one written there."""
    for path in reversed(event_files(folder)):
        with path.open("rb") as file:
            events = [Event.FromString(data) for _, data in Scan(path, file)]
        for event in reversed(events):
            for point in event.summary.value if event.step == step else ():
                if point.tag == tag and point.HasField("simple_value"):
                    point.simple_value = point.simple_value if value is None else value
                    event.wall_time = event.wall_time if time is None else time
                    path.write_bytes(b"".join(frame(event.SerializeToString()) for event in events))
                    return
    raise AssertionError(f"no point of {tag} at {step}")


def test_everything_matches_after_an_import(tmp_path: Path) -> None:
    """All points of every shape of log and every real sample: 0 missing, extra or different; every value that is no
    32 bit float told as rounded."""
    logs = make_logs(tmp_path / "logs")
    options = {"logdir": str(tmp_path / "tb")}
    import_runs(logs, "tensorboard", options, patience=0)
    result = verify(logs, "tensorboard", options)
    assert result.ok
    assert [(run.state, run.matching, run.mirrored) for run in result.runs] == [
        ("equal", run.points, True) for run in result.runs
    ]
    assert all(run.points > 100 and 0 < run.known["rounded"] < run.points for run in result.runs)
    assert result.totals()["points"] == sum(run.points for run in result.runs)


def test_the_same_without_state(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 match though the state is gone: the run is found by its name and marker."""
    monkeypatch.setenv("RUNMIRROR_HOME", str(tmp_path / "other"))
    run = rig.verify()
    assert (run.state, run.mirrored, counts(run)) == ("equal", False, {"matching": 16})


def test_a_value_changed_in_the_log_is_one_difference(rig: Rig) -> None:
    """1 different: what the log says is expected, what the tracker shows is found."""
    rig.change(lambda rows: rows[3].update(a=77.0))
    run = rig.verify()
    assert (run.state, counts(run)) == ("different", {"matching": 15, "different": 1})
    (one,) = run.examples
    assert (one.kind, one.key, one.step, one.expected, one.found) == ("value", "a", 3, 77.0, 3.5)


def test_a_time_changed_in_the_log_is_a_difference_of_each_key(rig: Rig) -> None:
    """2 different, told as times."""
    rig.change(lambda rows: rows[7].update(_timestamp=STARTED + 99))
    run = rig.verify()
    assert counts(run) == {"matching": 14, "different": 2}
    assert {(one.kind, one.key, one.expected, one.found) for one in run.examples} == {
        ("time", key, STARTED + 99, STARTED + 7) for key in "ab"
    }


def test_a_row_added_to_the_log_is_not_sent_yet(rig: Rig) -> None:
    """2 missing, both not sent yet; none after the next import."""
    rig.change(lambda rows: rows.append({"step": 8, "_timestamp": STARTED + 8, "a": 1.0, "b": 2.0}))
    run = rig.verify()
    assert (run.state, counts(run)) == ("different", {"matching": 16, "missing": 2, "not_sent": 2})
    assert counts(rig.import_().verify()) == {"matching": 18}


@pytest.mark.parametrize(("at", "step"), [(7, 7), (3, 3), (0, 0)])
def test_a_row_removed_from_the_log_is_extra(rig: Rig, at: int, step: int) -> None:
    """2 extra at the step of the row, wherever it was."""
    rig.change(lambda rows: rows.pop(at))
    run = rig.verify()
    assert counts(run) == {"matching": 14, "extra": 2}
    assert {(one.kind, one.key, one.step, one.expected) for one in run.examples} == {
        ("extra", key, step, None) for key in "ab"
    }


def test_a_rewritten_log_matches_after_the_next_import(rig: Rig) -> None:
    """Every point, in TensorBoard, which takes back what the log no longer says."""
    rig.change(lambda rows: rows[3].update(a=177.25))
    assert counts(rig.import_().verify()) == {"matching": 16}


@pytest.mark.parametrize("cut", [1, 20])
def test_an_event_file_cut_short_misses_its_end(rig: Rig, cut: int) -> None:
    """The 2 points of the last row missing, sent once; none after the next import."""
    (path,) = event_files(rig.events)
    with path.open("rb") as file:
        last = next(offset for offset, data in Scan(path, file) if Event.FromString(data).step == 7)
    os.truncate(path, last + cut)
    assert counts(rig.verify()) == {"matching": 14, "missing": 2}
    assert counts(rig.import_().verify()) == {"matching": 16}


def test_a_damaged_event_file_is_a_broken_run(rig: Rig) -> None:
    """State broken, with the file, the byte and what to do; not ok."""
    (path,) = event_files(rig.events)
    content = bytearray(path.read_bytes())
    content[-6] ^= 0xFF
    path.write_bytes(content)
    run = rig.verify()
    assert (run.state, run.ok) == ("broken", False)
    assert f"{path} is damaged at byte" in str(run.error)
    assert "import the run again" in str(run.error)


def test_a_point_that_the_log_does_not_have_is_extra(rig: Rig) -> None:
    """2 extra: a step of a known key, and an unknown key."""
    tb_append(rig.events, 100, STARTED, a=1.0)
    tb_append(rig.events, 3, STARTED, new=1.0)
    run = rig.verify()
    assert counts(run) == {"matching": 16, "extra": 2}
    assert [(one.key, one.step, one.found) for one in run.examples] == [("a", 100, 1.0), ("new", 3, 1.0)]


def test_an_earlier_step_written_by_another_program_hides_what_follows(rig: Rig) -> None:
    """TensorBoard drops the later points of the tag: 1 different, 3 missing."""
    tb_append(rig.events, 4, STARTED, a=1.0)
    assert counts(rig.verify()) == {"matching": 12, "missing": 3, "different": 1}


@pytest.mark.parametrize(("change", "kind"), [({"value": 9.25}, "value"), ({"time": 1.5}, "time")])
def test_a_point_changed_in_the_tracker_is_different(tmp_path: Path, change: dict[str, float], kind: str) -> None:
    """1 different for a value; for a time too, when the row has one key."""
    rig = Rig(tmp_path).write({"step": n, "a": n + 0.5} for n in range(4)).import_()
    tb_change(rig.events, "a", 2, **change)
    run = rig.verify()
    assert (counts(run), run.examples[0].kind) == ({"matching": 3, "different": 1}, kind)


def test_a_run_that_was_never_mirrored_is_absent(tmp_path: Path) -> None:
    """State absent, never mirrored, all missing and not sent."""
    run = Rig(tmp_path).write({"step": n, "a": 1.0} for n in range(3)).verify()
    assert (run.state, run.mirrored, run.ok) == ("absent", False, False)
    assert counts(run) == {"missing": 3, "not_sent": 3}


def test_a_run_that_the_tracker_lost_is_absent_but_was_mirrored(rig: Rig) -> None:
    """State absent, mirrored, all missing, none of it "not sent yet"."""
    shutil.rmtree(rig.events)
    run = rig.verify()
    assert (run.state, run.mirrored, counts(run)) == ("absent", True, {"missing": 16})


def test_another_run_of_the_same_name_is_not_taken_for_it(rig: Rig, tmp_path: Path) -> None:
    """Absent: the folder of that name belongs to the other one."""
    other = Rig(tmp_path / "other").write([{"step": 0, "a": 1.0}])
    other.options = rig.options
    assert other.verify().state == "absent"


def test_numbers_at_the_edges_match_as_the_tracker_keeps_them(tmp_path: Path) -> None:
    """NaN, both infinities, what overflows or vanishes in 32 bits, 2**24 + 1, 2**53 + 1, -0.0, bools: all match."""
    values = [math.nan, math.inf, -math.inf, 1e300, -1e300, 1e-300, 2**24 + 1, 2**53 + 1, 2**63, 10**400, -0.0, True]
    rig = Rig(tmp_path).write({"step": n, "a": value} for n, value in enumerate(values)).import_()
    run = rig.verify()
    assert counts(run) == {"matching": len(values)}
    assert run.known["rounded"] == 5  # 1e300, -1e300, 1e-300 and both odd integers


def test_a_double_is_compared_as_a_double(memory: Rig) -> None:
    """All match in a tracker that keeps 64 bits; the last bit changed is a difference, which 32 bits would not show."""
    memory.write([{"step": 0, "a": 0.1}]).import_()
    assert (counts(memory.verify()), memory.verify().known["rounded"]) == ({"matching": 1}, 0)
    points(memory)[0]["a"] = math.nextafter(0.1, 1)
    assert counts(memory.verify()) == {"different": 1}


def points(memory: Rig) -> list[dict[str, float]]:
    """The points of each row that the tracker holds."""
    (run,) = MemorySink.trackers[memory.place["tracker"]].values()
    return [points for *_, points in run.rows]


def test_include_and_exclude_leave_keys_out(rig: Rig) -> None:
    """8 match and 8 left out, whether the import left them out too or not."""
    for options in ({"exclude": "b"}, {"include": "a*"}):
        assert counts(rig.verify(**options)) == {"matching": 8, "left_out": 8}
    fresh = {"logdir": str(rig.events.parent.parent / "fresh")}
    rig.import_(exclude="b", **fresh)
    assert counts(rig.verify(exclude="b", **fresh)) == {"matching": 8, "left_out": 8}
    assert counts(rig.verify(**fresh)) == {"matching": 8, "missing": 8}


def test_keys_that_the_tracker_cannot_take_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """5 rejected: an empty key and a reserved one in two rows, and a key whose tag is another one's; a key that is not
    valid UTF-8 matches. The same when the state with the rejected file is gone."""
    row = {"": 1.0, "runmirror/x": 2.0, "bad\ud800": 3.0, "good": 4.0}
    rig = Rig(tmp_path).write([{"step": 0, **row}, {"step": 1, **row, "bad?": 5.0}]).import_()
    assert counts(rig.verify()) == {"matching": 4, "rejected": 5}
    monkeypatch.setenv("RUNMIRROR_HOME", str(tmp_path / "other"))
    assert counts(rig.verify()) == {"matching": 4, "rejected": 5}


def test_a_row_put_aside_is_known(memory: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 rejected of a row that the tracker never takes, 1 of a key; they match when it holds them all the same."""

    class Picky(MemorySink):
        def put(self, rows: list[Row]) -> list[Rejected]:  # type: ignore[override]
            if any(row.step == 3 and row.scalars() for row in rows):
                raise ValueError("poison")
            refused = [Rejected(row.ordinal, "b", "no b at 5") for row in rows if row.step == 5]
            super().put([row if row.step != 5 else without_b(row) for row in rows])
            return refused

    def without_b(row: Row) -> Row:
        return Row(row.ordinal, {"step": row.step, "a": row.data["a"]}, row.step, row.time)

    monkeypatch.setattr("runmirror.mirror.random.uniform", lambda low, high: 0.0)
    add_sink(monkeypatch, Picky)
    import_runs([memory.log.parent], "memory", memory.options)
    assert counts(memory.verify()) == {"matching": 13, "rejected": 3}
    points(memory)[5]["b"] = -5
    (run,) = verify([memory.log.parent], "memory", memory.options).runs
    assert (run.ok, run.matching, run.known["rejected"]) == (True, 14, 2)


@pytest.mark.parametrize("tombstones", [False, True])
def test_points_of_a_key_that_a_rewind_emptied_are_known(tmp_path: Path, tombstones: bool) -> None:
    """TensorBoard still shows 2 superseded points of a key without earlier ones, or a NaN in their place: known."""
    rows = [train_row(0), train_row(1), train_row(2) | {"lost": 1.0}, train_row(3) | {"lost": 2.0}]
    rows += [train_row(2, 0.5), train_row(3, 0.5), train_row(4, 0.5)]
    run = Rig(tmp_path, tombstones=tombstones).write(rows).import_().verify()
    assert run.known["superseded" if not tombstones else "tombstones"] == (1 if tombstones else 2)
    assert (run.ok, run.matching) == (True, 5 * 10)


def test_a_rewind_that_is_not_sent_yet_excuses_what_it_supersedes(tmp_path: Path) -> None:
    """The abandoned points known, those that take their place missing and not sent yet; nothing extra or different."""
    rows = resumed_rows()
    rig = Rig(tmp_path).write(rows[:6]).import_().write(rows)
    run = rig.verify()
    before = len([key for row in rows[4:6] for key in row if key != "step"])
    after = len([key for row in rows[6:] for key in row if key != "step"])
    assert (run.missing, run.not_sent, run.known["superseded"]) == (after, after, before)
    assert (run.extra, run.different) == (0, 0)
    assert rig.import_().verify().ok


def test_a_superseded_point_that_tensorboard_should_have_taken_back_is_extra(tmp_path: Path) -> None:
    """1 extra: the key has an earlier point, so the old one at a step that did not come again must be gone."""
    rows = [train_row(n) for n in range(6)] + [train_row(n, 0.5) for n in range(3, 5)]
    rig = Rig(tmp_path).write(rows).import_()
    assert rig.verify().ok
    tb_append(rig.events, 5, STARTED + 5, entropy=2.0 - 0.5)
    assert (rig.verify().extra, rig.verify().known["superseded"]) == (1, 0)


@pytest.mark.parametrize("policy", ["last", "all"])
def test_a_tracker_that_keeps_everything_is_compared_by_the_policy(memory: Rig, policy: Policy) -> None:
    """All match by the policy it was imported with, found without being told; "last" of an import by "all" shows what it
    superseded as known."""
    memory.write(resumed_rows()).import_(policy)
    run = memory.verify()
    total = sum(len(row) - 1 for row in resumed_rows())
    assert run.ok
    assert run.matching == (total if policy == "all" else total - sum(len(row) - 1 for row in resumed_rows()[4:6]))
    assert counts(run) == {"matching": run.points}


def test_the_points_of_a_live_mirror_stay_known_by_the_policy_last(memory: Rig) -> None:
    """Rows sent before the rewind was seen are known as superseded, and rows of the same step as overwritten."""
    rows = resumed_rows()
    memory.write(rows[:6]).import_()
    run = memory.write(rows).import_().verify()
    abandoned = sum(len(row) - 1 for row in rows[4:6])
    assert counts(run) == {"matching": run.points, "superseded": abandoned}
    run = memory.write([*rows, {"step": 8, "entropy": 9.0}]).import_().verify()
    assert counts(run) == {"matching": run.points, "superseded": abandoned + 1}


def test_a_point_shown_twice_is_known_and_another_value_is_not(memory: Rig) -> None:
    """1 repeated when an equal point is there twice; 1 extra when a second value is."""
    memory.import_()
    (run,) = MemorySink.trackers[memory.place["tracker"]].values()
    run.rows.append((8, 2, STARTED + 2, {"a": 2.5}))
    assert counts(memory.verify()) == {"matching": 16, "repeated": 1}
    run.rows.append((9, 2, STARTED + 2, {"a": 3.5}))
    assert counts(memory.verify()) == {"matching": 16, "repeated": 1, "extra": 1}


@pytest.mark.parametrize(("rule", "known"), [("all", 0), ("nan", 2), ("none", 3)])
def test_what_a_tracker_cannot_keep_is_known(
    memory: Rig, monkeypatch: pytest.MonkeyPatch, rule: Any, known: int
) -> None:
    """NaN and infinities that it keeps must match; those it doesn't are known, left out or changed."""

    class Finite(MemorySink):
        capabilities = Capabilities(nonfinite=rule, time_precision=0.001)

    add_sink(monkeypatch, Finite)
    values = [1.0, math.nan, math.inf, -math.inf]
    memory.write({"step": n, "a": value} for n, value in enumerate(values)).import_()
    (run,) = MemorySink.trackers[memory.place["tracker"]].values()
    if rule != "all":
        run.rows[2] = (2, 2, STARTED + 2.0004, {"a": 1.797e308})
        run.rows[3] = (3, 3, STARTED + 3, {})
    run.rows[0] = (0, 0, STARTED + 0.0009, {"a": 1.0})  # within the tracker's precision
    if rule == "none":
        run.rows[1] = (1, 1, STARTED + 1, {})
    found = memory.verify()
    assert (found.ok, found.matching, found.known["nonfinite"]) == (True, 4 - known, known)


def test_a_lost_infinity_does_not_take_the_place_of_a_number(memory: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two points at one step, kept by the policy "all", the number matches and the infinity is known."""

    class Finite(MemorySink):
        capabilities = Capabilities(nonfinite="nan")

    add_sink(monkeypatch, Finite)
    memory.write([{"step": 0, "a": math.inf}, {"step": 0, "a": 5.0}]).import_("all")
    points(memory)[0].clear()
    assert counts(memory.verify()) == {"matching": 1, "nonfinite": 1}


def test_broken_lines_text_and_summaries(tmp_path: Path) -> None:
    """A broken line and text are no points; final numbers are, at the last step."""
    rig = Rig(tmp_path).write([{"step": 0, "a": 1.0, "note": "hello"}, {"step": 1, "a": 2.0}])
    with rig.log.open("a") as file:
        file.write('{"step": 2, "a"\n' + json.dumps({"final/a": 3.0, "_timestamp": STARTED + 5}) + "\n")
    assert counts(rig.import_().verify()) == {"matching": 3}
    assert read_points(rig.events)["final/a"] == [(STARTED + 5, 1, 3.0)]


def test_a_run_of_our_own_writer(tmp_path: Path) -> None:
    """Everything matches, after a resume too, by the state inside the log_path."""
    options = {"logdir": str(tmp_path / "tb")}
    for first, last in ((0, 6), (4, 9)):
        run = runmirror.start(tmp_path / "run", {"lr": 0.1})
        for step in range(first, last):
            run.log_metrics({"loss": 1.0 / (step + 1) + first, "inf": math.inf}, step=step)
        if first:
            run.log_summary({"final": 1.0})
            run.finish()
        else:
            run.finish("failed")
        import_runs([tmp_path / "run"], "tensorboard", options, patience=0)
        assert verify([tmp_path / "run"], "tensorboard", options).ok


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file and folder, with the files' bytes."""
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in sorted(folder.rglob("*"))}


def test_verify_writes_nothing(tmp_path: Path) -> None:
    """No file or folder anywhere, before the import and after it; no RUNMIRROR_HOME, no state folder in the log, no lock."""
    flat_log(tmp_path / "logs" / "foreign")
    run = runmirror.start(tmp_path / "logs" / "own", {})
    run.log_metrics({"loss": 1.0}, step=0)
    run.finish()
    options = {"logdir": str(tmp_path / "tb")}

    def check(state: str) -> None:
        before = snapshot(tmp_path)
        assert [run.state for run in verify([tmp_path / "logs"], "tensorboard", options).runs] == [state] * 2
        assert snapshot(tmp_path) == before

    check("absent")
    import_runs([tmp_path / "logs"], "tensorboard", options, patience=0)
    check("equal")
    with (tmp_path / "logs" / "foreign" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 12, "new": 1}\n')
    (tmp_path / "home").rename(tmp_path / "moved")
    before = snapshot(tmp_path)
    verify([tmp_path / "logs"], "tensorboard", options)
    assert snapshot(tmp_path) == before


def test_an_empty_home_that_was_there_stays(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that somebody made is left, though it is empty."""
    (tmp_path / "mine").mkdir()
    monkeypatch.setenv("RUNMIRROR_HOME", str(tmp_path / "mine"))
    rig.verify()
    assert (tmp_path / "mine").is_dir()


def test_state_kept_in_a_foreign_log_is_found(tmp_path: Path) -> None:
    """Mirrored, when told with state_in_log."""
    flat_log(tmp_path / "run")
    options, read = {"logdir": str(tmp_path / "tb")}, ReadOptions(state_in_log=True)
    import_runs([tmp_path / "run"], "tensorboard", options, read=read, patience=0)
    assert verify([tmp_path / "run"], "tensorboard", options, read=read).runs[0].mirrored


def test_a_run_that_cannot_be_read_is_a_line_of_its_own(rig: Rig) -> None:
    """Broken with its error; the other run is verified."""
    broken = rig.log.parent.parent / "broken"
    (broken / "metrics.jsonl").mkdir(parents=True)
    (broken / ".runmirror").mkdir()
    (broken / ".runmirror" / "run.json").write_text("{}")
    result = verify([rig.log.parent.parent], "tensorboard", rig.options)
    assert {run.name: run.state for run in result.runs} == {"broken": "broken", "run": "equal"}
    assert "IsADirectoryError" in str(result.runs[0].error)
    assert not result.ok


def test_what_cannot_be_verified_is_an_error(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """OptionError that names the sink when it can't be read back; NotALogError for a path without a run."""

    class Blind(MemorySink):
        read_back = None  # type: ignore[assignment]

    add_sink(monkeypatch, Blind)
    with pytest.raises(OptionError, match="'memory' can't be read back"):
        verify([rig.log.parent], "memory")
    with pytest.raises(NotALogError, match="nowhere"):
        verify([rig.log.parent / "nowhere"], "tensorboard", rig.options)


def test_the_result_is_plain_data(rig: Rig) -> None:
    """Strict JSON, NaN as text; all counts of the runs together; at most as many examples as asked for."""
    rig.change(lambda rows: [row.update(a=math.nan) for row in rows])
    result: Verification = runmirror.verify([rig.log.parent], "tensorboard", rig.options, examples=3)
    data = json.loads(json.dumps(result.as_dict(), allow_nan=False))
    assert [example["expected"] for example in data["runs"][0]["examples"]] == ["nan"] * 3
    assert data["totals"]["different"] == 8
    assert set(data["totals"]["known"]) == set(KNOWN)
    assert data["ok"] is False


VALUES = st.floats(width=64) | st.integers(-(2**70), 2**70) | st.booleans()
ROWS = st.lists(
    st.tuples(st.integers(0, 12), st.dictionaries(st.sampled_from(["a", "b", "c", "eval/x"]), VALUES, max_size=4)),
    max_size=25,
)


@settings(max_examples=40, deadline=None)
@given(ROWS, st.booleans(), st.data())
def test_any_log_matches_and_one_change_is_one_difference(
    rows: list[tuple[int, dict[str, Any]]], tombstones: bool, data: st.DataObject
) -> None:
    """All points match in TensorBoard after an import, whatever steps repeat and go back; one point changed there is
    exactly one difference."""
    with tempfile.TemporaryDirectory() as folder:
        rig = Rig(Path(folder), tombstones=tombstones)
        rig.write({"step": step, **points} for step, points in rows).import_()
        run = rig.verify()
        assert (run.missing, run.extra, run.different) == (0, 0, 0), run.examples
        due = sorted(set(surviving(rig)))
        assert len(due) == run.points
        if due:
            tag, step = data.draw(st.sampled_from(due))
            tb_change(rig.events, tag, step, value=12345.5)
            changed = rig.verify()
            assert (changed.missing, changed.extra, changed.different) == (0, 0, 1)
            assert (changed.examples[0].key, changed.examples[0].step) == (tag, step)


def surviving(rig: Rig) -> Iterator[tuple[str, int]]:
    """(key, step) of every point that survives, by the rewinds that the reader of the log tells."""
    from runmirror.find import find_runs, open_run
    from runmirror.log.rows import START

    source, _ = open_run(find_runs([rig.log.parent])[0])
    points: set[tuple[str, int]] = set()
    for row in source.rows(START):
        if row.rewind is not None:
            points = {(key, step) for key, step in points if step < row.rewind}
        points |= {(key, row.step) for key in row.scalars()}
    yield from points


@settings(max_examples=40, deadline=None)
@given(ROWS, st.sampled_from(["last", "all"]), st.data())
def test_any_log_matches_in_a_tracker_that_keeps_everything(
    rows: list[tuple[int, dict[str, Any]]], policy: Policy, data: st.DataObject
) -> None:
    """By both policies, and one point changed there is exactly one difference, or one missing and one extra."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        add_sink(patch, MemorySink)
        rig = Rig(Path(folder), "memory").write({"step": step, **points} for step, points in rows).import_(policy)
        run = rig.verify()
        assert (run.missing, run.extra, run.different) == (0, 0, 0), run.examples
        held = [(row, key) for row in points(rig) for key in row]
        if held:
            row, key = data.draw(st.sampled_from(held))
            row[key] = 12345.5
            changed = rig.verify()
            assert (changed.missing, changed.extra + changed.different) == (0, 1), changed.examples


def test_the_tensorboard_sink_reads_back_without_a_lock(rig: Rig) -> None:
    """16 points while another mirror holds the run's folder."""
    held = TensorBoardSink(TensorBoardSink.Options.model_validate(rig.options))
    from runmirror.find import find_runs, open_run

    source, _ = open_run(find_runs([rig.log.parent])[0])
    held.open(source.info(), None)
    try:
        assert counts(rig.verify()) == {"matching": 16}
    finally:
        held.close(None, 10)


class GroupedOptions(MemoryOptions):
    group: str = ""


class Grouped(MemorySink):
    """A tracker that keeps runs that belong together in a place of their own."""

    Options = GroupedOptions

    def destination(self) -> str:
        return f"memory://x/{self.options.group}"  # type: ignore[attr-defined]


def test_a_run_in_a_cloud_that_is_named_itself_is_looked_for_where_an_import_puts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the group of the folder it is in."""

    with fsspec.open("memory://bucket/sweep/a/metrics.jsonl", "wb") as file:
        file.write(b'{"step": 0, "loss": 1.0, "_timestamp": 1764000000.0}\n')
    for module in (importer, verifier):
        monkeypatch.setattr(module, "load_sink", lambda name: Grouped)
    monkeypatch.setenv("RUNMIRROR_HOME", str(tmp_path / "home"))
    options = GroupedOptions(tracker=f"cloud-{next(_names)}")
    assert import_runs(["memory://bucket/sweep/a"], "memory", options).ok
    result = verify(["memory://bucket/sweep/a"], "memory", options)
    assert result.destination == "memory://x/sweep"
    assert result.ok
    assert result.runs[0].mirrored
