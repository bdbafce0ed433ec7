"""The W&B sink with a real, unmodified ``wandb`` against the loopback server."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

import runmirror
from runmirror.exceptions import OptionError, Refused, Retry
from runmirror.log.rows import Row
from runmirror.sinks import wandb_process
from runmirror.sinks.base import LogFile, RunInfo
from runmirror.sinks.wandb import WandbOptions, WandbSink
from runmirror.sinks.wandb_process import WandbProcess, take
from runmirror.sinks.wandb_rows import row_data
from runmirror.sinks.wandb_worker import explained
from runmirror.testing.conformance import a_row, a_run, rows
from tests.logs import async_rows, flat_log, nested_log, resumed_rows, train_row, write_rows
from tests.servers.wandb import Fault, StoredRun, WandbServer

ENDED = replace(a_run(), status="finished", end=1_700_000_900.0)
"""A run that is over: the sink needn't wait for wandb's next upload."""


@pytest.fixture
def server(wandb_user: WandbServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> WandbServer:
    """The server, in a project of the test."""
    monkeypatch.setenv("WANDB_PROJECT", tmp_path.name)
    return wandb_user


def make(**options: object) -> WandbSink:
    return WandbSink(WandbOptions.model_validate(options))


def deliver(sink: WandbSink, every: list[Row], run: RunInfo = ENDED) -> None:
    """All of a run, from where the sink says."""
    opened = sink.open(run, None)
    sink.put(every[opened.position or 0 :])
    assert sink.flush(30) == len(every)
    sink.close(run, 30)


def steps(held: StoredRun) -> list[int]:
    return [row["_step"] for row in held.history]


# -- options


def test_options_come_from_wandbs_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is given counts more."""
    values = {"WANDB_PROJECT": "p", "WANDB_ENTITY": "team", "WANDB_TAGS": "a,b", "WANDB_RUN_GROUP": "g"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    found = WandbOptions.model_validate({"project": "q"})
    assert (found.project, found.entity, found.tags, found.group) == ("q", "team", ("a", "b"), "g")
    assert WandbSink(found).destination() == "https://api.wandb.ai/team/q"


@pytest.mark.parametrize("options", [{"project": "a/b"}, {"project": "x" * 129}, {"project": ""}, {"tags": ["x" * 65]}])
def test_what_wandb_would_refuse_is_an_option_error(options: dict[str, object]) -> None:
    """Before anything is started."""
    with pytest.raises(OptionError, match="W&B takes"):
        make(**options)


def test_the_id_tells_place_and_policy() -> None:
    """The same for the same run, project, server and policy, whatever the entity; another one for another."""
    ids = {make(**options)._run_id(a_run()) for options in ({}, {"entity": "me"}, {"name": "x"})}
    ids |= {make(project="q")._run_id(a_run()), make(base_url="http://x")._run_id(a_run())}
    ids |= {make()._run_id(replace(a_run(), policy="all")), make()._run_id(a_run("another"))}
    assert len(ids) == 5


def test_disabled_sends_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """WANDB_MODE=disabled: every row counts as delivered, no process is started, people are told."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    sink = make()
    opened = sink.open(a_run(), None)
    sink.put(rows(3))
    assert (opened.position, sink.flush(1), sink.read_back(a_run(), None)) == (None, 3, None)
    assert "turned off" in opened.note
    sink.close(ENDED, 1)
    assert not (tmp_path / "home" / "wandb").exists()


def test_offline_stays_behind() -> None:
    """Refused, with the command that delivers the run; the options of that command say so too."""
    with pytest.raises(Refused, match=r"runmirror import .* -o mode=online"):
        make(mode="offline").open(a_run(), None)
    options = WandbOptions.model_validate({"mode": "offline", "project": "p", "beside": "x"})
    assert options.to_deliver() == {"mode": "online", "project": "p"}


# -- what arrives


@pytest.mark.slow
def test_a_row_is_a_row(server: WandbServer, tmp_path: Path) -> None:
    """``_step`` is the ordinal, ``step`` the training step and the x axis, ``_timestamp`` the row's time; the state, name,
    group, tags and config are the run's."""
    every = [replace(one, step=10 * one.ordinal) for one in rows(3)]
    every[1] = every[1].emptied("broken")
    run = RunInfo("0123456789abcdef", "a/run", 5.0, 65.0, "failed", config={"model": {"name": "tiny", "hf_token": "x"}})
    deliver(make(group="g", tags=["t"], job_type="train", notes="n"), every, run)
    held = server.run(tmp_path.name)
    shown = [(row["_step"], row.get("step"), row["_timestamp"]) for row in held.history]
    assert shown == [(n, None if n == 1 else 10 * n, every[n].time) for n in range(3)]
    assert (held.state, held.name, held.exit_code) == ("failed", "a/run", 1)
    told = {name: held.fields[name] for name in ("groupName", "tags", "jobType", "notes")}
    assert told == {"groupName": "g", "tags": ["t"], "jobType": "train", "notes": "n"}
    config = held.values()
    assert config["model"] == {"name": "tiny", "hf_token": "***"}
    assert (held.fields.get("host") or "", held.fields.get("program")) == (
        "",
        "runmirror",
    )  # not of the machine it came by
    about = {name: config["runmirror"][name] for name in ("start", "end", "duration", "rewinds")}
    assert about == {"start": 5.0, "end": 65.0, "duration": 60.0, "rewinds": "last"}
    metrics = config["_wandb"]["m"]
    axis = 1 + next(number for number, one in enumerate(metrics) if one.get("1") == "step")
    others = [one for one in metrics if one.get("1") != "step"]  # "*", or each key, as the version has it
    assert others
    assert {one["5"] for one in others} == {axis}, "the x axis of all is the column step"


@pytest.mark.slow
def test_text_goes_to_the_summary_where_no_number_has_its_name(server: WandbServer, tmp_path: Path) -> None:
    """One type per key: "both" is a number first, and stays one."""
    every = [
        a_row(0, {"loss": 1.0, "both": 2.0, "note": "first"}),
        a_row(1, {"loss": 0.5, "both": "text", "note": "last"}),
    ]
    deliver(make(), every)
    deliver(make(), [*every, a_row(2, {"both": "text"})])  # also in another life
    summary = server.run(tmp_path.name).summary
    assert (summary["loss"], summary["both"], summary["note"]) == (0.5, 2.0, "last")
    assert server.run(tmp_path.name).history[1].keys() >= {"loss"}


@pytest.mark.slow
def test_a_large_row_and_many_keys(server: WandbServer, tmp_path: Path) -> None:
    """A row of 12 MB is put aside and leaves an empty one; one of 20,000 keys arrives; so does what follows them."""
    every = [
        a_row(0, {f"{'k' * 600}{n}": n / 3 for n in range(20_000)}),
        a_row(1, {f"env/{n}": n / 3 for n in range(20_000)}),
    ]
    every.append(a_row(2, {"loss": 0.25}))
    sink = make()
    sink.open(ENDED, None)
    assert [(one.ordinal, one.key) for one in sink.put(every)] == [(0, None)]
    assert sink.flush(60) == 3
    sink.close(ENDED, 30)
    held = server.run(tmp_path.name)
    assert [len(row) - 3 for row in held.history] == [0, 20_001, 2]  # less _step, _timestamp and _runtime
    assert held.summary["loss"] == 0.25


@pytest.mark.slow
def test_a_resumes_config_changes_nothing_and_is_told(server: WandbServer, tmp_path: Path) -> None:
    """What differs is under ``runmirror.resumes``, once, whether a framework replaced config.json or a resume had another."""
    first = replace(ENDED, config={"lr": 1, "model": {"rank": 8, "name": "a"}})
    other = {"lr": 1, "model": {"rank": 16, "name": "a"}}
    deliver(make(), rows(1), first)
    deliver(make(), rows(2), replace(first, config=other))
    deliver(make(), rows(3), replace(first, resumes=(other, {"lr": 2})))
    config = server.run(tmp_path.name).values()
    assert config["model"] == {"rank": 8, "name": "a"}
    changes = [one["changes"] for _, one in sorted(config["runmirror"]["resumes"].items())]
    assert changes == [{"model": {"rank": 16}}, {"lr": 2, "model": None}]


@pytest.mark.slow
def test_a_config_that_comes_late_is_shown(server: WandbServer, tmp_path: Path) -> None:
    """Keys that ``log_config`` adds while a run is mirrored are in the run's config when the file comes. They are no resume,
    also when the run is opened again."""
    sink, late = make(stats=False), b'{"lr": 1, "model": {"rank": 8}, "api_key": "k3y-abcdef"}'
    run = replace(a_run(), config={"lr": 1})
    sink.open(run, None)
    sink.put(rows(1))
    sink.put_file(LogFile("config.json", "config", "2", lambda: late))
    assert sink.flush(30) == 1
    sink.close(None, 30)
    deliver(make(), rows(2), replace(ENDED, config=json.loads(late)))
    config = server.run(tmp_path.name).values()
    assert {key: config[key] for key in ("lr", "model", "api_key")} == {"lr": 1, "model": {"rank": 8}, "api_key": "***"}
    assert "resumes" not in config["runmirror"]


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("HTTP 404: project not found", "refused"),
        ("returned error 403: Forbidden", "refused"),
        ("No API key configured. Use `wandb login` to log in.", "refused"),
        ("HTTPConnectionPool(host='10.4.0.1', port=40401): Max retries exceeded", "retry"),
        ("502 Server Error: Bad Gateway for url: http://wandb.example.org:4034/graphql", "retry"),
        ("<Run me/p/rm70a94272d404f780f36 (running)> timed out", "retry"),
    ],
)
def test_an_outage_is_no_refusal(said: str, kind: str) -> None:
    """Whatever digits are in a port or in a run's id: else a mirror would wait for a person."""
    assert explained(OSError(said))[0] == kind


def test_a_live_row_is_asked_for_when_it_can_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as a rule: wandb sends what a run that goes on has got once a second. One that has ended is looked at at once."""
    for begun, expected in ((True, [0.6, 0.6, 0.9]), (False, [0.1, 0.15])):
        sink, shown, sleeps = make(), iter([0, 0, 1]), list[float]()
        sink._begun, sink._put = begun, 1
        monkeypatch.setattr(sink, "_held", lambda shown=shown: (next(shown), None))
        monkeypatch.setattr(
            "runmirror.sinks.wandb.time.sleep", lambda pause, sleeps=sleeps: sleeps.append(round(pause, 3))
        )
        sink._wait(1, 30)
        assert sleeps == expected


def test_a_file_without_a_process_is_not_sent() -> None:
    """It is said, so that it counts as due."""
    sink = make()
    sink._run = a_run()
    with pytest.raises(Retry, match="gone"):
        sink.put_file(LogFile("config.json", "config", "1", lambda: b"{}"))


@pytest.mark.slow
def test_every_sample_arrives_whole(server: WandbServer, samples: Path, tmp_path: Path) -> None:
    """Every point of the real logs, under both policies, by ``verify``."""
    for policy in ("last", "all"):
        paths = [samples, *samples.glob("*.json*")]
        assert runmirror.import_runs(paths, "wandb", rewinds=policy).ok  # type: ignore[arg-type]
        result = runmirror.verify(paths, "wandb", rewinds=policy)  # type: ignore[arg-type]
        assert result.ok, result.runs
        totals = result.totals()
        assert totals["matching"] == totals["points"] > 1000
        assert (totals["known"]["superseded"] > 0) == (policy == "last") or totals["known"]["superseded"] == 0


@pytest.mark.slow
def test_every_shape_of_log_arrives_whole(server: WandbServer, tmp_path: Path) -> None:
    """Files too: config and checkpoints by default, all kinds when asked for. Imported again, nothing is written."""
    logs = tmp_path / "logs"
    flat_log(logs / "flat")
    nested_log(logs / "nested")
    write_rows(logs / "async" / "metrics.jsonl", async_rows())
    odd = [{"step": n, "nan": math.nan, "inf": math.inf, "minus": -math.inf, "big": 2**70, "t": "x"} for n in range(3)]
    write_rows(logs / "resumed" / "metrics.jsonl", [*resumed_rows(), *odd])
    assert runmirror.import_runs([logs], "wandb").ok
    result = runmirror.verify([logs], "wandb")
    assert result.ok, result.runs
    assert result.totals()["matching"] == result.totals()["points"]
    flat = next(one for one in server.of(tmp_path.name) if one.name == "flat")
    assert flat.files.keys() >= {"config.json", "checkpoints.jsonl"}
    assert flat.fields["groupName"] == "logs"
    assert "code.diff" not in flat.files
    server.requests.clear()
    assert runmirror.import_runs([logs], "wandb").ok
    assert not {"UpsertBucket", "file_stream", "upload"} & set(server.requests)
    every = {
        "records": ["config", "checkpoints", "code", "report", "logtree", "rollouts"],
        "project": tmp_path.name + "x",
    }
    assert runmirror.import_runs([logs / "nested"], "wandb", every).ok
    files = server.run(tmp_path.name + "x").files
    assert files.keys() >= {"code.diff", "iteration_000008/train_logtree.json", "config.json"}
    assert files["code.diff"] == (logs / "nested" / "code.diff").read_bytes()


# -- exactly once


@pytest.mark.slow
def test_stopped_and_resumed_at_every_line(server: WandbServer, tmp_path: Path) -> None:
    """A log of 60 lines with a rewind, delivered line by line: a new Mirror, a new sink and a resumed W&B run for each."""
    lines = [train_row(n) for n in range(40)] + [train_row(n, 0.5) for n in range(20, 40)]
    for end in range(1, len(lines) + 1):
        write_rows(tmp_path / "run" / "metrics.jsonl", lines[:end])
        (done,) = runmirror.import_runs([tmp_path / "run"], "wandb", rewinds="all", patience=20).runs
        assert (done.rows, done.error) == (1, None)
    held = server.run(tmp_path.name)
    assert (steps(held), held.replaced, held.creations) == (list(range(60)), 0, 1)
    result = runmirror.verify([tmp_path / "run"], "wandb", rewinds="all")
    assert result.ok
    assert result.totals()["matching"] == 60 * 10


@pytest.mark.slow
def test_a_log_that_is_cut_and_grows(server: WandbServer, tmp_path: Path) -> None:
    """As some frameworks do at a resume: rows 20 to 29 vanish and others come. Every row that ever was is there once."""
    path = tmp_path / "run" / "metrics.jsonl"
    for lines in ([train_row(n) for n in range(30)], [train_row(n) for n in range(20)]):
        write_rows(path, lines)
        assert runmirror.import_runs([path.parent], "wandb", rewinds="all").ok
    write_rows(path, [train_row(n) for n in range(20)] + [train_row(n, 0.5) for n in range(20, 40)])
    assert runmirror.import_runs([path.parent], "wandb", rewinds="all").ok
    held = server.run(tmp_path.name)
    assert steps(held) == list(range(50))
    assert [row["step"] for row in held.history] == [*range(30), *range(20, 40)]
    assert runmirror.import_runs([path.parent], "wandb", rewinds="all").runs[0].rows == 0


@pytest.mark.slow
def test_an_outage_delays_and_loses_nothing(server: WandbServer, tmp_path: Path) -> None:
    """A 503 from the upload, a dropped connection and a torn answer: wandb tries again, each row is there once."""
    faults = [Fault("file_stream", status=503, times=1), Fault("file_stream", drop=True, times=1)]
    server.faults += [*faults, Fault("file_stream", truncate=True, times=1)]
    deliver(make(), rows(50))
    assert [fault.seen for fault in faults] == [1, 1]
    assert steps(server.run(tmp_path.name)) == list(range(50))


@pytest.mark.slow
def test_a_404_moves_nothing(server: WandbServer, tmp_path: Path) -> None:
    """wandb reports success; the sink a Retry that says how many rows are shown and what wandb printed. The next open is
    at 0."""
    server.faults.append(Fault("file_stream", status=404))
    sink = make()
    sink.open(a_run(), None)
    sink.put(rows(4))
    with pytest.raises(Retry, match=r"0 of 4 rows.*Fatal error"):
        sink.flush(20)
    write_rows(tmp_path / "run" / "metrics.jsonl", [train_row(n) for n in range(4)])
    (run,) = runmirror.import_runs([tmp_path / "run"], "wandb", patience=0).runs
    assert (run.state, "of 4 rows" in str(run.error)) == ("behind", True)
    assert runmirror.plan([tmp_path / "run"], "wandb")[0].rows == 4
    server.faults.clear()
    deliver(sink, rows(4))
    assert runmirror.import_runs([tmp_path / "run"], "wandb").ok
    assert [steps(one) for one in server.of(tmp_path.name)] == [[0, 1, 2, 3]] * 2


@pytest.mark.slow
def test_rows_that_were_lost_on_the_way_are_seen(
    server: WandbServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last row is there and one in the middle is not: refused, for W&B takes no earlier row, and never "complete"."""
    monkeypatch.setattr("runmirror.sinks.wandb.SETTLE_SECONDS", 0.5)
    deliver(make(), rows(6))
    held = server.run(tmp_path.name)
    del held.lines[2]
    with pytest.raises(Refused, match="row 6 but only 5 rows"):
        make().open(ENDED, None)


@pytest.mark.slow
def test_a_replay_from_zero_is_harmless(server: WandbServer, tmp_path: Path) -> None:
    """Should all position be lost: wandb itself drops rows that the server has."""
    deliver(make(), rows(20))
    worker, sink = take(server.url), make()
    held = server.run(tmp_path.name)
    path = f"me/{tmp_path.name}/{sink._run_id(ENDED)}"
    assert worker.call("init", (path, {}, [{}], {"mirrored": 1.0}, None), 30)["position"] == 20
    worker.call("put", ([(one.ordinal, row_data(one)[0]) for one in rows(25)], {}, {}), 30)
    worker.call("end", ({"mirrored": 1.0}, 0, path, 25), 30)
    worker.call("ended", (10,), 20)
    worker.end()
    assert (steps(held), held.replaced) == (list(range(25)), 0)
    assert [row["entropy"] for row in held.history] == [one.data["entropy"] for one in rows(25)]


@pytest.mark.slow
def test_two_states_reach_one_run(
    server: WandbServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wandb_home: Path
) -> None:
    """The id needs no state: another RUNMIRROR_HOME goes on with the same run, where it is."""
    path = write_rows(tmp_path / "run" / "metrics.jsonl", [train_row(n) for n in range(5)])
    assert runmirror.import_runs([path.parent], "wandb").runs[0].rows == 5
    monkeypatch.setenv("RUNMIRROR_HOME", str(tmp_path / "elsewhere"))
    write_rows(path, [train_row(n) for n in range(8)])
    (run,) = runmirror.import_runs([path.parent], "wandb").runs
    wandb_process.end_idle()
    monkeypatch.setenv("RUNMIRROR_HOME", str(wandb_home))
    assert runmirror.import_runs([path.parent], "wandb").runs[0].rows == 0
    assert run.rows == 3
    assert steps(server.run(tmp_path.name)) == list(range(8))


@pytest.mark.slow
def test_the_best_value_is_in_the_summary_when_asked(server: WandbServer, tmp_path: Path) -> None:
    """The highest reward beside the last; a key the catalogue doesn't know is as ever, and so are the rows."""
    rows = [
        {"step": n, "_timestamp": 1.7e9 + n, "reward": reward, "mine": n} for n, reward in enumerate((0.1, 0.9, 0.4))
    ]
    write_rows(tmp_path / "run" / "metrics.jsonl", rows)
    assert runmirror.import_runs([tmp_path / "run"], "wandb", {"best": True}).ok
    held = server.run(tmp_path.name)
    assert held.summary["reward"] == {"max": 0.9, "last": 0.4}
    assert held.summary["mine"] == 2
    assert [row["reward"] for row in held.history] == [0.1, 0.9, 0.4]


# -- others are not touched


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [Fault("UpsertBucket", status=403, times=1), Fault("UpsertBucket", delay=20.0, times=1)]
)
def test_init_refused_or_silent_costs_one_run(
    server: WandbServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    """The other run of the import arrives; the same command brings the first one later."""
    monkeypatch.setattr("runmirror.sinks.wandb.OPEN_SECONDS", 8.0)
    fault.seen = 0
    server.faults.append(fault)
    for name in ("a", "b"):
        write_rows(tmp_path / name / "metrics.jsonl", [train_row(n) for n in range(3)])
    work = [tmp_path / "a", tmp_path / "b"]
    first = runmirror.import_runs(work, "wandb", patience=0).runs
    assert [run.state for run in first] == ["broken" if fault.status else "behind", "complete"]
    assert ("needs you" if fault.status else "did not return") in str(first[0].error)
    assert [run.rows for run in runmirror.import_runs(work, "wandb").runs] == [3, 0]
    assert [steps(one) for one in server.of(tmp_path.name)] == [[0, 1, 2]] * 2


@pytest.mark.slow
def test_two_runs_in_turns(server: WandbServer, tmp_path: Path) -> None:
    """Two sinks of one process, row by row: each run has its own."""
    runs = [replace(ENDED, run_id=name) for name in ("left", "right")]
    sinks = [make(), make()]
    for sink, run in zip(sinks, runs, strict=True):
        sink.open(run, None)
    for n in range(6):
        for number, sink in enumerate(sinks):
            sink.put([a_row(n, {"loss": 10.0 * number + n})])
    for sink, run in zip(sinks, runs, strict=True):
        assert sink.flush(30) == 6
        sink.close(run, 30)
    shown = sorted([row["loss"] for row in one.history] for one in server.of(tmp_path.name))
    assert shown == [[float(n) for n in range(6)], [10.0 + n for n in range(6)]]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_copy_is_no_mirror(server: WandbServer, tmp_path: Path) -> None:
    """It ends, cleaning up as Python does, and the parent's run goes on; a copy that lives on keeps no process alive."""
    sink = make()
    sink.open(ENDED, None)
    sink.put(rows(2))
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            sink.close(ENDED, 1)
            del sink
            wandb_process.end_idle()
            code = 0
        except Retry:
            code = 0  # the run is not this process's
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    sink.put(rows(4)[2:])
    assert sink.flush(30) == 4
    sink.close(ENDED, 30)
    assert steps(server.run(tmp_path.name)) == [0, 1, 2, 3]


@pytest.mark.slow
def test_nothing_is_littered(
    server: WandbServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wandb_home: Path
) -> None:
    """No file in the working directory, the temporary folder or the user's home; the run's own folder goes with it."""
    places = [tmp_path / name for name in ("work", "tmp", "user")]
    for place, name in zip(places, ("PWD", "TMPDIR", "HOME"), strict=True):
        place.mkdir()
        monkeypatch.setenv(name, str(place))
    monkeypatch.chdir(places[0])
    wandb_process.end_idle()
    deliver(make(), rows(3))
    (folder,) = (wandb_home / "wandb").iterdir()
    assert not (folder / "wandb").exists()
    wandb_process.end_idle()
    assert [list(place.rglob("*")) for place in places] == [[], [], []]
    assert list((wandb_home / "wandb").iterdir()) == []


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks into /proc")
def test_a_core_that_was_left_is_ended(server: WandbServer, tmp_path: Path) -> None:
    """The worker was killed and its mirror too (its lock is free): the next worker ends wandb's own process, by its recorded
    id, and removes the folder. A process that got that id later is left alone."""
    left = WandbProcess(server.url)
    left.call("viewer", (), 30)
    (core,) = map(int, (left.folder / "cores").read_text().split())
    os.kill(core, signal.SIGSTOP)  # one that hangs, for others see for themselves that their parent is gone
    os.kill(int((left.folder / "worker").read_text()), signal.SIGKILL)
    until = time.monotonic() + 20
    while alive(int((left.folder / "worker").read_text())) and time.monotonic() < until:
        time.sleep(0.01)
    assert alive(core)
    (left.folder / "cores").write_text(f"{core}\n{os.getpid()}\n")
    left._lock.release()
    WandbProcess(server.url).end()
    assert (alive(core), left.folder.exists()) == (False, False)


@pytest.mark.slow
def test_a_lost_mirror_takes_all_with_it(server: WandbServer, tmp_path: Path) -> None:
    """Its side of the socket is gone: the worker, wandb's own process and the folder go within seconds."""
    worker = WandbProcess(server.url)
    worker.call("viewer", (), 30)
    (core,) = map(int, (worker.folder / "cores").read_text().split())
    worker._peer.close()
    until = time.monotonic() + 20
    while (alive(core) or worker.folder.exists()) and time.monotonic() < until:
        time.sleep(0.05)
    assert (alive(core), worker.folder.exists()) == (False, False)


@pytest.mark.slow
def test_missing_credentials_are_named(server: WandbServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No prompt, no hang: Refused, and a problem for ``runmirror doctor``."""
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(Refused, match=r"(?i)api.?key"):
        make().open(ENDED, None)
    (check,) = make().check()
    assert (check.ok, "WANDB_API_KEY" in check.fix) == (False, True)


# -- live


def test_a_run_that_is_open_here_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its group is joined and its id told to people; so is what ``WANDB_RUN_ID`` names."""
    import sys
    from types import SimpleNamespace

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=SimpleNamespace(id="mine", group="ours")))
    options = WandbOptions.model_validate({})
    assert (options.beside, options.group) == ("mine", "ours")
    assert "run mine is left alone" in WandbSink(options)._note()
    assert WandbOptions.model_validate({"group": "mine"}).group == "mine"
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=None))
    monkeypatch.setenv("WANDB_RUN_ID", "named")
    assert WandbOptions.model_validate({}).beside == "named"
