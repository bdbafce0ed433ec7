"""What metrics mean, in an MLflow description."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from runmirror.sinks.mlflow_note import LONGEST, MARK, NOTE, first_note, with_metrics

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


def test_a_key_makes_no_markup() -> None:
    """What stands in a key is text: no link, image, markup or HTML, in the key's own cell or in the meaning that repeats it."""
    start = "env/all/num_truncations_"
    keys = [f"{start}![x](javascript:alert(1))<img src=x onerror=alert(1)>_a_", f"{start}`|b|`\n# c"]
    note = with_metrics(TAGS, keys)[NOTE]
    rows = note.split("\n\n")[1].splitlines()[2:]
    assert len(rows) == 2
    cells = [re.split(r"(?<!\\)\|", row)[1:-1] for row in rows]
    assert [len(row) for row in cells] == [4, 4]
    for key, *_, meaning in cells:
        assert re.fullmatch(r" `[^`\n]*` ", key)
        assert not re.search(r"(?<!\\)[\[\]*_!]|[<>`]", meaning)
    assert "\\!\\[x\\](javascript:alert(1))&lt;img src=x" in "".join(row[3] for row in cells)


def test_notes_stay_before_the_metrics() -> None:
    """Also when the table changes; notes that somebody has changed are left alone."""
    tags = first_note(FIRST, "Look at **step 7**.\n\n| a | b |\n| --- | --- |")
    made = with_metrics(tags, ["reward"])
    assert made[NOTE].startswith(f"{tags[NOTE]}\n\n| metric | unit |")
    more = with_metrics(made, ["reward", "kl"])
    assert more[NOTE].startswith(f"{tags[NOTE]}\n\n| metric | unit |")
    assert more[NOTE].count("| metric |") == 1
    assert with_metrics(made | {NOTE: made[NOTE].replace("7", "8")}, ["reward", "kl"]) == {}
    assert len(with_metrics(first_note(FIRST, "n" * 9000), ["reward", "kl"])[NOTE]) < 8000
