"""What people see: a real ``tensorboard`` server, with both of its loaders, over HTTP."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runmirror.log.rows import Row
from runmirror.sinks import event_file
from runmirror.sinks.event_reader import read_points
from tests.servers.tensorboard import TensorBoardServer, tensorboard_server

from .runs import START, Shown, eventful_rows, file, make_run, make_sink, mirror, row, surviving

pytestmark = pytest.mark.slow

KEYS = ["größe", "a", "a/b", "a//b", "/x/", "..", "😀 & <b>", "x" * 10_000, "tab\tnul\0", "q?=#%", "loss:sum"]


def plain_rows() -> list[Row]:
    return [row(at, at, {"loss": at / 4}) for at in range(40)]


def rewind_rows() -> list[Row]:
    """48 rows, then 40 to 59 again, with an evaluation in the abandoned stretch and one before it."""
    rows = [
        row(at, at, {"loss": at / 4} | ({"eval": float(at)} if at in (20, 30, 46) else {})) for at in range(48)
    ]  # fmt: skip
    again = [row(48 + at, 40 + at, {"loss": -at / 4}, 40 if at == 0 else None) for at in range(20)]
    return rows + again


def odd_rows() -> list[Row]:
    return [
        row(0, -5, {"nan": math.nan, "inf": math.inf, "big": 1e300}),
        row(1, 2**53, {"nan": 1.0, "inf": -math.inf, "big": -1e300}),
        row(2, 2**53 + 2, {key: float(at) for at, key in enumerate(KEYS)}),
        row(3, 2**53 + 3, {}, fault="broken"),
        row(4, 2**53 + 4, {"text": "hello"}),
    ]


RUNS = {"plain": plain_rows(), "rewind": rewind_rows(), "eventful": eventful_rows(), "odd": odd_rows()}


@pytest.fixture(scope="module")
def logdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A logdir with every run of the matrix, and one that goes on in a second segment."""
    logdir = tmp_path_factory.mktemp("logdir")
    for name, rows in RUNS.items():
        # A step beyond int32 in a run with hyperparameters breaks the HPARAMS tab (its API has an int32), so "odd" has none.
        config = None if name == "odd" else {"lr": 1e-4, "name": name, "deep": {"on": name == "plain"}}
        run = make_run(f"exp/{name}", config=config, end=START + 99)
        sink = make_sink(logdir)
        sink.open(run, None)
        sink.put_file(file("config.json", "config", b'{"lr": 0.0001}'))
        sink.put(rows)
        sink.put_file(file("checkpoints.jsonl", "checkpoints", b'{"name": "000004", "batch": 4}\n'))
        sink.close(None if name == "odd" else make_run(run.name, status="finished", end=START + 99), 5)
    mirror(logdir, rewind_rows()[:30], make_run("segments"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_file, "ENCODER", 2)
        mirror(logdir, rewind_rows(), make_run("segments"))
    return logdir


@pytest.fixture(scope="module", params=[True, False], ids=["fast", "python"])
def server(logdir: Path, request: pytest.FixtureRequest) -> Iterator[tuple[TensorBoardServer, bool]]:
    """The server, and whether it is the fast loader."""
    with tensorboard_server(logdir, load_fast=request.param) as server:
        # A run is there as soon as its first record is read; these have all been read when their last tags are there.
        server.wait(lambda: len(server.runs()) == len(RUNS) + 1)
        server.wait(
            lambda: len(server.points("exp/odd")) == 3 + len(KEYS) and "runmirror/text/text" in server.texts("exp/odd")
        )
        server.wait(lambda: len(server.points("exp/plain")["loss"]) == 40)
        for name in ("exp/rewind", "segments"):
            server.wait(lambda name=name: [at for _, at, _ in server.points(name).get("loss", [])] == list(range(60)))
        server.wait(lambda: "final/score" in server.points("exp/eventful"))
        yield server, request.param


def shown(server: TensorBoardServer, run: str) -> Shown:
    """tag -> step -> the last point drawn there."""
    points = {tag: {step: (at, value) for at, step, value in drawn} for tag, drawn in server.points(run).items()}
    return {tag: dict(sorted(found.items())) for tag, found in points.items() if found}


def same(left: Any, right: Any) -> bool:
    return repr(left) == repr(right)  # NaN included


def test_runs_are_named_as_their_logs(server: tuple[TensorBoardServer, bool]) -> None:
    """Their names below the logdir."""
    assert sorted(server[0].runs()) == ["exp/eventful", "exp/odd", "exp/plain", "exp/rewind", "segments"]


def test_plain_run(server: tuple[TensorBoardServer, bool]) -> None:
    """Exactly its points, in order, with their times."""
    assert server[0].points("exp/plain") == {"loss": [(START + at, at, at / 4) for at in range(40)]}


def test_descriptions(server: tuple[TensorBoardServer, bool]) -> None:
    """A metric's meaning is shown with it."""
    shown = server[0].get("/data/plugin/scalars/tags")["exp/plain"]
    assert "running loss" in shown["loss"]["description"]


@pytest.mark.parametrize("run", ["exp/rewind", "segments"])
def test_rewind(server: tuple[TensorBoardServer, bool], run: str) -> None:
    """60 points of one line, none of the abandoned stretch, of no metric; also across two segments."""
    expected = surviving(rewind_rows())
    assert len(expected["loss"]) == 60
    points = server[0].points(run)
    assert [step for _, step, _ in points["loss"]] == list(range(60))
    assert shown(server[0], run) == expected
    # The Python loader draws the evaluation that was written again twice, at the same place.
    assert [step for _, step, _ in points["eval"]] == ([20, 30] if server[1] else [20, 30, 30])


def test_eventful_run(server: tuple[TensorBoardServer, bool]) -> None:
    """What survived, in both loaders; the fast one also keeps metrics that had no point before the rewind."""
    expected = surviving(eventful_rows())
    found = shown(server[0], "exp/eventful")
    assert {tag: points for tag, points in found.items() if tag in expected} == expected
    assert set(found) - set(expected) == ({"eval/late", "only/once"} if server[1] else set())


def test_odd_keys_steps_and_numbers(server: tuple[TensorBoardServer, bool]) -> None:
    """Keys byte for byte, steps as they are, NaN and infinities, what float32 can't hold infinite."""
    expected: Shown = {
        "nan": {-5: (START, math.nan), 2**53: (START + 1, 1.0)},
        "inf": {-5: (START, math.inf), 2**53: (START + 1, -math.inf)},
        "big": {-5: (START, math.inf), 2**53: (START + 1, -math.inf)},
    }
    expected |= {key: {2**53 + 2: (START + 2, float(at))} for at, key in enumerate(KEYS)}
    found = shown(server[0], "exp/odd")
    assert set(found) == set(expected)
    assert all(same(found[key], expected[key]) for key in expected)


def test_our_reader_is_the_fast_loader(server: tuple[TensorBoardServer, bool], logdir: Path) -> None:
    """read_points gives what the fast loader shows, point for point."""
    if server[1]:
        for run in server[0].runs():
            assert same(dict(sorted(read_points(logdir / run).items())), server[0].points(run))


def test_files_and_texts(server: tuple[TensorBoardServer, bool]) -> None:
    """In the TEXT tab: the config fenced, the checkpoints as a table, a row's text."""
    texts = server[0].texts("exp/odd")
    assert "<code>" in texts["runmirror/config.json"][0]
    assert "<table>" in texts["runmirror/checkpoints.jsonl"][0]
    assert texts["runmirror/text/text"] == ["<p>hello</p>"]


def test_files_outlive_a_run_begun_afresh(tmp_path: Path) -> None:
    """A rewind to step 0 takes no text away in the Python loader."""
    sink = make_sink(tmp_path)
    sink.open(make_run(), None)
    sink.put_file(file("config.json", "config", b"{}"))
    sink.put([row(0, 0, {"loss": 1.0}), row(1, 1, {"loss": 2.0}), row(2, 0, {"loss": 3.0}, rewind=0)])
    sink.close(None, 5)
    with tensorboard_server(tmp_path, load_fast=False) as server:
        server.wait(lambda: server.points("run").get("loss") == [(START + 2, 0, 3.0)])
        assert server.points("run") == {"loss": [(START + 2, 0, 3.0)]}
        assert list(server.texts("run")) == ["runmirror/config.json"]


def test_hyperparameters(server: tuple[TensorBoardServer, bool]) -> None:
    """The config of each run as a row of the HPARAMS table, with types and status."""
    query = {
        "experimentName": "",
        "allowedStatuses": ["STATUS_SUCCESS"],
        "colParams": [],
        "startIndex": 0,
        "sliceSize": 9,
    }
    groups = server[0].post("/data/plugin/hparams/session_groups", query)["sessionGroups"]
    found = {
        session["name"]: (group["hparams"], session["status"]) for group in groups for session in group["sessions"]
    }
    assert found == {
        f"exp/{name}": ({"lr": 1e-4, "name": name, "deep.on": name == "plain"}, "STATUS_SUCCESS")
        for name in ("plain", "rewind", "eventful")
    }


@pytest.mark.parametrize("load_fast", [True, False], ids=["fast", "python"])
def test_torn_record_is_completed_while_a_server_watches(tmp_path: Path, load_fast: bool) -> None:
    """The server that has read the torn file shows every row once it was resumed."""
    rows = rewind_rows()
    folder = mirror(tmp_path / "whole", rows)
    (whole,) = event_file.event_files(folder)
    live = tmp_path / "live"
    path = mirror(live, rows[:10]) / whole.name
    path.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    with tensorboard_server(live, load_fast) as server:
        server.wait(lambda: len(server.points("run").get("loss", [])) > 20)
        mirror(live, rows)
        server.wait(lambda: shown(server, "run") == surviving(rows))
        assert shown(server, "run") == surviving(rows)
    assert path.read_bytes() == whole.read_bytes()
