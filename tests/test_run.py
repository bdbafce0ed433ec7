"""start, Run and Iteration: what training code calls, on real folders and real processes."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest

import runmirror.ending
import runmirror.run
from runmirror.exceptions import LogBusyError, LogError, LogFinishedError, UnknownSinkError
from runmirror.log import layout
from runmirror.log.identity import identify
from runmirror.log.runlog import RunLog
from runmirror.log.status import read_journal
from runmirror.run import Run
from runmirror.starting import check_report_to, start
from runmirror.storage import LocalStorage
from runmirror.testing import MemoryOptions, MemorySink


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No rank from outside; no run left open."""
    for variable in ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "LOCAL_RANK"):
        monkeypatch.delenv(variable, raising=False)
    yield
    for run in list(runmirror.ending.OPEN.values()):
        run.finish("killed")


@pytest.fixture
def begin(tmp_path: Path) -> Callable[..., Run]:
    """start on one log_path, without the code's diff."""

    def begin(config: Any = None, **options: Any) -> Run:
        return start(tmp_path / "run", config, **{"code": False, **options})

    return begin


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What the library warned about so far."""
    caplog.set_level(logging.INFO, "runmirror")
    return lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def rows(folder: Path) -> list[dict[str, Any]]:
    data = (folder / "metrics.jsonl").read_bytes()
    assert data == b"" or data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


def values(folder: Path) -> list[dict[str, Any]]:
    """The rows without their time."""
    return [{key: value for key, value in row.items() if key != "_timestamp"} for row in rows(folder)]


def events(folder: Path) -> list[tuple[str, int, int | None, str | None]]:
    return [(entry.event, entry.offset, entry.step, entry.status) for entry in read_journal(LocalStorage(folder))]


def python(script: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Another interpreter, warnings as errors."""
    command = [sys.executable, "-W", "error", "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


# Rows


def test_a_row_is_in_the_file_when_the_call_returns(begin: Callable[..., Run], tmp_path: Path) -> None:
    """The row, step first, while the run is still open."""
    run = begin()
    run.log_metrics({"loss": 0.5, "n": 3}, step=4)
    assert values(tmp_path / "run") == [{"step": 4, "loss": 0.5, "n": 3}]
    assert list(rows(tmp_path / "run")[0])[:2] == ["step", "_timestamp"]


def test_a_step_omitted_is_one_more_than_the_last(begin: Callable[..., Run], tmp_path: Path) -> None:
    """0 first; after 7 comes 8, also after a row that went back."""
    run = begin()
    for step in (None, None, 7, None, 3, None):
        run.log_metrics({"a": 1}, step)
    assert [row["step"] for row in rows(tmp_path / "run")] == [0, 1, 7, 8, 3, 4]


@pytest.mark.parametrize("step", [5, 5.0, np.int32(5), np.float64(5), np.array(5)])
def test_any_integer_is_a_step(begin: Callable[..., Run], tmp_path: Path, step: Any) -> None:
    """5, whatever library it comes from, and nothing is rejected."""
    begin().log_metrics({"a": 1}, step)
    assert values(tmp_path / "run") == [{"step": 5, "a": 1}]


def test_a_step_among_the_metrics_is_the_step(begin: Callable[..., Run], tmp_path: Path) -> None:
    """As in code written for other loggers; one that is given beside it wins, and the other is named in _rejected."""
    run = begin()
    metrics = {"step": 5, "a": 1}
    run.log_metrics(metrics)
    run.log_metrics(metrics, 6)
    run.log_metrics({"a": 1})
    assert [(row["step"], list(row.get("_rejected", ()))) for row in rows(tmp_path / "run")] == [
        (5, []),
        (6, ["step"]),
        (7, []),
    ]
    assert metrics == {"step": 5, "a": 1}


@pytest.mark.parametrize("step", [1.5, math.nan, math.inf, "7", True, 2**63, 10**5000, object(), [1]], ids=type)
def test_a_bad_step_counts_as_omitted(
    begin: Callable[..., Run], tmp_path: Path, step: Any, warnings: Callable[[], list[str]]
) -> None:
    """The next step, named in _rejected, one warning for two rows."""
    run = begin()
    run.log_metrics({"a": 1}, step)
    run.log_metrics({"a": 1}, step)
    assert [(row["step"], row["a"], list(row["_rejected"])) for row in rows(tmp_path / "run")] == [
        (0, 1, ["step"]),
        (1, 1, ["step"]),
    ]
    assert len(warnings()) == 1


def test_nothing_raises_for_a_value_and_each_key_warns_once(
    begin: Callable[..., Run], tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    """Every row is written with what is good in it; two bad keys are two warnings in three rows."""
    run = begin()
    for _ in range(3):
        run.log_metrics({"good": 1.0, "list": [1], "step": "3", 7: 1, "nan": math.nan, "np": np.float32(0.5), "t": "x"})  # type: ignore[dict-item]
    assert [(row["good"], row["np"], row["t"], sorted(row["_rejected"])) for row in rows(tmp_path / "run")] == [
        (1.0, 0.5, "x", ["7", "list", "step"])
    ] * 3
    assert len(warnings()) == 3
    assert all(str(tmp_path / "run") in line for line in warnings())
    assert run.status().rejected == 3


@pytest.mark.parametrize("metrics", [None, 3.0, [("a", 1)], "text"])
def test_what_is_no_mapping_is_warned_about_and_recorded(
    begin: Callable[..., Run], tmp_path: Path, metrics: Any, warnings: Callable[[], list[str]]
) -> None:
    """A row with its step and the reason; TypeError after the write when strict."""
    begin().log_metrics(metrics)
    (row,) = rows(tmp_path / "run")
    assert (row["step"], type(metrics).__name__ in row["_rejected"]["*"], len(warnings())) == (0, True, 1)
    run = begin(strict=True)
    with pytest.raises(TypeError, match="mapping"):
        run.log_metrics(metrics)
    assert len(rows(tmp_path / "run")) == 2


def test_strict_raises_after_the_write(begin: Callable[..., Run], tmp_path: Path) -> None:
    """ValueError that lists both keys; the row is there, and the next one is not disturbed."""
    run = begin(strict=True)
    with pytest.raises(ValueError, match=r"'step'.*'list'"):
        run.log_metrics({"a": 1.0, "list": [1]}, step="x")  # type: ignore[arg-type]
    run.log_metrics({"a": 2.0, "n": math.nan})
    assert [row["a"] for row in rows(tmp_path / "run")] == [1.0, 2.0]


def test_a_run_with_endless_new_bad_keys_stays_small(begin: Callable[..., Run]) -> None:
    """Memory for 1,000 warned keys and no more."""
    run = begin()
    for i in range(1200):
        run.log_metrics({f"bad/{i}": [1]})
    assert run.status().rejected == 1000


def test_a_summary_is_a_row_without_a_step(begin: Callable[..., Run], tmp_path: Path) -> None:
    """No step in it, and the next omitted step goes on where it was."""
    run = begin()
    run.log_metrics({"a": 1}, 5)
    run.log_summary({"best": 0.9})
    run.log_metrics({"a": 2})
    assert values(tmp_path / "run") == [{"step": 5, "a": 1}, {"best": 0.9}, {"step": 6, "a": 2}]


def test_rows_of_two_threads_are_whole_and_numbered_without_a_gap(begin: Callable[..., Run], tmp_path: Path) -> None:
    """2 x 500 rows, steps 0 to 999 in file order, each thread's in its own order."""
    run = begin()

    def log(name: str) -> None:
        for i in range(500):
            run.log_metrics({name: i})

    threads = [threading.Thread(target=log, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = rows(tmp_path / "run")
    assert [row["step"] for row in found] == list(range(1000))
    for name in "ab":
        assert [row[name] for row in found if name in row] == list(range(500))


def test_standard_readers_read_a_file_of_every_kind_of_value(begin: Callable[..., Run], tmp_path: Path) -> None:
    """pandas and polars read it, and find the finite values."""
    run = begin()
    for value in (1.5, math.nan, math.inf, None, np.float32(2.5), 3.0):
        run.log_metrics({"v": value, "t": "ü\u2028\n", "big": 2**80, "s": "\ud800"})
    run.log_summary({"best": 1.0})
    path = tmp_path / "run/metrics.jsonl"
    expected = [1.5, None, None, None, 2.5, 3.0, None]
    pandas = pd.read_json(path, lines=True)["v"]
    assert [None if math.isnan(value) else value for value in pandas] == expected
    assert pl.read_ndjson(path)["v"].to_list() == expected


# Iterations


def test_an_iteration_is_one_timed_row(begin: Callable[..., Run], tmp_path: Path) -> None:
    """One row with what was logged, progress, the total and the sum of each span."""
    run = begin(total_iterations=4)
    with run.iteration(1) as it:
        for _ in range(2):
            with it.span("sample"), it.span("inner"):
                pass
        it.log({"env/all/reward/total": 0.5})
        it["kl"] = 0.1
        it["kl"] = 0.2
    (row,) = values(tmp_path / "run")
    times = [row.pop(key) for key in ("time/total", "time/sample", "time/inner")]
    assert row == {"step": 1, "progress/batch": 1, "progress/done_frac": 0.5, "env/all/reward/total": 0.5, "kl": 0.2}
    assert times == sorted(times, reverse=True)
    assert times[2] >= 0


def test_iterations_number_themselves(begin: Callable[..., Run], tmp_path: Path) -> None:
    """0, 1, then 8 after a row at 7; progress/batch is the step, without a total no done_frac."""
    run = begin()
    for _ in range(2):
        with run.iteration():
            pass
    run.log_metrics({}, 7)
    with run.iteration() as it:
        assert it.step == 8
    found = values(tmp_path / "run")
    assert [row["step"] for row in found] == [0, 1, 7, 8]
    assert [row.get("progress/batch") for row in found] == [0, 1, None, 8]
    assert not any("progress/done_frac" in row for row in found)


def test_an_iteration_that_fails_is_written_with_what_it_had(begin: Callable[..., Run], tmp_path: Path) -> None:
    """The exception goes on; the row is there and names its class; the span that failed is timed."""
    run = begin(strict=True)

    def fail() -> None:
        with run.iteration() as it:
            it.log({"a": 1.0, "bad": []})
            with it.span("train"):
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    (row,) = rows(tmp_path / "run")
    assert (row["a"], row["_error"], "time/train" in row, list(row["_rejected"])) == (
        1.0,
        "ZeroDivisionError",
        True,
        ["bad"],
    )


def test_an_iteration_takes_any_value_and_keeps_keys_logged_by_hand(begin: Callable[..., Run], tmp_path: Path) -> None:
    """Bad step, bad metrics and bad keys are named; time/total logged by hand stays."""
    run = begin()
    with run.iteration("x") as it:  # type: ignore[arg-type]
        it.log(3)  # type: ignore[arg-type]
        it.log({"time/total": 9.0, 4: 1.0})  # type: ignore[dict-item]
    (row,) = rows(tmp_path / "run")
    assert (row["step"], row["time/total"], sorted(row["_rejected"])) == (0, 9.0, ["*", "4", "step"])


def test_strict_iterations_raise_at_their_end(begin: Callable[..., Run], tmp_path: Path) -> None:
    """ValueError when the block itself did not fail, and the row is written."""
    run = begin(strict=True)
    with pytest.raises(ValueError, match="bad"), run.iteration() as it:
        it["bad"] = []
    assert len(rows(tmp_path / "run")) == 1


def test_the_plot_of_the_published_page(begin: Callable[..., Run], tmp_path: Path) -> None:
    """df.plot(x="progress/batch", y="env/all/reward/total") draws the reward over the batches."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    run = begin({"lr": 1e-4}, total_iterations=5)
    for i in range(5):
        with run.iteration(i) as it:
            it["env/all/reward/total"] = i / 8
    run.finish()
    df = pd.read_json(tmp_path / "run/metrics.jsonl", lines=True)
    axes = df.plot(x="progress/batch", y="env/all/reward/total")
    assert axes.lines[0].get_xydata().tolist() == [[i, i / 8] for i in range(5)]
    matplotlib.pyplot.close("all")


# Config, code, identity


def test_start_writes_config_and_identity_and_journal(begin: Callable[..., Run], tmp_path: Path) -> None:
    """Indented config with masked secrets, run.json, and one "started"."""
    run = begin({"lr": 1e-4, "api_key": "sk-1234567890"}, layout="nested")
    text = (tmp_path / "run/config.json").read_text()
    assert json.loads(text) == {"lr": 1e-4, "api_key": "***"}
    assert text.startswith('{\n  "lr"')
    assert events(tmp_path / "run") == [("started", 0, None, None)]
    assert run.run_id == identify(LocalStorage(tmp_path / "run")).run_id
    assert (run.url, run.log_path, run.layout) == ((tmp_path / "run").as_uri(), str(tmp_path / "run"), "nested")
    assert run.storage.read(layout.CONFIG).decode() == text


def test_the_first_config_stays_and_a_resumes_goes_aside_when_it_differs(
    begin: Callable[..., Run], tmp_path: Path
) -> None:
    """config.json of the first start; resume_2 has the one that differs; an equal one and none leave nothing."""
    for config in ({"lr": 1}, {"lr": 1}, {"lr": 2}, None):
        run = begin(config)
        run.log_metrics({"a": 1})
        run.finish("failed")
    found = {str(path.relative_to(tmp_path / "run")) for path in (tmp_path / "run").rglob("config.json")}
    assert found == {"config.json", ".runmirror/resume_2/config.json"}
    assert json.loads((tmp_path / "run/config.json").read_text()) == {"lr": 1}
    assert json.loads((tmp_path / "run/.runmirror/resume_2/config.json").read_text()) == {"lr": 2}


def test_a_start_that_came_to_nothing_leaves_no_config_behind(begin: Callable[..., Run], tmp_path: Path) -> None:
    """The second start's config, and "started" twice, when the first wrote no row."""
    begin({"lr": 1}).finish()
    begin({"lr": 2}).log_metrics({"a": 1})
    assert json.loads((tmp_path / "run/config.json").read_text()) == {"lr": 2}
    assert [event[0] for event in events(tmp_path / "run")] == ["started", "finished", "started"]


def test_a_config_that_others_put_there_is_not_replaced(begin: Callable[..., Run], tmp_path: Path) -> None:
    """The user's own config.json stays, also at the second start of a run without rows; ours goes aside."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text('{"mine": 1}')
    begin({"lr": 1})
    begin({"lr": 1})
    assert (tmp_path / "run/config.json").read_text() == '{"mine": 1}'
    assert json.loads((tmp_path / "run/.runmirror/resume_1/config.json").read_text()) == {"lr": 1}


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_code_diff_is_kept_and_a_resumes_goes_aside(begin: Callable[..., Run], tmp_path: Path) -> None:
    """The change against HEAD at the first start; at a resume with other code, that in resume_1."""
    repository = tmp_path / "repo"
    repository.mkdir()
    git = ["git", "-C", str(repository), "-c", "user.name=t", "-c", "user.email=t@t"]
    subprocess.run([*git, "init", "-q"], check=True)
    (repository / "train.py").write_text("lr = 1\n")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "x"], check=True)
    for number in (2, 2, 3):
        (repository / "train.py").write_text(f"lr = {number}\n")
        run = begin(code=repository)
        run.log_metrics({"a": 1})
        run.finish("killed")
    assert "+lr = 2" in (tmp_path / "run/code.diff").read_text()
    found = [str(path.relative_to(tmp_path / "run")) for path in (tmp_path / "run").rglob("code.diff")]
    assert sorted(found) == [".runmirror/resume_2/code.diff", "code.diff"]
    assert "+lr = 3" in (tmp_path / "run/.runmirror/resume_2/code.diff").read_text()


# Resuming


@pytest.mark.parametrize("status", ["failed", "killed", None])
def test_a_run_that_did_not_finish_is_resumed(begin: Callable[..., Run], tmp_path: Path, status: Any) -> None:
    """auto goes on at the next step; the journal says where the log was. None: the process just went away."""
    run = begin()
    run_id = run.run_id
    run.log_metrics({"a": 1}, 41)
    size = (tmp_path / "run/metrics.jsonl").stat().st_size
    if status is not None:
        run.finish(status)
    run = begin()
    run.log_metrics({"a": 2})
    assert [row["step"] for row in rows(tmp_path / "run")] == [41, 42]
    assert run.run_id == run_id
    assert events(tmp_path / "run") == [
        ("started", 0, None, None),
        ("finished", size, 41, status or "killed"),
        ("resumed", size, 41, None),
    ]


def test_a_finished_run_is_refused_and_left_as_it_is(begin: Callable[..., Run], tmp_path: Path) -> None:
    """LogFinishedError with rows, last step, the next free sibling and the way to go on; not a byte changes."""
    with begin({"lr": 1}) as run:
        run.log_metrics({"a": 1}, 5)
        run.log_summary({"best": 1})
    (tmp_path / "run-2").mkdir()
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(LogFinishedError, match=rf"2 rows, last step 5\..*{tmp_path}/run-3, .*resume=True"):
        begin({"lr": 2})
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_resume_true_always_resumes(begin: Callable[..., Run], tmp_path: Path) -> None:
    """A new path, and a finished run, both go on."""
    begin(resume=True).log_metrics({"a": 1})
    begin(resume=True).finish()
    begin(resume=True).log_metrics({"a": 2})
    assert [row["step"] for row in rows(tmp_path / "run")] == [0, 1]


def test_config_that_comes_later_is_added(begin: Callable[..., Run], tmp_path: Path) -> None:
    """Key by key, secrets masked; the first start's stays, and what differs in a resume goes beside it."""

    def config(name: str = "config.json") -> Any:
        path = tmp_path / "run" / name
        return json.loads(path.read_text()) if path.exists() else None

    run = begin()
    assert config() is None
    run.log_config({"lr": 1, "api_key": "abc"})
    run.log_config({"lr": 2, "model": {"rank": 8}})
    run.log_config(object())
    assert config() == {"lr": 2, "api_key": "***", "model": {"rank": 8}, "config": "object"}
    run.log_metrics({"a": 1})
    run.finish("killed")
    run.log_config({"late": 1})
    again = begin()
    again.log_config({"lr": 2})
    assert config(".runmirror/resume_1/config.json") is None
    again.log_config({"lr": 3})
    again.log_config({"seed": 4})
    first = {"lr": 2, "api_key": "***", "model": {"rank": 8}, "config": "object"}
    assert config(".runmirror/resume_1/config.json") == first | {"lr": 3, "seed": 4}
    assert config() == first
    assert RunLog(LocalStorage(tmp_path / "run")).info().resumes == (first | {"lr": 3, "seed": 4},)


def test_numbered_logs_stand_side_by_side(tmp_path: Path) -> None:
    """A finished log is followed by the next number; resume is about the newest; names get the number too."""

    def once(resume: Any = None, status: Any = "finished") -> tuple[str, int]:
        run = start(tmp_path / "run", code=False, numbered=True, name="mine", resume=resume)
        run.log_metrics({"a": 1})
        run.finish(status)
        return Path(run.log_path).name, run.status().last_step or 0

    assert once() == ("run", 0)
    assert once(status="killed") == ("run-2", 0)
    assert once() == ("run-2", 1)
    assert once(resume=True) == ("run-2", 2)
    assert once(resume=False) == ("run-3", 0)
    records = [json.loads((tmp_path / name / layout.RUN).read_text()) for name in ("run", "run-2", "run-3")]
    assert [record["name"] for record in records] == ["mine", "mine-2", "mine-3"]
    with pytest.raises(ValueError, match="numbered=True needs a log_path"):
        start(LocalStorage(tmp_path / "run"), code=False, numbered=True)


def test_a_name_is_kept_until_another_is_given(tmp_path: Path) -> None:
    names = []
    for given in ("first", None, "second", None):
        start(tmp_path / "run", code=False, name=given, resume=True).finish()
        names.append(json.loads((tmp_path / "run" / layout.RUN).read_text())["name"])
    assert names == ["first", "first", "second", "second"]


def test_report_to_can_be_checked_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names it means, from the environment too; what start would raise."""
    assert check_report_to() == []
    assert check_report_to(["dummy", {"tensorboard": {"logdir": "tb"}}]) == ["dummy", "tensorboard"]
    monkeypatch.setenv("RUNMIRROR_REPORT_TO", "dummy,tensorbord")
    with pytest.raises(UnknownSinkError, match="did you mean 'tensorboard'"):
        check_report_to()
    assert check_report_to("none") == []


def test_resume_false_wants_an_empty_log_path(begin: Callable[..., Run], tmp_path: Path) -> None:
    """LogError naming a sibling once there is a row, also from a run that is open in this process, which goes on."""
    run = begin(resume=False)
    begin(resume=False).log_metrics({"a": 1})
    run = next(iter(runmirror.ending.OPEN.values()))
    with pytest.raises(LogError, match=f"is not empty: 1 rows, last step 0.*{tmp_path}/run-2"):
        begin(resume=False)
    run.log_metrics({"a": 2})
    assert len(rows(tmp_path / "run")) == 2


def test_a_foreign_log_that_did_not_finish_is_resumed(begin: Callable[..., Run], tmp_path: Path) -> None:
    """tinker-cookbook's rows stay, ours follow; the journal says where ours begin."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_bytes(b'{"step": 3, "a": NaN}\n{"progress/batch": 4, "b": 1}\n')
    (tmp_path / "run/checkpoints.jsonl").write_bytes(b'{"name": "000003", "batch": 3, "state_path": "tinker://x"}\n')
    size = (tmp_path / "run/metrics.jsonl").stat().st_size
    run = begin({"lr": 1})
    run.log_metrics({"a": 1})
    assert rows(tmp_path / "run")[-1]["step"] == 5
    assert events(tmp_path / "run") == [("resumed", size, 4, None)]


def test_a_foreign_log_with_a_final_checkpoint_has_finished(begin: Callable[..., Run], tmp_path: Path) -> None:
    """LogFinishedError, and nothing is written into it."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_bytes(b'{"step": 11, "a": 1}\n{"step": 12, "test/a": 1}\n')
    (tmp_path / "run/checkpoints.jsonl").write_bytes(
        b'{"name": "000009", "batch": 9, "state_path": "tinker://stub/weights/000009"}\n'
        b'{"name": "final", "batch": 12, "final": true, "state_path": "tinker://stub/weights/final"}\n'
    )
    with pytest.raises(LogFinishedError, match="2 rows, last step 12"):
        begin()
    assert not (tmp_path / "run/.runmirror").exists()


@pytest.mark.parametrize(
    ("tail", "kept", "cut"),
    [
        (b'{"step":1,"a":2}', b'{"step":1,"a":2}\n', None),
        (b'{"step":1,"a":2}\x00\x00', b'{"step":1,"a":2}\n', None),
        (b'{"step":1,"a', b"", b'{"step":1,"a'),
        (b'{"step":1,"t":"\xe6\x97', b"", b'{"step":1,"t":"\xe6\x97'),
        (b"\x00" * 5000, b"", None),
        (b'{"st\x00\x00\x00', b"", b'{"st'),
        (b'{"step":1,"a":"' + b"x" * 300_000, b"", b'{"step":1,"a":"' + b"x" * 300_000),
    ],
    ids=lambda value: repr(value)[:20],
)
@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints.jsonl", ".runmirror/journal.jsonl"])
def test_a_torn_tail_is_repaired_at_every_open(
    begin: Callable[..., Run],
    tmp_path: Path,
    name: str,
    tail: bytes,
    kept: bytes,
    cut: bytes | None,
    warnings: Callable[[], list[str]],
) -> None:
    """A whole object gets its newline, anything else is cut and kept in torn-1.txt, with one warning."""
    run = begin()
    run.log_metrics({"a": 1}, 0)
    run.log_checkpoint("0", state_path="x")
    run.finish("killed")
    path = tmp_path / "run" / name
    before = path.read_bytes()
    path.write_bytes(before + tail)
    begin()
    torn = tmp_path / "run/.runmirror/torn-1.txt"
    assert path.read_bytes().startswith(before + kept)
    assert path.read_bytes().endswith(b"\n")
    assert (torn.read_bytes() if torn.exists() else None) == cut
    assert [line for line in warnings() if name in line] == warnings()
    assert len(warnings()) == 1


def test_a_log_that_is_one_torn_line_starts_afresh(begin: Callable[..., Run], tmp_path: Path) -> None:
    """No row is left, the bytes are kept, and the first step is 0."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_bytes(b'{"step": 7')
    begin().log_metrics({"a": 1})
    assert [row["step"] for row in rows(tmp_path / "run")] == [0]
    assert (tmp_path / "run/.runmirror/torn-1.txt").read_bytes() == b'{"step": 7'


def test_the_last_step_is_found_at_the_end_only(begin: Callable[..., Run], tmp_path: Path) -> None:
    """Behind summary rows, broken lines and long lines; opening reads at most a few blocks of a large log."""
    read: list[int] = []

    class Counting(LocalStorage):
        def read_range(self, path: str, offset: int, length: int | None = None) -> bytes:
            data = super().read_range(path, offset, length)
            read.append(len(data))
            return data

    (tmp_path / "run").mkdir()
    line = b'{"step":1,"pad":"' + b"x" * 1000 + b'"}\n'
    tail = b'{"step":12,"pad":"' + b"y" * 200_000 + b'"}\n{"best":1}\nbroken\n\n'
    (tmp_path / "run/metrics.jsonl").write_bytes(line * 20_000 + tail)
    run = start(Counting(tmp_path / "run"), code=False)
    assert run.status().last_step == 12
    assert sum(read) < 1_000_000


# One writer


def test_a_second_start_in_this_process_takes_over(
    begin: Callable[..., Run], tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    """The first Run ends and says so, the second goes on; what the first logs now is ignored with one warning."""
    first = begin()
    first.log_metrics({"a": 1})
    second = begin()
    assert "started again in this process" in warnings()[-1]
    for _ in range(2):
        first.log_metrics({"a": 99})
    second.log_metrics({"a": 2})
    assert [row["a"] for row in rows(tmp_path / "run")] == [1, 2]
    assert first.status().state == "killed"
    assert len([line for line in warnings() if "ignored" in line]) == 1


WRITE = """
import sys, runmirror
run = runmirror.start(sys.argv[1], code=False)
run.log_metrics({"a": 1})
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_writer_in_another_process_is_named(begin: Callable[..., Run], tmp_path: Path) -> None:
    """LogBusyError with its pid and host, nothing written; free again once that process was killed."""
    command = [sys.executable, "-W", "error", "-c", WRITE, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"ready\n"
        with pytest.raises(LogBusyError, match=rf"process {other.pid} on host \S+, since 20"):
            begin()
        assert len(rows(tmp_path / "run")) == 1
        other.send_signal(signal.SIGKILL)
        other.wait()
    begin().log_metrics({"a": 2})
    assert [row["a"] for row in rows(tmp_path / "run")] == [1, 2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_writes_nothing_and_does_not_keep_the_lock(
    begin: Callable[..., Run], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The child's rows are ignored with one warning; while it lives on, another process may write after the parent."""
    run = begin()
    run.log_metrics({"a": 1})
    told, tell = os.pipe()
    wait, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(go)
            caplog.clear()
            for _ in range(3):
                run.log_metrics({"a": 99})
            run.log_checkpoint("x", state_path="y")
            run.finish()
            code = 0 if len(caplog.records) == 1 and "forked" in caplog.text else 2
            os.write(tell, b"1")
            os.read(wait, 1)
        finally:
            os._exit(code)
    try:
        assert os.read(told, 1) == b"1"
        run.log_metrics({"a": 2})
        run.finish("killed")
        done = python(WRITE, tmp_path / "run", input="")
        assert done.returncode == 0, done.stderr
    finally:
        os.close(go)
        status = os.waitpid(pid, 0)[1]
    assert os.waitstatus_to_exitcode(status) == 0
    assert [row["a"] for row in rows(tmp_path / "run")] == [1, 2, 1]
    assert not (tmp_path / "run/checkpoints.jsonl").exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_while_another_thread_logs_does_not_block_the_child(begin: Callable[..., Run], tmp_path: Path) -> None:
    """20 children forked under a logging thread all come to their end."""
    run = begin()
    done = threading.Event()

    def log() -> None:
        while not done.is_set():
            run.log_metrics({"a": 1.0})

    thread = threading.Thread(target=log)
    thread.start()
    try:
        for _ in range(20):
            pid = os.fork()
            if pid == 0:
                signal.alarm(10)
                run.log_metrics({"a": 99.0})
                run.latest_checkpoint()
                run.status()
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        done.set()
        thread.join()
    assert {row["a"] for row in rows(tmp_path / "run")} == {1.0}


# Ranks


@pytest.mark.parametrize(
    ("environment", "main"),
    [
        ({}, True),
        ({"RANK": "0", "SLURM_PROCID": "3"}, True),
        ({"RANK": "2", "OMPI_COMM_WORLD_RANK": "0"}, False),
        ({"OMPI_COMM_WORLD_RANK": "1", "SLURM_PROCID": "0"}, False),
        ({"SLURM_PROCID": "1"}, False),
        ({"LOCAL_RANK": "1"}, True),
        ({"RANK": "", "SLURM_PROCID": "0"}, True),
        ({"RANK": "x", "SLURM_PROCID": "4"}, False),
    ],
)
def test_only_rank_zero_writes(
    begin: Callable[..., Run],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    main: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """RANK before OMPI before SLURM decides; the others leave no trace, and say once why."""
    caplog.set_level(logging.INFO, "runmirror")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with begin({"lr": 1}) as run:
        run.log_metrics({"a": 1})
        run.log_summary({"a": 1})
        with run.iteration(2) as it, it.span("x"):
            it["a"] = 1
        run.log_checkpoint("a", state_path="b")
    assert (tmp_path / "run").exists() is main
    told = [record for record in caplog.records if "writes nothing" in record.getMessage()]
    assert len(told) == (0 if main else 1)
    assert all(name in caplog.text for name in environment if not main and environment[name] not in ("", "x", "0"))


def test_is_main_process_overrides_the_rank(
    begin: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """True writes on rank 3; False doesn't on rank 0, and reads what the other wrote."""
    monkeypatch.setenv("RANK", "3")
    main = begin(is_main_process=True)
    main.log_checkpoint("1", state_path="s")
    monkeypatch.setenv("RANK", "0")
    other = begin(is_main_process=False)
    other.log_metrics({"a": 1})
    found = other.latest_checkpoint()
    assert found is not None
    assert (found.state_path, other.run_id, other.status().rows) == ("s", main.run_id, 0)
    assert not (tmp_path / "run/metrics.jsonl").exists()


# Checkpoints


def test_checkpoints_are_lines_in_tinker_cookbooks_shape(begin: Callable[..., Run], tmp_path: Path) -> None:
    """Fields that are None are left out, the loop state is merged and never wins, odd values are described."""
    run = begin()
    run.log_checkpoint("000003", batch=3, state_path=Path("/s/3"), loop_state={"batch": 9, "seen": [1], "none": None})
    run.log_checkpoint(
        "final", np.int64(4), final=True, sampler_path="w", loop_state=None, rolling=True, odd=object(), n=math.nan
    )
    run.log_checkpoint(None, loop_state=3, big=10**5000, text="\ud800")  # type: ignore[arg-type]
    lines = [json.loads(line) for line in (tmp_path / "run/checkpoints.jsonl").read_text("utf-8").splitlines()]
    assert lines[0] == {"name": "000003", "batch": 3, "state_path": "/s/3", "seen": [1]}
    assert {key: lines[1][key] for key in ("name", "batch", "final", "sampler_path", "rolling")} == {
        "name": "final",
        "batch": 4,
        "final": True,
        "sampler_path": "w",
        "rolling": True,
    }
    assert len(lines) == 3


def test_the_latest_checkpoint_is_the_last_one_to_resume_from(begin: Callable[..., Run], tmp_path: Path) -> None:
    """The last line with a state_path; later ones without, broken and torn lines are passed over; else None."""
    run = begin()
    assert run.latest_checkpoint() is None
    run.log_checkpoint("1", 1, state_path="s1")
    run.log_checkpoint("2", 2, state_path="s2", loop_state={"best": 0.5})
    run.log_checkpoint("3", 3, sampler_path="w3")
    with open(tmp_path / "run/checkpoints.jsonl", "ab") as file:
        file.write(b'broken\n\n{"state_path": "no name"}\n[1]\n{"name": "4", "state_path": "s4"')
    found = run.latest_checkpoint()
    assert found is not None
    assert (found.name, found.batch, found.state_path, found.loop_state) == ("2", 2, "s2", {"best": 0.5})


# The end


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, "finished"),
        (ValueError(), "failed"),
        (KeyboardInterrupt(), "killed"),
        (SystemExit(1), "failed"),
        (SystemExit(0), "finished"),
        (SystemExit(), "finished"),
    ],
    ids=repr,
)
def test_leaving_the_with_block_ends_the_run(
    begin: Callable[..., Run], tmp_path: Path, error: BaseException | None, status: str
) -> None:
    """The status that the exception stands for, once, with the last step."""
    try:
        with begin() as run:
            run.log_metrics({"a": 1}, 3)
            if error is not None:
                raise error
    except BaseException as raised:
        assert raised is error  # noqa: PT017
    run.finish("failed")
    size = (tmp_path / "run/metrics.jsonl").stat().st_size
    assert events(tmp_path / "run") == [("started", 0, None, None), ("finished", size, 3, status)]
    assert run.status().state == status


def test_a_resume_is_told_with_what_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where it goes on, from which checkpoint, and the settings that differ, in one line; nothing for a new run."""
    caplog.set_level(logging.INFO, "runmirror")
    run = start(tmp_path / "run", {"lr": 0.1, "model": {"rank": 8}}, code=False)
    run.log_metrics({"a": 1}, 3)
    run.log_checkpoint("000003", state_path="/ckpt/3")
    run.finish("killed")
    assert caplog.messages == []
    with start(tmp_path / "run", {"lr": 0.2, "model": {"rank": 8, "bias": True}}, code=False):
        pass
    (told,) = caplog.messages
    assert told == (
        f"{tmp_path / 'run'} goes on behind step 3 (latest checkpoint 000003); "
        "changed: lr 0.1 -> 0.2, model.bias null -> true"
    )


def test_an_unknown_end_is_refused(begin: Callable[..., Run]) -> None:
    """ValueError that lists the three, and the run goes on."""
    run = begin()
    with pytest.raises(ValueError, match="finished, failed, killed"):
        run.finish("done")  # type: ignore[arg-type]
    assert run.status().state == "running"


def test_logging_after_the_end_is_ignored_with_one_warning(
    begin: Callable[..., Run], tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    """No row, no checkpoint, no exception."""
    run = begin()
    run.finish()
    for _ in range(3):
        run.log_metrics({"a": 1})
        run.log_checkpoint("x")
    with run.iteration() as it:
        it["a"] = 1
    assert len(warnings()) == 1
    assert not (tmp_path / "run/metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("", "finished"),
        ("raise ValueError('x')", "failed"),
        ("raise KeyboardInterrupt", "killed"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", None),
    ],
)
def test_a_run_left_open_ends_with_the_interpreter(tmp_path: Path, end: str, status: str | None) -> None:
    """finished, failed or killed as the interpreter ends; nothing after SIGKILL; the row is there in any case."""
    script = "import sys, runmirror\nrun = runmirror.start(sys.argv[1], code=False)\nrun.log_metrics({'a': 1})\n"
    done = python(script + end, tmp_path / "run")
    assert len(rows(tmp_path / "run")) == 1
    assert [event[3] for event in events(tmp_path / "run")[1:]] == ([status] if status else [])
    assert "runmirror" not in done.stderr.replace("import sys, runmirror", "")


def test_threads_that_log_until_the_end_do_no_harm(tmp_path: Path) -> None:
    """Exit code 0, whole lines, and an end in the journal, with a daemon thread logging all the while."""
    script = """
import sys, threading, runmirror
run = runmirror.start(sys.argv[1], code=False)
def log():
    while True:
        run.log_metrics({"a": 1.0})
threading.Thread(target=log, daemon=True).start()
while run.status().rows < 100:
    pass
"""
    done = python(script, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert len(rows(tmp_path / "run")) >= 100
    assert events(tmp_path / "run")[-1][0] == "finished"


# A full disk


class FullDisk(LocalStorage):
    """A real folder whose metrics can't grow while ``full``."""

    full = False

    def append(self, path: str, data: bytes) -> None:
        if self.full and path != layout.JOURNAL:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().append(path, data)


def test_rows_wait_for_a_full_disk_and_come_in_order(tmp_path: Path, warnings: Callable[[], list[str]]) -> None:
    """One warning; every row is there, in order, after the first row that finds room."""
    storage = FullDisk(tmp_path / "run")
    run = start(storage, code=False)
    run.log_metrics({"a": 0})
    storage.full = True
    for i in range(1, 500):
        run.log_metrics({"a": i})
    run.log_checkpoint("c", state_path="s")
    status = run.status()
    assert (status.rows, status.waiting, status.lost, status.last_step) == (1, 499, 0, 499)
    assert "No space left" in status.error
    checkpoint = run.latest_checkpoint()
    assert checkpoint is not None
    assert checkpoint.state_path == "s"
    storage.full = False
    run.log_metrics({"a": 500})
    assert [row["a"] for row in rows(tmp_path / "run")] == list(range(501))
    run.finish()
    assert (tmp_path / "run/checkpoints.jsonl").read_bytes().count(b"\n") == 1
    assert len([line for line in warnings() if "metrics.jsonl" in line]) == 1


def test_only_the_last_rows_wait_and_the_others_are_counted(tmp_path: Path) -> None:
    """1,000 wait, 200 are lost; the file has the first and the last ones."""
    storage = FullDisk(tmp_path / "run")
    run = start(storage, code=False)
    run.log_metrics({"a": 0})
    storage.full = True
    for i in range(1, 1201):
        run.log_metrics({"a": i})
    storage.full = False
    run.finish()
    assert [row["a"] for row in rows(tmp_path / "run")] == [0, *range(201, 1201)]
    assert (run.status().lost, run.status().waiting, run.status().rows) == (200, 0, 1001)


def test_waiting_rows_are_bounded_in_bytes(tmp_path: Path) -> None:
    """Never more than 4 MB of text rows, and a single larger row still waits."""
    storage = FullDisk(tmp_path / "run")
    run = start(storage, code=False)
    storage.full = True
    for _ in range(10):
        run.log_metrics({"t": "x" * 1_000_000})
    assert (run.status().waiting, run.status().lost) == (4, 6)
    run.log_metrics({"t": "x" * 5_000_000})
    assert (run.status().waiting, run.status().lost) == (1, 10)


def test_rows_that_still_wait_at_the_end_are_lost_and_said_so(
    tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    """finish doesn't raise, counts them, and warns with their number."""
    storage = FullDisk(tmp_path / "run")
    run = start(storage, code=False)
    storage.full = True
    run.log_metrics({"a": 0})
    run.log_metrics({"a": 1})
    run.finish()
    assert (run.status().lost, run.status().waiting) == (2, 0)
    assert "the last 2 lines of metrics.jsonl could not be written" in warnings()[-1]


LIMITED = """
import json, resource, sys, runmirror
run = runmirror.start(sys.argv[1], code=False)
infinite = resource.RLIM_INFINITY
for i in range(50):
    run.log_metrics({"i": i})
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, infinite))
for i in range(50, 120):
    run.log_metrics({"i": i})
    data = open(sys.argv[1] + "/metrics.jsonl", "rb").read()
    assert data.endswith(b"\\n"), data[-100:]
assert run.status().waiting > 10, run.status()
resource.setrlimit(resource.RLIMIT_FSIZE, (infinite, infinite))
run.log_metrics({"i": 120})
assert run.status().waiting == 0
"""


def test_a_real_limit_of_the_file_size_never_leaves_half_a_row(tmp_path: Path) -> None:
    """Whole lines after every call while RLIMIT_FSIZE cuts the writes, and all 121 rows once it is lifted."""
    done = python(LIMITED, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert [row["i"] for row in rows(tmp_path / "run")] == list(range(121))
    assert done.stderr.count("can't write to") == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True)
    if made.returncode != 0:
        pytest.skip("mounting a tmpfs is not allowed here")
    yield folder
    for run in list(runmirror.ending.OPEN.values()):
        run.finish("killed")
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="tmpfs")
def test_a_disk_that_is_really_full_costs_no_row_once_there_is_room(small_disk: Path) -> None:
    """All rows, whole and in order, after a real ENOSPC in mid-row and a file that was deleted."""
    run = start(small_disk / "run", code=False)
    (small_disk / "ballast").write_bytes(b"x" * 40_000)
    for i in range(60):
        run.log_metrics({"i": i, "pad": "x" * 700})
        rows(small_disk / "run")
    assert run.status().waiting > 0
    (small_disk / "ballast").unlink()
    run.log_metrics({"i": 60})
    assert [row["i"] for row in rows(small_disk / "run")] == list(range(61))


# Arguments


@pytest.mark.parametrize("nothing", [None, "none", [], (), ["none"]])
def test_report_to_nothing_is_fine(begin: Callable[..., Run], nothing: Any) -> None:
    """The run starts."""
    assert begin(report_to=nothing).status().state == "running"


@pytest.mark.parametrize("named", ["wnadb", ["tensorboard", "nope"], object(), {"tensorboard": {"logdri": "x"}}])
def test_a_wrong_report_to_is_told_before_anything_is_made(
    begin: Callable[..., Run], tmp_path: Path, named: Any
) -> None:
    """ValueError that says what there is; no log_path is made."""
    with pytest.raises(ValueError, match=r"There are|can't be|did you mean"):
        begin(report_to=named)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "options",
    [{"layout": "deep"}, {"resume": "never"}, {"total_iterations": 0}, {"total_iterations": "9"}],
)
def test_values_that_an_argument_does_not_have_are_refused(
    begin: Callable[..., Run], tmp_path: Path, options: dict[str, Any]
) -> None:
    """ValueError that shows the value; nothing is made."""
    with pytest.raises(ValueError, match=repr(next(iter(options.values())))):
        begin(**options)
    assert not (tmp_path / "run").exists()


def test_a_log_path_may_be_text_path_uri_or_storage(tmp_path: Path) -> None:
    """The same folder for all four."""
    for place in (str(tmp_path / "r"), tmp_path / "r", (tmp_path / "r").as_uri(), LocalStorage(tmp_path / "r")):
        with start(place, code=False, resume=True) as run:
            run.log_metrics({"a": 1})
    assert [row["step"] for row in rows(tmp_path / "r")] == [0, 1, 2, 3]


def test_an_empty_log_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ValueError, and nothing is written into the working directory."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="log_path is empty"):
        start("")
    assert list(tmp_path.iterdir()) == []


def test_a_start_that_fails_lets_go_of_the_log_path(begin: Callable[..., Run], tmp_path: Path) -> None:
    """OSError of the first start; the second one works once the obstacle is gone."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").mkdir()
    with pytest.raises(OSError, match=r"metrics\.jsonl"):
        begin()
    (tmp_path / "run/metrics.jsonl").rmdir()
    begin().log_metrics({"a": 1})


def test_fsync_syncs_every_row(begin: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """One sync a row or more with fsync=True, none without."""
    counted: list[int] = []
    monkeypatch.setattr(os, "fsync", counted.append)
    run = begin()
    run.log_metrics({"a": 1})
    assert counted == []
    run = begin(fsync=True)
    run.log_metrics({"a": 1})
    assert counted


def test_importing_the_writer_is_light() -> None:
    """No array library, tracker, cloud library or server framework is imported with it, and nothing is started."""
    script = """
import sys, threading, runmirror
heavy = {"numpy", "torch", "pandas", "tensorboard", "mlflow", "wandb", "fsspec", "typer", "rich", "google.protobuf"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert threading.active_count() == 1
"""
    done = python(script)
    assert done.returncode == 0, done.stderr


def test_spans_of_other_threads_may_end_with_the_iteration(begin: Callable[..., Run]) -> None:
    """Nothing is raised while new spans come."""
    run = begin()
    done = threading.Event()
    current: list[Any] = []

    def work() -> None:
        number = 0
        while not done.is_set():
            number += 1
            for it in current[-1:]:
                with it.span(str(number)):
                    pass

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(300):
            with run.iteration() as it:
                current.append(it)
    finally:
        done.set()
        thread.join()
    assert run.status().rows == 300


def test_a_log_path_need_not_be_utf8(tmp_path: Path) -> None:
    """Written, locked, repaired, resumed and mirrored where it is, and nowhere else."""
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/runs/\xff1")
    try:
        os.makedirs(folder)
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    for number in range(2):
        with start(folder, code=False, resume=True, report_to={"dummy": {"folder": str(tmp_path / "dummy")}}) as run:
            run.log_metrics({"i": number})
            assert run.log_path == folder
        assert run.status().sinks["dummy"].state == "delivered"
        if not number:
            with open(os.path.join(folder, "metrics.jsonl"), "a") as file:
                file.write('{"torn')
    assert [row["i"] for row in rows(Path(folder))] == [0, 1]
    assert os.listdir(tmp_path / "runs") == [os.path.basename(folder)]


class Broken:
    """A stderr in the midst of a write, as a signal handler may find it."""

    def write(self, text: str) -> None:
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stderr>'>")


def test_a_notice_that_can_not_be_told_stops_nothing(
    begin: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither on stderr nor in a logging handler of the user's."""

    class Fails(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError("the chat is down")

    handler, logger = Fails(), logging.getLogger("runmirror")
    run = begin()
    logger.addHandler(handler)
    try:
        run.log_metrics({"one": object()})
    finally:
        logger.removeHandler(handler)
    monkeypatch.setattr(logging.Logger, "hasHandlers", lambda self: False)
    monkeypatch.setattr(sys, "stderr", Broken())
    run.log_metrics({"two": object()})
    assert [sorted(row["_rejected"]) for row in rows(tmp_path / "run")] == [["one"], ["two"]]


def test_the_deadline_of_finish_is_for_all_of_it(begin: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """Trackers get what reports have left; a second at least, to say what is not there yet."""
    given: list[float] = []
    for deadline, took in ((10.0, 0.3), (0.2, 0.3), (0.0, 0.0)):
        run = begin(resume=True, report_to=MemorySink(MemoryOptions(tracker="deadline")))
        assert run.live is not None
        monkeypatch.setattr(run.live, "finish", given.append)
        monkeypatch.setattr(run, "_reports", SlowReports(took))
        run.finish(deadline=deadline)
    assert given[0] <= 9.7
    assert given[1:] == [1.0, 0.0]


class SlowReports:
    """Reports that take their time to be written."""

    lost = 0

    def __init__(self, took: float) -> None:
        self.took = took

    def finish(self, deadline: float) -> None:
        time.sleep(self.took)
