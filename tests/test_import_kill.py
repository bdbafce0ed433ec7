"""SIGKILL of a real ``runmirror import``, at every failpoint and at random moments."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from runmirror import failpoints
from runmirror.importer import import_runs
from tests.forked import command, forked
from tests.logs import flat_log, nested_log, resumed_rows, train_row, write_rows
from tests.test_importer import tree

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name != "posix", reason="SIGKILL")]


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs with files, a rewind and enough rows for a kill to fall among them."""
    folder = tmp_path_factory.mktemp("logs")
    flat_log(folder / "flat")
    nested_log(folder / "nested")
    write_rows(folder / "resumed" / "metrics.jsonl", resumed_rows())
    for name in ("long", "longer"):
        rows = ({k: v + n for k, v in train_row(step).items()} | {"step": step} for step in range(3000) for n in [step])
        write_rows(folder / name / "metrics.jsonl", rows)
    return folder


@pytest.fixture(scope="module")
def undisturbed(logs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The event files of an import that nobody killed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    os.environ["RUNMIRROR_HOME"] = str(folder / "home")
    assert import_runs([logs], "tensorboard", {"logdir": str(folder / "tb")}, patience=0).ok
    return tree(folder / "tb")


def run(logs: Path, folder: Path, failpoint: str = "", kill_after: float | None = None, *, end: int = 0) -> int:
    """The exit code of an import of the logs into ``folder``: ``end`` unless it was killed."""
    folder.mkdir(exist_ok=True)
    arguments = ["import", str(logs), "--to", "tensorboard", "--logdir", str(folder / "tb")]
    more = {failpoints.VARIABLE: failpoint} if failpoint else {}
    process = forked(command, arguments, folder / "home", folder / "said", **more)
    if kill_after is not None:
        # the moment counts from the first byte in the logdir: before that nothing is at stake
        deadline = time.monotonic() + 60
        while process.is_alive() and time.monotonic() < deadline and not any((folder / "tb").rglob("events.*")):
            time.sleep(0.001)
        process.join(kill_after)
        process.kill()
    process.join(120)
    assert process.exitcode in (end, -signal.SIGKILL), (folder / "said").read_text()
    return process.exitcode


@pytest.mark.parametrize("name", failpoints.NAMES)
def test_killed_at_a_failpoint(name: str, logs: Path, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    """The same bytes as undisturbed, after being killed at the first and then at a later hit of it."""
    assert run(logs, tmp_path, f"{name}:1") == -signal.SIGKILL
    run(logs, tmp_path, f"{name}:3")
    assert run(logs, tmp_path) == 0
    assert tree(tmp_path / "tb") == undisturbed


@pytest.mark.parametrize(("name", "end"), [("after-put", 3), ("after-flush", 0), ("before-state", 3)])
def test_keys_refused_before_a_kill_are_listed_once(name: str, end: int, tmp_path: Path) -> None:
    """The rows are in the tracker and are not put again; what it refused of them is listed all the same, and the import says
    so that lists it."""
    logs = tmp_path / "logs"
    rows = [{"step": n, "loss": 1.0} | ({"_hparams_/x": 1.0, "runmirror/x": 2.0} if n % 2 else {}) for n in range(1500)]
    write_rows(logs / "run" / "metrics.jsonl", [row | {"hparams": 1.0} for row in rows])
    assert run(logs, tmp_path, f"{name}:1") == -signal.SIGKILL
    assert run(logs, tmp_path, end=end) == end
    (listed,) = (tmp_path / "home").rglob("*.rejected.jsonl")
    found = [json.loads(line) for line in listed.read_text().splitlines()]
    assert [(one["ordinal"], one["key"], one["data"]) for one in found] == [
        (n, "runmirror/x", {"runmirror/x": 2.0}) for n in range(1, 1500, 2)
    ]
    (state,) = (tmp_path / "home" / "runs").rglob("tensorboard-*.json")
    assert json.loads(state.read_text())["rejected"] <= 750


def test_killed_at_random_moments(logs: Path, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    """The same bytes as undisturbed after each of 50 kills and a re-run; several kills hit one import."""
    moment, killed, took = random.Random(7), 0, 0.0
    for number in range(100):
        folder = tmp_path / str(number)
        for _ in range(2 if took and killed < 50 else 0):
            killed += run(logs, folder, kill_after=moment.uniform(0.0, 0.9 * took)) == -signal.SIGKILL
        began = time.monotonic()
        assert run(logs, folder) == 0
        took = took or time.monotonic() - began
        assert tree(folder / "tb") == undisturbed
        shutil.rmtree(folder)
        if killed >= 50:
            break
    assert killed >= 50
