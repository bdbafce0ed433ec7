"""The health of runs on disk: real logs, resumes, logs that grow, mirrors that are behind."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import pytest

import runmirror
from runmirror.catalogue import RunHealth, check_runs
from runmirror.catalogue.entries import shipped
from runmirror.catalogue.findings import Finding
from runmirror.catalogue.runs import RunWatch
from runmirror.find import Found, open_log
from tests.catalogue.synthetic import FAMILIES, FAULTS, healthy
from tests.logs import async_rows, flat_log, nested_log, resumed_rows, train_row, write_rows

Mark = tuple[str, str, str | None, int | None]


def marks(run: RunHealth) -> list[Mark]:
    assert run.error is None
    return [(one.level, one.rule, one.key, one.step) for one in run.findings]


def check(path: Path) -> RunHealth:
    (run,) = check_runs([path])
    return run


CUT = "completions/clipped_ratio"
TURNS = "env/all/num_truncations_max_turn_tokens"
EXPECTED: dict[str, list[Mark]] = {
    # 12 iterations that learn; no group is mixed at two of the last three only
    "tinker_flat": [],
    # turns are cut at steps 2, 5, 6 and 10, never three times in a row; two rows share the last step
    "tinker_newlayout": [],
    # resumed from checkpoint 4; of what is valid, turns are cut at 0, 1, 3, 4 and then at 6, 7 and 8
    "tinker_resumed_058_metrics.jsonl": [("warn", "truncation", TURNS, 6), ("warn", "rewind", None, 4)],
    # turns are cut in six iterations in a row; late evaluation rows are no rewinds
    "tinker_async_061_metrics.jsonl": [("warn", "truncation", TURNS, 1)],
    # all, three quarters and three quarters of the answers are cut, and as many in the evaluations
    "trl_grpo_on_log.jsonl": [("warn", "truncation", CUT, 1), ("warn", "truncation", f"eval_{CUT}", 2)],
    "trl_trainer_state.json": [("warn", "truncation", CUT, 1), ("warn", "truncation", f"eval_{CUT}", 2)],
    # the length is only there once; a reward that is None is no fault
    "trl_grpo_none_on_log.jsonl": [],
    # the rows of the second rank are no metrics
    "trl_grpo_2ranks_on_log.jsonl": [],
    # KL is below 0 once, value clipping high once; five updates are too few for a trend
    "trl_ppo_on_log.jsonl": [],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_real_logs(samples: Path, name: str) -> None:
    """Exactly what a person who knows the rules would say."""
    assert marks(check(samples / name)) == EXPECTED[name]


def test_the_same_shapes(tmp_path: Path) -> None:
    """Both layouts and asynchronous runs are healthy, a resume is told."""
    assert marks(check(flat_log(tmp_path / "flat"))) == []
    assert marks(check(nested_log(tmp_path / "nested"))) == []
    write_rows(tmp_path / "async" / "metrics.jsonl", async_rows())
    assert marks(check(tmp_path / "async")) == []
    write_rows(tmp_path / "resumed" / "metrics.jsonl", resumed_rows())
    (finding,) = check(tmp_path / "resumed").findings
    assert str(finding) == "step 4: the run went back from step 5 to step 4"


def test_what_a_resume_superseded_does_not_count(tmp_path: Path) -> None:
    """A NaN in the abandoned part is gone; the same one after the resume is a finding."""
    rows = [calm_row(n) for n in range(12)]
    again = [calm_row(n) for n in range(6, 15)]
    ill = [*rows[:10], rows[10] | {"entropy": float("nan")}, rows[11]]
    write_rows(tmp_path / "a" / "metrics.jsonl", [*ill, *again])
    assert marks(check(tmp_path / "a")) == [("warn", "rewind", None, 6)]
    write_rows(tmp_path / "b" / "metrics.jsonl", [*rows, *again[:-1], again[-1] | {"entropy": float("nan")}])
    assert marks(check(tmp_path / "b")) == [("fail", "non-finite", "entropy", 14), ("warn", "rewind", None, 6)]
    write_rows(tmp_path / "c" / "metrics.jsonl", [*ill[:5], *[r | {"entropy": float("inf")} for r in rows[5:]], *again])
    assert marks(check(tmp_path / "c")) == [("fail", "non-finite", "entropy", 5), ("warn", "rewind", None, 6)]


def calm_row(step: int) -> dict[str, Any]:
    """A training row of a long healthy run."""
    return train_row(step) | {"entropy": 2.0, "kl_sample_train_v1": 0.001}


def write(file: Any, row: dict[str, Any]) -> None:
    if "_broken" in row:
        file.write(row["_broken"] + "\n")
    else:
        file.write(json.dumps(row) + "\n")
    file.flush()


@pytest.mark.parametrize("family", FAMILIES)
def test_reading_on_finds_what_reading_at_once_finds(tmp_path: Path, family: str) -> None:
    """Whatever the pieces are, in which the log comes, a resume among them."""
    for seed in range(12):
        random = Random(f"{family} {seed}")
        rows = healthy(random, family, 80)
        names = [name for name, fault in FAULTS.items() if family in fault.families and name != "no time"]
        for name in random.sample(names, 2):
            FAULTS[name].put(rows, random.randint(40, 60), family, random)
        back = random.randint(20, 70)
        rows += [row | {"step": back + n} for n, row in enumerate(healthy(random, family, 40))]
        folder = tmp_path / f"{seed}"
        folder.mkdir()
        found = Found(str(folder), "x")
        path = folder / "metrics.jsonl"
        path.touch()
        watch = RunWatch(lambda found=found: open_log(found), shipped())
        seen: list[Finding] = []
        with path.open("a") as file:
            for row in rows:
                write(file, row)
                if random.random() < 0.1:
                    seen = watch.read()
        seen = watch.read()
        assert seen == RunWatch(lambda found=found: open_log(found), shipped()).read()
        assert watch.read() == seen
        assert {"rewind"} <= {one.rule for one in seen}


def test_a_log_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    """Its old findings go with it."""
    path = write_rows(tmp_path / "metrics.jsonl", [calm_row(n) | {"entropy": float("nan")} for n in range(5)])
    found = Found(str(tmp_path), "x")
    watch = RunWatch(lambda: open_log(found), shipped())
    assert [one.count for one in watch.read()] == [5]
    write_rows(path, [calm_row(n) for n in range(9)])
    assert watch.read() == []
    assert watch.rows == 9


def test_broken_lines_are_counted(tmp_path: Path) -> None:
    """One finding that names the first; nothing is missing because of them."""
    path = write_rows(tmp_path / "metrics.jsonl", [calm_row(n) for n in range(30)])
    lines = path.read_text().splitlines()
    lines[20], lines[25] = lines[20][:30], ""
    path.write_text("\n".join(lines) + "\n")
    (finding,) = check(tmp_path).findings
    assert (finding.rule, finding.count, finding.about) == ("broken-lines", 2, "log")
    assert str(finding).endswith(
        "2 rows of the log can't be read, the first is metrics.jsonl:21: broken line (until step 24)"
    )


def test_a_run_that_cannot_be_read(tmp_path: Path) -> None:
    """The reason, and the other runs."""
    flat_log(tmp_path / "good")
    (tmp_path / "bad" / "metrics.jsonl").mkdir(parents=True)
    (tmp_path / "bad" / ".runmirror").mkdir()
    (tmp_path / "bad" / ".runmirror" / "run.json").write_text("{}")
    runs = {run.name: run for run in check_runs([tmp_path])}
    assert runs["good"].ok
    assert not runs["bad"].ok or runs["bad"].rows == 0


def test_limits_come_from_the_configuration(tmp_path: Path) -> None:
    """Answers as long as ``max_tokens`` allows are cut; without that number nothing is said."""
    rows = [calm_row(n) | {"env/all/ac_tokens_per_turn": 512.0 if n > 5 else 100.0} for n in range(12)]
    for name, config in (("a", {"max_tokens": 512}), ("b", {}), ("c", {"max_tokens": "512"})):
        write_rows(tmp_path / name / "metrics.jsonl", rows)
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    assert marks(check(tmp_path / "a")) == [("warn", "truncation", "env/all/ac_tokens_per_turn", 6)]
    assert marks(check(tmp_path / "b")) == marks(check(tmp_path / "c")) == []


def test_mirrors_that_are_behind(tmp_path: Path) -> None:
    """A finished log with rows above the cursor, and rows that a tracker refused; whole again, nothing."""
    log = tmp_path / "run"
    with runmirror.start(log) as run:
        for n in range(5):
            run.log_metrics({"reward": n})
    options = {"logdir": str(tmp_path / "tb")}
    runmirror.import_runs([log], "tensorboard", options)
    assert check(log).ok
    with runmirror.start(log, resume=True) as run:
        run.log_metrics({"reward": 6.0, "": 1.0})
    (finding,) = check(log).findings
    assert (finding.rule, finding.about, finding.key, finding.step) == ("sink-behind", "mirror", None, None)
    assert str(finding) == "tensorboard is behind: 1 row"
    runmirror.import_runs([log], "tensorboard", options)
    (finding,) = check(log).findings
    assert str(finding) == "tensorboard could not take 1 row or key"


def test_the_state_of_a_live_run(tmp_path: Path) -> None:
    """``status().findings``: nothing, then what is wrong, each time with what is new; also after the end."""
    with runmirror.start(tmp_path / "run") as run:
        for n in range(12):
            run.log_metrics({"reward": n / 10, "kl": 0.01, "grad_norm": 1.0, "loss": 0.1})
        assert run.status().findings == ()
        status = run.status()
        run.log_metrics({"reward": 1.3, "kl": 0.01, "grad_norm": float("nan"), "loss": 0.0})
        assert [str(one) for one in status.findings] == ["step 12: grad_norm is nan while loss looks fine"]
        assert [one.rule for one in run.status().findings] == ["hidden-nan-step"]
    assert [one.rule for one in run.status().findings] == ["hidden-nan-step"]
    assert run.status() == run.status()
    assert asdict(run.status())["rows"] == 13
    assert pickle.loads(pickle.dumps(run.status())).findings == ()


def test_findings_of_a_live_run_never_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor do they hold up the run: a catalogue that is broken is left out, a log that is gone has no findings."""
    monkeypatch.setenv("RUNMIRROR_CATALOGUE", str(tmp_path / "none.toml"))
    with runmirror.start(tmp_path / "run") as run:
        run.log_metrics({"loss": float("inf"), "\x1b[31m": float("nan")})
        assert [one.rule for one in run.status().findings] == ["non-finite"]
        assert "it is left out" in caplog.text
        os.rename(tmp_path / "run", tmp_path / "gone")
        assert isinstance(run.status().findings, tuple)
        os.rename(tmp_path / "gone", tmp_path / "run")
    with runmirror.start(tmp_path / "other", is_main_process=False) as run:
        run.log_metrics({"loss": float("inf")})
        assert run.status().findings == ()


def test_nothing_is_loaded_before_somebody_asks(tmp_path: Path) -> None:
    """Logging and ``status()`` read no log and no catalogue."""
    code = (
        f"import sys, runmirror; run = runmirror.start({str(tmp_path / 'run')!r}); run.log_metrics({{'loss': 1}}); "
        "run.status(); print('runmirror.catalogue' in sys.modules); run.status().findings; "
        "print('runmirror.catalogue' in sys.modules); run.finish()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
