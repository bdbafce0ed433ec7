"""The mirror against a tracker in memory: order, retries, rejects, deadlines, files, state."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import runmirror
from runmirror import mirror as mirror_module
from runmirror.exceptions import MirrorBusyError, Refused, Retry
from runmirror.fence import OverdueError
from runmirror.find import find_runs, open_run
from runmirror.log.index import LineIndex
from runmirror.log.rows import Row
from runmirror.log.runlog import RunLog
from runmirror.mirror import Mirror
from runmirror.sinks.base import Capabilities, LogFile, Rejected, SinkOptions
from runmirror.storage import LocalStorage
from runmirror.testing import MemoryOptions, MemoryRun, MemorySink
from tests.logs import flat_log, resumed_rows, train_row, write_rows

_names = itertools.count()


class Rig:
    """A log, a folder for state, and an in-memory tracker of its own."""

    def __init__(self, tmp_path: Path) -> None:
        self.log = tmp_path / "run"
        self.folder = tmp_path / "state"
        self.tracker = f"rig-{next(_names)}"

    def source(self) -> RunLog:
        return RunLog(LocalStorage(self.log), "run", LineIndex(self.folder))

    def mirror(self, sink: MemorySink | None = None, **options: Any) -> Mirror:
        return Mirror(self.source(), sink or self.sink(), self.folder, **options)

    def sink(self, kind: type[MemorySink] = MemorySink) -> MemorySink:
        return kind(MemoryOptions(tracker=self.tracker))

    def run(self) -> MemoryRun:
        (run,) = MemorySink.trackers[self.tracker].values()
        return run

    def steps(self) -> list[int]:
        return [step for _, step, _, _ in self.run().rows]

    def state(self) -> dict[str, Any]:
        (path,) = self.folder.glob("memory-*.json")
        result: dict[str, Any] = json.loads(path.read_bytes())
        return result


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(mirror_module.random, "uniform", lambda low, high: 0.0)  # no pauses between tries
    return Rig(tmp_path)


def scripted(*results: Exception | None, verb: str = "put") -> type[MemorySink]:
    """A sink whose ``verb`` raises these in turn (None: works), then always works."""
    script = list(results)

    class Scripted(MemorySink):
        pass

    original: Callable[..., Any] = getattr(MemorySink, verb)

    def scripted_verb(self: MemorySink, *args: Any) -> Any:
        error = script.pop(0) if script else None
        if error is not None:
            raise error
        return original(self, *args)

    setattr(Scripted, verb, scripted_verb)
    return Scripted


def test_brings_rows_files_and_status(rig: Rig) -> None:
    """12 rows in order with their times and values, 3 files, and the status; all of it in the state."""
    flat_log(rig.log)
    with rig.mirror() as mirror:
        done = mirror.deliver(patience=0)
        mirror.close(end=True)
    assert (done.rows, done.files, done.rejected) == (12, 3, 0)
    assert rig.steps() == list(range(12))
    assert rig.run().rows[3][3]["env/all/reward/total"] == pytest.approx(0.3)
    assert set(rig.run().files) == {"config.json", "code.diff", "checkpoints.jsonl"}
    assert rig.run().status == "finished"
    state = rig.state()
    assert (state["format"], state["ordinal"], state["closed"]) == (1, 12, "finished")
    assert state["offset"] == (rig.log / "metrics.jsonl").stat().st_size


def test_second_delivery_sends_nothing(rig: Rig) -> None:
    """0 rows, 0 files, and the log is not read again."""
    flat_log(rig.log)
    with rig.mirror() as mirror:
        mirror.deliver(patience=0)
        mirror.close(end=True)
    with rig.mirror() as mirror:
        mirror.source.rows = None  # type: ignore[method-assign, assignment]
        done = mirror.deliver(patience=0)
        mirror.close(end=True)
    assert (done.rows, done.files) == (0, 0)


def test_the_cursor_catches_up_with_the_tracker(rig: Rig) -> None:
    """When the state is lost (or was not saved at a kill), the tracker's position becomes the cursor, and is complete."""
    flat_log(rig.log)
    with rig.mirror() as mirror:
        mirror.deliver(patience=0)
    shutil.rmtree(rig.folder)
    with rig.mirror() as mirror:
        assert mirror.deliver(patience=0).rows == 0
        assert mirror.is_current()
    state = rig.state()
    assert (state["ordinal"], state["offset"]) == (12, (rig.log / "metrics.jsonl").stat().st_size)


def test_files_come_again_when_the_tracker_lost_rows(rig: Rig) -> None:
    """A tracker whose run lost its end gets the rows above it, and the files, which may have been behind them."""
    flat_log(rig.log)
    with rig.mirror() as mirror:
        mirror.deliver(patience=0)
    run = rig.run()
    del run.rows[5:]
    run.files.clear()
    with rig.mirror() as mirror:
        done = mirror.deliver(patience=0)
    assert (done.rows, done.files) == (7, 3)
    assert rig.steps() == list(range(12))


def test_a_stopped_delivery_is_not_an_end(rig: Rig) -> None:
    """``close(end=True)`` after a stop on the way tells the tracker no status."""
    flat_log(rig.log)
    stop = threading.Event()
    with rig.mirror(batch_rows=5, on_progress=lambda rows, points: stop.set()) as mirror:
        mirror.deliver(patience=0, stop=stop)
        assert not mirror.is_current()
        mirror.close(end=True)
    assert (rig.steps(), rig.run().status) == (list(range(5)), "running")


def test_the_end_is_told_although_reopening_fails(rig: Rig) -> None:
    """Close fails, and so does the open between two tries: the third try tells the status."""
    flat_log(rig.log)
    kind = scripted(Retry("busy"), verb="close")
    original, script = kind.open, [None, Retry("down")]

    def opening(self: MemorySink, *args: Any) -> Any:
        error = script.pop(0) if script else None
        if error is not None:
            raise error
        return original(self, *args)

    kind.open = opening  # type: ignore[method-assign]
    mirror = rig.mirror(rig.sink(kind))
    mirror.deliver(patience=0)
    mirror.close(end=True)
    assert rig.run().status == "finished"


def test_a_rewind_behind_the_first_look_is_seen(rig: Rig) -> None:
    """Policy "last" on a mirror that stays: of rows that come with the rewind, the superseded ones go without values."""
    write_rows(rig.log / "metrics.jsonl", resumed_rows()[:2])

    class Appending(MemorySink):
        capabilities = Capabilities(rewinds="append")

    with rig.mirror(rig.sink(Appending), policy="last") as mirror:
        mirror.deliver(patience=0)
        write_rows(rig.log / "metrics.jsonl", resumed_rows())
        mirror.deliver(patience=0)
    rows = rig.run().rows
    at = next(n for n in range(1, len(rows)) if rows[n][1] <= rows[n - 1][1])
    gone = [points for _, step, _, points in rows[2:at] if step >= rows[at][1]]
    assert gone
    assert not any(gone)


def test_follows_a_growing_log(rig: Rig) -> None:
    """Each delivery brings just the new rows."""
    rows = [train_row(step) for step in range(9)]
    with rig.mirror() as mirror:
        for count in (0, 3, 3, 9):
            write_rows(rig.log / "metrics.jsonl", rows[:count])
            mirror.deliver(patience=0)
    assert rig.steps() == list(range(9))


def test_a_changed_file_is_sent_again(rig: Rig) -> None:
    """Once per version."""
    flat_log(rig.log)
    with rig.mirror() as mirror:
        assert mirror.deliver(patience=0).files == 3
        (rig.log / "checkpoints.jsonl").write_text('{"name": "new"}\n')
        assert mirror.deliver(patience=0).files == 1
    assert rig.run().files["checkpoints.jsonl"] == b'{"name": "new"}\n'


@pytest.mark.parametrize("verb", ["open", "put", "put_file", "flush"])
def test_transient_errors_are_tried_again(rig: Rig, verb: str) -> None:
    """12 rows once each after three failures, explained or not, of any call."""
    flat_log(rig.log)
    kind = scripted(Retry("busy"), ConnectionError("reset"), Retry("busy", after=0.01), verb=verb)
    with rig.mirror(rig.sink(kind)) as mirror:
        done = mirror.deliver(patience=30)
    assert rig.steps() == list(range(12))
    assert (done.rejected, len(rig.run().files), rig.state()["last_error"]) == (0, 3, None)


def test_a_failed_flush_moves_no_cursor(rig: Rig) -> None:
    """The state stays at 0 when flush never worked, though the rows were put; the next mirror sends none twice."""
    flat_log(rig.log)
    kind = scripted(*[Retry("down")] * 50, verb="flush")
    with pytest.raises(Retry), rig.mirror(rig.sink(kind)) as mirror:
        mirror.deliver(patience=0)
    assert rig.state()["ordinal"] == 0
    assert "down" in rig.state()["last_error"]
    with rig.mirror() as mirror:
        mirror.deliver(patience=0)
    assert rig.steps() == list(range(12))


def test_patience_ends_an_outage(rig: Rig) -> None:
    """Retry is raised when the tracker failed for as long as the caller waits."""
    flat_log(rig.log)
    kind = scripted(*[Retry("down")] * 1000, verb="open")
    with pytest.raises(Retry, match="down"), rig.mirror(rig.sink(kind)) as mirror:
        mirror.deliver(patience=0.05)


def test_a_lost_acknowledgement_doubles_nothing(rig: Rig) -> None:
    """12 rows: the put that failed after it was applied is found on reopening."""

    class LateSuccess(MemorySink):
        failed = False

        def put(self, rows: Sequence[Row]) -> list[Rejected]:
            super().put(rows)
            if not type(self).failed:
                type(self).failed = True
                raise ConnectionError("answer lost")
            return []

    flat_log(rig.log)
    with rig.mirror(rig.sink(LateSuccess)) as mirror:
        mirror.deliver(patience=30)
    assert rig.steps() == list(range(12))


class RefusesStep5(MemorySink):
    """Fails, without saying why, on any batch with the row of step 5."""

    puts = 0

    def put(self, rows: Sequence[Row]) -> list[Rejected]:
        if any(row.step == 5 and row.data for row in rows):
            raise ValueError("row 5 is poison")
        return super().put(rows)


def test_a_poison_row_is_put_aside(rig: Rig) -> None:
    """11 rows with values and an empty one; the poison row is in the rejected file with its reason and its data."""
    flat_log(rig.log)
    with rig.mirror(rig.sink(RefusesStep5)) as mirror:
        done = mirror.deliver(patience=30)
        rejected_path = mirror.state.rejected_path
    assert (done.rejected, rig.steps()) == (1, list(range(12)))
    assert [bool(points) for *_, points in rig.run().rows] == [step != 5 for step in range(12)]
    (line,) = [json.loads(line) for line in rejected_path.read_text().splitlines()]
    assert (line["ordinal"], line["key"], line["step"]) == (5, None, 5)
    assert "poison" in line["reason"]
    assert line["data"]["optim/lr"] == 4e-05
    assert rig.state()["rejected"] == 1


def test_rejected_keys_are_counted_and_named(rig: Rig) -> None:
    """Every row is there; the key the tracker can't take is in the rejected file once per row."""

    class RefusesEntropy(MemorySink):
        def put(self, rows: Sequence[Row]) -> list[Rejected]:
            super().put(rows)
            return [Rejected(row.ordinal, "entropy", "no entropy here") for row in rows]

    flat_log(rig.log)
    with rig.mirror(rig.sink(RefusesEntropy)) as mirror:
        assert mirror.deliver(patience=0).rejected == 12
        lines = [json.loads(line) for line in mirror.state.rejected_path.read_text().splitlines()]
    assert [line["data"] for line in lines] == [{"entropy": train_row(step)["entropy"]} for step in range(12)]


def test_a_file_the_tracker_cannot_take_holds_nothing_back(rig: Rig) -> None:
    """12 rows and the two other files."""

    class NoCode(MemorySink):
        def put_file(self, file: LogFile) -> None:
            if file.kind == "code":
                raise ValueError("no code")
            super().put_file(file)

    flat_log(rig.log)
    with rig.mirror(rig.sink(NoCode)) as mirror:
        mirror.deliver(patience=30)
    assert (len(rig.run().rows), set(rig.run().files)) == (12, {"config.json", "checkpoints.jsonl"})


def test_many_files_are_noted_together(rig: Rig) -> None:
    """The state names every file that was sent, so it is not written after each of them: 40 files, a few writes. Files before
    one that fails are not sent again, and are no progress that would keep a failing tracker waited for."""
    puts: list[str] = []

    class Derives(MemorySink):
        capabilities = replace(MemorySink.capabilities, derives=frozenset({"rollouts"}))

        def put_file(self, file: LogFile) -> None:
            if "000030" in file.path and puts.count(file.path) < 2:
                puts.append(file.path)
                raise Retry("not now", after=0.0)
            puts.append(file.path)
            super().put_file(file)

    write_rows(rig.log / "metrics.jsonl", [train_row(0)])
    for number in range(40):
        (rig.log / f"train_iteration_{number:06d}_rollout_summaries.jsonl").write_text("{}\n")
    with rig.mirror(rig.sink(Derives)) as mirror:
        save, saves = mirror.state.save, 0

        def counted(**options: Any) -> None:
            nonlocal saves
            saves += 1
            save(**options)

        mirror.state.save = counted  # type: ignore[method-assign]
        with pytest.raises(Retry, match="not now"):
            mirror.deliver(patience=0)
        assert len(rig.state()["files"]) == 30
        assert mirror.deliver(patience=5).files == 10
    assert saves < 20
    assert sorted(puts) == sorted([*rig.run().files, *[path for path in puts if "000030" in path][:2]])


def test_refused_is_raised_at_once(rig: Rig) -> None:
    """Refused comes through unretried, and is in the state."""
    flat_log(rig.log)
    with (
        pytest.raises(Refused, match="no such project"),
        rig.mirror(rig.sink(scripted(Refused("no such project"), verb="open"))) as mirror,
    ):
        mirror.deliver(patience=None)
    assert "no such project" in rig.state()["last_error"]


def test_a_hanging_call_is_given_up(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """OverdueError after the deadline, and the next mirror delivers."""
    release = threading.Event()

    class Hangs(MemorySink):
        def put(self, rows: Sequence[Row]) -> list[Rejected]:
            release.wait(60)
            return []

    monkeypatch.setattr(mirror_module, "CALL_DEADLINE", 0.1)
    flat_log(rig.log)
    try:
        with pytest.raises(OverdueError, match="put did not return"), rig.mirror(rig.sink(Hangs)) as mirror:
            mirror.deliver()
    finally:
        release.set()
    monkeypatch.undo()
    with rig.mirror() as mirror:
        mirror.deliver(patience=0)
    assert rig.steps() == list(range(12))


def test_one_mirror_per_destination(rig: Rig) -> None:
    """MirrorBusyError for the second one; another destination is free."""
    flat_log(rig.log)
    with rig.mirror():
        with pytest.raises(MirrorBusyError, match="another mirror"):
            rig.mirror()
        with rig.mirror(MemorySink(MemoryOptions(tracker="elsewhere"))):
            pass
    with rig.mirror():
        pass


def test_a_damaged_state_is_rebuilt_from_the_tracker(rig: Rig) -> None:
    """No row twice: the position is the tracker's; the damaged file is kept aside."""
    flat_log(rig.log)
    with rig.mirror() as mirror:
        mirror.deliver(patience=0)
        path = mirror.state.path
    path.write_bytes(b'{"format": 1, "ordi')
    with rig.mirror() as mirror:
        assert mirror.deliver(patience=0).rows == 0
    assert rig.steps() == list(range(12))
    assert list(rig.folder.glob("*.damaged-*"))


def test_a_tracker_that_lost_its_run_gets_it_again(rig: Rig) -> None:
    """All 12 rows and 3 files once more, into the new run."""
    flat_log(rig.log)
    with rig.mirror() as mirror:
        mirror.deliver(patience=0)
        mirror.close(end=True)
    MemorySink.trackers[rig.tracker].clear()
    with rig.mirror() as mirror:
        done = mirror.deliver(patience=0)
        mirror.close(end=True)
    assert (done.rows, done.files, rig.run().status) == (12, 3, "finished")


def test_a_replaced_log_without_state_is_refused(rig: Rig) -> None:
    """Refused, with both counts: 12 rows are there, the new log in the same place has 5, and no state tells of a cut."""
    flat_log(rig.log)
    with rig.mirror() as mirror:
        mirror.deliver(patience=0)
    shutil.rmtree(rig.folder)
    write_rows(rig.log / "metrics.jsonl", [train_row(step, 9.0) for step in range(5)])
    with pytest.raises(Refused, match="holds 12 rows of this run, but the log has only 5"), rig.mirror() as mirror:
        mirror.deliver(patience=0)


def test_lost_state_of_the_same_log_is_no_reason_to_refuse(rig: Rig) -> None:
    """The 2 new rows arrive; the 12 old ones are not sent again."""
    flat_log(rig.log)
    with rig.mirror() as mirror:
        mirror.deliver(patience=0)
    shutil.rmtree(rig.folder)
    with (rig.log / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(train_row(step)) + "\n" for step in (12, 13))
    with rig.mirror() as mirror:
        assert mirror.deliver(patience=0).rows == 2
    assert rig.steps() == list(range(14))


def test_rows_that_are_never_confirmed_are_not_delivered(rig: Rig) -> None:
    """Retry that says how many; the cursor stays at what was confirmed, and the status is not set."""

    class Slow(MemorySink):
        def flush(self, deadline: float) -> int:
            return min(8, super().flush(deadline))

    flat_log(rig.log)
    with (
        pytest.raises(Retry, match="not confirmed the last 4 rows"),
        rig.mirror(rig.sink(Slow), batch_rows=4) as mirror,
    ):
        mirror.deliver(patience=0)
    assert rig.state()["ordinal"] == 8
    assert rig.run().status == "running"


def test_the_end_is_told_again_when_that_failed(rig: Rig) -> None:
    """Status finished in tracker and state, after two failures of close."""
    flat_log(rig.log)
    with rig.mirror(rig.sink(scripted(Retry("busy"), ConnectionError("reset"), verb="close"))) as mirror:
        mirror.deliver(patience=0)
        mirror.close(end=True)
    assert (rig.run().status, rig.state()["closed"]) == ("finished", "finished")


def test_include_and_exclude(rig: Rig) -> None:
    """Only keys that match an include and no exclude."""
    flat_log(rig.log)
    options = SinkOptions(include=("env/*", "entropy"), exclude=("*/total_episodes",))
    with rig.mirror(options=options) as mirror:
        mirror.deliver(patience=0)
    assert set(rig.run().rows[1][3]) == {"env/all/reward/total", "env/all/correct", "entropy"}


def test_policy_last_leaves_superseded_rows_empty(rig: Rig) -> None:
    """After the rewind to 4 the two earlier rows at 4 and 5 carry nothing; under "all" they do."""
    write_rows(rig.log / "metrics.jsonl", resumed_rows())
    with rig.mirror(policy="last") as mirror:
        mirror.deliver(patience=0)
    assert [step for _, step, _, points in rig.run().rows if points] == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    MemorySink.trackers[rig.tracker].clear()
    with rig.mirror(policy="all") as mirror:
        mirror.deliver(patience=0)
    assert [step for _, step, _, points in rig.run().rows if points] == [0, 1, 2, 3, 4, 5, 4, 5, 6, 7, 8]


def test_a_native_sink_gets_every_row(rig: Rig) -> None:
    """11 rows with values: a sink that takes points back itself sees the rewind."""

    class Native(MemorySink):
        capabilities = Capabilities(rewinds="native")

    write_rows(rig.log / "metrics.jsonl", resumed_rows())
    with rig.mirror(rig.sink(Native)) as mirror:
        mirror.deliver(patience=0)
    assert len([1 for *_, points in rig.run().rows if points]) == 11


def test_a_cut_log_is_followed(rig: Rig) -> None:
    """Rows 0..5, then the log is cut to 4 rows and grows again: every new row arrives, nothing twice."""
    before = [train_row(step) for step in range(6)]
    after = before[:4] + [train_row(step, 0.5) for step in range(4, 8)]
    write_rows(rig.log / "metrics.jsonl", before)
    with rig.mirror() as mirror:
        mirror.deliver(patience=0)
        (rig.log / "metrics.jsonl").rename(rig.log / "metrics.jsonl.pre_resume_000004")
        write_rows(rig.log / "metrics.jsonl", after[:4])
        mirror.deliver(patience=0)
        write_rows(rig.log / "metrics.jsonl", after)
        mirror.deliver(patience=0)
    assert rig.steps() == [0, 1, 2, 3, 4, 5, 4, 5, 6, 7]
    assert [points["entropy"] for *_, points in rig.run().rows[6:]] == [row["entropy"] for row in after[4:]]


def test_stops_between_batches(rig: Rig) -> None:
    """A stop that is set leaves the rest for the next time."""
    flat_log(rig.log)
    stop = threading.Event()
    with rig.mirror(batch_rows=5, on_progress=lambda rows, points: stop.set()) as mirror:
        assert mirror.deliver(stop=stop).rows == 5
        assert mirror.deliver().rows == 7
    assert rig.steps() == list(range(12))


def test_refused_keys_are_not_lost_and_not_put_again(rig: Rig) -> None:
    """When the list of what was refused can't be written, the row stays put: it is not put twice for that."""

    class Fussy(MemorySink):
        def put(self, rows: Sequence[Row]) -> list[Rejected]:
            super().put(rows)
            return [Rejected(rows[0].ordinal, "loss", "not this one")]

    write_rows(rig.log / "metrics.jsonl", [train_row(step) for step in range(3)])
    with rig.mirror(rig.sink(Fussy)) as mirror:
        mirror.state.rejected_path.mkdir()
        with pytest.raises(Retry, match="IsADirectoryError"):
            mirror.deliver(patience=0)
        mirror.state.rejected_path.rmdir()
        mirror.deliver(patience=0)
        assert json.loads(mirror.state.rejected_path.read_text().splitlines()[0])["ordinal"] == 0
    assert rig.steps() == [0, 1, 2]


def test_rows_behind_a_power_cut_are_numbered_anew(rig: Rig) -> None:
    """The log and the index lost their ends, the cursor did not: other rows in their place are not taken for delivered."""
    path = rig.log / "metrics.jsonl"
    write_rows(path, [train_row(step) for step in range(100)])
    with rig.mirror() as mirror:
        mirror.deliver()
    lines = path.read_bytes().splitlines(keepends=True)
    others = [line.replace(b"{", b'{"again": 1, ', 1) for line in lines[90:]]
    path.write_bytes(b"".join(lines[:90] + others))
    os.truncate(rig.folder / "lines.bin", 90 * 16)
    with rig.mirror() as mirror:
        mirror.deliver()
        assert mirror.state.record.ordinal == 110
    assert rig.steps()[-10:] == list(range(90, 100))


def test_a_lost_index_of_an_unchanged_log_sends_nothing_again(rig: Rig) -> None:
    write_rows(rig.log / "metrics.jsonl", [train_row(step) for step in range(100)])
    with rig.mirror() as mirror:
        mirror.deliver()
    os.truncate(rig.folder / "lines.bin", 90 * 16)
    with rig.mirror() as mirror:
        assert mirror.deliver().rows == 0


def test_the_index_is_on_disk_before_the_cursor(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(rig.log / "metrics.jsonl", [train_row(step) for step in range(3)])
    synced: list[str] = []
    real = os.fsync

    def fsync(file: int) -> None:
        is_index = (
            os.fstat(file).st_ino == (rig.folder / "lines.bin").stat().st_ino
            if any(rig.folder.glob("lines.bin"))
            else False
        )
        synced.append("index" if is_index else "state")
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    with rig.mirror() as mirror:
        mirror.deliver()
        assert synced.count("index") == 1
        assert "state" in synced[synced.index("index") :]


def test_rows_of_a_put_that_fails_are_progress(rig: Rig) -> None:
    """Each put brings one row and fails: patience, which is for no progress at all, does not run out."""

    class OneByOne(MemorySink):
        def put(self, rows: Sequence[Row]) -> list[Rejected]:
            super().put(rows[:1])
            time.sleep(0.02)
            if len(rows) > 1:
                raise Retry("slow")
            return []

    write_rows(rig.log / "metrics.jsonl", [train_row(step) for step in range(6)])
    with rig.mirror(rig.sink(OneByOne)) as mirror:
        mirror.deliver(patience=0.03)
        assert mirror.is_current()
    assert rig.steps() == list(range(6))


def test_a_close_that_fails_lets_go_of_the_sink(rig: Rig) -> None:
    """Though the log can't be read for its end; a second close does nothing."""
    flat_log(rig.log)
    sink = rig.sink()
    with rig.mirror(sink) as mirror:
        mirror.deliver(patience=0)
        (rig.log / "config.json").unlink()
        (rig.log / "config.json").mkdir()
        with pytest.raises(IsADirectoryError):
            mirror.close(end=True)
        assert sink.run is None
    assert not mirror._fence.overdue


def test_a_removed_log_path_is_not_made_anew(tmp_path: Path) -> None:
    """By the state that a mirror keeps in it."""
    run = runmirror.start(tmp_path / "run", code=False)
    run.log_metrics({"loss": 1.0})
    run.finish()
    (found,) = find_runs([tmp_path / "run"])
    source, folder = open_run(found)
    with Mirror(source, MemorySink(MemoryOptions(tracker="removed")), folder) as mirror:
        mirror.deliver(patience=0)
        shutil.rmtree(tmp_path / "run")
    assert not (tmp_path / "run").exists()
