"""Rollouts and reports read back: by the code of the page that describes the files, and by ours."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

import runmirror
from runmirror.exceptions import NotALogError
from runmirror.reports.reading import Conversation, conversations, find_nodes, flat, records
from runmirror.storage import LocalStorage
from tests.reports.groups import groups, trajectory

SUMMARIES = """
with open("train_iteration_000010_rollout_summaries.jsonl") as f:
    trajectories = [json.loads(line) for line in f]
# Each trajectory has:
# – metadata: schema_version, split, iteration, group_idx, traj_idx, tags, sampling_client_step
# – episode totals: total_reward, final_reward, trajectory_metrics, final_ob_len
# – steps: list of {step_idx, ob_len, ac_len, reward, episode_done, metrics, logs}
"""
"""Word for word (its line breaks put back), from the page "RL Training Outputs" that described these files first."""

FIND_CONVERSATIONS = """
def find_conversations(node):
    \"\"\"Recursively find all nodes with conversation data.\"\"\"
    results = []
    if isinstance(node, dict):
        if node.get("data", {}).get("type") == "conversation":
            results.append(node["data"])
        for child in node.get("children", []):
            if isinstance(child, dict):
                results.extend(find_conversations(child))
    return results
with open("eval_test_iteration_000020_logtree.json") as f:
    trace = json.load(f)
for conv in find_conversations(trace["root"]):
    for msg in conv["messages"]:
        print(f"{msg['role']}: {msg['content'][:100] if isinstance(msg['content'], str) else '…'}")
"""

META = ["schema_version", "split", "iteration", "group_idx", "traj_idx", "tags", "sampling_client_step"]
TOTALS = ["total_reward", "final_reward", "trajectory_metrics", "final_ob_len"]
STEP = ["step_idx", "ob_len", "ac_len", "reward", "episode_done", "metrics", "logs"]


def run_snippet(code: str, name: str, path: Path) -> dict[str, Any]:
    """Run a snippet of the page on a file of ours, put in the place of its own."""
    assert name in code
    space: dict[str, Any] = {"json": json}
    exec(code.replace(name, path.as_posix()), space)
    return space


def check_summaries(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]]
    found = run_snippet(SUMMARIES, "train_iteration_000010_rollout_summaries.jsonl", path)["trajectories"]
    assert found
    for one in found:
        assert {*META, *TOTALS, "steps"} == set(one)
        assert all(set(step) == set(STEP) for step in one["steps"])
    return found


def check_conversations(path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    run_snippet(FIND_CONVERSATIONS, "eval_test_iteration_000020_logtree.json", path)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("names", ["flat", "nested"])
def test_the_code_of_the_page(tmp_path: Path, names: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Its two snippets run unchanged on our files, of both layouts."""
    with runmirror.start(tmp_path / "run", code=False, layout=names) as run:
        run.log_rollouts(10, groups(2, 2))
        with run.evaluation("test", 20) as evaluation:
            evaluation.log_rollouts(groups(1, 1, 2))
    files = runmirror.read_run(tmp_path / "run").iterations
    assert len(check_summaries(Path(files[10].path("rollouts")))) == 4
    assert len(check_summaries(Path(files[20].path("rollouts", "test")))) == 1
    assert check_conversations(Path(files[20].path("logtree", "test")), capsys) == [
        "system: Guess.",
        "user: What is it?",
        "assistant: …",
        "tool: Higher.",
        "assistant: …",
        "tool: Higher.",
    ]


def test_the_code_of_the_page_on_real_files(samples: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On every sample too, and our reader finds the same."""
    summaries = sorted(samples.glob("tinker_*/**/*_rollout_summaries.jsonl"))
    trees = sorted(samples.glob("tinker_*/**/*_logtree.json"))
    assert (len(summaries), len(trees)) > (20, 10)
    for path in summaries:
        theirs = check_summaries(path)
        assert list(records(LocalStorage(path.parent), path.name)) == theirs
    for path in trees:
        told = check_conversations(path, capsys)
        ours = list(conversations(json.loads(path.read_bytes())))
        assert len(told) == sum(len(one.messages) for one in ours) > 0
    for name in ("tinker_flat", "tinker_newlayout"):
        view = runmirror.read_run(samples / name)
        assert [one["iteration"] for one in view.rollouts()] == [n for n in range(12) for _ in range(6)]
        assert len(view.conversations(0)) > 0
        assert len(view.rollouts(8, "held out/v2 (small)").records) == 2
        assert view.logtree(8, "held out/v2 (small)")["title"] == "Running evaluation held out/v2 (small) 8"


def write(folder: Path, iterations: int = 3) -> runmirror.RunView:
    with runmirror.start(folder, code=False) as run:
        for iteration in range(iterations):
            with run.iteration(iteration):
                run.log_rollouts(iteration, groups(2, 2))
                run.evaluation("held out/v2", iteration).log_rollouts(groups(1, 1))
    return runmirror.read_run(folder)


def test_records_and_frames(tmp_path: Path) -> None:
    """All iterations or one, training or an evaluation by its name; frames of pandas and polars."""
    view = write(tmp_path / "run")
    assert len(view.rollouts().records) == 12
    assert [one["traj_idx"] for one in view.rollouts(1)] == [0, 1, 0, 1]
    assert [one["split"] for one in view.rollouts(split="held out/v2")] == ["eval/held_out_v2"] * 3
    assert [one["split"] for one in view.rollouts(split="eval/held_out_v2")] == ["eval/held_out_v2"] * 3
    frame = view.rollouts().to_pandas()
    assert frame["total_reward"].tolist() == [1.0, 0.75] * 6
    assert frame.groupby("iteration")["total_reward"].mean().tolist() == [0.875] * 3
    other = view.rollouts().to_polars()
    assert other.columns == list(frame.columns)
    assert other["metrics/distance"].to_list() == [1.0] * 12


def test_a_row_of_the_table() -> None:
    """Sums and means of the turns; metrics of the trajectory as they are; what is missing is None."""
    record = {"split": "train", "iteration": 1, "group_idx": 2, "traj_idx": 3, "tags": ["a", "b"], "total_reward": 1.5}
    steps = [{"ac_len": 2, "metrics": {"m": 1, "text": "x"}}, {"ac_len": 3, "metrics": {"m": 2, "n": True}}]
    assert flat(record | {"steps": steps, "trajectory_metrics": {"p": 0.5}}) == {
        "split": "train", "iteration": 1, "group_idx": 2, "traj_idx": 3, "tags": "a,b", "sampling_client_step": None,
        "total_reward": 1.5, "final_reward": None, "turns": 2, "ac_tokens": 5, "final_ob_len": None,
        "metrics/m": 1.5, "metrics/n": 1.0, "metrics/p": 0.5,
    }  # fmt: skip
    assert flat({"steps": None, "tags": None, "trajectory_metrics": 3})["turns"] == 0


def test_nan_comes_back(tmp_path: Path) -> None:
    """As a float, in records and in frames."""
    bad = trajectory()
    bad["steps"][0]["reward"] = math.nan
    bad["trajectory_metrics"]["penalty"] = -math.inf
    with runmirror.start(tmp_path / "run", code=False) as run:
        run.log_rollouts(0, [[bad]])
    view = runmirror.read_run(tmp_path / "run")
    (record,) = view.rollouts(0).records
    assert math.isnan(record["total_reward"])
    assert record["trajectory_metrics"]["penalty"] == -math.inf
    assert view.rollouts(0).to_pandas()["metrics/penalty"].tolist() == [-math.inf]


def test_conversations_with_their_headings(tmp_path: Path) -> None:
    """Each with the titles it stands below."""
    view = write(tmp_path / "run", 1)
    found = view.conversations(0)
    assert found[1] == Conversation(
        ("Group 0 (guess): reward 0.875", "Trajectory 1: reward 0.750"), trajectory(1)["messages"]
    )
    assert len(found) == 4
    assert len(view.conversations(0, "held out/v2")) == 1


def test_what_is_not_there(tmp_path: Path) -> None:
    """The error names what is."""
    view = write(tmp_path / "run", 2)
    with pytest.raises(FileNotFoundError, match="no rollout file of iteration 7; there are 0, 1"):
        view.logtree(7)
    with pytest.raises(FileNotFoundError, match=r"no rollouts of 'other'; it has .*rollouts of train"):
        view.rollouts(0, "other")
    with pytest.raises(FileNotFoundError, match="no iteration has rollouts of 'other'"):
        view.rollouts(split="other")
    os.truncate(tmp_path / "run/train_iteration_000000_logtree.json", 100)
    with pytest.raises(NotALogError, match="is no JSON object"):
        view.conversations(0)


def test_broken_lines_and_large_files(tmp_path: Path) -> None:
    """Lines longer than a read are whole; broken and torn ones are left out."""
    path = tmp_path / "x_rollout_summaries.jsonl"
    long = {"x": "y" * 3_000_000}
    path.write_text(f"{json.dumps(long)}\nbroken\n\n{json.dumps({'n': 1})}\r\n{json.dumps(long)}\n{{torn")
    assert list(records(LocalStorage(tmp_path), path.name)) == [long, {"n": 1}, long]
    path.write_text(json.dumps({"n": 2}))
    assert list(records(LocalStorage(tmp_path), path.name)) == [{"n": 2}]


def test_trees_of_any_shape() -> None:
    """Nothing raises; only conversations with messages are found, however deep."""
    deep: dict[str, Any] = {"data": {"type": "conversation", "messages": [1]}}
    for _ in range(5000):
        deep = {"tag": "div", "children": [deep]}
    odd = [None, 3, "x", {"children": None}, {"data": 3}, {"data": {"type": "conversation"}}, {"tag": "section"}]
    tree = {"root": {"children": [*odd, {"tag": "section", "children": ["x", deep]}]}}
    assert list(conversations(tree)) == [Conversation((), [1])]
    assert list(conversations({})) == []
    assert [one["messages"] for one in find_nodes(tree["root"], "conversation") if "messages" in one] == [[1]]
