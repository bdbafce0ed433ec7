"""What trackers show of rollouts: rewards as distributions, conversations as text, tables; and only what was asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

import runmirror
from runmirror import duefiles
from runmirror.importer import import_runs
from runmirror.log.runlog import RunLog
from runmirror.mirror import Mirror
from runmirror.sinks.base import SinkOptions
from runmirror.sinks.event_notes import histogram_value, summary_pb2
from runmirror.sinks.event_rollouts import LONGEST, SAMPLES, rollout_value
from runmirror.sinks.mlflow_files import TAG_LENGTH, listed, rollout_table
from runmirror.storage import LocalStorage
from tests.reports.groups import groups, trajectory
from tests.servers.mlflow import with_tables
from tests.servers.tensorboard import tensorboard_server

from .runs import file, make_run, make_sink, row, the_bytes

REWARDS = "runmirror/reward/train"
Histogram = list[list[float]]


def rollouts(iteration: int, rewards: Sequence[float], split: str = "train") -> Any:
    lines = "".join(json.dumps({"total_reward": reward}) + "\n" for reward in rewards)
    stem = "train" if split == "train" else f"eval_{split}"
    return file(f"{stem}_iteration_{iteration:06d}_rollout_summaries.jsonl", "rollouts", lines.encode())


def histograms(folder: Path, tag: str = REWARDS) -> dict[int, Histogram]:
    """step -> buckets [from, to, count] that TensorBoard's Python loader has."""
    accumulator = EventAccumulator(str(folder), tensor_size_guidance={"histograms": 0})
    accumulator.Reload()
    if tag not in accumulator.AllSummaryMetadata():
        return {}
    assert accumulator.SummaryMetadata(tag).plugin_data.plugin_name == "histograms"
    return {event.step: tensor_util.make_ndarray(event.tensor_proto).tolist() for event in accumulator.Tensors(tag)}


def counts(buckets: Histogram) -> float:
    return sum(bucket[2] for bucket in buckets)


def write(folder: Path, iterations: int = 3, **options: Any) -> Path:
    with runmirror.start(folder, code=False) as run:
        for iteration in range(iterations):
            with run.iteration(iteration):
                run.log_rollouts(iteration, groups(2, 2, **options))
                run.evaluation("held out", iteration).log_rollouts(groups(1, 1))
    return folder


# -- TensorBoard


def test_rewards_are_histograms(tmp_path: Path) -> None:
    """Of each iteration and split, without being asked; what was said is not sent then."""
    import_runs([write(tmp_path / "run")], "tensorboard", {"logdir": str(tmp_path / "tb")})
    folder = tmp_path / "tb/run"
    found = histograms(folder)
    assert list(found) == [0, 1, 2]
    assert [counts(buckets) for buckets in found.values()] == [4, 4, 4]
    assert found[0][0] == [0.75, pytest.approx(0.75 + 0.25 / 30), 2.0]
    assert found[0][-1][1:] == [1.0, 2.0]
    assert list(histograms(folder, "runmirror/reward/eval/held_out")) == [0, 1, 2]
    assert b"I guess" not in b"".join(the_bytes(folder).values())


def test_conversations_are_text_when_asked_for(tmp_path: Path) -> None:
    """``records=reports``: the first conversations of each report, in Markdown."""
    options = {"logdir": str(tmp_path / "tb"), "records": "reports"}
    import_runs([write(tmp_path / "run")], "tensorboard", options)
    accumulator = EventAccumulator(str(tmp_path / "tb/run"))
    accumulator.Reload()
    events = accumulator.Tensors("runmirror/rollouts/train")
    assert [event.step for event in events] == [0, 1, 2]
    text = events[0].tensor_proto.string_val[0].decode()
    assert text.count("**Group ") == 4
    assert "*assistant*\n\n```\nPerhaps 0?\nI guess 0.\n" in text


def test_an_import_again_writes_nothing(tmp_path: Path) -> None:
    """Also when the state is lost: the event file tells what it has."""
    options = {"logdir": str(tmp_path / "tb"), "records": "reports"}
    run = write(tmp_path / "run")
    import_runs([run], "tensorboard", options)
    before = the_bytes(tmp_path / "tb/run")
    assert import_runs([run], "tensorboard", options).as_dict()["totals"]["files"] == 0
    for state in (run / ".runmirror").glob("tensorboard-*"):
        state.unlink()
    import_runs([run], "tensorboard", options)
    assert the_bytes(tmp_path / "tb/run") == before


def test_a_changed_file_is_shown_anew(tmp_path: Path) -> None:
    """The last one at a step counts; the same again is no event."""
    sink = make_sink(tmp_path)
    folder = Path(sink.open(make_run(), None).url)
    sink.put([row(0, 0, {"loss": 1.0})])
    for rewards in ([1.0, 2.0], [1.0, 2.0], [3.0]):
        sink.put_file(rollouts(0, rewards))
    sink.close(None, 10)
    assert histograms(folder) == {0: [[2.5, 3.5, 1.0]]}
    before = the_bytes(folder)
    sink.open(make_run(), None)
    sink.put_file(rollouts(0, [3.0]))
    sink.close(None, 10)
    assert the_bytes(folder) == before


@pytest.mark.parametrize("early", [False, True])
def test_a_rewind_takes_histograms_back(tmp_path: Path, early: bool) -> None:
    """Those from the step on, until they come again; one that came before the row of the rewind did is not lost."""
    sink = make_sink(tmp_path)
    folder = Path(sink.open(make_run(), None).url)
    for step in range(6):
        sink.put([row(step, step, {"loss": 1.0})])
        sink.put_file(rollouts(step, [float(step)]))
    if early:
        sink.put_file(rollouts(3, [33.0]))
    sink.put([row(6, 3, {"loss": 2.0}, rewind=3)])
    expected = [0, 1, 2, 3] if early else [0, 1, 2]
    sink.flush(10)
    assert sorted(histograms(folder)) == expected
    for step in (3, 4):
        sink.put_file(rollouts(step, [step * 11.0]))
    sink.close(None, 10)
    found = histograms(folder)
    assert sorted(found) == [0, 1, 2, 3, 4]
    assert found[3] == [[32.5, 33.5, 1.0]]


@pytest.mark.slow
@pytest.mark.parametrize("load_fast", [True, False])
def test_what_the_server_shows(tmp_path: Path, load_fast: bool) -> None:
    """Both loaders: histograms, texts, and after a rewind only what survived; the curves are what they were."""
    sink = make_sink(tmp_path / "tb", records=["reports"])
    sink.open(make_run(), None)
    for ordinal, step in enumerate([0, 1, 2, 3, 2, 3]):
        sink.put([row(ordinal, step, {"loss": float(ordinal)}, rewind=2 if ordinal == 4 else None)])
        sink.put_file(rollouts(step, [float(ordinal)] * 3))
    conversation = {
        "root": {"children": [{"data": {"type": "conversation", "messages": [{"role": "x", "content": "<b>"}]}}]}
    }
    sink.put_file(file("train_iteration_000003_logtree.json", "logtree", json.dumps(conversation).encode()))
    sink.close(None, 10)
    with tensorboard_server(tmp_path / "tb", load_fast=load_fast) as server:
        query = {"run": "run", "tag": REWARDS}
        server.wait(lambda: len(server.get("/data/plugin/histograms/tags").get("run", {})) == 1)
        server.wait(lambda: len(server.get("/data/plugin/histograms/histograms", **query)) == 4)
        shown = server.get("/data/plugin/histograms/histograms", **query)
        server.wait(lambda: "runmirror/rollouts/train" in server.texts("run"))
        text = server.texts("run")["runmirror/rollouts/train"][0]
        points = server.points("run")["loss"]
    assert {step: buckets for _, step, buckets in shown} == {
        step: [[value - 0.5, value + 0.5, 3.0]] for step, value in ((0, 0.0), (1, 1.0), (2, 4.0), (3, 5.0))
    }
    assert "&lt;b&gt;" in text
    assert [value for _, _, value in points] == [0.0, 1.0, 4.0, 5.0]


def test_buckets() -> None:
    """30 from the least to the greatest, every value in one; one bucket for a single value."""

    def buckets(values: list[float]) -> Histogram:
        (value,) = summary_pb2.Summary.FromString(histogram_value("t", values)).value
        found: Histogram = tensor_util.make_ndarray(value.tensor).tolist()
        return found

    found = buckets([0.0, 0.5, 1.0, 3.0, 3.0])
    assert (len(found), found[0][0], found[-1][1:], counts(found)) == (30, 0.0, [3.0, 2.0], 5)
    assert all(low[1] == high[0] for low, high in pairwise(found))
    assert buckets([2.0, 2.0]) == [[1.5, 2.5, 2.0]]
    assert counts(buckets([-1e308, 1e308])) == 2
    assert counts(buckets([1.0, 1.0 + 2**-52])) == 2


def test_what_is_nothing_to_show() -> None:
    """Empty, broken and foreign files give nothing; values that are no finite numbers are left out."""
    name = "train_iteration_000001_rollout_summaries.jsonl"
    assert rollout_value(name, b"") is None
    assert rollout_value(name, b'broken\n{"total_reward": null}\n{"total_reward": NaN}\n') is None
    assert rollout_value("other.jsonl", b'{"total_reward": 1}') is None
    assert rollout_value("train_iteration_000001_logtree.json", b"{") is None
    found = rollout_value(
        name, b'{"total_reward": 1}\n{"total_reward": null, "_nonfinite": {"/total_reward": "inf"}}\n'
    )
    assert found == (REWARDS, 1, histogram_value(REWARDS, [1.0]))


def test_texts_are_bounded() -> None:
    """A few conversations, the beginning of long messages, a text at most; odd content is JSON."""
    content = [{"type": "image"}, "plain", {"type": "audio", "x": 1}, None]
    messages = [{"role": "user", "content": content, "tool_calls": [{"name": "f"}]}, "odd"]
    messages += [{"role": "assistant", "content": "y" * 10 * LONGEST}]
    nodes = [{"data": {"type": "conversation", "messages": messages}} for _ in range(50)]
    found = rollout_value("train_iteration_000001_logtree.json", json.dumps({"root": {"children": nodes}}).encode())
    assert found is not None
    (value,) = summary_pb2.Summary.FromString(found[2]).value
    text = value.tensor.string_val[0].decode()
    assert text.count("*assistant*") == SAMPLES
    assert '[image]\nplain\n{"type":"audio","x":1}\n{"name":"f"}' in text
    assert len(text) < SAMPLES * (LONGEST + 500)


# -- which files are sent


def test_reports_are_pages_and_trees() -> None:
    """``records`` may say "reports", in a list or as text."""
    for given in (["reports", "code"], "reports,code", {"reports", "code"}):
        assert SinkOptions(records=given).records == {"report", "logtree", "code"}  # type: ignore[arg-type]


def artifacts(uri: str) -> tuple[Any, str, list[str]]:
    """(client, run id, artifacts) of the one run in a database."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    (run,) = client.search_runs([one.experiment_id for one in client.search_experiments()])
    run_id = run.info.run_id
    return client, run_id, [entry.path for entry in client.list_artifacts(run_id)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_gets_reports_and_a_table_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default nothing that anybody said; with ``records`` pages, trees, records, and a table that MLflow finds."""
    run = write(tmp_path / "run", 2)
    uri = f"sqlite:///{with_tables(tmp_path / 'mlflow.db')}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert import_runs([run], "mlflow", {"tracking_uri": uri}).ok
    assert artifacts(uri)[2] == []
    assert import_runs([run], "mlflow", {"tracking_uri": uri, "records": "reports,rollouts"}).ok
    client, run_id, found = artifacts(uri)
    stems = [f"{split}_iteration_{n:06d}" for split in ("eval_held_out", "train") for n in range(2)]
    assert found == sorted(
        [
            "rollouts",
            *(f"{stem}{end}" for stem in stems for end in (".html", "_logtree.json", "_rollout_summaries.jsonl")),
        ]
    )
    experiment = client.get_run(run_id).info.experiment_id
    table = client.load_table(experiment, "rollouts/train_000001.json", [run_id])
    assert table["total_reward"].tolist() == [1.0, 0.75] * 2
    assert table["metrics/distance"].tolist() == [1.0] * 4


def test_mlflow_tables() -> None:
    """The shape of ``log_table``; the tag lists each once, as long as there is room."""
    line = json.dumps({"group_idx": 1, "total_reward": 0.5, "trajectory_metrics": {"a": 1}}).encode()
    found = rollout_table("eval_x_iteration_000002_rollout_summaries.jsonl", line + b"\nbroken\n")
    assert found is not None
    name, content = found
    table = json.loads(content)
    assert name == "rollouts/eval_x_000002.json"
    assert dict(zip(table["columns"], table["data"][0], strict=True))["metrics/a"] == 1.0
    assert rollout_table("eval_x_iteration_000002_rollout_summaries.jsonl", b"") is None
    first = listed(None, name)
    assert first == json.dumps([{"path": name, "type": "table"}])
    assert listed(first, name) is None
    assert listed("damaged", name) is None
    assert listed(json.dumps(["x" * TAG_LENGTH]), name) is None


def test_the_budget_of_a_run(tmp_path: Path) -> None:
    """Of 60 iterations 20 reports are sent, first and last included; histograms of all."""
    with runmirror.start(tmp_path / "run", code=False) as run:
        for iteration in range(60):
            with run.iteration(iteration):
                run.log_rollouts(iteration, [[trajectory(turns=1)]])
    import_runs([tmp_path / "run"], "tensorboard", {"logdir": str(tmp_path / "tb"), "records": "reports"})
    accumulator = EventAccumulator(str(tmp_path / "tb/run"), tensor_size_guidance={"text": 0})
    accumulator.Reload()
    steps = [event.step for event in accumulator.Tensors("runmirror/rollouts/train")]
    assert (len(steps), steps[0], steps[-1]) == (20, 0, 59)
    assert len(histograms(tmp_path / "tb/run")) == 60


def test_other_logs_have_histograms_too(samples: Path, tmp_path: Path) -> None:
    """Both layouts of tinker-cookbook: one of each of 12 iterations."""
    for name in ("tinker_flat", "tinker_newlayout"):
        assert import_runs([samples / name], "tensorboard", {"logdir": str(tmp_path / name)}).ok
        assert list(histograms(tmp_path / name / name)) == list(range(12))


def test_rollouts_are_not_listed_for_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a long run that takes a while, so it waits; the end of the run brings all."""
    monkeypatch.setattr(duefiles, "LISTING_SHARE", 1e9)
    folder = tmp_path / "run"
    sink = make_sink(tmp_path / "tb")
    with runmirror.start(folder, code=False) as run:
        run.log_metrics({"loss": 1.0})
        source = RunLog(LocalStorage(folder), "run")
        mirror = Mirror(source, sink, tmp_path / "state")
        assert mirror.deliver().rows == 1
        with run.iteration(1):
            run.log_rollouts(1, groups(1, 1))
        assert (mirror.deliver().rows, histograms(tmp_path / "tb/run")) == (1, {})
    mirror.close(end=True)
    assert list(histograms(tmp_path / "tb/run")) == [1]
