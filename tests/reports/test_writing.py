"""What a Run writes of reports and rollouts, and that nothing about them stops training."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import runmirror
from runmirror import reports
from runmirror.log import layout
from runmirror.reports.reading import find_nodes
from runmirror.storage import LocalStorage
from tests.reports.groups import groups, trajectory

NAMES = ("{}.html", "{}_logtree.json", "{}_rollout_summaries.jsonl")


def start(folder: Path, **options: Any) -> runmirror.Run:
    return runmirror.start(folder / "run", code=False, **options)


def written(folder: Path) -> set[str]:
    """Rollout files below the log_path."""
    root = folder / "run"
    paths = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
    return {path for path in paths if layout.parse(path) or path.endswith((".html", ".json", ".jsonl"))} - {
        "metrics.jsonl",
        ".runmirror/run.json",
        ".runmirror/journal.jsonl",
        ".runmirror/evaluations.json",
    }


def tree_of(folder: Path, stem: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "run" / f"{stem}_logtree.json").read_bytes())
    return loaded


def titles(tree: dict[str, Any]) -> list[str]:
    """Titles of the sections right below the top."""
    sections = [node for node in tree["root"]["children"] if node["tag"] == "section"]
    return [section["children"][0]["children"][0] for section in sections]


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("names", "train", "test"),
    [
        ("flat", "train_iteration_000010", "eval_held_out_v2_small_iteration_000010"),
        ("nested", "iteration_000010/train", "iteration_000010/eval_held_out_v2_small"),
    ],
)
def test_the_files(tmp_path: Path, names: Any, train: str, test: str) -> None:
    """Three files for training and three for an evaluation, named as the layout says; the records name their split."""
    with start(tmp_path, layout=names) as run:
        run.log_rollouts(10, groups())
        with run.evaluation("held out/v2 (small)", 10) as evaluation:
            evaluation.log_rollouts(groups(1))
    assert written(tmp_path) == {name.format(stem) for name in NAMES for stem in (train, test)}
    assert tree_of(tmp_path, train)["path"] == f"{train}.html"
    (line, _) = (tmp_path / "run" / f"{test}_rollout_summaries.jsonl").read_text().splitlines()
    assert json.loads(line)["split"] == "eval/held_out_v2_small"
    assert tree_of(tmp_path, test)["title"] == "Evaluation held out/v2 (small), iteration 10"


def test_the_cap(tmp_path: Path) -> None:
    """Of 6 groups 4 have their conversations; all 6 are in Trajectory Details, and in the records."""
    with start(tmp_path) as run:
        run.log_rollouts(0, groups(6, 2, 3))
    tree = tree_of(tmp_path, "train_iteration_000000")
    assert titles(tree) == [f"Group {n} (guess): reward 0.875" for n in range(4)] + ["Trajectory Details"]
    assert len(list(find_nodes(tree["root"], "conversation"))) == 8
    (details,) = find_nodes(tree["root"], "trajectory_details")
    assert [row[:2] for row in details["trajectories"]["rows"]] == [[g, t] for g in range(6) for t in range(2)]
    assert len(details["turns"]["rows"]) == 6 * 2 * 3
    assert details["trajectories"]["columns"][:7] == [
        "group_idx", "traj_idx", "turns", "ac_tokens", "step_reward", "final_reward", "total_reward",
    ]  # fmt: skip
    assert details["trajectories"]["rows"][1] == [0, 1, 3, 33, 1.0, -0.25, 0.75, 0.25]
    assert len((tmp_path / "run/train_iteration_000000_rollout_summaries.jsonl").read_text().splitlines()) == 12


@pytest.mark.parametrize(
    ("given", "call", "shown"), [(None, None, 4), (2, None, 2), (2, 3, 3), (0, None, 0), (4, 0, 0)]
)
def test_how_many_groups(tmp_path: Path, given: int | None, call: int | None, shown: int) -> None:
    """``start`` says, ``log_rollouts`` may say otherwise; 0 writes neither HTML nor JSON, but the records."""
    with start(tmp_path, **({} if given is None else {"num_groups_to_log": given})) as run:
        run.log_rollouts(0, groups(5, 1), num_groups_to_log=call)
    if shown:
        assert len(titles(tree_of(tmp_path, "train_iteration_000000"))) == shown + 1
    else:
        assert written(tmp_path) == {"train_iteration_000000_rollout_summaries.jsonl"}


def test_a_config_says_how_many_groups(tmp_path: Path) -> None:
    """LogConfig's ``num_groups_to_log``."""
    with start(tmp_path, config=runmirror.LogConfig(num_groups_to_log=1)) as run:
        run.log_rollouts(0, groups(5, 1))
    assert len(titles(tree_of(tmp_path, "train_iteration_000000"))) == 2
    with pytest.raises(ValueError, match="num_groups_to_log is a whole number"):
        runmirror.start(tmp_path / "other", num_groups_to_log=-1)


def test_metrics_of_the_iteration(tmp_path: Path) -> None:
    """In its row, unless given; those of an evaluation under its name as it is; nowhere without an open iteration."""
    with start(tmp_path) as run:
        with run.iteration(3) as it:
            found = run.log_rollouts(3, groups(1, 2))
            it["env/all/correct"] = 0.5
            with run.evaluation("held out/v2", 3) as evaluation:
                evaluation.log_rollouts(groups(1, 1))
                evaluation.log({"pass@8": 1})
        other = run.log_rollouts(4, groups(1, 1))
        run.evaluation("late", 5).log({"x": 1})
    row, late = rows(tmp_path)
    assert found == {
        "env/all/reward/total": 0.875,
        "env/all/penalty": 0.125,
        "env/all/correct": 1 / 3,
        "env/all/distance": 1.0,
        "ac_tokens_per_turn": 11.0,
    }
    assert {key: row[key] for key in found} == found | {"env/all/correct": 0.5}
    assert row["held out/v2/env/all/reward/total"] == 1.0
    assert row["held out/v2/env/all/ac_tokens_per_turn"] == 11.0
    assert row["held out/v2/pass@8"] == 1
    assert other["env/all/reward/total"] == 1.0
    assert (late["step"], late["late/x"]) == (5, 1)


def test_rollouts_within_a_report(tmp_path: Path) -> None:
    """One file holds both; environments log into it from anywhere."""
    with start(tmp_path) as run, run.report(0, title="My title") as tree:
        with tree.scope("Rollouts"):
            reports.text("from an environment")
        run.log_rollouts(0, groups(1, 1))
        assert run.report(0) is tree
    found = tree_of(tmp_path, "train_iteration_000000")
    assert found["title"] == "My title"
    assert titles(found) == ["Rollouts", "Group 0 (guess): reward 1.000", "Trajectory Details"]


def test_a_report_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As after a resume; within one process it is told, for it may not be meant."""
    for text in ("first", "second"):
        with start(tmp_path) as run:
            with run.report(0) as tree:
                tree.text(text)
            run.finish("killed")
    assert "second" in json.dumps(tree_of(tmp_path, "train_iteration_000000"))
    assert caplog.text == ""
    with start(tmp_path) as run:
        for text in ("third", "fourth"):
            with run.report(0) as tree:
                tree.text(text)
    assert "fourth" in json.dumps(tree_of(tmp_path, "train_iteration_000000"))
    assert "was written before and is replaced" in caplog.text


def test_an_error_leaves_a_partial_report(tmp_path: Path) -> None:
    """HTML and JSON are there, and say so; the error goes on."""
    run = start(tmp_path)

    def fail() -> None:
        with run.report(0) as tree:
            tree.text("before")
            raise KeyError("gone")

    with pytest.raises(KeyError):
        fail()
    run.finish("failed")
    assert tree_of(tmp_path, "train_iteration_000000")["root"]["attrs"]["data-partial"] == "true"
    page = (tmp_path / "run/train_iteration_000000.html").read_text()
    assert "before" in page
    assert "This report is partial: KeyError was raised" in page


def test_the_end_of_the_run_closes_reports(tmp_path: Path) -> None:
    """What is open then is written as partial; what comes later is ignored."""
    run = start(tmp_path)
    tree = run.report(0)
    with tree:
        tree.text("before")
        run.finish()
        tree.text("after")
    found = json.dumps(tree_of(tmp_path, "train_iteration_000000"))
    assert "This report is partial: the run ended before it was finished" in found
    assert "before" in found
    assert "after" not in found.replace("before", "")


def test_names_that_share_a_file(tmp_path: Path) -> None:
    """The first has the clean name, others that and a mark; the same in every process, whoever comes first then."""
    names = ["a b", "a/b", "a_b", "A_B", "测试", "评测", "x" * 300]
    for order in (names, names[::-1]):
        with start(tmp_path, resume=True) as run:
            for name in order:
                run.log_rollouts(0, groups(1, 1), name, num_groups_to_log=0)
        found = sorted(path.name for path in (tmp_path / "run").glob("eval_*.jsonl"))
        assert len({name.casefold() for name in found}) == len(names)
        assert "eval_a_b_iteration_000000_rollout_summaries.jsonl" in found
        assert "eval_unnamed_iteration_000000_rollout_summaries.jsonl" in found
        assert max(map(len, found)) < 255
        assert all(layout.parse(name) for name in found)
    view = runmirror.read_run(tmp_path / "run")
    for name in names:
        assert len(view.rollouts(0, name).records) == 1


def test_an_evaluation_called_train(tmp_path: Path) -> None:
    """It is an evaluation all the same."""
    with start(tmp_path) as run:
        run.evaluation("train", 0).log_rollouts(groups(1, 1), num_groups_to_log=0)
    assert written(tmp_path) == {"eval_train_iteration_000000_rollout_summaries.jsonl"}


def test_bad_rollouts_are_kept_and_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Training goes on, the good ones are written, the reason and what was given are beside the log."""
    bad = {"steps": [{"ob_len": 1, "reward": 1.0}]}
    with start(tmp_path) as run:
        for iteration in range(3):
            run.log_rollouts(iteration, [[trajectory(), bad], 7])
        run.log_rollouts(3, 7)  # type: ignore[arg-type]
    lines = [
        json.loads(line) for line in (tmp_path / "run/.runmirror/rollouts.rejected.jsonl").read_text().splitlines()
    ]
    assert len(lines) == 7
    assert lines[0]["reason"] == "steps.0.ac_len: Field required"
    assert json.loads(lines[0]["given"]) == bad
    assert (lines[0]["iteration"], lines[0]["group_idx"], lines[0]["traj_idx"]) == (0, 0, 1)
    assert len(runmirror.read_run(tmp_path / "run").rollouts(0).records) == 1
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert (
        "iteration 0, train: left out of the rollouts: group 0, trajectory 1: steps.0.ac_len: Field required" in told[0]
    )
    assert "(and 1 more); kept in .runmirror/rollouts.rejected.jsonl" in told[0]


def test_strict_raises_after_the_write(tmp_path: Path) -> None:
    """The good ones are there."""
    with start(tmp_path, strict=True) as run, pytest.raises(ValueError, match=r"steps.0.ac_len.*strict=True"):
        run.log_rollouts(0, [[trajectory(), {"steps": [{"ob_len": 1, "reward": 1.0}]}]])
    assert "train_iteration_000000.html" in written(tmp_path)


@pytest.mark.parametrize("given", ["ten", -1, 1.5, None])
def test_an_iteration_that_is_none(tmp_path: Path, given: Any, caplog: pytest.LogCaptureFixture) -> None:
    """It is told, and the next number (0 for a negative one) is taken."""
    with start(tmp_path) as run:
        run.log_rollouts(given, groups(1, 1))
    assert "an iteration is a whole number from 0 on" in caplog.text
    assert "train_iteration_000000.html" in written(tmp_path)


def test_numbers_of_numpy_are_iterations(tmp_path: Path) -> None:
    """As a loop over an array gives them."""
    import numpy as np

    with start(tmp_path) as run, run.iteration(np.int64(3)):  # type: ignore[arg-type]
        run.log_rollouts(np.int64(3), groups(1, 1))  # type: ignore[arg-type]
    assert rows(tmp_path)[0]["env/all/reward/total"] == 1.0
    assert "train_iteration_000003.html" in written(tmp_path)


class FullDisk(LocalStorage):
    """Takes no whole files, and rows."""

    def write(self, path: str, data: bytes, *, content_type: str | None = None) -> None:
        if layout.parse(path):
            raise OSError(28, "No space left on device")
        super().write(path, data, content_type=content_type)


def test_a_full_disk_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Training goes on, rows are written."""
    with runmirror.start(FullDisk(tmp_path / "run"), code=False) as run:
        for iteration in range(3):
            with run.iteration(iteration):
                run.log_rollouts(iteration, groups(1, 1))
        run.log_checkpoint("waits")
        assert run.status().lost_files == 9
    assert len(rows(tmp_path)) == 3
    assert len(caplog.records) == 1
    assert "could not be written (OSError: [Errno 28] No space left on device): training goes on" in caplog.text


class Slow:
    """A Storage that is not local, and writes whole files only when it is told to."""

    def __init__(self, root: Path) -> None:
        self.local = LocalStorage(root)
        self.go = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.local, name)

    def write(self, path: str, data: bytes, *, content_type: str | None = None) -> None:
        if layout.parse(path) and layout.parse(path).kind in layout.ROLLOUT_KINDS:  # type: ignore[union-attr]
            self.go.wait(60)
        self.local.write(path, data)


def test_training_does_not_wait_for_a_slow_place(tmp_path: Path) -> None:
    """Rows are written while reports wait; they are there after the end."""
    slow = Slow(tmp_path / "run")
    with runmirror.start(slow, code=False) as run:  # type: ignore[arg-type]
        for iteration in range(3):
            with run.iteration(iteration), run.report(iteration):
                run.log_rollouts(iteration, groups(1, 1))
        assert (len(rows(tmp_path)), written(tmp_path)) == (3, set())
        slow.go.set()
    assert len(written(tmp_path)) == 9


def test_one_report_entered_twice(tmp_path: Path) -> None:
    """By an evaluation and by its user, one in the other or in two tasks: it is written when the last one is left."""

    async def task(run: runmirror.Run, name: str, inside: asyncio.Event, leave: asyncio.Event) -> None:
        with run.report(1):
            reports.text(f"{name} begins")
            inside.set()
            await leave.wait()
            reports.text(f"{name} ends")

    async def two(run: runmirror.Run) -> None:
        a, b, never = asyncio.Event(), asyncio.Event(), asyncio.Event()
        never.set()
        first = asyncio.create_task(task(run, "first", a, b))
        await a.wait()
        await task(run, "second", b, never)
        await first

    with start(tmp_path) as run:
        with run.evaluation("x", 0) as evaluation:
            with pytest.raises(KeyError), run.report(0, "x") as tree:
                raise KeyError("inner")
            evaluation.tree.text("outer")
            reports.text("module")
        assert tree is evaluation.tree
        asyncio.run(two(run))
    found = tree_of(tmp_path, "eval_x_iteration_000000")
    assert [node["tag"] for node in found["root"]["children"][2:]] == ["details", "p", "p"]
    assert "data-partial" not in found["root"]["attrs"]
    texts = [node["children"][0] for node in tree_of(tmp_path, "train_iteration_000001")["root"]["children"][2:]]
    assert texts == ["first begins", "second begins", "second ends", "first ends"]


def test_other_processes_do_nothing(tmp_path: Path) -> None:
    """Every call works, and no file is made."""
    with start(tmp_path, is_main_process=False) as run:
        with run.report(0) as tree:
            tree.text("x")
        assert run.log_rollouts(0, groups()) == {}
        with run.evaluation("x", 0) as evaluation:
            evaluation.tree.text("x")
            evaluation.log_rollouts(groups())
            evaluation.log({"y": 1})
    assert not (tmp_path / "run").exists()


def _in_a_fork(run: runmirror.Run) -> None:
    with run.report(1) as tree:
        tree.text("x")
    run.log_rollouts(1, groups())


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    """Only the process that started the run does, also right after it wrote a report."""
    with start(tmp_path) as run:
        run.log_rollouts(0, groups())
        child = multiprocessing.get_context("fork").Process(target=_in_a_fork, args=(run,))
        child.start()
        child.join(30)
        assert child.exitcode == 0
        run.log_rollouts(2, groups())
    assert not any("000001" in path for path in written(tmp_path))
    assert len(written(tmp_path)) == 6


def test_a_script_that_just_ends(tmp_path: Path) -> None:
    """Without ``finish``: reports are there when the interpreter has ended."""
    script = f"""
import runmirror
from tests.reports.groups import groups
run = runmirror.start({str(tmp_path / "run")!r}, code=False)
run.log_rollouts(0, groups(4, 4, 20))
tree = run.report(1).__enter__()
tree.text("open")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(written(tmp_path)) == 5
    assert "partial" in json.dumps(tree_of(tmp_path, "train_iteration_000001"))


BIG = r"""
import pathlib, re, sys
import runmirror
with runmirror.start(sys.argv[1], code=False) as run, run.report(0) as tree:
    for number in range(200):
        with tree.scope(number):
            tree.conversation([{"role": "user", "content": f"{number} word " * 1500} for _ in range(80)])
# getrusage() would tell the peak of the process that started this one, if that was higher
print(re.search(r"VmHWM:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_a_large_report_needs_less_than_a_gigabyte(tmp_path: Path) -> None:
    """200 MB of messages."""
    command = [sys.executable, "-c", BIG, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    assert (tmp_path / "run/train_iteration_000000.html").stat().st_size > 200_000_000
    assert int(done.stdout) < 1_000_000
