"""The commands on MLflow: shorthands, selection, groups, import ids, several processes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import runmirror
from runmirror.cli import app
from runmirror.importer import group_name
from runmirror.sinks.mlflow_client import how_to_see, run_url
from tests.logs import STARTED, flat_log, train_row, write_rows
from tests.servers.mlflow import TWICE, Database, with_tables

runner = CliRunner()


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """Four runs in two folders, one of them from 2020."""
    for name in ("a/x", "a/y", "b/x"):
        write_rows(tmp_path / "sweep" / name / "metrics.jsonl", (train_row(step) for step in range(5)))
    write_rows(tmp_path / "sweep" / "b/old" / "metrics.jsonl", (train_row(step) for step in range(5)), STARTED - 1.6e8)
    return tmp_path / "sweep"


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database(with_tables(tmp_path / "mlflow.db"))


def run(command: str, *arguments: object, database: Database, expected: int = 0) -> str:
    more = [str(one) for one in arguments] + ["--to", "mlflow", "--tracking-uri", f"sqlite:///{database.file}"]
    done = runner.invoke(app, [command, *more])
    assert done.exit_code == expected, done.output
    return done.stdout if "--json" in more else done.output  # a slow import tells its progress on stderr


def experiments(database: Database) -> dict[Any, set[Any]]:
    """Experiment -> names of its runs."""
    found: dict[Any, set[Any]] = {}
    for experiment, name in database.ask("SELECT e.name, r.name FROM runs r JOIN experiments e USING (experiment_id)"):
        found.setdefault(experiment, set()).add(name)
    return found


def test_an_import_is_one_experiment(logs: Path, database: Database) -> None:
    """Named after the folder given; the summary prints a filter that finds its runs; verify and doctor are content."""
    output = run("import", logs, database=database)
    assert experiments(database) == {"sweep": {"a/x", "a/y", "b/x", "b/old"}}
    import_id = output.rpartition("tags.`runmirror.import` = '")[2].partition("'")[0]
    assert database.ask("SELECT COUNT(*) FROM tags WHERE key = 'runmirror.import' AND value = ?", import_id) == [(4,)]
    assert "200 of 200 points match" in run("verify", logs, database=database)
    assert "All is well" in run("doctor", logs, database=database)
    assert "runmirror.import" not in run("import", logs, database=database)  # nothing was sent
    assert database.ask(TWICE) == []


def test_an_import_says_how_to_see_it(logs: Path, database: Database) -> None:
    """The command that opens a database; of a server, the page of the experiment, on its training side."""
    output = run("import", logs, database=database).replace("\n", "")
    assert f"See: mlflow ui --backend-store-uri sqlite:///{database.file}" in output
    assert "See:" not in run("import", logs, database=database)
    page = "http://h:5/#/experiments/{}?workflowType=machine_learning"
    runs = [run_url("http://h:5", one, "r") for one in ("1", "2")]
    assert runs[0] == "http://h:5/#/experiments/1/runs/r?workflowType=machine_learning"
    assert how_to_see("http://h:5#mine", runs[:1] * 2) == page.format(1)
    assert how_to_see("http://h:5", runs) == how_to_see("http://h:5", []) == "http://h:5"
    assert run_url("postgresql://me:pw@h/db", "1", "r") == "postgresql://***@h/db#/experiments/1/runs/r"


def test_experiments_by_name_and_by_folder(logs: Path, database: Database) -> None:
    """What --experiment says, or one for each folder of runs; a run that is somewhere already goes on there."""
    run("import", logs, "--experiment", "mine", "--only", "a/*", database=database)
    run("import", logs, "--experiment-per-folder", "--only", "b/*", "--only", "a/y", database=database)
    assert experiments(database) == {"mine": {"a/x", "a/y"}, "sweep/b": {"b/x", "b/old"}}


def test_runs_are_chosen_by_name_and_date(logs: Path, database: Database) -> None:
    """--only takes globs, --since a date; the plan shows the same."""
    plan = json.loads(run("import", logs, "--since", "2022-01-01", "--dry-run", "--json", database=database))
    assert [one["name"] for one in plan] == ["a/x", "a/y", "b/x"]
    summary = json.loads(run("import", logs, "--since", "2022-01-01", "--only", "b/*", "--json", database=database))
    assert [one["name"] for one in summary["runs"]] == ["b/x"]
    assert experiments(database) == {"sweep": {"b/x"}}


def test_restore_and_rebuild(logs: Path, database: Database) -> None:
    """A deleted run is said and taken back; a rebuilt one stands beside the old one."""
    run("import", logs / "a/x", database=database)
    (run_id,) = next(iter(database.ask("SELECT run_uuid FROM runs")))
    import sqlite3

    with sqlite3.connect(database.file) as connection:
        connection.execute("UPDATE runs SET lifecycle_stage = 'deleted'")
    connection.close()
    assert "stays deleted" in run("import", logs / "a/x", database=database, expected=3)
    run("import", logs / "a/x", "--restore", database=database)
    run("import", logs / "a/x", "--rebuild", database=database)
    assert experiments(database) == {"a": {"x", "x (superseded)"}}
    assert database.ask("SELECT COUNT(*) FROM metrics WHERE run_uuid != ?", run_id) == [(50,)]


@pytest.mark.slow
def test_several_processes_share_the_runs(logs: Path, tmp_path: Path) -> None:
    """The same as with one, in a database that isn't there yet: every point once, and the second time nothing."""
    database = Database(tmp_path / "new.db")
    summary = json.loads(run("import", logs, "--workers", "2", "--json", database=database))
    assert [one["name"] for one in summary["runs"]] == ["a/x", "a/y", "b/old", "b/x"]
    assert summary["totals"]["points"] == 200
    assert "200 of 200 points match" in run("verify", logs, database=database)
    again = json.loads(run("import", logs, "--json", database=database))
    assert (again["totals"]["points"], again["ok"]) == (0, True)


def test_the_group_of_paths(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder given, or the one the runs given are in."""
    (logs / "a" / "dump.jsonl").write_text("{}\n")
    assert group_name([logs]) == "sweep"
    assert group_name([logs / "a"]) == group_name([logs / "a" / "x"]) == group_name([logs / "a" / "dump.jsonl"]) == "a"
    assert group_name([logs / "a", logs / "b" / "x"]) == group_name([f"{logs}/*/x"]) == "sweep"
    monkeypatch.chdir(logs)
    assert group_name(["."]) == "sweep"


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="process groups")
def test_live_runs_are_grouped_by_folder(tmp_path: Path, database: Database) -> None:
    """Experiment and name are those of the log_path; status and all rows are there after finish."""
    options = {"mlflow": {"tracking_uri": f"sqlite:///{database.file}"}}
    with runmirror.start(tmp_path / "night" / "one", {"lr": 1}, report_to=options, code=False) as live:
        for step in range(5):
            live.log_metrics({"loss": step}, step=step)
    assert experiments(database) == {"night": {"one"}}
    assert database.ask("SELECT status FROM runs") == [("FINISHED",)]
    flat_log(tmp_path / "night" / "two")
    run("import", tmp_path / "night", database=database)
    assert experiments(database) == {"night": {"one", "two"}}
