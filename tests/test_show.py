"""``runmirror show`` and its library: what is told of runs, and that telling it writes nothing."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import runmirror
from runmirror.cli.show import draw, how_long, redraw, sparkline
from runmirror.find import find_runs, open_run
from runmirror.importer import import_runs
from runmirror.log.rows import START
from runmirror.log.runlog import RunLog
from runmirror.show import CURVE, ShownRun, Watch, differences, shorten, show_runs
from runmirror.state import MirrorState
from tests.logs import async_rows, flat_log, nested_log, resumed_rows, train_row, write_rows
from tests.test_cli import runmirror as run_cli

TOTAL = "env/all/reward/total"


def write_run(folder: Path, rows: int = 3, config: dict[str, Any] | None = None, **start: Any) -> Path:
    with runmirror.start(folder, config, code=False, **start) as run:
        for step in range(rows):
            run.log_metrics({TOTAL: step / 2, "entropy": 1.0})
    return folder


def mirrored(folder: Path, tmp_path: Path) -> Path:
    assert import_runs([folder], "tensorboard", {"logdir": str(tmp_path / "tb")}).ok
    return folder


def one(path: Path, **options: Any) -> ShownRun:
    (run,) = show_runs([path], **options)
    return run


def text(runs: list[ShownRun], width: int = 160, **options: bool) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(draw(runs, width, **options))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def everything(folder: Path) -> set[tuple[str, int, int]]:
    """Every file and folder below, with its size and modification time."""
    found = [(path, path.lstat()) for path in folder.rglob("*")]
    return {(str(path), stat.st_size if path.is_file() else 0, stat.st_mtime_ns) for path, stat in found}


def test_a_run_of_ours(tmp_path: Path) -> None:
    """Rows, step, status, reward with its course, config and checkpoints of a run written by ``start``."""
    with runmirror.start(tmp_path / "run", {"lr": 1e-5}, code=False) as run:
        for step in range(4):
            run.log_metrics({TOTAL: step / 2, "entropy": 1.0, "note": "x"})
        run.log_checkpoint("000002", batch=2)
        run.log_checkpoint("000003", batch=3)
    shown = one(tmp_path / "run")
    assert (shown.last_step, shown.status, shown.status_known) == (3, "finished", True)
    assert (shown.rows, shown.broken_lines, shown.source) == (4, 0, "runmirror")
    assert (shown.reward_key, shown.reward, shown.curve) == (TOTAL, 1.5, [0.0, 0.5, 1.0, 1.5])
    assert (shown.config, shown.checkpoints, shown.latest_checkpoint) == ({"lr": 1e-5}, 2, "000003")
    assert (shown.keys, shown.groups, shown.sinks) == (3, {"env": 1}, [])
    assert shown.start is not None
    assert shown.start <= (shown.last_row or 0) <= (shown.end or 0) <= time.time()


def test_logs_of_other_tools(tmp_path: Path) -> None:
    """Both layouts, late evaluations and a resume: highest step, the reward's last values, rollout files by kind."""
    flat_log(tmp_path / "flat")
    nested_log(tmp_path / "nested")
    write_rows(tmp_path / "late" / "metrics.jsonl", async_rows())
    write_rows(tmp_path / "resumed" / "metrics.jsonl", resumed_rows())
    runs = {run.name: run for run in show_runs([tmp_path], details=True)}
    assert {name: run.last_step for name, run in runs.items()} == {"flat": 11, "late": 9, "nested": 12, "resumed": 8}
    assert runs["flat"].rollout_files == {"report": 2, "logtree": 2, "rollouts": 2}
    assert runs["nested"].rollout_files == {"logtree": 3}
    assert (runs["flat"].source, runs["late"].source) == ("tinker-cookbook", "metrics")
    assert pytest.approx(runs["resumed"].curve) == [0.0, 0.1, 0.2, 0.3, 0.9, 1.0, 1.1, 1.2, 1.3]
    assert (runs["resumed"].status, runs["resumed"].status_known) == ("killed", False)


def test_nothing_is_written(tmp_path: Path) -> None:
    """Not a file, not a folder, not a modification time: neither in the logs nor in RUNMIRROR_HOME, nor by --json."""
    flat_log(tmp_path / "runs" / "foreign")
    write_run(tmp_path / "runs" / "own")
    before = everything(tmp_path)
    assert not (tmp_path / "home").exists()
    show_runs([tmp_path / "runs"], details=True)
    run_cli("show", "runs", "--json", cwd=tmp_path)
    assert before == everything(tmp_path)


@pytest.mark.parametrize("own", [True, False])
def test_sinks_and_how_far_they_are(tmp_path: Path, own: bool) -> None:
    """0 behind after an import, N after N more rows, whether the state is in the log or in RUNMIRROR_HOME."""
    folder = write_run(tmp_path / "run", 5) if own else flat_log(tmp_path / "run", 5)
    mirrored(folder, tmp_path)
    (sink,) = one(folder).sinks
    assert (sink.sink, sink.destination) == ("tensorboard", str(tmp_path / "tb"))
    assert (sink.rows, sink.behind, sink.closed) == (5, 0, "finished")
    assert sink.url == str(tmp_path / "tb" / "run")
    with open(folder / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(train_row(step)) + "\n" for step in (5, 6))
    assert [sink.behind for sink in one(folder).sinks] == [2]
    assert "tensorboard 2 behind" in text(show_runs([folder, write_run(tmp_path / "other")]))


def test_an_archive_known_by_its_content(tmp_path: Path) -> None:
    """The cursor of an import with ``--identity content`` is found too."""
    folder = flat_log(tmp_path / "run")
    arguments = ["--to", "tensorboard", "--identity", "content"]
    done = run_cli("import", "run", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [sink.behind for sink in one(folder).sinks] == [0]


def test_rejected_rows_errors_and_secrets(tmp_path: Path) -> None:
    """Rejected counts and the last error of a sink are told; credentials in URLs and configs are not."""
    folder = write_run(tmp_path / "run", 3)
    (folder / "config.json").write_text(json.dumps({"api_key": "hunter22", "model": {"name": "tiny"}}))
    source, place = open_run(find_runs([folder])[0])
    state = MirrorState(place, "wandb", source.identity.run_id, "https://me:secret99@host/x", "last")
    rows = list(source.rows(START))
    state.record.position = rows[0].position
    state.record.last_error = "Retry: https://me:secret99@host/x answers 503"
    state.reject([{"ordinal": 0, "key": "a", "reason": "too long"}])
    state.save()
    state.close()
    shown = one(folder)
    assert [(sink.rows, sink.behind, sink.rejected) for sink in shown.sinks] == [(1, 2, 1)]
    printed = text([shown]) + text([shown, shown]) + json.dumps(shown.as_dict())
    assert "1 rejected" in printed
    assert "answers 503" in printed
    assert "secret99" not in printed
    assert "hunter22" not in printed


def test_a_log_that_was_changed_below_the_cursor(tmp_path: Path) -> None:
    """``behind`` is None: only the next mirror can tell."""
    folder = mirrored(flat_log(tmp_path / "run", 5), tmp_path)
    write_rows(folder / "metrics.jsonl", [train_row(step, 0.5) for step in range(5)])
    assert [sink.behind for sink in one(folder).sinks] == [None]
    assert "log changed" in text(show_runs([folder]))


def test_state_that_cannot_be_used(tmp_path: Path) -> None:
    """Damaged state is left out; one of a newer version is named with its error; a copied log has none of its own."""
    folder = mirrored(write_run(tmp_path / "run"), tmp_path)
    shutil.copytree(folder, tmp_path / "copy")
    assert one(tmp_path / "copy").sinks == []
    (state,) = (folder / ".runmirror" / "mirror").glob("tensorboard-*.json")
    state.write_text('{"format": 99}')
    (state.parent / "wandb-0123456789ab.json").write_text("{torn")
    (sink,) = one(folder).sinks
    assert (sink.behind, "state format 99" in (sink.last_error or "")) == (None, True)


def test_a_run_that_cannot_be_read_is_a_line(tmp_path: Path) -> None:
    """Exit 3, the reason in one line, the other run in the table."""
    write_run(tmp_path / "runs" / "good")
    broken = tmp_path / "runs" / "bad"
    (broken / ".runmirror").mkdir(parents=True)
    (broken / ".runmirror" / "run.json").write_text("{}")
    (broken / "metrics.jsonl").mkdir()
    done = run_cli("show", "runs", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (3, "")
    assert "bad: IsADirectoryError" in done.stdout
    assert re.search(r"(?m)^good +finished +3 +2 +1 ", done.stdout)


def test_an_empty_run_and_broken_lines(tmp_path: Path) -> None:
    """A run before its first row has no step, reward or age; broken lines are counted and named."""
    run = runmirror.start(tmp_path / "run", code=False)
    shown = one(tmp_path / "run")
    assert (shown.rows, shown.last_step, shown.reward, shown.last_row) == (0, None, None, None)
    assert shown.status == "running"
    assert "running" in text([shown]) + text([shown, shown])
    run.finish()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 0, "a": 1}\n{broken\n')
    shown = one(tmp_path / "run")
    assert (shown.rows, shown.broken_lines) == (1, 1)
    assert "1 broken line" in text([shown])


@pytest.mark.parametrize(
    ("keys", "chosen"),
    [
        (["reward_std", "rewards/a/mean", "reward"], "reward"),
        (["reward", TOTAL], TOTAL),
        (["loss", "objective/rlhf_reward", "objective/scores"], "objective/scores"),
        (["reward_model/lr", "env/math/reward/total"], "env/math/reward/total"),
        (["reward_std", "my_Reward"], "my_Reward"),
        (["loss", "_reward"], None),
    ],
)
def test_the_main_reward(tmp_path: Path, keys: list[str], chosen: str | None) -> None:
    """The first of the usual keys, wherever it stands and whenever it first comes; ``--key`` overrides."""
    write_rows(tmp_path / "run" / "metrics.jsonl", [{"step": n, key: n} for n, key in enumerate(keys)])
    assert chosen == one(tmp_path / "run").reward_key
    assert (keys[0], 0.0) == (one(tmp_path / "run", key=keys[0]).reward_key, one(tmp_path / "run", key=keys[0]).reward)


def test_nan_rewards(tmp_path: Path) -> None:
    """The last value is told as it is; strict JSON has it as text; the course leaves a gap."""
    with runmirror.start(tmp_path / "run", code=False) as run:
        for value in (0.0, math.nan, 1.0, math.inf):
            run.log_metrics({"reward": value})
    shown = one(tmp_path / "run")
    assert math.inf == shown.reward
    assert json.loads(json.dumps(shown.as_dict(), allow_nan=False))["curve"] == [0.0, "nan", 1.0, "inf"]
    assert sparkline(shown.curve, 10) == "▁ █ "


def test_a_long_curve_is_shortened() -> None:
    """At most the length asked, by means; a stretch without finite values stays so."""
    assert shorten([0, 1, 2, 3, 4, 5], 3) == [0.5, 2.5, 4.5]
    assert shorten([1.0, math.nan, math.inf, 3.0], 2) == [1.0, 3.0]
    assert math.isnan(shorten([math.nan] * 4, 2)[0])
    assert len(shorten([1.0] * 100_001, CURVE)) == CURVE


@pytest.mark.parametrize("values", [[], [1.0], [math.nan], [2.0, 2.0], [-1e308, 1e308], [5e-324, 0.0]])
def test_a_sparkline_of_anything(values: list[float]) -> None:
    """A character per value; none of these raises."""
    assert len(values) == len(sparkline(values, 8))


def test_differences_of_configs(tmp_path: Path) -> None:
    """Only keys that differ, nested ones as a.b.c; a missing key is no value; equal configs differ in nothing."""
    model = {"name": "tiny", "rank": 8}
    write_run(tmp_path / "runs" / "a", config={"lr": 1, "model": model, "seed": 1})
    write_run(tmp_path / "runs" / "b", config={"lr": 2, "model": model | {"rank": 16}, "seed": 1})
    write_run(tmp_path / "runs" / "c", config={"lr": 1, "model": model, "seed": 1, "note": None})
    runs = show_runs([tmp_path / "runs"])
    expected = {"lr": {"a": 1, "b": 2, "c": 1}, "model.rank": {"a": 8, "b": 16, "c": 8}, "note": {"c": None}}
    assert expected == differences(runs)
    assert "seed" not in text(runs, diff_config=True)
    assert re.search(r"(?m)^model.rank +8 +16 +8", text(runs, diff_config=True))
    assert "no config key differs" in text(runs[:1], diff_config=True)
    done = run_cli("show", "runs", "--diff-config", "--json", cwd=tmp_path)
    assert expected == json.loads(done.stdout)


@pytest.mark.parametrize("runs", [2, 20])
@pytest.mark.parametrize("keys", [1, 30])
def test_differences_fit_the_terminal(runs: int, keys: int) -> None:
    """2 to 20 runs, few or many keys, 60 columns: every value is there, no line is longer, runs are named in each part."""
    shown = [
        ShownRun("", f"run-{n:02d}", config={f"group.key_{k}": f"value-{n}-{k}" for k in range(keys)})
        for n in range(runs)
    ]
    lines = text(shown, 60, diff_config=True).splitlines()
    assert max(map(len, lines)) <= 60
    words = set(" ".join(lines).split())
    assert {f"value-{n}-{k}" for n in range(runs) for k in range(keys)} <= words
    assert {run.name for run in shown} | {f"group.key_{k}" for k in range(keys)} <= words


@pytest.mark.parametrize("width", [20, 60, 80, 120])
def test_any_terminal_and_any_name(tmp_path: Path, width: int) -> None:
    """Unicode, very long and hostile names, at any width: nothing raises, and nothing of it steers the terminal."""
    names = ["größe-✓-数据", "x" * 120, "\x1b[2Jred\x07", "[bold]not markup[/bold]"]
    for name in names:
        write_run(tmp_path / "runs" / name, config={f"\x1b[0m{name}": "\x1b]0;title\x07"})
    runs = show_runs([tmp_path / "runs"])
    assert len(names) == len(runs)
    printed = "".join([text(runs, width), text(runs, width, diff_config=True), *(text([run], width) for run in runs)])
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", printed)
    if width >= 60:
        assert "größe-✓" in printed
        assert "[bold]" in printed


def test_the_command_line_at_60_columns(tmp_path: Path) -> None:
    """Exit 0; no line is longer than the terminal."""
    flat_log(tmp_path / "runs" / "a_run_with_a_rather_long_name_in_it")
    write_run(tmp_path / "runs" / "b")
    command = [sys.executable, "-m", "runmirror", "show", "runs"]
    environment = os.environ | {"COLUMNS": "60"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert max(map(len, done.stdout.splitlines())) <= 60


def test_errors_of_the_command_line(tmp_path: Path) -> None:
    """1 for a path without runs, 2 for --watch with --json."""
    assert "nowhere does not exist" in run_cli("show", "nowhere", cwd=tmp_path).stderr
    done = run_cli("show", "nowhere", "--watch", "--json", cwd=tmp_path)
    assert (done.returncode, "--watch" in done.stderr) == (2, True)


def test_a_watch_reads_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that came since are read and no others; a new run, and one that was replaced, are seen."""
    read: list[int] = []
    monkeypatch.setattr(RunLog, "rows", _counting(RunLog.rows, read))
    write_rows(tmp_path / "a" / "metrics.jsonl", [train_row(step) for step in range(5)])
    watch = Watch([tmp_path])
    assert [run.rows for run in watch.read()] == [5]
    with open(tmp_path / "a" / "metrics.jsonl", "a") as file:
        file.write(json.dumps(train_row(5)) + "\n")
    assert [run.rows for run in watch.read()] == [6]
    assert len(read) == 6
    write_run(tmp_path / "b")
    write_rows(tmp_path / "a" / "metrics.jsonl", [train_row(step, 1.0) for step in range(7)])
    assert [(run.name, run.rows, len(run.curve)) for run in watch.read()] == [("a", 7, 7), ("b", 3, 3)]
    shutil.rmtree(tmp_path / "a")
    assert [run.name for run in watch.read()] == ["b"]


def _counting(rows: Any, read: list[int]) -> Any:
    def counted(self: RunLog, after: Any) -> Any:
        for row in rows(self, after):
            read.append(row.ordinal)
            yield row

    return counted


def test_redraw_without_a_terminal() -> None:
    """Each drawing below the last."""
    console = Console(file=io.StringIO(), width=80)
    numbers = iter(range(5))
    redraw(lambda width: f"drawing {next(numbers)} in {width}", 0.0, console, times=2)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().split("\n")[:2] == ["drawing 0 in 80", "drawing 1 in 80"]


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals")
def test_watch_in_a_terminal(tmp_path: Path) -> None:
    """It shows a row that was written after it started, and ends with exit code 0 at Ctrl-C."""
    import pty

    run = runmirror.start(tmp_path / "run", code=False)
    run.log_metrics({"reward": 0.125})
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "runmirror", "show", "run", "--watch", "--interval", "0.1"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    assert "0.125" in _read_until(master, "0.125")
    run.log_metrics({"reward": 0.375})
    assert "0.375" in _read_until(master, "0.375")
    process.send_signal(signal.SIGINT)
    _read_until(master, "never")
    assert process.wait(timeout=30) == 0
    run.finish()
    os.close(master)


def _read_until(master: int, wanted: str) -> str:
    seen, deadline = b"", time.monotonic() + 30
    while wanted.encode() not in seen and time.monotonic() < deadline:
        try:
            chunk = os.read(master, 65536)
        except OSError:  # the other end is closed
            break
        if not chunk:
            break
        seen += chunk
    return seen.decode(errors="replace")


@pytest.mark.parametrize(
    ("seconds", "told"), [(0, "0 s"), (99, "99 s"), (300, "5 min"), (3 * 3600, "3.0 h"), (4 * 86400, "4 d")]
)
def test_how_long(seconds: float, told: str) -> None:
    """Rounded to what a person says."""
    assert told == how_long(seconds)
