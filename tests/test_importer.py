"""Importing runs into TensorBoard, read back with its own EventAccumulator and over HTTP from its own server."""

from __future__ import annotations

import json
import os
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from runmirror import importer
from runmirror.exceptions import NotALogError, OptionError, UnknownSinkError
from runmirror.find import Found, ReadOptions, open_run, other_logs
from runmirror.importer import import_runs, plan
from runmirror.log.rows import START
from runmirror.sinks.base import RunInfo
from runmirror.sinks.event_reader import read_points
from runmirror.testing import MemoryOptions, MemorySink
from runmirror.testing.dummy import read_dummy_run
from tests.conftest import SAMPLES
from tests.logs import STARTED, async_rows, flat_log, nested_log, resumed_rows, train_row, write_rows
from tests.servers.tensorboard import tensorboard_server

Points = dict[str, dict[int, float]]
"""key -> step -> value"""


def make_logs(folder: Path) -> list[Path]:
    """Every shape of log: our own fixtures, and the real samples when they are there."""
    logs = [flat_log(folder / "flat"), nested_log(folder / "nested")]
    logs += [write_rows(folder / "async_metrics.jsonl", async_rows())]
    logs += [write_rows(folder / "resumed_metrics.jsonl", resumed_rows())]
    if SAMPLES.is_dir():
        for name in ("tinker_flat", "tinker_newlayout"):
            shutil.copytree(SAMPLES / name, folder / name)
            logs.append(folder / name)
        for name in ("tinker_async_061_metrics.jsonl", "tinker_resumed_058_metrics.jsonl"):
            shutil.copy(SAMPLES / name, folder / name)
            os.utime(folder / name, (STARTED, STARTED))
            logs.append(folder / name)
    return logs


def name_of(log: Path) -> str:
    return log.stem if log.suffix == ".jsonl" else log.name


def expected_points(log: Path) -> tuple[Points, Points]:
    """What a tracker must show of a log by the policy "last", told by a plain reading of it; and the points of keys that
    a rewind superseded and that have no earlier point (TensorBoard's default loader can't take those away)."""
    rows = [json.loads(line) for line in (log if log.is_file() else log / "metrics.jsonl").read_text().splitlines()]
    points: Points = {}
    gone: Points = {}
    for number, row in enumerate(rows):
        step = row["step"]
        if "resumed" in log.name and number == 6:  # the only rewind in these logs, to checkpoint 4
            for key, values in points.items():
                taken = {s: v for s, v in values.items() if s >= step}
                points[key] = {s: v for s, v in values.items() if s < step}
                if not points[key]:
                    gone[key] = taken
        for key, value in row.items():
            if key != "step" and isinstance(value, (int, float)):
                points.setdefault(key, {})[step] = float(value)
    for key, values in points.items():
        if values:
            gone.pop(key, None)
    return {key: values for key, values in points.items() if values}, gone


def expected_times(log: Path) -> Points:
    """key -> step -> the time of the row that a tracker must show there, as the log's reader tells it."""
    source, _ = open_run(Found(str(log), name_of(log)))
    times: Points = {}
    for row in source.rows(START):
        if row.rewind is not None:
            times = {key: {s: t for s, t in known.items() if s < row.rewind} for key, known in times.items()}
        for key in row.scalars():
            times.setdefault(key, {})[row.step] = row.time
    return times


def rounded(points: Points) -> dict[str, dict[int, Any]]:
    """Values as TensorBoard keeps them: 32 bit floats."""
    return {key: {step: pytest.approx(v, rel=1e-6, nan_ok=True) for step, v in s.items()} for key, s in points.items()}


@pytest.fixture
def imported(tmp_path: Path) -> tuple[list[Path], Path]:
    logs = make_logs(tmp_path / "logs")
    summary = import_runs(logs, "tensorboard", {"logdir": str(tmp_path / "tb")}, patience=0)
    assert summary.ok
    assert [run.state for run in summary.runs] == ["complete"] * len(logs)
    return logs, tmp_path / "tb"


def test_event_accumulator_reads_every_scalar(imported: tuple[list[Path], Path]) -> None:
    """Every point of every log under its key and step, with one time per row, and none beside them."""
    logs, logdir = imported
    for log in logs:
        events = EventAccumulator(str(logdir / name_of(log)), size_guidance={"scalars": 0})
        events.Reload()
        seen = {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
        assert seen == rounded(expected_points(log)[0]), log.name


@pytest.mark.slow
@pytest.mark.parametrize("load_fast", [True, False])
def test_tensorboard_serves_every_scalar(imported: tuple[list[Path], Path], load_fast: bool) -> None:
    """Every point of every log under its key, step and time, from a real server in both of its loaders."""
    logs, logdir = imported
    with tensorboard_server(logdir, load_fast=load_fast) as server:
        server.wait(lambda: set(server.runs()) == {name_of(log) for log in logs})
        for log in logs:
            points, gone = expected_points(log)
            run = name_of(log)
            wanted = set(points) | (set(gone) if load_fast else set())
            server.wait(lambda run=run, wanted=wanted: set(server.tags(run)) >= wanted)
            shown = server.points(run)
            kept = {key: values for key, values in shown.items() if key not in gone}
            assert {key: {s: v for _, s, v in series} for key, series in kept.items()} == rounded(points), run
            times = expected_times(log)
            assert {key: {s: t for t, s, _ in series} for key, series in kept.items()} == {
                k: times[k] for k in points
            }, run
            if load_fast:  # its own rule: a point takes the place of those at later steps; nothing twice, all in order
                for key, series in shown.items():
                    steps = [step for _, step, _ in series]
                    assert steps == sorted(set(steps)), (run, key)


def test_times_are_the_logs_own(tmp_path: Path) -> None:
    """A row's ``_timestamp`` to the microsecond; without one, the report's start plus the row's duration."""
    rows = [{"step": n, "_timestamp": 1_700_000_000.25 + n, "loss": 1.0} for n in range(3)]
    write_rows(tmp_path / "own" / "metrics.jsonl", rows)
    flat_log(tmp_path / "flat")
    import_runs([tmp_path / "own", tmp_path / "flat"], "tensorboard", {"logdir": str(tmp_path / "tb")}, patience=0)
    times = {}
    for name, tag in (("own", "loss"), ("flat", "entropy")):
        events = EventAccumulator(str(tmp_path / "tb" / name))
        events.Reload()
        times[name] = [event.wall_time for event in events.Scalars(tag)]
    assert times["own"] == [1_700_000_000.25, 1_700_000_001.25, 1_700_000_002.25]
    started = datetime(2025, 11, 24, 16, 0, tzinfo=UTC).timestamp()
    assert times["flat"][:3] == [started + 1.5, started + 3.0, started + 4.5]
    assert times["flat"][8] == started + 8 * 60 + 1.5


def tree(folder: Path) -> dict[str, bytes]:
    """Every event file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("events.*"))}


def test_a_second_import_writes_nothing(imported: tuple[list[Path], Path]) -> None:
    """0 rows, 0 files, the same bytes and modification times."""
    logs, logdir = imported
    before = {path: path.stat().st_mtime_ns for path in logdir.rglob("events.*")}
    content = tree(logdir)
    summary = import_runs(logs, "tensorboard", {"logdir": str(logdir)}, patience=0)
    assert summary.as_dict()["totals"] == {"rows": 0, "points": 0, "files": 0, "rejected": 0}
    assert {path: path.stat().st_mtime_ns for path in logdir.rglob("events.*")} == before
    assert tree(logdir) == content


def test_without_state_the_event_file_is_the_cursor(
    imported: tuple[list[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bytes when all state is gone."""
    logs, logdir = imported
    content = tree(logdir)
    monkeypatch.setenv("RUNMIRROR_HOME", str(tmp_path / "another home"))
    summary = import_runs(logs, "tensorboard", {"logdir": str(logdir)}, patience=0)
    assert summary.as_dict()["totals"]["rows"] == 0
    assert tree(logdir) == content


def test_a_removed_logdir_is_made_again(imported: tuple[list[Path], Path]) -> None:
    """The same bytes, though the state says it is all delivered."""
    logs, logdir = imported
    content = tree(logdir)
    shutil.rmtree(logdir)
    assert import_runs(logs, "tensorboard", {"logdir": str(logdir)}, patience=0).ok
    assert tree(logdir) == content


def test_nothing_is_written_into_a_foreign_log(tmp_path: Path) -> None:
    """The log_path of another tool is byte for byte what it was, and a read-only one imports too."""
    log = flat_log(tmp_path / "run")
    before = {path: path.read_bytes() for path in log.rglob("*") if path.is_file()}
    import_runs([log], "tensorboard", {"logdir": str(tmp_path / "tb")}, patience=0)
    assert {path: path.read_bytes() for path in log.rglob("*") if path.is_file()} == before
    import_runs([log], "tensorboard", {"logdir": str(tmp_path / "tb2")}, read=None, patience=0)
    assert not (log / ".runmirror").exists()


def test_a_broken_run_is_a_line_in_the_summary(tmp_path: Path) -> None:
    """The other runs are imported; the broken one has its error; exit is not ok."""
    flat_log(tmp_path / "logs" / "a")
    (tmp_path / "logs" / "b" / "metrics.jsonl").mkdir(parents=True)
    (tmp_path / "logs" / "b" / ".runmirror").mkdir()
    (tmp_path / "logs" / "b" / ".runmirror" / "run.json").write_text("{")
    flat_log(tmp_path / "logs" / "c")
    summary = import_runs([tmp_path / "logs"], "tensorboard", {"logdir": str(tmp_path / "tb")}, patience=0)
    assert {run.name: run.state for run in summary.runs} == {"a": "complete", "b": "behind", "c": "complete"} or {
        run.name: run.state for run in summary.runs
    } == {"a": "complete", "b": "broken", "c": "complete"}
    assert not summary.ok
    assert "IsADirectoryError" in str(next(run.error for run in summary.runs if run.name == "b"))


def test_broken_lines_are_counted(tmp_path: Path) -> None:
    """Two whole rows, two broken lines, and a torn last line that is left for later."""
    path = tmp_path / "run" / "metrics.jsonl"
    write_rows(path, [train_row(0), train_row(1)])
    with path.open("a") as file:
        file.write('{"step": 2, "loss"\n[1, 2]\n{"step": 3, "lo')
    (run,) = import_runs([tmp_path / "run"], "tensorboard", {"logdir": str(tmp_path / "tb")}, patience=0).runs
    assert (run.rows, run.broken_lines) == (4, 2)


def test_a_running_run_stays_open(tmp_path: Path) -> None:
    """State "running", and the rows that come later go into the same file."""
    path = write_rows(tmp_path / "run" / "metrics.jsonl", [train_row(0)])
    os.utime(path)
    options = {"logdir": str(tmp_path / "tb")}
    assert import_runs([tmp_path / "run"], "tensorboard", options, patience=0).runs[0].state == "running"
    with path.open("a") as file:
        file.write(json.dumps(train_row(1)) + "\n")
    (run,) = import_runs([tmp_path / "run"], "tensorboard", options, patience=0).runs
    assert (run.rows, len(tree(tmp_path / "tb"))) == (1, 1)


def test_a_log_that_is_cut_and_grows_again(tmp_path: Path) -> None:
    """As tinker-cookbook 0.6.1 resumes: cut to 4 rows, the rest kept aside, then new rows 4 to 8. What TensorBoard shows
    is the log as it is now, whether or not an import came in between; nothing is there twice."""
    old = [train_row(step) for step in range(6)]
    new = old[:4] + [train_row(step, 0.5) for step in range(4, 9)]
    for name, stages in (("between", [old, new[:4], new[:6], new]), ("after", [old, new])):
        path = tmp_path / name / "metrics.jsonl"
        for stage in stages:
            if path.exists() and len(stage) < 6:
                path.rename(path.with_name("metrics.jsonl.pre_resume_000004"))
            write_rows(path, stage)
            assert import_runs([tmp_path / name], "tensorboard", {"logdir": str(tmp_path / "tb")}, patience=0).ok
        shown = read_points(tmp_path / "tb" / name)
        assert {s: v for _, s, v in shown["entropy"]} == pytest.approx({row["step"]: row["entropy"] for row in new})
        assert [s for _, s, _ in shown["entropy"]] == list(range(9))


def test_plan_says_new_behind_and_complete(tmp_path: Path) -> None:
    """new before, complete after, behind when rows came; nothing is written by planning."""
    logs = tmp_path / "logs"
    flat_log(logs / "a")
    options = {"logdir": str(tmp_path / "tb")}
    (one,) = plan([logs], "tensorboard", options)
    assert (one.name, one.state, one.rows, one.source) == ("a", "new", 12, "tinker-cookbook")
    assert one.size == (logs / "a" / "metrics.jsonl").stat().st_size
    assert not (tmp_path / "tb").exists()
    import_runs([logs], "tensorboard", options, patience=0)
    assert [run.state for run in plan([logs], "tensorboard", options)] == ["complete"]
    with (logs / "a" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(train_row(12)) + "\n")
    (one,) = plan([logs], "tensorboard", options)
    assert (one.state, one.rows) == ("behind", 1)


def test_names_are_paths_below_the_root(tmp_path: Path) -> None:
    """``sweep/lr=1`` for a run two folders below the path given, kept when it is named otherwise later."""
    flat_log(tmp_path / "logs" / "sweep" / "lr=1")
    options = {"logdir": str(tmp_path / "tb")}
    import_runs([tmp_path / "logs"], "tensorboard", options, patience=0)
    assert [path.parent.relative_to(tmp_path / "tb").as_posix() for path in (tmp_path / "tb").rglob("events.*")] == [
        "sweep/lr=1"
    ]
    summary = import_runs([tmp_path / "logs" / "sweep" / "lr=1"], "tensorboard", options, patience=0)
    assert (summary.runs[0].rows, len(tree(tmp_path / "tb"))) == (0, 1)


def test_two_runs_of_one_name_stay_apart(tmp_path: Path) -> None:
    """Two event files in two folders when two roots have a run of the same name."""
    for root in ("one", "two"):
        flat_log(tmp_path / root / "run")
        import_runs([tmp_path / root], "tensorboard", {"logdir": str(tmp_path / "tb")}, patience=0)
    assert len(tree(tmp_path / "tb")) == 2


def test_wrong_names_are_errors_before_anything_is_done(tmp_path: Path) -> None:
    """An unknown sink, an unknown option, a path without a run: named, with what there is."""
    flat_log(tmp_path / "run")
    with pytest.raises(UnknownSinkError, match="did you mean 'tensorboard'"):
        import_runs([tmp_path / "run"], "tensorbord")
    with pytest.raises(OptionError, match="did you mean 'logdir'"):
        import_runs([tmp_path / "run"], "tensorboard", {"logdri": "x"})
    with pytest.raises(NotALogError, match="nowhere"):
        import_runs([tmp_path / "nowhere"], "tensorboard")


def test_a_tracker_out_of_reach_is_waited_for_once(tmp_path: Path) -> None:
    """Four runs and a sink that always fails: the first is tried for the whole patience, the others once each; the next
    import waits again."""
    for number in range(4):
        flat_log(tmp_path / "logs" / f"run{number}", 2)
    options = {"folder": str(tmp_path / "dummy"), "transient": 1.0, "calls": ["open"], "retry_after": 0.01}
    for _ in range(2):
        before = opens(tmp_path / "dummy")
        summary = import_runs([tmp_path / "logs"], "dummy", options, patience=0.3)
        assert [run.state for run in summary.runs] == ["behind"] * 4
        tries = [after - earlier for after, earlier in zip(opens(tmp_path / "dummy"), before, strict=True)]
        assert sorted(tries)[:3] == [1, 1, 1]
        assert max(tries) > 1


def opens(folder: Path) -> list[int]:
    """How often each run was opened."""
    held = [read_dummy_run(path).opened for path in sorted(folder.glob("*.jsonl"))]
    return held or [0] * 4


def test_a_refused_run_is_broken(tmp_path: Path) -> None:
    """Trying again can't help: the state says so, and the error is told without the name of a class."""
    flat_log(tmp_path / "run", 2)
    (tmp_path / "tb").write_text("a file")
    (run,) = import_runs([tmp_path / "run"], "tensorboard", {"logdir": str(tmp_path / "tb")}).runs
    assert run.state == "broken"
    assert str(run.error).startswith("can't write to")


def test_rows_without_steps_are_told(tmp_path: Path) -> None:
    """``numbered``; not with the right key."""
    path = write_rows(tmp_path / "run" / "metrics.jsonl", [{"it": n, "loss": 1.0} for n in range(5)])
    for step_key, numbered in ((None, True), ("iter", True), ("it", False)):
        options = {"logdir": str(tmp_path / f"tb-{step_key}")}
        read = ReadOptions(step_key=step_key)
        assert import_runs([path.parent], "tensorboard", options, read=read).runs[0].numbered is numbered


def test_logs_that_are_not_taken_are_named(tmp_path: Path) -> None:
    """A metrics file of another name beside runs; not the files of a run, nor those of something else."""
    flat_log(tmp_path / "run", 2)
    write_rows(tmp_path / "other.jsonl", [{"step": 0, "loss": 1.0}])
    write_rows(tmp_path / "sub" / "more.jsonl", [{"step": 0, "loss": 1.0}])
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello"}\n')
    assert [Path(one).name for one in other_logs([tmp_path])] == ["other.jsonl", "more.jsonl"]
    assert [Path(one).name for one in other_logs([tmp_path, tmp_path / "oth*.jsonl"])] == ["more.jsonl"]
    assert other_logs([tmp_path / "run", tmp_path / "nowhere"]) == []


def test_inferred_times_stay_when_the_file_is_touched(tmp_path: Path) -> None:
    """A log without times whose modification time changes writes no second event file."""
    path = write_rows(tmp_path / "run" / "metrics.jsonl", [{"step": n, "loss": 1.0} for n in range(5)])
    options = {"logdir": str(tmp_path / "tb")}
    import_runs([tmp_path / "run"], "tensorboard", options, patience=0)
    content = tree(tmp_path / "tb")
    assert next(iter(content)) == f"run/events.out.tfevents.{int(STARTED)}.runmirror.v1"
    os.utime(path, (STARTED + 5000, STARTED + 5000))
    import_runs([tmp_path / "run"], "tensorboard", options, patience=0)
    assert tree(tmp_path / "tb") == content


SECRETS = {"api_key": "sesame-1234", "url": "http://me:hunter2@host/x", "nested": [{"hf_token": "open-5678"}]}


def secret_log(folder: Path) -> Path:
    """A log of another program whose config, checkpoints and code hold secrets."""
    write_rows(folder / "metrics.jsonl", [train_row(step) for step in range(3)])
    (folder / "config.json").write_text(json.dumps(SECRETS | {"lr": 0.5, "max_tokens": 77}))
    (folder / "checkpoints.jsonl").write_text(json.dumps({"name": "c1", "password": "xyzzy-9012", "batch": 1}) + "\n")
    (folder / "code.diff").write_text('+client = Client(api_key="plugh-3456")\n')
    return folder


def test_secrets_of_foreign_logs_are_not_sent(tmp_path: Path) -> None:
    """None in the event files, neither as hyperparameter nor as text; what stands beside them is there."""
    log = secret_log(tmp_path / "logs/run")
    import_runs([log], "tensorboard", {"logdir": str(tmp_path / "tb")})
    sent = b"".join(tree(tmp_path / "tb").values())
    assert [word for word in (b"sesame", b"hunter2", b"open-5678", b"xyzzy", b"plugh") if word in sent] == []
    assert [word for word in (b"max_tokens", b"client = Client", b"c1", b"api_key", b"***") if word not in sent] == []


def test_event_files_with_secrets_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begun before secrets were masked: the same file grows by the new rows, and a further import changes nothing."""
    log = secret_log(tmp_path / "logs/run")
    to = {"logdir": str(tmp_path / "tb")}
    with monkeypatch.context() as patch:
        patch.setattr("runmirror.log.status.mask_values", lambda config: config)
        patch.setattr("runmirror.log.sources.mask_json", lambda text: text)
        patch.setattr("runmirror.log.sources.mask_text", lambda text: text)
        import_runs([log], "tensorboard", to)
    before = tree(tmp_path / "tb")
    assert b"sesame" in b"".join(before.values())
    write_rows(log / "metrics.jsonl", [train_row(step) for step in range(5)])
    assert import_runs([log], "tensorboard", to).runs[0].rows == 2
    after = tree(tmp_path / "tb")
    assert after.keys() == before.keys()
    assert all(after[name].startswith(before[name]) for name in before)
    assert [step for _, step, _ in read_points(tmp_path / "tb/run")["entropy"]] == [0, 1, 2, 3, 4]
    import_runs([log], "tensorboard", to)
    assert tree(tmp_path / "tb") == after


def test_files_that_links_fetch_from_elsewhere_are_not_sent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A config, code and a folder of reports out of the log_path: left out, with a warning each; a link within is sent."""
    log = tmp_path / "logs/run"
    write_rows(log / "metrics.jsonl", [train_row(step) for step in range(3)])
    (log / "notes.txt").write_text(json.dumps({"name": "within"}) + "\n")
    (log / "checkpoints.jsonl").symlink_to("notes.txt")
    away = tmp_path / "away/reports"
    away.mkdir(parents=True)
    for path, name in ((tmp_path / "away/c", "config.json"), (tmp_path / "away/d", "code.diff")):
        path.write_text('{"word": "private"}')
        (log / name).symlink_to(path)
    (away / "train_logtree.json").write_text('{"title": "private"}')
    (log / "iteration_000001").symlink_to(away)
    records = "config,code,checkpoints,logtree"
    run = import_runs([log], "tensorboard", {"logdir": str(tmp_path / "tb"), "records": records}).runs[0]
    sent = b"".join(tree(tmp_path / "tb").values())
    assert (run.error, run.rows, run.files, b"private" in sent, b"within" in sent) == (None, 3, 1, False, True)
    for name in ("config.json", "code.diff", "iteration_000001/train_logtree.json"):
        assert f"{name} is left out" in caplog.text


def test_a_snapshot_in_a_cache_has_its_config(tmp_path: Path) -> None:
    """Hugging Face's cache holds files as links to the blobs beside the snapshots: these are the run's own."""
    log = tmp_path / "models--x/snapshots/abc"
    write_rows(log / "metrics.jsonl", [train_row(0)])
    blobs = tmp_path / "models--x/blobs"
    blobs.mkdir()
    (blobs / "f00").write_text('{"lr": 0.5}')
    (log / "config.json").symlink_to("../../blobs/f00")
    found = Found(str(log), "abc")
    assert open_run(found)[0].info().config == {"lr": 0.5}


def test_a_log_that_breaks_at_the_very_end_is_a_line_in_the_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next run is imported all the same."""

    class Breaks(MemorySink):
        def close(self, run: RunInfo | None, deadline: float) -> None:
            if self.run is not None and self.run.name == "a":
                (tmp_path / "a" / "config.json").unlink()
                (tmp_path / "a" / "config.json").mkdir()
            super().close(run, deadline)

    flat_log(tmp_path / "a")
    flat_log(tmp_path / "b")
    monkeypatch.setattr(importer, "load_sink", lambda name: Breaks)
    summary = import_runs([tmp_path], "memory", MemoryOptions(tracker="breaks"))
    assert [(run.name, run.state) for run in summary.runs] == [("a", "behind"), ("b", "complete")]
    assert "IsADirectoryError" in (summary.runs[0].error or "")
