"""What metric keys mean: every key of the frameworks' pages and of real logs is known; a user's file comes first."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from random import Random

import pytest

from runmirror import read_run
from runmirror.catalogue import Catalogue, best, describe
from runmirror.catalogue.entries import EVALUATION, SHIPPED, rules, shipped
from runmirror.catalogue.patterns import Pattern
from runmirror.exceptions import CatalogueError
from runmirror.find import find_runs
from tests.catalogue.synthetic import FAMILIES, FAULTS, healthy
from tests.logs import async_rows, eval_row, train_row

PPO_PAGE = [
    "eps",
    "objective/kl",
    "objective/entropy",
    "objective/non_score_reward",
    "objective/rlhf_reward",
    "objective/scores",
    "policy/approxkl_avg",
    "policy/clipfrac_avg",
    "loss/policy_avg",
    "loss/value_avg",
    "val/clipfrac_avg",
    "policy/entropy_avg",
    "val/ratio",
    "val/ratio_var",
    "val/num_eos_tokens",
    "lr",
    "episode",
]
GRPO_PAGE = [
    "num_tokens",
    "completions/mean_length",
    "completions/min_length",
    "completions/max_length",
    "completions/clipped_ratio",
    "completions/mean_terminated_length",
    "completions/min_terminated_length",
    "completions/max_terminated_length",
    "rewards/my_custom_reward/mean",
    "rewards/my_custom_reward/std",
    "reward",
    "reward_std",
    "kl",
    "entropy",
    "clip_ratio",
    "clip_ratio/low_mean",
    "clip_ratio/low_min",
    "clip_ratio/high_mean",
    "clip_ratio/high_max",
    "clip_ratio/region_mean",
]
TINKER_PAGE = [
    "progress/batch",
    "progress/done_frac",
    "env/all/reward/total",
    "env/all/format_parse",
    "env/all/correct",
    "ac_tokens_per_turn",
    "entropy",
    "kl_sample_train_v1",
    "kl_sample_train_v2",
    "optim/lr",
    "time/total",
    "time/sample",
    "time/policy_sample:mean",
]
SAMPLES = 9
"""Runs in the folder of real logs."""


def unknown(keys: set[str]) -> list[str]:
    return sorted(key for key in keys if key[:1] != "_" and key != "step" and describe(key) is None)


def test_every_key_of_the_pages_is_known() -> None:
    """None is left out, and each has its range, its unit or a direction where it can have one."""
    assert unknown({*PPO_PAGE, *GRPO_PAGE, *TINKER_PAGE}) == []
    assert {describe(key).family for key in PPO_PAGE} == {"trl-ppo"}  # type: ignore[union-attr]
    assert {describe(key).family for key in GRPO_PAGE} == {"trl-grpo"}  # type: ignore[union-attr]


def test_every_key_of_the_real_logs_is_known(samples: Path) -> None:
    """Nothing is uncovered."""
    runs = find_runs([*samples.glob("*.jsonl"), samples / "trl_trainer_state.json", *samples.glob("tinker_*/")])
    assert len(runs) == SAMPLES
    for run in runs:
        keys = {key for row in read_run(run.path).rows() for key in row.data}
        assert len(keys) > 15
        assert unknown(keys) == [], run.path


def test_every_key_of_the_same_shapes_is_known() -> None:
    """Of the rows that the tests make of three frameworks."""
    rows = [train_row(1), eval_row(1), *async_rows()]
    rows += [row for family in FAMILIES for row in healthy(Random(1), family, 60)]
    assert unknown({key for row in rows for key in row}) == []


def test_parts_are_named_and_filled_in() -> None:
    """``{reward_func_name}`` is what stood there, in the meaning too; a part without dots is one segment."""
    found = describe("rewards/digit_reward/mean")
    assert found is not None
    assert found.parts == {"reward_func_name": "digit_reward"}
    assert found.meaning == "Mean of the reward function digit_reward, over the answers it applied to."
    assert (found.unit, found.better, found.pattern) == ("reward", "up", "rewards/{reward_func_name}/mean")
    assert describe("rewards/a/b/mean") is None
    deep = describe("held out/v2 (small)/env/all/by_group/frac_mixed")
    assert deep is not None
    assert deep.parts == {"evaluator": "held out/v2 (small)", "tag": "all", "metric": "by_group/frac_mixed"}
    assert deep.evaluation


@pytest.mark.parametrize("prefix", ["train/", *EVALUATION])
def test_what_trackers_put_in_front_is_seen_through(prefix: str) -> None:
    """The entry is the same; an evaluation is said to be one."""
    found, plain = describe(f"{prefix}completions/clipped_ratio"), describe("completions/clipped_ratio")
    assert found is not None
    assert plain is not None
    assert found.metric is plain.metric
    assert found.evaluation == (prefix != "train/")
    assert found.meaning.startswith("In the evaluation: ") == found.evaluation


def test_what_is_not_a_prefix() -> None:
    """``train_runtime`` is a number of the run, and a name with the same letters is nothing."""
    found = describe("train_runtime")
    assert found is not None
    assert "whole run" in found.meaning
    assert describe("trainer/x") is None
    assert describe("") is None
    assert describe("evaluation") is None


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("reward", "max"),
        ("env/all/reward/total", "max"),
        ("completions/clipped_ratio", "min"),
        ("time/sample", "min"),
        ("val/ratio", "last"),
        ("optim/lr", "last"),
        ("my/own", None),
    ],
)
def test_best(key: str, expected: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The value that sums a metric up, also while a user's file can't be read."""
    assert best(key) == expected
    monkeypatch.setenv("RUNMIRROR_CATALOGUE", "/nowhere.toml")
    assert best(key) == expected


MINE = """
family = "mine"
title = "Mine"

[[metric]]
key = "score/{task}/{rest...}"
meaning = "Score of {task}."
unit = "points"
better = "up"
checks = [{ test = "below", rule = "no-signal", warn = 0.0, rows = 2 }]

[[metric]]
key = "reward"
meaning = "My own reward."
main = 1
"""


def test_a_users_file_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given to ``load``, or named in the environment; what it doesn't name is as it was."""
    file = tmp_path / "mine.toml"
    file.write_text(MINE)
    for catalogue in (
        Catalogue.load(file),
        (monkeypatch.setenv("RUNMIRROR_CATALOGUE", str(file)), Catalogue.load())[1],
    ):
        found = catalogue.describe("score/maths/hard/1")
        assert found is not None
        assert (found.meaning, found.unit, found.family) == ("Score of maths.", "points", "mine")
        assert catalogue.describe("reward").meaning == "My own reward."  # type: ignore[union-attr]
        assert catalogue.describe("kl") is not None
        assert catalogue.main_rewards[:3] == ("reward", "env/all/reward/total", "objective/scores")
    assert describe("score/a/b") is not None
    assert shipped().describe("score/a/b") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "the catalogue can't be read: No such file"),
        ("family = 1 =", "is no TOML"),
        ('family = "x"', "title: Field required"),
        (MINE.replace("better", "beter"), "metric.0.beter: Extra inputs"),
        (MINE.replace('"below"', '"under"'), "'under' found using 'test' does not match"),
        (MINE.replace("no-signal", "nosignal"), "score/{task}/{rest...}: no rule 'nosignal'; there is non-finite, "),
        (MINE.replace("Score of {task}", "Score of {tusk}"), "names tusk, which the key has not"),
        (MINE.replace("{rest...}", "{task}"), "two parts have one name"),
        (MINE.replace("{rest...}", "{rest"), "a part is {name} or {name...}"),
        ("\udcff", "is no TOML"),
    ],
)
def test_a_file_that_is_no_catalogue(tmp_path: Path, text: str | None, message: str) -> None:
    """An error that names the file, the place in it, and what is expected."""
    file = tmp_path / "mine.toml"
    if text is not None:
        file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CatalogueError, match=re.escape(message)) as caught:
        Catalogue.load(file)
    assert str(caught.value).startswith(str(file))


def test_shipped_entries_say_enough() -> None:
    """Each has a meaning that ends a sentence, a rule that exists, and a literal key is there once in its file."""
    for family in shipped().families:
        keys = [metric.key for metric in family.metric]
        assert len(set(keys)) == len(keys)
        for metric in family.metric:
            assert metric.meaning.endswith("."), metric.key
            assert {check.rule for check in metric.checks} <= set(rules()), metric.key
            if metric.low is not None and metric.high is not None:
                assert metric.low < metric.high
    used = {check.rule for family in shipped().families for metric in family.metric for check in metric.checks}
    assert {fault.rule for fault in FAULTS.values()} <= set(rules())
    assert used <= set(rules())


def test_no_shipped_pattern_hides_another() -> None:
    """An example of every pattern is found by that pattern, or by a more exact one before it."""
    for family in shipped().families:
        for metric in family.metric:
            example = re.sub(r"\{\w+(\.\.\.)?\}", "x", metric.key)
            found = shipped().describe(example)
            assert found is not None, metric.key
            if found.pattern != metric.key:
                assert Pattern(metric.key).match(example) is not None
                order = [one.key for one in next(f for f in shipped().families if f.family == found.family).metric]
                assert found.family != family.family or order.index(found.pattern) < order.index(metric.key)


def test_the_files_are_in_the_wheel(tmp_path: Path) -> None:
    """One per family and the rules, beside the modules."""
    root = Path(__file__).parents[2]
    script = (
        "import sys; from hatchling.builders.wheel import WheelBuilder;"
        "print(next(WheelBuilder(sys.argv[1]).build(directory=sys.argv[2], versions=['standard'])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(root), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ,
    )
    names = zipfile.ZipFile(done.stdout.strip()).namelist()
    assert {f"runmirror/catalogue/{name}.toml" for name in (*SHIPPED, "rules")} <= set(names)
