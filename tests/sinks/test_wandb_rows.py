"""What of a run goes to W&B, as plain data."""

from __future__ import annotations

import math
from dataclasses import replace

from runmirror.log.rows import Row
from runmirror.sinks.resumes import changed
from runmirror.sinks.texts import MAX_TEXT, row_texts
from runmirror.sinks.wandb_rows import config, digest, points, row_data, times
from runmirror.testing.conformance import a_run


def row(data: dict[str, object]) -> Row:
    return Row(3, {"step": 7, **data}, 7, 12.5)


def test_numbers_go_with_the_step_and_the_time() -> None:
    """Keys as they are, bools as numbers, NaN and infinities as such; text, lists and bookkeeping are left out."""
    data, rejected = row_data(row({"a/b c": True, "inf": math.inf, "text": "x", "list": [1], "_rejected": {}}))
    assert data == {"_timestamp": 12.5, "step": 7, "a/b c": 1, "inf": math.inf}
    assert rejected == []


def test_a_row_without_numbers_is_its_time() -> None:
    """Such a row keeps W&B's row numbers equal to ours, and has no place on the x axis."""
    assert row_data(row({"note": "x"})) == ({"_timestamp": 12.5}, [])


def test_a_row_of_12_mb_is_put_aside_whole() -> None:
    """W&B would drop it, and every later summary with it."""
    data, (rejected,) = row_data(row({f"{'k' * 600}{n}": n / 3 for n in range(20_000)}))
    assert data == {"_timestamp": 12.5}
    assert (rejected.ordinal, rejected.key) == (3, None)
    assert "larger than 1,000,000 bytes" in rejected.reason


def test_many_keys_are_taken() -> None:
    """20,000 short ones are below the limit."""
    data, rejected = row_data(row({f"env/{n}": n / 3 for n in range(20_000)}))
    assert (len(data), rejected) == (20_002, [])


def test_keys_that_become_one_are_named() -> None:
    """No name, and two half characters that both become "?"."""
    data, rejected = row_data(row({"": 1, "a\ud800": 2, "a" + chr(0xD801): 3}))
    assert data == {"_timestamp": 12.5, "step": 7, "a?": 2}
    assert [one.key for one in rejected] == ["", "a" + chr(0xD801)]


def test_texts_are_masked_and_cut() -> None:
    """For the summary: no secret, no novel."""
    texts = row_texts(row({"url": "https://me:secret99@host/x", "long": "x" * 10_000, "n": 1}))
    assert texts == {"url": "https://***@host/x", "long": "x" * MAX_TEXT}


def test_the_config_is_strict_nested_and_masked() -> None:
    """NaN as text (W&B would make it null), keys as text, objects as their text, W&B's own names left out."""
    given = {"lr": math.nan, "model": {"api_key": "sk-1", 3: [1, (2, {"x": None})]}, "_wandb": 1, "runmirror": 2}
    assert config(given) == {"lr": "nan", "model": {"api_key": "***", "3": [1, [2, {"x": None}]]}}


def test_what_changed_is_told_nested() -> None:
    """New and other values, None for those that are gone; digests tell equal configs."""
    before = {"lr": 1, "model": {"rank": 8, "name": "a"}, "old": 1, "runmirror": {}}
    after = {"lr": 1, "model": {"rank": 16, "name": "a"}, "new": [1]}
    assert changed(before, after) == {"model": {"rank": 16}, "new": [1], "old": None}
    assert changed(after, after) == {}
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 1})


def test_the_original_times_are_told() -> None:
    """Start, end and duration, which W&B can't be given otherwise; nothing of an end while there is none."""
    ended = times(replace(a_run(), status="failed", end=a_run().start + 60.0))  # type: ignore[operator]
    assert (ended["start"], ended["duration"], ended["status"]) == (a_run().start, 60.0, "failed")
    assert not times(a_run()).keys() & {"end", "duration", "status"}


def test_points_come_back_from_rows() -> None:
    """Those with a step; NaN and infinities also where they are text; no bookkeeping, no text."""
    shown = [{"_step": 0, "_timestamp": 1.5, "step": 4, "a": "NaN", "b": -math.inf, "c": 2, "d": "x", "e": None}]
    found = list(points([*shown, {"_step": 1, "_timestamp": 2.5}]))
    assert [(one.key, one.step, one.time) for one in found] == [("a", 4, 1.5), ("b", 4, 1.5), ("c", 4, 1.5)]
    assert math.isnan(found[0].value)
