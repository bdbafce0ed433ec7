"""File names of a log_path, in both layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runmirror.log.layout import (
    CHECKPOINTS,
    CODE,
    CONFIG,
    JOURNAL,
    METRICS,
    RUN,
    FileName,
    Kind,
    clean_name,
    file_name,
    parse,
)

ROLLOUT_KINDS: list[Kind] = ["report", "logtree", "rollouts"]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("config.json", FileName("config.json", "config")),
        ("code.diff", FileName("code.diff", "code")),
        ("checkpoints.jsonl", FileName("checkpoints.jsonl", "checkpoints")),
        ("train_iteration_000010.html", ("report", "train", 10)),
        ("train_iteration_000010_logtree.json", ("logtree", "train", 10)),
        ("train_iteration_1234567_rollout_summaries.jsonl", ("rollouts", "train", 1234567)),
        ("eval_gsm8k_iteration_000002.html", ("report", "eval/gsm8k", 2)),
        ("eval_x_iteration_000001_iteration_000002.html", ("report", "eval/x_iteration_000001", 2)),
        ("iteration_000010/train.html", ("report", "train", 10)),
        ("iteration_000010/train_logtree.json", ("logtree", "train", 10)),
        ("iteration_000010/eval_held_out.v2_rollout_summaries.jsonl", ("rollouts", "eval/held_out.v2", 10)),
    ],
)
def test_a_file_is_known_by_its_name(path: str, expected: FileName | tuple[Kind, str, int]) -> None:
    """Kind, split and iteration, in both layouts; the last ``_iteration_`` counts."""
    assert parse(path) == (expected if isinstance(expected, FileName) else FileName(path, *expected))


@pytest.mark.parametrize(
    "path",
    [
        METRICS,
        JOURNAL,
        RUN,
        "logs.log",
        "timing_gantt_000001.html",
        "iteration_000010/timing_gantt.html",
        "train_iteration_1.html",
        "sub/train_iteration_000010.html",
        "iteration_000010/sub/train.html",
        "iteration_000010/eval_a/b.html",
        "eval__iteration_000010.html.bak",
        "",
    ],
)
def test_other_files_are_none_of_ours(path: str) -> None:
    """None for metrics, bookkeeping, other programs' files, and folders too deep."""
    assert parse(path) is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("held out/v2 (small)", "held_out_v2_small"),
        ("test", "test"),
        ("a/b", "a_b"),
        ("..", "unnamed"),
        ("日本", "unnamed"),
        ("_x_", "x"),
        ("v1.2-b", "v1.2-b"),
    ],
)
def test_names_are_cleaned_as_tinker_cookbook_does(name: str, expected: str) -> None:
    """The name that tinker-cookbook gives the file (its source and real runs)."""
    assert clean_name(name) == expected


@given(st.sampled_from(ROLLOUT_KINDS), st.text(), st.integers(0, 10**8), st.sampled_from(["flat", "nested"]))
def test_a_made_name_is_understood_and_stays_inside(kind: Kind, name: str, iteration: int, layout: str) -> None:
    """parse gives back kind, cleaned split and iteration, for any evaluation's name."""
    split = f"eval/{name}"
    path = file_name(kind, split, iteration, layout)  # type: ignore[arg-type]
    assert parse(path) == FileName(path, kind, f"eval/{clean_name(name)}", iteration)
    assert ".." not in path.split("/")


def test_training_names_are_those_of_the_published_page() -> None:
    """train_iteration_000010.html when flat, iteration_000010/train.html when nested."""
    assert file_name("report", "train", 10) == "train_iteration_000010.html"
    assert file_name("logtree", "train", 10, "nested") == "iteration_000010/train_logtree.json"
    assert file_name("rollouts", "my eval", 0) == "eval_my_eval_iteration_000000_rollout_summaries.jsonl"


def test_top_level_names() -> None:
    """The names that tinker-cookbook gives them, and ours below .runmirror."""
    assert (METRICS, CONFIG, CHECKPOINTS, CODE) == ("metrics.jsonl", "config.json", "checkpoints.jsonl", "code.diff")
    assert {str(Path(path).parent) for path in (RUN, JOURNAL)} == {".runmirror"}
