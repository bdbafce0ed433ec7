"""Rollout records: their exact shape, what is taken for a trajectory, what is left out, and the metrics."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runmirror.reports.rollouts import Checked, Group, Step, Trajectory, check, encode, metrics, restore
from tests.reports.groups import groups, trajectory

KEYS = [
    "schema_version", "split", "iteration", "group_idx", "traj_idx", "tags", "sampling_client_step", "total_reward",
    "final_reward", "trajectory_metrics", "steps", "final_ob_len",
]  # fmt: skip
STEP_KEYS = ["step_idx", "ob_len", "ac_len", "reward", "episode_done", "metrics", "logs"]


def lines(checked: Checked) -> list[dict[str, Any]]:
    return [json.loads(line) for line in checked.lines]


def one(given: Any) -> dict[str, Any]:
    """The record of a single trajectory."""
    checked = check([[given]], "train", 0)
    assert checked.rejected == []
    return lines(checked)[0]


def reason(given: Any) -> str:
    checked = check([[given]], "train", 0)
    assert checked.records == []
    return checked.rejected[0][2]


def test_the_record() -> None:
    """The fields of schema_version 1, in their order; the total is the turns' rewards and the final one."""
    checked = check(groups(2, 2), "eval/x", 7)
    first, second, third, _ = lines(checked)
    assert list(first) == KEYS
    assert list(first["steps"][0]) == STEP_KEYS
    assert [record["group_idx"] for record in lines(checked)] == [0, 0, 1, 1]
    assert [record["traj_idx"] for record in lines(checked)] == [0, 1, 0, 1]
    assert (third["split"], third["iteration"], third["schema_version"]) == ("eval/x", 7, 1)
    assert (second["total_reward"], second["final_reward"]) == (0.75, -0.25)
    assert (second["tags"], second["sampling_client_step"], second["final_ob_len"]) == (["guess"], 3, 200)
    assert [step["episode_done"] for step in second["steps"]] == [False, False, True]
    assert second["steps"][2] == {
        "step_idx": 2, "ob_len": 120, "ac_len": 12, "reward": 1.0, "episode_done": True,
        "metrics": {"correct": True, "distance": 0}, "logs": {"guess": 2, "hint": "Higher."},
    }  # fmt: skip
    assert "messages" not in second


def test_the_record_of_tinker_cookbook(samples: Path) -> None:
    """Every line of every sample, given to us as a trajectory, gives the same record."""
    paths = sorted(samples.glob("tinker_*/**/*_rollout_summaries.jsonl"))
    assert len(paths) > 20
    for path in paths:
        for line in path.read_bytes().splitlines():
            theirs = json.loads(line)
            given = {name: theirs[name] for name in ("steps", "final_reward", "trajectory_metrics", "final_ob_len")}
            group = {
                "trajectories": [given],
                "tags": theirs["tags"],
                "sampling_client_step": theirs["sampling_client_step"],
            }
            (ours,) = lines(check([group], theirs["split"], theirs["iteration"]))
            assert list(ours) == list(theirs)
            assert ours == theirs | {"group_idx": 0, "traj_idx": 0}


def test_the_metrics_of_tinker_cookbook(samples: Path) -> None:
    """The means that its own rows hold, of every iteration."""
    folder = samples / "tinker_newlayout"
    rows = {row["step"]: row for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())}
    paths = sorted(folder.glob("iteration_*/train_rollout_summaries.jsonl"))
    assert len(paths) == 12
    for path in paths:
        records = [json.loads(line) for line in path.read_bytes().splitlines()]
        row = json.loads((folder / "metrics.jsonl").read_text().splitlines()[records[0]["iteration"]])
        assert row["step"] in rows
        for name, value in metrics(records).items():
            assert row[f"env/all/{name}"] == pytest.approx(value), name


def test_what_may_be_given() -> None:
    """Models, mappings, dataclasses and other objects, and lists of them; all give the same."""

    @dataclass
    class MyStep:
        ob_len: int
        ac_len: int
        reward: float
        metrics: dict[str, float] = field(default_factory=dict)

    given: list[Any] = [
        Trajectory(steps=[Step(ob_len=1, ac_len=2, reward=0.5)]),
        {"steps": [{"ob_len": 1, "ac_len": 2, "reward": 0.5}]},
        SimpleNamespace(steps=[MyStep(1, 2, 0.5)]),
    ]
    records = [one(trajectory) for trajectory in given]
    assert records[0] == records[1] == records[2]
    whole = check([Group(trajectories=given), {"trajectories": given}, given, tuple(given)], "train", 0)
    assert [(record["group_idx"], record["traj_idx"]) for record in whole.records] == [
        (group, place) for group in range(4) for place in range(3)
    ]
    assert whole.rejected == []


def test_numbers_of_array_libraries() -> None:
    """numpy scalars and 0-d arrays are numbers, also below metrics and logs."""
    import numpy as np

    step = {"ob_len": np.int64(3), "ac_len": np.array(4), "reward": np.float32(0.5), "metrics": {"m": np.float64(0.25)}}
    record = one({"steps": [step | {"logs": {"a": np.array([1, 2]), "b": np.bool_(True)}}]})
    assert record["steps"][0] | {"logs": {}} == {
        "step_idx": 0, "ob_len": 3, "ac_len": 4, "reward": 0.5, "episode_done": True, "metrics": {"m": 0.25}, "logs": {},
    }  # fmt: skip
    assert record["steps"][0]["logs"] == {"a": [1, 2], "b": True}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"steps": [{"ob_len": 1, "reward": 1.0}]}, "steps.0.ac_len: Field required"),
        ({"steps": [], "rewards": [1]}, "rewards: Extra inputs are not permitted"),
        ({"final_reward": 1.0}, "steps: Field required"),
        ({"steps": [{"ob_len": 1, "ac_len": 1, "reward": "high"}]}, "steps.0.reward: Input should be a valid number"),
        ({"steps": [{"ob_len": 1, "ac_len": 1.5, "reward": 1}]}, "steps.0.ac_len: Input should be a valid integer"),
        (7, "it: Input should be a valid dictionary or object"),
    ],
)
def test_what_is_wrong_is_told(given: Any, told: str) -> None:
    """The field and what is wrong with it."""
    assert told in reason(given)


def test_only_what_is_wrong_is_left_out() -> None:
    """The rest keep their numbers; what was given is kept as JSON."""
    bad = {"steps": [{"ob_len": 1}]}
    checked = check([[trajectory(), bad, trajectory()], 7, [trajectory()]], "train", 0)
    assert [(r["group_idx"], r["traj_idx"]) for r in checked.records] == [(0, 0), (0, 2), (2, 0)]
    assert [(group, place) for group, place, _, _ in checked.rejected] == [(0, 1), (1, None)]
    assert json.loads(checked.rejected[0][3]) == bad
    assert checked.rejected[0][2].startswith("steps.0.ac_len: Field required; steps.0.reward: Field required")


numbers = st.floats(allow_nan=True, allow_infinity=True, width=32)
names = st.sampled_from(["a", "b/c", "d~e", "~1", "", "0"])


@given(
    st.lists(st.tuples(numbers, st.dictionaries(names, numbers)), max_size=3), numbers, st.dictionaries(names, numbers)
)
def test_nan_and_infinities_come_back(steps: Any, final: float, found: dict[str, float]) -> None:
    """The line is strict JSON, and read back it holds what was given."""

    def refuse(token: str) -> None:
        raise AssertionError(f"a bare {token}")

    given = [{"ob_len": 1, "ac_len": 1, "reward": reward, "metrics": metric} for reward, metric in steps]
    checked = check([[{"steps": given, "final_reward": final, "trajectory_metrics": found}]], "train", 0)
    line = json.loads(checked.lines[0], parse_constant=refuse)
    assert ("_nonfinite" in line) == (not all(map(math.isfinite, floats(checked.records[0]))))
    assert repr(restore(line)) == repr(checked.records[0])


def floats(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for below in value.values() for number in floats(below)]
    if isinstance(value, list):
        return [number for below in value for number in floats(below)]
    return [value] if isinstance(value, float) else []


def test_null_text_is_no_nan() -> None:
    """A log that says "null" or is None needs no mark."""
    record = one({"steps": [{"ob_len": 1, "ac_len": 1, "reward": 0, "logs": {"a": "null", "b": None}}]})
    assert "_nonfinite" not in record


def test_a_broken_mark_is_passed_over() -> None:
    """A pointer to nowhere changes nothing and raises nothing."""
    record = {
        "total_reward": None,
        "_nonfinite": {"/x/y": "nan", "/total_reward": "inf", "/steps/9": "nan", "z": "what"},
    }
    assert restore(record) == {"total_reward": math.inf}
    assert restore({"_nonfinite": 3}) == {}


def test_metrics() -> None:
    """Means over trajectories and turns, over those that have them; text is none; nothing gives nothing."""
    given = [[trajectory(0, 3), trajectory(2, 1)]]
    given[0][1]["steps"][0]["metrics"]["rare"] = 4
    given[0][1]["steps"][0]["metrics"]["note"] = "text"
    found = metrics(check(given, "train", 0).records)
    assert found == {
        "reward/total": (1.0 + 0.5) / 2,
        "penalty": 0.25,
        "correct": 0.5,
        "distance": 0.75,
        "rare": 4.0,
        "ac_tokens_per_turn": (10 + 11 + 12 + 10) / 4,
    }
    assert metrics([]) == {}
    assert metrics(check([[{"steps": []}]], "train", 0).records) == {"reward/total": 0.0}


def test_infinities_of_both_signs_have_no_mean() -> None:
    """It is NaN, as a sum of them is."""
    step = {"ob_len": 1, "ac_len": 1, "reward": math.inf}
    records = check([[{"steps": [step]}, {"steps": [step | {"reward": -math.inf}]}]], "train", 0).records
    assert math.isnan(metrics(records)["reward/total"])
    assert encode(records[0]).endswith(b'"_nonfinite":{"/total_reward":"inf","/steps/0/reward":"inf"}}\n')
