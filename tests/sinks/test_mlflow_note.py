"""What metrics mean, in an MLflow description."""

from __future__ import annotations

from pathlib import Path

import pytest

from runmirror.sinks.mlflow_note import LONGEST, MARK, NOTE, with_metrics

FIRST = "Mirrored by runmirror from a tinker-cookbook log. Times: told from reports and files."
TAGS = {NOTE: FIRST}


def test_the_main_reward_comes_first() -> None:
    """Then metrics that are watched, by name; not those of evaluations, nor what nobody knows."""
    keys = ["optim/entropy", "env/all/reward/total", "mine", "test/env/all/reward/total", "time/total"]
    made = with_metrics(TAGS, keys)
    assert made[NOTE].startswith(f"{FIRST}\n\n| metric | unit | better | meaning |\n| --- |")
    assert [line.split("`")[1] for line in made[NOTE].splitlines() if "`" in line] == [
        "env/all/reward/total",
        "optim/entropy",
    ]
    assert "| higher |" in made[NOTE]


def test_again_it_changes_nothing_and_new_metrics_are_added() -> None:
    """No tags for the same keys; the table anew when there are more."""
    made = with_metrics(TAGS, ["reward"])
    assert with_metrics(TAGS | made, ["reward"]) == {}
    more = with_metrics(TAGS | made, ["reward", "kl"])
    assert more[NOTE].count("`") == 4
    assert more[MARK] != made[MARK]


@pytest.mark.parametrize("note", ["my own words", FIRST + "\n\nand mine", ""])
def test_a_description_of_somebody_stays(note: str) -> None:
    """Whatever it says, also behind one of ours."""
    assert with_metrics({NOTE: note}, ["reward"]) == {}
    made = with_metrics(TAGS, ["reward"])
    assert with_metrics(made | {NOTE: note}, ["reward", "kl"]) == {}


def test_it_is_never_longer_than_mlflow_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much a user's catalogue has to say, and whatever is in a key."""
    long = "x" * 900
    metrics = [f'[[metric]]\nkey = "{n}{{name}}"\nmeaning = "{long}"\nmain = {n}\n' for n in range(1, 15)]
    file = tmp_path / "mine.toml"
    file.write_text('family = "mine"\ntitle = "Mine"\n' + "".join(metrics))
    monkeypatch.setenv("RUNMIRROR_CATALOGUE", str(file))
    made = with_metrics(TAGS, [f"{n}|`\n" for n in range(1, 15)])
    assert LONGEST / 2 < len(made[NOTE]) < LONGEST + 200
    assert len(made[NOTE].split("\n\n")[1].splitlines()) == 2 + 6
