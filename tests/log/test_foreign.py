"""Logs of other frameworks: what is told apart, which rows come out, and what TensorBoard then shows."""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner

from runmirror.cli import app
from runmirror.exceptions import NotALogError
from runmirror.find import Found, ReadOptions, find_runs, open_log, open_run
from runmirror.importer import import_runs, plan
from runmirror.log import foreign, trainer
from runmirror.log.layout import METRICS
from runmirror.log.rows import START, Row
from runmirror.log.runlog import RunLog
from tests.foreign_logs import grpo_history, on_log_rows, output_dir, prime_rl_rows, verl_rows, write_state
from tests.logs import STARTED, flat_log, train_row, write_rows

TRL_SAMPLES = (
    "trl_grpo_on_log.jsonl",
    "trl_grpo_none_on_log.jsonl",
    "trl_grpo_2ranks_on_log.jsonl",
    "trl_ppo_on_log.jsonl",
    "trl_trainer_state.json",
)


def found(path: Path) -> list[tuple[str, str]]:
    """(name, kind of log) of every run below a path."""
    return [(one.name, open_log(one).source) for one in find_runs([path])]


def one_log(path: Path) -> RunLog:
    (one,) = find_runs([path])
    return open_log(one)


def rows_of(path: Path) -> list[Row]:
    return list(one_log(path).rows(START))


def shown(logdir: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard's own reader finds: key -> step -> value."""
    events = EventAccumulator(str(logdir), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def plain_reading(path: Path) -> dict[str, dict[int, float]]:
    """The same by an independent reading of a file: the last number of each key at each step, of rank 0 alone."""
    text = path.read_text()
    rows = json.loads(text)["log_history"] if path.suffix == ".json" else list(map(json.loads, text.splitlines()))
    points: dict[str, dict[int, Any]] = {}
    for row in rows:
        if not row.get("_not_rank0"):
            step = row["_global_step"] if "_global_step" in row else row["step"]
            values = row["data"] if type(row.get("data")) is dict else row
            for key, value in values.items():
                if isinstance(value, (int, float)) and key[0] != "_" and key != "step" and not math.isnan(value):
                    points.setdefault(key, {})[step] = pytest.approx(value, rel=1e-6)
    return points


# -- what TensorBoard shows


def logs(folder: Path) -> list[Path]:
    one = write_state(folder / "state.json", grpo_history(8, final=True), step=8)
    two = write_rows(folder / "on_log.jsonl", on_log_rows(ranks=2))
    return [one, two, write_rows(folder / "verl.jsonl", verl_rows())]


def test_tensorboard_shows_every_scalar(tmp_path: Path) -> None:
    """Every number of every row under its raw key and step, the final numbers at the last step, nothing else; again: 0."""
    paths = logs(tmp_path)
    summary = import_runs(paths, "tensorboard", {"logdir": str(tmp_path / "tb")}, patience=0)
    assert summary.ok
    for path in paths:
        assert shown(tmp_path / "tb" / path.stem) == plain_reading(path), path.name
    again = import_runs(paths, "tensorboard", {"logdir": str(tmp_path / "tb")}, patience=0)
    assert again.as_dict()["totals"] == {"rows": 0, "points": 0, "files": 0, "rejected": 0}


@pytest.mark.parametrize("name", TRL_SAMPLES)
def test_tensorboard_shows_every_scalar_of_a_real_run(samples: Path, tmp_path: Path, name: str) -> None:
    """The same for what TRL itself wrote; no row goes back, none is broken."""
    path = tmp_path / name
    shutil.copy(samples / name, path)
    os.utime(path, (STARTED, STARTED))
    (run,) = import_runs([path], "tensorboard", {"logdir": str(tmp_path / "tb")}, patience=0).runs
    assert (run.state, run.broken_lines, run.source.split()[0]) == ("complete", 0, "transformers")
    assert shown(tmp_path / "tb" / path.stem) == plain_reading(path)
    assert [row.rewind for row in rows_of(path) if row.rewind is not None] == []


def test_the_source_is_named(tmp_path: Path) -> None:
    """By the plan and by the summary of an import."""
    options = {"logdir": str(tmp_path / "tb")}
    wanted = ["transformers", "transformers on_log", "verl"]
    assert [run.source for run in plan(logs(tmp_path), "tensorboard", options)] == wanted
    assert [run.source for run in import_runs(logs(tmp_path), "tensorboard", options, patience=0).runs] == wanted


def test_the_command_line_says_which_logs_it_saw(tmp_path: Path) -> None:
    """A count per kind, in the plan's table and below an import, once a log is not runmirror's own."""
    write_rows(tmp_path / "runs" / "v" / METRICS, verl_rows())
    output_dir(tmp_path / "runs" / "t")
    arguments = ["import", str(tmp_path / "runs"), "--to", "tensorboard", "--logdir", str(tmp_path / "tb")]
    planned = CliRunner().invoke(app, [*arguments, "--dry-run"])
    assert [line.split()[-1] for line in planned.output.splitlines()[1:]] == ["transformers", "verl"]
    assert "logs: 1 transformers, 1 verl\n" in CliRunner().invoke(app, arguments).output


# -- rows


def test_trainer_rows_keep_their_steps(tmp_path: Path) -> None:
    """Training and evaluation share a step; the final numbers are a summary there; no rewinds."""
    rows = rows_of(write_state(tmp_path / "run" / "trainer_state.json", grpo_history(4, final=True), step=4))
    assert [(row.step, row.summary) for row in rows] == [
        *((1, False), (2, False), (2, False), (3, False), (4, False), (4, False)),
        (4, True),
    ]
    assert [row.rewind for row in rows] == [None] * 7
    assert rows[-1].scalars() == {"epoch": 0.5, "total_flos": 0.0, "train_loss": 0.31, "train_runtime": 12.5}


def test_nan_in_a_history_is_nan(tmp_path: Path) -> None:
    """NaN for a bare token, no point for null, text as text."""
    history = [{"grad_norm": math.nan, "loss": None, "note": "x", "step": 1}]
    (row,) = rows_of(write_state(tmp_path / "run" / "trainer_state.json", history, step=1))
    assert (math.isnan(row.scalars()["grad_norm"]), len(row.scalars()), row.text()) == (True, 1, {"note": "x"})


def test_a_row_of_a_history_is_one_line_whatever_stands_beside_it(tmp_path: Path) -> None:
    """The same bytes for a row before and after a NaN, an integer beyond 64 bits or half a character joins the file."""
    history = [{"loss": 1e-05, "n": 3, "note": "é", "step": 1}, {"loss": None, "step": 2}]
    path = write_state(tmp_path / "trainer_state.json", history, step=2)
    before = trainer.TrainerOutput(str(tmp_path)).read(METRICS)
    odd = [{"loss": math.nan, "step": 3}, {"n": 2**70, "step": 4}, {"note": "\ud800", "step": 5}]
    write_state(path, history + odd, step=5)
    assert trainer.TrainerOutput(str(tmp_path)).read(METRICS).startswith(before)
    rows = rows_of(tmp_path)
    assert [row.step for row in rows] == [1, 2, 3, 4, 5]
    assert (math.isnan(rows[2].scalars()["loss"]), rows[3].scalars()["n"]) == (True, float(2**70))


def test_other_ranks_are_left_out(tmp_path: Path) -> None:
    """Rank 0's values alone, each once, though every rank logged every row; not counted as broken."""
    alone = rows_of(write_rows(tmp_path / "one.jsonl", on_log_rows()))
    log = one_log(write_rows(tmp_path / "four.jsonl", on_log_rows(ranks=4)))
    rows = list(log.rows(START))
    assert (len(rows), log.broken_count) == (4 * len(alone), 0)
    kept = [row for row in rows if row.scalars()]
    assert [row.data for row in kept] == [row.data for row in alone]
    assert [row.summary for row in kept] == [row.summary for row in alone]
    assert "_types" in kept[0].data
    assert "rewards/none/mean" not in kept[0].scalars()


def test_a_resumed_on_log_dump_goes_back_once(tmp_path: Path) -> None:
    """A rewind to 3 when the same dump goes on from checkpoint 2, and none elsewhere; it has not finished."""
    before = [row for row in on_log_rows() if "train_runtime" not in row]
    after = [row | {"loss": 7.0} if "loss" in row else row for row in before if row["_global_step"] >= 3]
    path = write_rows(tmp_path / "on_log.jsonl", on_log_rows() + after)
    assert [row.rewind for row in rows_of(path) if row.rewind is not None] == [3]
    assert one_log(path).info().status == "killed"


def test_prime_rl_time_is_the_time(tmp_path: Path) -> None:
    """``time`` is each row's time and no metric; a late evaluation is no rewind; start and end are known."""
    log = one_log(write_rows(tmp_path / "run" / METRICS, prime_rl_rows()).parent)
    info = log.info()
    rows = list(log.rows(START))
    assert (log.source, log.time_source) == ("prime-rl", "row")
    assert [row.time - STARTED for row in rows] == [0, 1, 10, 20, 30, 40, 45]
    assert all("time" not in row.scalars() and row.rewind is None for row in rows)
    assert (info.start, info.end) == (STARTED, STARTED + 45)
    assert rows[1].scalars() == {"progress/total_tokens": 128}


def test_verl_values_come_to_the_top(tmp_path: Path) -> None:
    """The keys of ``data`` as they are; what stands beside it stays; null is no point; durations tell the times."""
    rows = [row | {"elapsed_seconds": 1.5} for row in verl_rows()]
    log = one_log(write_rows(tmp_path / "run" / METRICS, rows).parent)
    read = list(log.rows(START))
    assert (log.source, [row.step for row in read]) == ("verl", [0, 1, 2, 3])
    assert read[1].scalars() == {"elapsed_seconds": 1.5, "actor/pg_loss": 0.5, "timing_s/step": 2.0}
    assert [row.time - STARTED for row in read] == [-6, -4, -2, 0]


@pytest.mark.parametrize(
    "row",
    [
        {"step": 1, "time": 12.5, "loss": 1.0},
        {"time": STARTED, "step": 1, "loss": 1.0},
        {"step": 1, "time": STARTED, "_timestamp": STARTED, "loss": 1.0},
        {"step": 1, "data": 3.0},
        {"step": 1, "data": [1.0]},
        {"_global_step": "1", "loss": 1.0},
    ],
)
def test_an_ambiguous_log_is_plain_metrics(tmp_path: Path, row: dict[str, Any]) -> None:
    """Source "metrics", and the row as it is, when not every sign of a framework is there."""
    log = one_log(write_rows(tmp_path / "run" / METRICS, [row]).parent)
    assert (log.source, next(log.rows(START)).data) == ("metrics", row)


def test_one_row_that_does_not_fit_makes_a_log_plain(tmp_path: Path) -> None:
    """A log whose second row is no prime-rl row is read as plain metrics, ``time`` included."""
    rows = [prime_rl_rows()[0], {"step": 1, "time": 3.0}]
    log = one_log(write_rows(tmp_path / "run" / METRICS, rows).parent)
    assert (log.source, [row.scalars()["time"] for row in log.rows(START)]) == ("metrics", [STARTED, 3.0])


def test_a_log_without_rows_is_told_by_its_first(tmp_path: Path) -> None:
    """prime-rl opens its file long before the first row: that row's time is still its ``time``."""
    path = write_rows(tmp_path / "run" / METRICS, [])
    log = one_log(path.parent)
    assert list(log.rows(START)) == []
    write_rows(path, prime_rl_rows())
    assert [row.time - STARTED for row in log.rows(START)] == [0, 1, 10, 20, 30, 40, 45]


def test_cookbook_and_own_logs_stay_what_they_are(tmp_path: Path) -> None:
    """No translation for tinker-cookbook's files and for metrics of any other tool."""
    assert foreign.detect(str(flat_log(tmp_path / "flat"))).adapt is None
    assert foreign.detect(str(write_rows(tmp_path / "plain.jsonl", [train_row(0)]))).adapt is None
    assert found(tmp_path / "flat") == [("flat", "tinker-cookbook")]


# -- finding


def test_a_search_finds_runs_of_every_kind(tmp_path: Path) -> None:
    """One run per output_dir at any depth, whatever its checkpoints; no data set, no other JSON file."""
    output_dir(tmp_path / "trl" / "a")
    output_dir(tmp_path / "trl" / "deep" / "er" / "b", final=True)
    write_state(tmp_path / "trl" / "c" / "trainer_state.json", grpo_history(2), step=2)
    write_rows(tmp_path / "prime" / METRICS, prime_rl_rows())
    write_rows(tmp_path / "verl" / "exp" / METRICS, verl_rows())
    write_rows(tmp_path / "data" / "train.jsonl", [{"prompt": "1+1", "step": 1}])
    write_rows(tmp_path / "data" / "on_log.jsonl", on_log_rows())
    (tmp_path / "data" / "state.json").write_text(json.dumps({"global_step": 1, "log_history": []}))
    (tmp_path / "checkpoint-7").mkdir()
    assert found(tmp_path) == [
        ("prime", "prime-rl"),
        ("trl/a", "transformers"),
        ("trl/c", "transformers"),
        ("trl/deep/er/b", "transformers"),
        ("verl/exp", "verl"),
    ]


def test_a_checkpoint_stands_for_its_run(tmp_path: Path) -> None:
    """One run, named after the output_dir, for its folder, a checkpoint, a trainer_state.json, and globs of them."""
    run = output_dir(tmp_path / "runs" / "a", final=True)
    paths = [
        *(run, run / "checkpoint-4", run / "checkpoint-4" / "trainer_state.json", run / "trainer_state.json"),
        *(run / "checkpoint-*", run / "*" / "trainer_state.json", run / "*", run / "checkpoint-8" / "*"),
    ]
    for path in paths:
        assert find_runs([path]) == [Found(str(run), "a")], path
    assert find_runs([tmp_path / "runs" / "*" / "checkpoint-*"]) == [Found(str(run), "a")]
    assert find_runs(paths) == [Found(str(run), "a")]


def test_a_log_path_wins_over_the_states_in_it(tmp_path: Path) -> None:
    """metrics.jsonl counts when the output_dir is a log_path too, and its checkpoints are no runs."""
    run = output_dir(tmp_path / "a", final=True)
    write_rows(run / METRICS, [train_row(0)])
    assert found(tmp_path) == [("a", "metrics")]
    assert len(rows_of(run)) == 1


def test_a_state_of_any_name_is_read_when_named(tmp_path: Path) -> None:
    """Two files in one folder are two runs, called by their names; a JSON file of another kind is an error."""
    for name in ("x", "y"):
        write_state(tmp_path / f"{name}_state.json", grpo_history(2), step=2)
    assert found(tmp_path / "x_state.json") == [("x_state", "transformers")]
    first, second = (one_log(tmp_path / f"{name}_state.json").identity.run_id for name in ("x", "y"))
    assert first != second
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(NotALogError, match="holds no run"):
        find_runs([tmp_path / "config.json"])


def test_finding_reads_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is opened by a search, however large."""
    output_dir(tmp_path / "a")
    write_rows(tmp_path / "b" / METRICS, prime_rl_rows())

    def refuse(*arguments: object, **named: object) -> None:
        raise AssertionError(f"opened {arguments[0]}")

    monkeypatch.setattr("builtins.open", refuse)
    assert [one.name for one in find_runs([tmp_path])] == ["a", "b"]


# -- which state counts


def test_the_furthest_state_counts(tmp_path: Path) -> None:
    """Checkpoint 8 over 4 though a copy gave 4 the later time; the output_dir's own, with the final numbers, over both."""
    run = output_dir(tmp_path / "a")
    os.utime(run / "checkpoint-4" / "trainer_state.json", (STARTED + 99, STARTED + 99))
    assert [row.step for row in rows_of(run)][-1] == 8
    output_dir(run, final=True)
    assert rows_of(run)[-1].summary


def test_after_a_resume_the_later_state_counts(tmp_path: Path) -> None:
    """Checkpoint 6, written after 8 and with another history from step 5 on: its rows, with NaN in both."""
    start = [row | {"grad_norm": math.nan} for row in grpo_history(4)]
    rest = [row for row in grpo_history(6, shift=5.0) if row["step"] > 4]
    run = output_dir(tmp_path / "a")
    old = start + [row for row in grpo_history(8) if row["step"] > 4]
    write_state(run / "checkpoint-8" / "trainer_state.json", old, step=8, modified=STARTED + 8)
    write_state(run / "checkpoint-4" / "trainer_state.json", start, step=4, modified=STARTED + 50)
    assert rows_of(run)[-1].step == 8
    write_state(run / "checkpoint-6" / "trainer_state.json", start + rest, step=6, modified=STARTED + 60)
    rows = rows_of(run)
    assert rows[-1].step == 6
    assert rows[-2].scalars()["loss"] == pytest.approx(5.6)


def test_a_history_that_grows_keeps_its_ordinals(tmp_path: Path) -> None:
    """Only the new rows are sent when a later checkpoint appears; the tracker then holds each row once."""
    run = tmp_path / "a"
    write_state(run / "checkpoint-4" / "trainer_state.json", grpo_history(4), step=4)
    options = {"logdir": str(tmp_path / "tb")}
    assert import_runs([run], "tensorboard", options, patience=0).runs[0].rows == 6
    output_dir(run, final=True)
    assert import_runs([run], "tensorboard", options, patience=0).runs[0].rows == 13 - 6
    assert shown(tmp_path / "tb" / "a") == plain_reading(run / "trainer_state.json")


def test_a_follower_sees_the_next_checkpoint(tmp_path: Path) -> None:
    """The same log object yields rows 6 to 11, with ordinals that go on."""
    run = tmp_path / "a"
    write_state(run / "checkpoint-4" / "trainer_state.json", grpo_history(4), step=4)
    source, _ = open_run(find_runs([run])[0])
    before = list(source.rows(START))
    output_dir(run)
    after = list(source.rows(before[-1].position))
    assert [row.ordinal for row in before + after] == list(range(12))
    assert all(row.rewind is None and not row.fault for row in after)


def test_a_resume_is_a_rewind_for_who_saw_the_rows_before(tmp_path: Path) -> None:
    """The tracker shows the later history alone: the points of the abandoned steps are taken back or overwritten."""
    run = output_dir(tmp_path / "a")
    options = {"logdir": str(tmp_path / "tb")}
    import_runs([run], "tensorboard", options, patience=0)
    history = grpo_history(4) + [row for row in grpo_history(6, shift=5.0) if row["step"] > 4]
    later = write_state(run / "checkpoint-6" / "trainer_state.json", history, step=6, modified=STARTED + 60)
    assert import_runs([run], "tensorboard", options, patience=0).ok
    assert shown(tmp_path / "tb" / "a") == plain_reading(later)


def test_a_torn_state_is_passed_over(tmp_path: Path) -> None:
    """The rows of checkpoint 4 while 8 is damaged; a reader that knew more keeps it; an error when none can be read."""
    run = output_dir(tmp_path / "a")
    log = one_log(run)
    assert len(list(log.rows(START))) == 12
    state = run / "checkpoint-8" / "trainer_state.json"
    state.write_text(state.read_text()[:700])
    assert len(list(log.rows(START))) == 12
    assert len(rows_of(run)) == 6
    (run / "checkpoint-4" / "trainer_state.json").write_text("{")
    with pytest.raises(NotALogError, match=r"no trainer_state\.json in it can be read"):
        open_log(Found(str(run), "a"))
    (planned,) = plan([run], "tensorboard", {"logdir": str(tmp_path / "tb")})
    assert planned.state == "broken"


# -- what else is known of a run


def test_a_trainer_run_has_settings_checkpoints_and_a_status(tmp_path: Path) -> None:
    """The trainer's settings with the model's config beside them; a checkpoint per folder; finished at max_steps."""
    log = one_log(output_dir(tmp_path / "a"))
    info = log.info()
    assert info.config is not None
    assert (info.config["max_steps"], info.config["train_batch_size"]) == (8, 4)
    assert info.config["model_config"] == {"model_type": "llama", "hidden_size": 32}
    assert (info.status, info.status_known) == ("finished", True)
    names = [file.path for file in log.files(frozenset({"config", "checkpoints", "code"}))]
    assert names == ["checkpoints.jsonl", "config.json"]
    lines = [json.loads(line) for line in log.storage.read("checkpoints.jsonl").splitlines()]
    assert [(line["name"], line["batch"]) for line in lines] == [("checkpoint-4", 4), ("checkpoint-8", 8)]


def test_a_config_that_is_no_models_is_the_runs(tmp_path: Path) -> None:
    """Its keys at the top, before nothing of the model's."""
    run = output_dir(tmp_path / "a", final=True)
    (run / "config.json").write_text(json.dumps({"learning_rate": 0.5}))
    config = one_log(run).info().config
    assert config is not None
    assert (config["learning_rate"], "model_config" in config, config["max_steps"]) == (0.5, False, 8)


def test_a_trainer_run_that_stopped_early_was_killed(tmp_path: Path) -> None:
    """Killed, or what --status-unknown says, without final numbers and below max_steps."""
    run = tmp_path / "a"
    write_state(run / "checkpoint-4" / "trainer_state.json", grpo_history(4), step=4)
    assert one_log(run).info().status == "killed"
    options = ReadOptions(status_unknown="failed")
    assert open_log(find_runs([run])[0], options).info().status == "failed"
    write_state(run / "trainer_state.json", grpo_history(4, final=True), step=4)
    assert one_log(run).info().status == "finished"


def test_nothing_is_written_into_an_output_dir(tmp_path: Path) -> None:
    """The same files after an import; the view itself refuses to write, and travels to other processes."""
    run = output_dir(tmp_path / "a")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    import_runs([run], "tensorboard", {"logdir": str(tmp_path / "tb")}, patience=0)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    view = trainer.TrainerOutput(str(run))
    for write in (view.append, view.write):
        with pytest.raises(PermissionError, match="read only"):
            write("metrics.jsonl", b"{}\n")
    with pytest.raises(PermissionError):
        view.remove("checkpoint-4/trainer_state.json")
    assert pickle.loads(pickle.dumps(view)).read(METRICS) == view.read(METRICS)
