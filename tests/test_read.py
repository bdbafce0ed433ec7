"""Reading runs back: rows, columns, DataFrames, checkpoints, rollouts; of our own logs and of others'."""

from __future__ import annotations

import json
import math
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import runmirror
from runmirror.exceptions import MissingPackageError, NotALogError
from runmirror.find import ReadOptions
from runmirror.read import RunView, read_run
from tests.conftest import SAMPLES
from tests.foreign_logs import on_log_rows, output_dir, prime_rl_rows, verl_rows
from tests.logs import STARTED, flat_log, nested_log, resumed_rows, train_row, write_rows


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """A finished run of our own: three rows with every type of value, final numbers, two checkpoints."""
    with runmirror.start(tmp_path / "first", {"lr": 4e-5}) as run:
        run.log_metrics({"loss": 1.5, "count": 1, "ok": True, "note": "warm", "rare": 7}, step=0)
        run.log_metrics({"loss": math.nan, "count": 2, "ok": False, "gap": math.inf}, step=1)
        run.log_metrics({"loss": 0.5, "count": 3, "ok": True, "note": "cold", "rare": None}, step=2)
        run.log_checkpoint("000001", batch=1, state_path="/ckpt/1")
        run.log_checkpoint("000002", batch=2, sampler_path="/sampler/2")
        run.log_summary({"final/reward": 0.4, "verdict": "good"})
    return tmp_path / "first"


def test_a_run_tells_who_it_is(first: Path) -> None:
    """Name, kind, id, status, config and times, of a run that runmirror wrote."""
    run = runmirror.read_run(first)
    assert isinstance(run, runmirror.RunView)
    assert (run.name, run.source, run.status, run.config) == ("first", "runmirror", "finished", {"lr": 4e-5})
    assert run.run_id == json.loads((first / ".runmirror" / "run.json").read_text())["run_id"]
    assert run.start is not None
    assert run.end is not None
    assert 0 <= run.end - run.start < 60
    assert repr(run) == f"<RunView {str(first)!r}>"


def test_rows_come_one_after_the_other(first: Path) -> None:
    """Steps, NaN restored, final numbers marked; two iterators at once don't disturb each other."""
    run = read_run(first)
    one, two = run.rows(), run.rows()
    assert (next(one).step, next(two).step, next(one).step) == (0, 0, 1)
    rows = list(run.rows())
    assert [(row.step, row.summary) for row in rows] == [(0, False), (1, False), (2, False), (2, True)]
    assert math.isnan(rows[1].scalars()["loss"])
    assert rows[0].text() == {"note": "warm"}


def test_metrics_are_columns_of_one_length(first: Path) -> None:
    """``step`` and ``_timestamp`` first, None where a row has no value, no final numbers."""
    columns = read_run(first).metrics()
    assert list(columns) == ["step", "_timestamp", "loss", "count", "ok", "note", "rare", "gap"]
    assert columns["step"] == [0, 1, 2]
    assert (columns["count"], columns["ok"], columns["rare"]) == ([1, 2, 3], [True, False, True], [7, None, None])
    assert (columns["gap"], columns["note"]) == ([None, math.inf, None], ["warm", None, "cold"])
    assert read_run(first).summary == {"final/reward": 0.4, "verdict": "good"}


def test_named_metrics_come_with_the_rows_that_have_them(first: Path) -> None:
    """Only those rows and keys; one key may be given as text; an unknown one is an error that names its neighbours."""
    run = read_run(first)
    assert {key: values for key, values in run.metrics("rare").items() if key != "_timestamp"} == {
        "step": [0],
        "rare": [7],
    }
    assert run.metrics(["step", "gap", "rare"])["step"] == [0, 1]
    with pytest.raises(KeyError, match="no metric 'los'; did you mean loss"):
        run.metrics(["los"])


def test_superseded_rows_are_left_out(tmp_path: Path) -> None:
    """Steps 0 to 8 once, with the values after the resume; all eleven rows when asked."""
    run = read_run(write_rows(tmp_path / "run" / "metrics.jsonl", resumed_rows()).parent)
    columns = run.metrics()
    assert columns["step"] == list(range(9))
    assert columns["entropy"][3:6] == [pytest.approx(value) for value in (1.7, 2.1, 2.0)]
    assert run.metrics(superseded=True)["step"] == [0, 1, 2, 3, 4, 5, 4, 5, 6, 7, 8]
    assert len(list(run.rows())) == 11


def test_pandas_columns_have_types(first: Path) -> None:
    """int64, float64, bool, text, and nullable integers where a value is missing; ``step`` first; NaN and inf kept."""
    frame = read_run(first).to_pandas()
    assert {key: str(kind) for key, kind in frame.dtypes.items()} == {
        "step": "int64",
        "_timestamp": "float64",
        "loss": "float64",
        "count": "int64",
        "ok": "bool",
        "note": "object",
        "rare": "Int64",
        "gap": "float64",
    }
    assert (next(iter(frame)), frame["rare"].isna().tolist()) == ("step", [False, True, True])
    assert math.isinf(frame["gap"][1])
    assert list(read_run(first).to_pandas(["loss"])) == ["step", "_timestamp", "loss"]


def test_polars_columns_have_types(first: Path) -> None:
    """Int64, Float64, Boolean and String; null where there is no value, NaN where it was NaN."""
    frame = read_run(first).to_polars()
    assert dict(frame.schema) == {
        "step": pl.Int64,
        "_timestamp": pl.Float64,
        "loss": pl.Float64,
        "count": pl.Int64,
        "ok": pl.Boolean,
        "note": pl.String,
        "rare": pl.Int64,
        "gap": pl.Float64,
    }
    assert (frame["gap"].null_count(), frame["loss"].null_count(), frame["loss"].is_nan().sum()) == (2, 0, 1)


def test_mixed_columns_take_the_wider_type(tmp_path: Path) -> None:
    """Float64 for integers and floats, String for numbers and text, Float64 for an integer beyond 64 bits."""
    rows: list[dict[str, Any]] = [
        {"step": 0, "a": 1, "b": 1, "c": 2**70, "d": True},
        {"step": 1, "a": 0.5, "b": "x", "c": 1, "d": 2},
    ]
    frame = read_run(write_rows(tmp_path / "run" / "metrics.jsonl", rows).parent).to_polars()
    assert [str(kind) for kind in frame.dtypes[2:]] == ["Float64", "String", "Float64", "Int64"]
    assert (frame["a"].to_list(), frame["b"].to_list()) == ([1.0, 0.5], ["1", "x"])
    assert (frame["c"].to_list(), frame["d"].to_list()) == ([float(2**70), 1.0], [1, 2])


def test_an_empty_run_has_empty_tables(tmp_path: Path) -> None:
    """No rows, two columns, no checkpoints, no iterations, config {}."""
    run = read_run(write_rows(tmp_path / "run" / "metrics.jsonl", []).parent)
    assert list(run.rows()) == []
    assert run.metrics() == {"step": [], "_timestamp": []}
    assert (run.to_pandas().shape, run.to_polars().shape) == ((0, 2), (0, 2))
    assert (run.checkpoints, run.latest_checkpoint, run.iterations, run.config) == ([], None, {}, {})
    assert (run.start, run.end) == (None, None)


@pytest.mark.parametrize("name", ["pandas", "polars"])
def test_a_missing_package_is_named(first: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """What to install, when the library of the table isn't there."""
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingPackageError, match=f"pip install {name}"):
        getattr(read_run(first), f"to_{name}")()


def test_checkpoints_and_the_one_to_resume_from(first: Path) -> None:
    """All of them in order; the last with a state_path."""
    run = read_run(first)
    assert [one.name for one in run.checkpoints] == ["000001", "000002"]
    assert run.latest_checkpoint is not None
    assert (run.latest_checkpoint.name, run.latest_checkpoint.state_path) == ("000001", "/ckpt/1")


def test_iterations_have_their_files_in_both_layouts(tmp_path: Path) -> None:
    """Reports, trees and rollouts per split, flat and nested, even mixed in one log."""
    folder = nested_log(flat_log(tmp_path / "run"))
    lines = "".join(json.dumps({"traj_idx": n}) + "\n" for n in range(3))
    (folder / "iteration_000011" / "train_rollout_summaries.jsonl").write_text(
        lines + "\n{broken\n" + '{"traj_idx": 3}'
    )
    (folder / "iteration_000011" / "eval_test.html").write_text("<html></html>")
    iterations = read_run(folder).iterations
    assert {number: one.splits for number, one in iterations.items()} == {
        0: ["train", "eval/held_out_v2_small"],
        8: ["train"],
        11: ["train", "eval/test"],
    }
    last = iterations[11]
    assert [row["traj_idx"] for row in last.rollouts()] == [0, 1, 2, 3]
    assert last.logtree("train")["title"] == "RL Iteration 11"
    assert last.path("report", "eval/test") == str(folder / "iteration_000011" / "eval_test.html")
    assert iterations[0].path("report") == str(folder / "train_iteration_000000.html")
    assert list(iterations[0].rollouts("eval/held_out_v2_small")) == [{}]
    with pytest.raises(FileNotFoundError, match="iteration 8 has no rollouts of 'train'; it has logtree of train"):
        iterations[8].rollouts()
    (folder / "iteration_000011" / "train_logtree.json").write_text("[1")
    with pytest.raises(NotALogError, match=r"train_logtree\.json is no JSON object"):
        last.logtree()


def test_long_rollouts_are_read_in_pieces(tmp_path: Path) -> None:
    """Every line of a file of several pieces, in order, whatever the pieces cut."""
    folder = flat_log(tmp_path / "run")
    lines = [json.dumps({"traj_idx": n, "pad": "é" * (n % 700)}, ensure_ascii=False) for n in range(4000)]
    (folder / "train_iteration_000000_rollout_summaries.jsonl").write_text("\n".join(lines) + "\n")
    assert [row["traj_idx"] for row in read_run(folder).iterations[0].rollouts()] == list(range(4000))


def test_times_of_a_foreign_run_are_inferred(tmp_path: Path) -> None:
    """The first report's start to the last row's time; finished by its last checkpoint."""
    run = read_run(flat_log(tmp_path / "run"))
    started = datetime(2025, 11, 24, 16, 0, tzinfo=UTC).timestamp()
    assert (run.source, run.status, run.start) == ("tinker-cookbook", "finished", started + 1.5)
    assert run.end == started + 8 * 60 + 1.5 * 4


def test_logs_of_other_frameworks_read_alike(tmp_path: Path) -> None:
    """transformers, an on_log dump of two ranks, prime-rl and verl: kind, steps, and a metric of each."""
    logs = {
        "transformers": (output_dir(tmp_path / "trl", final=True), "loss", [1, 2, 3, 4, 5, 6, 7, 8]),
        "transformers on_log": (write_rows(tmp_path / "o.jsonl", on_log_rows(2)), "loss", [1, 2, 3, 4]),
        "prime-rl": (write_rows(tmp_path / "p" / "metrics.jsonl", prime_rl_rows()), "reward/mean", [0, 1, 2, 3, 4]),
        "verl": (write_rows(tmp_path / "verl.jsonl", verl_rows()), "critic/score/mean", [0, 2, 3]),
    }
    for source, (path, key, steps) in logs.items():
        run = read_run(path)
        assert (run.source, run.metrics([key])["step"]) == (source, steps)
    run = read_run(logs["transformers"][0])
    assert (run.status, run.summary["train_runtime"], run.config["max_steps"]) == ("finished", 12.5, 8)
    assert run.latest_checkpoint is not None
    assert run.latest_checkpoint.state_path == "checkpoint-8"
    assert len(list(read_run(logs["transformers on_log"][0]).rows())) == 7


def test_read_options_hold(tmp_path: Path) -> None:
    """Steps of another key, and the status of a run that stopped without saying how it ended."""
    rows = [{"step": 0, "epoch": n, "loss": 1.0} for n in range(3)]
    path = write_rows(tmp_path / "run" / "metrics.jsonl", rows).parent
    run = read_run(path, read=ReadOptions(step_key="epoch", status_unknown="failed"))
    assert (run.metrics()["step"], run.status) == ([0, 1, 2], "failed")


def test_nothing_is_read_before_it_is_asked_for(tmp_path: Path) -> None:
    """A view of a run shows what is there when it is asked, not when it was made; broken lines are left out."""
    path = write_rows(tmp_path / "run" / "metrics.jsonl", [train_row(0)])
    run = read_run(path.parent)
    with path.open("a") as file:
        file.write("{broken\n" + json.dumps(train_row(1)) + "\n")
    assert [row.step for row in run.rows()] == [0, 1]


def test_reading_writes_nothing(tmp_path: Path) -> None:
    """Neither into the log nor into the folder of state."""
    folder = flat_log(tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    run = read_run(folder)
    assert (len(run.to_pandas()), len(run.iterations), run.status) == (12, 2, "finished")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_no_run_and_several_runs_are_errors(tmp_path: Path) -> None:
    """What was found there; a folder with a single run below it is that run."""
    with pytest.raises(NotALogError, match="does not exist"):
        read_run(tmp_path / "nowhere")
    flat_log(tmp_path / "runs" / "a")
    assert read_run(tmp_path / "runs").name == "a"
    flat_log(tmp_path / "runs" / "b")
    with pytest.raises(NotALogError, match=r"holds 2 runs \(a, b\): name one of them"):
        read_run(tmp_path / "runs")


@pytest.mark.skipif(not SAMPLES.is_dir(), reason="no folder of sample logs beside the checkout")
@pytest.mark.parametrize("name", ["tinker_flat", "tinker_newlayout"])
def test_real_logs_read(name: str) -> None:
    """Every row of a real log; six trajectories and a report tree of iteration 0, in both layouts."""
    run: RunView = read_run(SAMPLES / name)
    rows = (SAMPLES / name / "metrics.jsonl").read_text().splitlines()
    frame = run.to_polars()
    assert frame["step"].to_list() == [json.loads(row)["step"] for row in rows]
    assert len(list(run.iterations[0].rollouts())) == 6
    assert run.iterations[8].logtree("eval/held_out_v2_small")["root"]["tag"] == "body"
    assert (run.start or 0) > STARTED
