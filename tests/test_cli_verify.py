"""``runmirror verify`` as a user runs it: output, exit codes, JSON, errors in one line."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from runmirror.sinks.event_file import event_files
from tests.logs import flat_log, resumed_rows, train_row, write_rows
from tests.test_cli import runmirror

TO = ("--to", "tensorboard", "--logdir", "tb")


def verify(cwd: Path, *arguments: str | Path, code: int = 0) -> str:
    """What it printed; it must end with ``code``, and say nothing on stderr unless that is 1."""
    done = runmirror("verify", *arguments, cwd=cwd)
    assert (done.returncode, bool(done.stderr)) == (code, code == 1), done.stderr
    return done.stderr if code == 1 else done.stdout


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two imported runs, flat and timed."""
    flat_log(tmp_path / "runs" / "flat")
    rows = [{"step": n, "_timestamp": 1.7e9 + n, "loss": n / 2} for n in range(6)]
    write_rows(tmp_path / "runs" / "timed" / "metrics.jsonl", rows)
    assert runmirror("import", "runs", *TO, cwd=tmp_path).returncode == 0
    return tmp_path


def test_all_there(runs: Path) -> None:
    """Exit 0, a line per run, what is known, and the sum."""
    assert verify(runs, "runs", *TO).splitlines() == [
        "equal  flat: 135 of 135 points match",
        "equal  timed: 6 of 6 points match",
        "known: 69 matching points rounded to the tracker's precision",
        "2 runs: 141 of 141 points match; 0 missing, 0 extra, 0 different",
    ]


def test_what_is_wrong_is_named(runs: Path) -> None:
    """Exit 3; counts and examples with what was expected and found; what is not sent yet is named so."""
    path = runs / "runs" / "timed" / "metrics.jsonl"
    lines = path.read_text().replace('"loss": 1.0}', '"loss": 9.0}').splitlines(keepends=True)
    path.write_text("".join(lines) + '{"step": 6, "_timestamp": 1700000006.5, "loss": 1.0}\n')
    told = verify(runs, "runs/timed", *TO, code=3)
    assert "different  timed: 5 of 7 points match; 1 missing (1 not sent yet); 1 different" in told
    assert "  different: loss at step 2: expected 9.0, found 1.0" in told
    assert "  missing: loss at step 6: expected 1.0" in told
    assert "comes with the next import" in told


def test_a_run_that_was_never_mirrored(runs: Path) -> None:
    """Exit 3, said plainly; and of one whose folder was removed that it was mirrored before."""
    write_rows(runs / "new" / "metrics.jsonl", [train_row(0)])
    told = verify(runs, "new", *TO, code=3)
    assert f"absent  new: never mirrored to {runs}/tb: all of 10 points missing" in told
    shutil.rmtree(runs / "tb" / "flat")
    assert f"absent  flat: mirrored before, but no longer in {runs}/tb" in verify(runs, "runs/flat", *TO, code=3)


def test_many_differences_are_cut_short(runs: Path) -> None:
    """Five examples and an ellipsis."""
    (path,) = event_files(runs / "tb" / "flat")
    os.truncate(path, path.stat().st_size // 2)
    told = verify(runs, "runs/flat", *TO, code=3).splitlines()
    assert sum(line.startswith("  missing: ") for line in told) == 5
    assert "  ..." in told


def test_json(runs: Path) -> None:
    """One object on stdout with the counts, and the same exit codes."""
    result = json.loads(verify(runs, "runs", *TO, "--json"))
    assert (result["ok"], result["totals"]["matching"], result["runs"][0]["known"]["rounded"]) == (True, 141, 69)
    write_rows(runs / "runs" / "new" / "metrics.jsonl", [train_row(0)])
    result = json.loads(verify(runs, "runs", *TO, "--json", code=3))
    assert [(run["name"], run["state"]) for run in result["runs"]] == [
        ("flat", "equal"),
        ("new", "absent"),
        ("timed", "equal"),
    ]


def test_options_of_the_import_are_options_here(tmp_path: Path) -> None:
    """Exit 0 with the same --step-key, --timezone, --identity, --rewinds, --state-in-log and -o; 3 with other ones."""
    log = flat_log(tmp_path / "a")
    rows = [{"it": n, **row} for n, row in enumerate(resumed_rows())]
    write_rows(log / "metrics.jsonl", rows)
    same = [*TO, "--step-key", "it", "--timezone", "Asia/Tokyo", "--identity", "content", "--state-in-log"]
    same += ["--rewinds", "last", "-o", "exclude=time/*"]
    assert runmirror("import", "a", *same, cwd=tmp_path).returncode == 0
    assert "left out by include and exclude" in verify(tmp_path, "a", *same)
    verify(tmp_path, "a", *TO, "--identity", "content", code=3)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere", *TO], "nowhere does not exist"),
        (["runs", "--to", "tensorbord"], "did you mean 'tensorboard'"),
        (["runs", *TO, "-o", "logdri=x"], "did you mean 'logdir'"),
        (["runs", *TO, "--timezone", "Mars"], "no such zone"),
    ],
)
def test_an_error_is_one_plain_line(tmp_path: Path, arguments: list[str], told: str) -> None:
    """Exit 1, one line on stderr, and a traceback with --debug."""
    flat_log(tmp_path / "runs" / "a")
    said = verify(tmp_path, *arguments, code=1)
    assert told in said
    assert len(said.splitlines()) == 1
    assert "Traceback" in verify(tmp_path, *arguments, "--debug", code=1)
