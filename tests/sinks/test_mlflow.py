"""What MLflow shows of a log, and how its errors are told; on a SQLite database unless it is about a server."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runmirror.exceptions import OptionError, Refused, Retry
from runmirror.importer import import_runs
from runmirror.log.rows import Row
from runmirror.sinks.base import LogFile, Opened, RunInfo
from runmirror.sinks.mlflow import MlflowOptions, MlflowSink
from runmirror.sinks.mlflow_client import FreshConnections, Invalid, explain, quiet, resolve_uri
from runmirror.sinks.mlflow_run import CREATED, CURSOR, INFINITE, PARAMS, RESUME, RUN, Runs, flatten, send
from runmirror.sinks.registry import check_options
from runmirror.testing.conformance import a_file, a_row, a_run, rows
from runmirror.verifier import verify
from tests.foreign_logs import grpo_history, write_state
from tests.logs import async_rows, flat_log, nested_log, resumed_rows, write_rows
from tests.servers.mlflow import TWICE, Database, mlflow_server, with_tables

DAY = 86_400.0


class Place:
    """An experiment in a database."""

    def __init__(self, folder: Path) -> None:
        self.uri = f"sqlite:///{folder / 'mlflow.db'}"
        self.database = Database(folder / "mlflow.db")

    def sink(self, **options: Any) -> MlflowSink:
        return MlflowSink(MlflowOptions(**{"tracking_uri": self.uri, "experiment": "place"} | options))

    def deliver(
        self, every: Sequence[Row], run: RunInfo | None = None, end: RunInfo | None = None, **options: Any
    ) -> Opened:
        sink = self.sink(**options)
        opened = sink.open(run or a_run(), None)
        sink.put(every)
        sink.flush(30)
        sink.close(end, 30)
        return opened

    def client(self) -> Any:
        with quiet():
            from mlflow.tracking import MlflowClient

            return MlflowClient(self.uri)

    def run(self, opened: Opened) -> Any:
        with quiet():
            return self.client().get_run(opened.tracker_run_id)

    def shown(self, run: RunInfo | None = None) -> dict[tuple[str, int], float]:
        return {(one.key, one.step): one.value for one in self.sink().read_back(run or a_run(), None) or ()}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    folder = tmp_path / "tracker"
    folder.mkdir()
    with_tables(folder / "mlflow.db")
    return Place(folder)


# What a run looks like


def test_a_run_looks_as_it_was(place: Place) -> None:
    """Name, start, end, status, description and source of the log; not of the import."""
    run = replace(a_run(), name="sweep/lr 1", start=1_700_000_000.25, source="tinker-cookbook", time_source="mtime")
    end = replace(run, status="failed", end=1_700_000_000.25 + DAY)
    found = place.run(place.deliver(rows(3), run, end))
    assert (found.info.run_name, found.info.status) == ("sweep/lr 1", "FAILED")
    assert (found.info.start_time, found.info.end_time) == (1_700_000_000_250, 1_700_086_400_250)
    assert "tinker-cookbook" in found.data.tags["mlflow.note.content"]
    assert "told from reports" in found.data.tags["mlflow.note.content"]
    assert (found.data.tags["mlflow.source.name"], found.data.tags["mlflow.source.type"]) == ("runmirror", "LOCAL")
    assert "mlflow.user" not in found.data.tags
    assert found.data.params == {"lr": "4e-05", "model.name": "tiny"}


def test_the_description_says_what_metrics_mean(place: Place) -> None:
    """Once they are there; one that somebody has changed meanwhile stays."""
    run = a_run()
    made = [replace(one, data={"reward": 1.0}) for one in rows(3)]
    found = place.run(place.deliver(made[:2], run, None))
    note = found.data.tags["mlflow.note.content"]
    assert "| `reward` | reward | higher |" in note
    place.client().set_tag(found.info.run_id, "mlflow.note.content", f"{note}\n\nLooks good.")
    more = [*made[:2], replace(made[2], data={"kl": 1.0})]
    found = place.run(place.deliver(more, run, None))
    assert found.data.tags["mlflow.note.content"] == f"{note}\n\nLooks good."


def test_the_experiment_opens_as_one_of_training(place: Place) -> None:
    """Its kind is set, and its files lie beside the database."""
    place.deliver(rows(1), experiment="fresh")
    with quiet():
        found = place.client().get_experiment_by_name("fresh")
    assert found.tags["mlflow.experimentKind"] == "custom_model_development"
    assert found.artifact_location.startswith((place.database.file.parent / "mlartifacts").as_uri())


def test_values_arrive_as_they_are(place: Place) -> None:
    """NaN kept, infinities left out and counted, None no point, 2^60 exact, steps and milliseconds exact."""
    odd = {"nan": math.nan, "inf": math.inf, "minus": -math.inf, "none": None, "big": 2**60, "third": 1 / 3}
    opened = place.deliver([replace(a_row(0, odd), step=2**40, time=1_500_000_000.1239), a_row(1, {"inf": math.inf})])
    shown = place.shown()
    assert {key for key, _ in shown} == {"nan", "big", "third"}
    assert math.isnan(shown["nan", 2**40])
    assert (shown["big", 2**40], shown["third", 2**40]) == (float(2**60), 1 / 3)
    assert {when for (when,) in place.database.ask("SELECT timestamp FROM metrics")} == {1_500_000_000_124}
    assert place.run(opened).data.tags[INFINITE] == "3"


def test_odd_keys_keep_apart(place: Place) -> None:
    """Each under a name of its own, decoded when read; keys.json lists those that have another name."""
    keys = ["mean@1", "mean_1", "timing(s)/gen", "a//b", "a/b", "kl", "kl/mean", "k" * 300, "k" * 299 + "l", "a_x0040_"]
    opened = place.deliver([a_row(0, {key: float(n) for n, key in enumerate(keys)})])
    assert place.shown() == {(key, 0): float(n) for n, key in enumerate(keys)}
    place.deliver([a_row(0, {}), a_row(1, {"late#1": 1.0})])
    assert place.shown()["late#1", 1] == 1.0
    with quiet():
        listed = json.loads(
            Path(place.client().download_artifacts(opened.tracker_run_id, "runmirror/keys.json")).read_text()
        )
    assert set(listed.values()) == {"mean@1", "timing(s)/gen", "a//b", "k" * 300, "k" * 299 + "l", "a_x0040_", "late#1"}


def test_text_of_rows_is_in_tags(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one of each key, masked and cut, under a name MLflow takes; written with the points of its row."""
    every = [replace(one, data={"loss": 1.0, "phase@1": f"p{one.ordinal // 2}"}) for one in rows(4)]
    every[1].data["url"] = "https://me:secret99@host/" + "x" * 9000
    sink = place.sink()
    opened = sink.open(a_run(), None)
    log_batch, tags = sink._client.log_batch, list[dict[str, str]]()

    def note(run_id: str, **options: Any) -> None:
        tags.append({tag.key: tag.value for tag in options["tags"]})
        log_batch(run_id, **options)

    monkeypatch.setattr(sink._client, "log_batch", note)
    for row in every:
        sink.put([row])
    told = [{name.removeprefix("runmirror.text.") for name in one if ".text." in name} for one in tags]
    assert told == [{"phase_x0040_1"}, {"url"}, {"phase_x0040_1"}, set()]
    found = place.run(opened).data.tags
    assert found["runmirror.text.phase_x0040_1"] == "p1"
    assert found["runmirror.text.url"].startswith("https://***@host/xx")
    assert len(found["runmirror.text.url"]) == 2000
    many = [a_row(n + 4, {f"k{key}": "t" for key in range(60)} | {"n": 1.0}) for n in range(2)]
    place.deliver([*every, *many])
    assert len([name for name in place.run(opened).data.tags if ".text." in name]) == 50


def test_a_config_becomes_params(place: Place) -> None:
    """Flat names, lists as JSON, 10,000 characters cut to 6,000, secrets masked; a changed value is told in a tag."""
    config = {"a": {"b": {"c": 1}}, "list": [1, 2], "long": "x" * 10_000, "api_key": "k3y-abcdef", "on": True, "e": {}}
    place.deliver(rows(1), replace(a_run(), config=config))
    again = replace(a_run(), config={**config, "a": {"b": {"c": 2}}, "new@key": "v"})
    found = place.run(place.deliver(rows(1), again)).data
    assert len(found.params.pop("long")) == 6000
    assert found.params.pop("new_x0040_key") == "v"
    assert found.params == {"a.b.c": "1", "list": "[1, 2]", "api_key": "***", "on": "true", "e": "{}"}
    assert json.loads(found.tags[PARAMS]) == {"a.b.c": "now 2"}
    assert dict(flatten({"u": "https://me:pw@host/x"})) == {"u": "https://***@host/x"}


def test_a_config_that_comes_late_is_shown(place: Place) -> None:
    """Keys that ``log_config`` adds while a run is mirrored become params when the file comes."""
    sink = place.sink()
    opened = sink.open(replace(a_run(), config={"lr": 1}), None)
    late = json.dumps({"lr": 2, "model": {"rank": 8}, "api_key": "k3y-abcdef"}).encode()
    sink.put_file(LogFile("config.json", "config", "2", lambda: late))
    found = place.run(opened).data
    assert found.params == {"lr": "1", "model.rank": "8", "api_key": "***"}
    assert json.loads(found.tags[PARAMS]) == {"lr": "now 2"}


def test_a_resumes_config_is_told(place: Place) -> None:
    """What each has otherwise, in a tag of its own; the params stay."""
    run = replace(
        a_run(), config={"lr": 1, "model": {"rank": 8}}, resumes=({"lr": 1, "model": {"rank": 16}}, {"lr": 2})
    )
    found = place.run(place.deliver(rows(1), run)).data
    assert found.params == {"lr": "1", "model.rank": "8"}
    assert json.loads(found.tags[f"{RESUME}1"]) == {"model.rank": "16"}
    assert json.loads(found.tags[f"{RESUME}2"]) == {"lr": "2", "model": "null"}


def test_name_tags_and_notes_are_those_given(place: Place) -> None:
    """For a new run; they change nothing of one that is there. Ours can't be overwritten."""
    options = {"name": "mine", "tags": "team=rl, mlflow.user=me", "notes": "Look at **step 7**."}
    found = place.run(place.deliver(rows(1), **options))
    assert (found.info.run_name, found.data.tags["team"], found.data.tags["mlflow.user"]) == ("mine", "rl", "me")
    assert found.data.tags["mlflow.note.content"].startswith(
        "Mirrored by runmirror from a runmirror log.\n\nLook at **st"
    )
    again = place.run(place.deliver(rows(2), name="other", tags={"team": "x"}, notes="y"))
    assert (again.info.run_id, again.info.run_name, again.data.tags["team"]) == (found.info.run_id, "mine", "rl")


def test_tags_are_read_as_people_write_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """KEY=VALUE or JSON, as MLFLOW_TAGS of transformers; what MLflow or runmirror can't take is said."""
    monkeypatch.setenv("MLFLOW_TAGS", '{"a": "1,2", "n": 3}')
    options = MlflowOptions()
    assert options.tags == {"a": "1,2", "n": "3"}
    assert MlflowOptions.model_validate(options.to_deliver()) == options
    for given in ("a=b, baseline", ["a=b", "baseline"]):  # words as W&B has them
        assert MlflowOptions.model_validate({"tags": given}).tags == {"a": "b", "baseline": "true"}
    for wrong in ("=1", "{a", "mean@1=x", "runmirror.run=x"):
        with pytest.raises(OptionError, match="option 'tags' of the sink 'mlflow'"):
            check_options("mlflow", MlflowOptions, {"tags": wrong})


def test_many_params_are_taken(place: Place) -> None:
    """450 of them, in requests of 100."""
    found = place.run(place.deliver(rows(1), replace(a_run(), config={f"p{n}": n for n in range(450)})))
    assert len(found.data.params) == 450


def test_files_are_artifacts_with_safe_names(place: Place) -> None:
    """The diff as text and only when it is asked for; its commit and branch in any case."""
    diff = a_file("code.diff", "code", b"commit: abc1234\nbranch: main\ndirty: yes\n\ndiff --git a b\n")
    sink = place.sink()
    opened = sink.open(a_run(), None)
    sink.put_file(diff)
    sink.put_file(a_file("config.json", "config", b"{}"))
    sink.put_file(a_file("eval_50%#1?_iteration_000000.html", "report", b"<p>"))
    tags = place.run(opened).data.tags
    git = {name: tags[f"mlflow.source.git.{name}"] for name in ("commit", "branch", "dirty")}
    assert git == {"commit": "abc1234", "branch": "main", "dirty": "true"}

    def names() -> set[str]:
        with quiet():
            return {one.path for one in place.client().list_artifacts(opened.tracker_run_id)}

    assert names() == {"config.json", "eval_50_x0025__x0023_1_x003F__iteration_000000.html"}
    sink.close(None, 10)
    sink = place.sink(records="code")
    sink.open(a_run(), None)
    sink.put_file(diff)
    assert "code.diff.txt" in names()
    sink.close(None, 10)


def test_secrets_in_files_of_other_tools_are_masked(place: Place) -> None:
    """In config.json, the code diff and checkpoints; what has none goes up byte for byte, and so do rollouts."""
    secret = "hf_" + "abcd1234" * 3
    config = {"hub": {"token": secret, "name": "x"}, "url": "https://me:pw@host/x", "lr": 4e-5}
    files = {
        "config.json": ("config", json.dumps(config).encode()),
        "checkpoints.jsonl": ("checkpoints", f'{{"name": "1", "note": "{secret}"}}\n'.encode()),
        "code.diff": ("code", f"dirty: yes\n\n+TOKEN = '{secret}'\n".encode()),
        "train_iteration_000000_rollout_summaries.jsonl": ("rollouts", b'{"text": "\xff"}\n'),
    }
    sink = place.sink(records="config,checkpoints,code,rollouts")
    opened = sink.open(replace(a_run(), config=config), None)
    for path, (kind, content) in files.items():
        sink.put_file(a_file(path, kind, content))
    sink.close(None, 10)

    def read(name: str) -> bytes:
        with quiet():
            return Path(place.client().download_artifacts(opened.tracker_run_id, name)).read_bytes()

    assert json.loads(read("config.json")) == {
        "hub": {"token": "***", "name": "x"},
        "url": "https://***@host/x",
        "lr": 4e-5,
    }
    assert secret.encode() not in read("checkpoints.jsonl") + read("code.diff.txt")
    assert read("train_iteration_000000_rollout_summaries.jsonl") == b'{"text": "\xff"}\n'
    assert place.run(opened).data.params == {
        "hub.token": "***",
        "hub.name": "x",
        "url": "https://***@host/x",
        "lr": "4e-05",
    }


def test_text_that_a_database_refuses(place: Place) -> None:
    """NUL and lone surrogates, which PostgreSQL or the wire refuse, in a name, a param and a key: replaced or encoded."""
    key = "odd\udcff\0" + "k" * 300
    opened = place.deliver(
        [a_row(0, {key: 1.0})], replace(a_run(), name="a\udcff\0", config={"x": "\0\udcff", "e": ""})
    )
    found = place.run(opened)
    assert (found.info.run_name, found.data.params) == ("a?\ufffd", {"x": "\ufffd?", "e": ""})
    assert place.shown() == {("odd?\ufffd" + "k" * 300, 0): 1.0}


def test_many_changed_params_fit_a_tag(place: Place) -> None:
    """As whole JSON, with a mark that there is more."""
    config = {f"p{n}": "x" * 300 for n in range(200)}
    place.deliver(rows(1), replace(a_run(), config=config))
    tag = place.run(place.deliver(rows(1), replace(a_run(), config=dict.fromkeys(config, "y" * 300)))).data.tags[PARAMS]
    assert len(tag) <= 5000
    assert json.loads(tag)["..."] == "and more"


# Finding the run


def test_a_deleted_run_stays_deleted(place: Place) -> None:
    """Refused with the way out; taken back, with its points, by ``restore``."""
    opened = place.deliver(rows(3))
    with quiet():
        place.client().delete_run(opened.tracker_run_id)
    for known in (None, opened.tracker_run_id):
        with pytest.raises(Refused, match="restore=true"):
            place.sink().open(a_run(), known)
    assert place.sink().read_back(a_run(), None) is None
    assert place.sink(restore=True).open(a_run(), None).position == 3
    assert len(place.shown()) == 6


def test_a_run_deleted_while_it_is_written(place: Place) -> None:
    """Retry, and the open that follows says it: nothing is written into it."""
    sink = place.sink()
    opened = sink.open(a_run(), None)
    with quiet():
        place.client().delete_run(opened.tracker_run_id)
    with pytest.raises(Retry):
        sink.put(rows(2))
    with pytest.raises(Refused, match="deleted"):
        sink.open(a_run(), opened.tracker_run_id)


def test_a_deleted_experiment_is_said(place: Place) -> None:
    """Refused with the way out, and taken back by ``restore``."""
    place.deliver(rows(1), experiment="gone")
    with quiet():
        place.client().delete_experiment(place.client().get_experiment_by_name("gone").experiment_id)
    with pytest.raises(Retry):  # known to this process: looked for again
        place.sink(experiment="gone").open(a_run("new"), None)
    with pytest.raises(Refused, match="restore=true"):
        place.sink(experiment="gone").open(a_run("new"), None)
    place.deliver(rows(1), a_run("new"), experiment="gone", restore=True)
    assert place.database.runs("gone") >= 1


def test_of_two_made_at_once_the_first_is_kept(place: Place) -> None:
    """Both importers end with the one made first; the other one is deleted, and no run is left double."""
    sinks = [place.sink(), place.sink()]
    run = a_run("raced")
    for sink in sinks:
        sink._connect()
    before = Runs.find
    try:
        Runs.find = lambda *arguments, **options: []  # type: ignore[method-assign]  # neither sees the other one
        opened = [sink.open(run, None) for sink in sinks]
    finally:
        Runs.find = before  # type: ignore[method-assign]
    assert opened[0].tracker_run_id != opened[1].tracker_run_id
    sinks[0].put(rows(3))
    assert sinks[0].flush(10) == 3
    sinks[1].put(rows(2))
    with pytest.raises(Retry, match="made this run first"):
        sinks[1].flush(10)
    again = sinks[1].open(run, opened[1].tracker_run_id)
    assert (again.tracker_run_id, again.position) == (opened[0].tracker_run_id, 3)
    assert len(place.shown(run)) == 6
    query = "SELECT COUNT(*) FROM tags t JOIN runs r USING (run_uuid) WHERE t.key = ? AND r.lifecycle_stage = 'active'"
    assert place.database.ask(query, CREATED) == [(1,)]


def test_rebuild_makes_the_run_anew(place: Place) -> None:
    """A new run with all points; the old one is renamed and kept; once per sink, so a reopening goes on."""
    old = place.deliver(rows(3))
    sink = place.sink(rebuild=True)
    new = sink.open(a_run(), old.tracker_run_id)
    assert (new.position, new.tracker_run_id == old.tracker_run_id) == (0, False)
    sink.put(rows(2))
    assert sink.open(a_run(), new.tracker_run_id).position == 2
    kept = place.run(old)
    assert kept.info.run_name.endswith("(superseded)")
    assert kept.data.tags[RUN].startswith("superseded")
    assert len(place.shown()) == 4


def test_a_run_is_found_in_whatever_experiment(place: Place) -> None:
    """Unless one was named: an import of the same log under another root goes on with its run."""
    first = place.deliver(rows(2), experiment=None, group="one")
    assert place.sink(experiment=None, group="two").open(a_run(), None) == Opened(first.url, first.tracker_run_id, 2)


def test_an_experiment_id_that_is_not_there_is_said(place: Place) -> None:
    """Refused, not tried again for ever; one that was deleted as well."""
    with pytest.raises(Refused, match="no experiment with the id 99"):
        place.sink(experiment=None, experiment_id="99").open(a_run(), None)
    place.deliver(rows(1), experiment="by id")
    with quiet():
        experiment_id = place.client().get_experiment_by_name("by id").experiment_id
        place.client().delete_experiment(experiment_id)
    with pytest.raises(Refused, match="'by id' was deleted"):
        place.sink(experiment=None, experiment_id=experiment_id).open(a_run("other"), None)


def test_runs_are_found_among_many_experiments(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the first page of them."""
    client = place.client()
    with quiet():
        for number in range(12):
            client.create_experiment(f"e{number}")
    first = place.deliver(rows(2), experiment="e0")
    search = type(client).search_experiments
    monkeypatch.setattr(
        type(client), "search_experiments", lambda self, **options: search(self, **(options | {"max_results": 5}))
    )
    monkeypatch.setattr("runmirror.sinks.mlflow_run._everywhere", {})
    monkeypatch.setattr("runmirror.sinks.mlflow_run._experiments", {})
    opened = place.sink(experiment=None, group="elsewhere").open(a_run(), None)
    assert (opened.tracker_run_id, opened.position) == (first.tracker_run_id, 2)


# Exactly once


def test_the_same_rows_again_add_nothing(place: Place) -> None:
    """As after a lost answer and a lost cursor: the rows are sent again, and MLflow has each point once."""
    every = [a_row(n, {"loss": n / 3, "nan": math.nan}) for n in range(600)]
    opened = place.deliver(every)
    with quiet():
        place.client().set_tag(opened.tracker_run_id, CURSOR, "damaged")
    sink = place.sink()
    assert sink.open(a_run(), None).position is None
    sink.put(every)
    assert sink.flush(30) == 600
    assert place.database.ask("SELECT COUNT(*) FROM metrics") == [(1200,)]


@pytest.mark.slow
def test_the_position_never_leads_the_points(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever request fails, the tag covers whole rows that MLflow has; wide rows span requests."""
    every = [a_row(n, {f"k{at}": float(n) for at in range(700)}) for n in range(5)]
    for number in range(4):
        run, calls = a_run(f"wide{number}"), 0
        sink = place.sink()
        sink.open(run, None)
        log_batch = sink._client.log_batch

        def fails(*arguments: Any, stop: int = number, log_batch: Any = log_batch, **options: Any) -> None:
            nonlocal calls
            calls += 1
            if calls > stop:
                raise ConnectionError("the network is gone")
            log_batch(*arguments, **options)

        monkeypatch.setattr(sink._client, "log_batch", fails)
        with pytest.raises(Retry):
            sink.put(every)
        monkeypatch.undo()
        again = sink.open(run, None)
        assert again.position == number * 999 // 700
        sink.put(every[again.position :])
        assert len(place.shown(run)) == 3500


def test_a_refused_point_is_named_and_the_rest_arrives() -> None:
    """Bisected down to it; one that an old server calls a duplicate counts as delivered."""
    taken: list[int] = []

    def put(some: list[int]) -> None:
        if 7 in some:
            raise Invalid("7 is not a number")
        if 3 in some:
            raise Invalid("(sqlite3.IntegrityError) UNIQUE constraint failed: metrics.key")
        if 5 in some:
            raise Invalid("Invalid value for metric 'frac_unique'")
        taken.extend(some)

    assert send(put, list(range(10))) == [(5, "Invalid value for metric 'frac_unique'"), (7, "7 is not a number")]
    assert taken == [0, 1, 2, 4, 6, 8, 9]


@pytest.mark.slow
def test_rejected_keys_survive_a_lost_answer(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The position stays below their row until ``flush``, so that they are told again by the next ``put``."""
    long = "k" * 6000
    every = [a_row(n, {f"k{at}": float(n) for at in range(700)} | ({long: 1.0} if n == 1 else {})) for n in range(5)]
    sink = place.sink()
    sink.open(a_run(), None)
    log_batch, calls = sink._client.log_batch, 0

    def loses_the_third_answer(*arguments: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        log_batch(*arguments, **options)
        if calls == 3:
            raise ConnectionError("the network is gone")

    monkeypatch.setattr(sink._client, "log_batch", loses_the_third_answer)
    with pytest.raises(Retry):
        sink.put(every)
    assert sink.open(a_run(), None).position == 1
    assert [(one.ordinal, one.key) for one in sink.put(every[1:])] == [(1, long)]
    assert place.sink().open(a_run(), None).position == 1  # killed here, it is told once more
    assert sink.flush(10) == 5
    assert sink.open(a_run(), None).position == 5
    assert len(place.shown()) == 3500
    assert place.database.ask(TWICE) == []


def test_infinities_keep_requests_whole(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request takes 1,000 points and tags; their count takes one place, no second request."""
    sink = place.sink()
    sink.open(a_run(), None)
    sizes: list[int] = []
    log_batch = sink._client.log_batch

    def counts(run_id: str, metrics: Any = (), tags: Any = (), **options: Any) -> None:
        sizes.append(len(metrics) + len(tags))
        log_batch(run_id, metrics=metrics, tags=tags, **options)

    monkeypatch.setattr(sink._client, "log_batch", counts)
    sink.put([a_row(n, {f"k{at}": float(n) for at in range(100)} | {"inf": math.inf}) for n in range(30)])
    assert sizes == [1000, 1000, 1000, 3008 - 3000]
    sink.close(None, 10)


def test_a_slow_put_is_cut_short(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an error that makes the mirror send fewer rows at once; what was sent counts."""
    monkeypatch.setattr("runmirror.sinks.mlflow.PUT_SECONDS", -1.0)
    sink = place.sink()
    sink.open(a_run(), None)
    with pytest.raises(TimeoutError):
        sink.put([a_row(n, {f"k{at}": float(n) for at in range(999)}) for n in range(5)])
    monkeypatch.undo()
    assert sink.open(a_run(), None).position == 1


def test_a_broken_place_for_files_holds_up_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as an S3 one without boto3: the run ends all the same; keys.json comes when it can."""
    sink = place.sink()
    opened = sink.open(a_run(), None)
    sink.put([a_row(0, {"mean@1": 1.0})])

    def no_boto(*arguments: Any) -> None:
        raise ImportError("No module named 'boto3'")

    monkeypatch.setattr(sink._client, "log_artifact", no_boto)
    sink.close(replace(a_run(), status="finished", end=1_700_000_000.0), 10)
    assert place.run(opened).info.status == "FINISHED"
    assert "boto3" in caplog.text
    place.deliver([a_row(0, {}), a_row(1, {"loss": 1.0})])
    with quiet():
        assert [one.path for one in place.client().list_artifacts(opened.tracker_run_id)] == ["runmirror"]


# Imports


def test_every_shape_of_log_arrives_whole(place: Place, tmp_path: Path) -> None:
    """verify finds every point; a second import sends nothing and changes no table."""
    logs = tmp_path / "logs"
    flat_log(logs / "flat")
    nested_log(logs / "nested")
    write_rows(logs / "resumed" / "metrics.jsonl", resumed_rows())
    write_rows(logs / "async" / "metrics.jsonl", async_rows())
    write_state(logs / "trl" / "trainer_state.json", grpo_history(8, final=True), step=8)
    options = {"tracking_uri": place.uri}
    summary = import_runs([logs], "mlflow", options, patience=0)
    assert summary.ok, summary
    result = verify([logs], "mlflow", options)
    assert result.ok, result.as_dict()
    assert result.totals()["points"] > 500
    tables = place.database.file.read_bytes()
    again = import_runs([logs], "mlflow", options, patience=0).as_dict()["totals"]
    assert (again["rows"], again["points"], again["files"]) == (0, 0, 0)
    assert place.database.file.read_bytes() == tables


@pytest.mark.slow
def test_real_logs_arrive_whole(place: Place, samples: Path) -> None:
    """The samples beside the checkout, each file of them."""
    paths = [samples, *samples.glob("*.json*")]
    options = {"tracking_uri": place.uri, "records": "config,code,checkpoints,report,logtree,rollouts"}
    assert import_runs(paths, "mlflow", options, patience=0).ok
    assert verify(paths, "mlflow", options).ok


def test_equal_points_under_the_policy_all(place: Place, tmp_path: Path) -> None:
    """MLflow keeps one of them, and verify knows; one that is missing is still missing."""
    lines = [{"step": 1, "loss": value, "_timestamp": 1.7e9} for value in (0.5, 0.5, 0.25, 0.5)]
    log = write_rows(tmp_path / "run" / "metrics.jsonl", lines).parent
    options = {"tracking_uri": place.uri}
    assert import_runs([log], "mlflow", options, rewinds="all").ok
    result = verify([log], "mlflow", options)
    assert result.ok, result.as_dict()
    assert (result.totals()["points"], result.totals()["matching"], result.totals()["known"]["once"]) == (4, 4, 2)
    with contextlib.closing(sqlite3.connect(place.database.file)) as connection, connection:
        connection.execute("DELETE FROM metrics WHERE value = 0.5")
    result = verify([log], "mlflow", options)
    assert (result.totals()["matching"], result.totals()["missing"]) == (1, 3)


# Options and errors


def test_the_environment_gives_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """MLFLOW_TRACKING_URI, _EXPERIMENT_NAME and _EXPERIMENT_ID; else a database in the working directory."""
    monkeypatch.chdir(tmp_path)
    assert MlflowSink(MlflowOptions()).destination() == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:secret@host:5000/")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    assert MlflowSink(MlflowOptions()).destination() == "https://***@host:5000#mine"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"experiment": "mine"}, "#mine"),
        ({"experiment_id": "3"}, "#3"),
        ({}, "#theirs"),
        ({"experiment": None, "experiment_id": None}, ""),
    ],
)
def test_an_experiment_given_wins(given: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the name and the id in the environment, where ``mlflow.set_experiment`` leaves one; else the name counts."""
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "7")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "theirs")
    assert MlflowSink(MlflowOptions(tracking_uri="http://h", **given)).destination() == f"http://h{expected}"
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME")
    expected = "#7" if not given else expected
    assert MlflowSink(MlflowOptions(tracking_uri="http://h", **given)).destination() == f"http://h{expected}"


@pytest.mark.parametrize("uri", ["./mlruns", "file:///data/mlruns", "mlruns"])
def test_the_file_store_is_refused(uri: str) -> None:
    """With what to give instead."""
    with pytest.raises(OptionError, match=r"sqlite:///mlflow.db.*migrate-filestore"):
        resolve_uri(uri)


def test_a_server_that_is_down_is_tried_again() -> None:
    """Retry at once, in one line, without the password; doctor says it too."""
    sink = MlflowSink(MlflowOptions(tracking_uri="http://me:secret@127.0.0.1:9"))
    with pytest.raises(Retry, match=r"http://\*\*\*@127.0.0.1:9 does not answer: Connection refused") as told:
        sink.open(a_run(), None)
    assert "secret" not in str(told.value)
    assert [(one.name, one.ok) for one in sink.check()] == [("tracker", False)]


@pytest.mark.parametrize(
    ("code", "said", "kind"),
    [
        ("UNAUTHENTICATED", "no", Refused),
        ("PERMISSION_DENIED", "no", Refused),
        ("INTERNAL_ERROR", "failed with error code 404 != 200", Refused),
        ("INVALID_PARAMETER_VALUE", "Invalid value", Invalid),
        ("BAD_REQUEST", "UNIQUE constraint", Invalid),
        ("RESOURCE_DOES_NOT_EXIST", "no run", Retry),
        ("TEMPORARILY_UNAVAILABLE", "database is locked", Retry),
        ("INTERNAL_ERROR", "bad gateway", Retry),
    ],
)
def test_errors_are_told_by_their_code(code: str, said: str, kind: type[Exception]) -> None:
    """Permanent, about the points, or transient; in one line."""
    error = Exception(f"{said}\nat https://u:hidden@h/")
    error.error_code = code  # type: ignore[attr-defined]
    told = explain(error, "https://u:hidden@h")
    assert type(told) is kind or isinstance(told, kind)
    assert "hidden" not in str(told)
    assert "\n" not in str(told)


def test_a_database_needs_the_whole_of_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused with the package to install when only mlflow-skinny is there."""
    from runmirror.sinks import mlflow_client

    with quiet():
        pass  # MLflow itself looks for packages when it is first imported
    monkeypatch.setattr(mlflow_client.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Refused, match=r"runmirror\[mlflow-local\]"):
        MlflowSink(MlflowOptions(tracking_uri="postgresql://u:p@h/db")).open(a_run(), None)


def test_doctor_looks_and_writes_nothing(tmp_path: Path, place: Place) -> None:
    """A database that is not there yet: whether its folder can be written; one that is: whether it opens."""
    sink = MlflowSink(MlflowOptions(tracking_uri=f"sqlite:///{tmp_path}/new.db"))
    assert [(one.name, one.ok) for one in sink.check()] == [("database", True), ("database's disk", True)]
    assert not (tmp_path / "new.db").exists()
    assert [(one.name, one.ok) for one in place.sink().check()] == [("tracker", True)]


def test_only_our_own_calls_use_fresh_connections() -> None:
    """The header provider that MLflow loads answers inside our blocks only."""
    provider = FreshConnections()
    assert not provider.in_context()
    with quiet(), quiet():
        assert provider.in_context()
        from mlflow.tracking.request_header.registry import resolve_request_headers

        assert resolve_request_headers()["Connection"] == "close"
    assert not provider.in_context()
    assert "Connection" not in resolve_request_headers()


def test_options_and_the_module_import_no_mlflow() -> None:
    """Checked in the training process, which must not pay for it."""
    code = (
        "import sys\n"
        "from runmirror.sinks.registry import make_sink\n"
        "make_sink('mlflow', {'tracking_uri': 'http://h'}).destination()\n"
        "assert not {'mlflow', 'sqlalchemy', 'requests'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_the_users_active_run_is_untouched(place: Place, tmp_path: Path) -> None:
    """Theirs goes on in its own place while we mirror in the same process."""
    code = f"""
import mlflow
mlflow.set_tracking_uri("sqlite:///{tmp_path}/theirs.db")
with mlflow.start_run() as theirs:
    from runmirror.sinks.mlflow import MlflowOptions, MlflowSink
    from runmirror.testing.conformance import a_run, rows
    sink = MlflowSink(MlflowOptions(tracking_uri="{place.uri}"))
    sink.open(a_run("beside"), None); sink.put(rows(3)); sink.close(None, 10)
    mlflow.log_metric("theirs", 1.0)
    assert mlflow.active_run().info.run_id == theirs.info.run_id
assert mlflow.get_tracking_uri() == "sqlite:///{tmp_path}/theirs.db"
"""
    environment = os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Database(tmp_path / "theirs.db").ask("SELECT key FROM metrics") == [("theirs",)]


@pytest.fixture
def two_workers(tmp_path: Path) -> Iterator[str]:
    with mlflow_server(tmp_path / "server", workers=2) as server:
        yield server.url


@pytest.mark.slow
def test_a_server_with_two_workers(two_workers: str, tmp_path: Path) -> None:
    """All points and files of a log, read back."""
    flat_log(tmp_path / "runs" / "flat")
    options = {"tracking_uri": two_workers, "records": "config,report"}
    assert import_runs([tmp_path / "runs"], "mlflow", options, patience=0).ok
    result = verify([tmp_path / "runs"], "mlflow", options)
    assert result.ok
    assert result.totals()["points"] > 100
