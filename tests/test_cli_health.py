"""``runmirror health``, and findings that ``runmirror mirror`` tells."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from runmirror.cli import app
from runmirror.follow import Follower
from runmirror.targets import parse_targets
from tests.logs import flat_log, train_row, write_rows

NAN = float("nan")


def row(step: int) -> dict[str, Any]:
    return train_row(step) | {"entropy": 2.0, "kl_sample_train_v1": 0.001}


def ill_log(folder: Path) -> Path:
    rows = [row(n) | {"optim/entropy": 2.0 if n < 20 else 0.01} for n in range(30)]
    rows[7]["kl_sample_train_v1"] = NAN
    write_rows(folder / "metrics.jsonl", rows)
    return folder


def run(*arguments: str | Path) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["health", *map(str, arguments)])
    return done.exit_code, done.stdout, done.stderr


def test_a_healthy_run(tmp_path: Path) -> None:
    """One line and exit code 0; nothing is written."""
    log = flat_log(tmp_path / "runs" / "good")
    before = sorted(path.name for path in log.iterdir())
    assert run(tmp_path / "runs") == (0, "1 run: healthy\n", "")
    assert sorted(path.name for path in log.iterdir()) == before
    assert not (tmp_path / "home").exists()


def test_findings(tmp_path: Path) -> None:
    """Run, level, rule, step, key and value, what it means and what people try; exit code 3."""
    ill_log(tmp_path / "ill")
    flat_log(tmp_path / "good")
    code, shown, _ = run(tmp_path)
    assert code == 3
    assert "ill: fail non-finite: step 7: kl_sample_train_v1 is nan\n  means: A loss or gradient" in shown
    assert (
        "ill: warn entropy-collapse: step 20: optim/entropy fell to 0.01, from 2 at the start (until step 29)" in shown
    )
    assert shown.count("  try:   ") == 2
    assert shown.endswith("2 runs: 1 with findings\n")


def test_json(tmp_path: Path) -> None:
    """All of it, as strict JSON."""
    ill_log(tmp_path / "ill")
    code, shown, _ = run(tmp_path / "ill", "--json")
    assert code == 3
    (found,) = json.loads(shown, parse_constant=lambda name: 1 / 0)
    assert (found["name"], found["status"], found["rows"], found["error"]) == ("ill", "finished", 30, None)
    first, second = found["findings"]
    assert (first["rule"], first["key"], first["step"], first["value"]) == (
        "non-finite",
        "kl_sample_train_v1",
        7,
        "nan",
    )
    assert (second["rule"], second["step"], second["value"], second["last_step"]) == ("entropy-collapse", 20, 0.01, 29)
    assert all(second[name] for name in ("means", "tries", "says", "about", "level"))


def test_a_catalogue_of_ones_own(tmp_path: Path) -> None:
    """Its checks count; one that can't be read is an error in one line."""
    log = write_rows(tmp_path / "run" / "metrics.jsonl", [{"step": n, "my/score": float(n)} for n in range(9)]).parent
    file = tmp_path / "mine.toml"
    file.write_text(
        'family = "mine"\ntitle = "Mine"\n[[metric]]\nkey = "my/{name}"\nmeaning = "Mine."\n'
        'checks = [{ test = "above", rule = "clipping", warn = 4.5, rows = 2 }]\n'
    )
    assert run(log)[0] == 0
    code, shown, _ = run(log, "--catalogue", file)
    assert code == 3
    assert "run: warn clipping: step 5: my/score is 5 (until step 8)" in shown
    code, shown, error = run(log, "--catalogue", tmp_path / "none.toml")
    assert (code, shown) == (1, "")
    assert error.startswith(f"runmirror: {tmp_path / 'none.toml'}: the catalogue can't be read")


def test_text_of_a_log_cannot_steer_a_terminal(tmp_path: Path) -> None:
    """Control characters of a key are replaced."""
    rows = [{"step": 0, "rewards/\x1b[2Jx": 1.0, "env/a/\x1b]0;t\x07": 1.0}, {"step": 1, "env/a/\x1b]0;t\x07": NAN}]
    write_rows(tmp_path / "run" / "metrics.jsonl", rows)
    code, shown, _ = run(tmp_path / "run")
    assert code == 3
    assert "\x1b" not in shown
    assert "\x07" not in shown


def test_following_tells_findings_once(tmp_path: Path) -> None:
    """Each once, however many sinks there are, also when the run goes on; the rows are sent all the same."""
    log = ill_log(tmp_path / "runs" / "ill")
    lines: list[str] = []
    targets = parse_targets(["tensorboard"], [], logdir=str(tmp_path / "tb"))
    targets += parse_targets(["dummy"], [f"folder={tmp_path / 'dummy'}"])
    follower = Follower([tmp_path / "runs"], targets, interval=0.05, exit_idle=1.0, tell=lines.append)
    stop = threading.Event()

    def more() -> None:
        with (log / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row(30) | {"optim/entropy": NAN, "kl_sample_train_v1": NAN}) + "\n")

    threading.Timer(0.4, more).start()
    assert follower.run(stop)
    told = [line.split(": ")[1] for line in lines if line.startswith(("ill: warn", "ill: fail"))]
    assert sorted(told) == ["fail non-finite", "fail non-finite", "warn entropy-collapse"]
    assert sum(lane.rows for lane in follower.lanes) == 2 * 31
