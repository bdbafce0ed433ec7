"""Keys for trackers that refuse some: every key has one name, and the name gives it back."""

from __future__ import annotations

import posixpath
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runmirror.sinks.keys import ARTIFACT, MLFLOW, KeyMap, KeyRule, decode, encode

RULES = [MLFLOW, ARTIFACT, KeyRule(r"[A-Za-z0-9_]", 40)]
TRICKY = st.text(st.sampled_from([*"_x04AFh@/.%a5\n", "é", "🙂", "\ud800"]), max_size=60)
ANY = st.one_of(TRICKY, st.text(st.characters(), max_size=300))


def taken(name: str) -> bool:
    """Whether MLflow takes a name: its own validator, in other words."""
    clean = posixpath.normpath(name)
    path = clean == name and clean != "." and not clean.startswith(("..", "/"))
    return bool(name) and path and len(name) <= 250 and re.fullmatch(r"[/\w.\- :]*", name) is not None


@given(ANY, st.sampled_from(RULES))
def test_a_name_gives_its_key_back(key: str, rule: KeyRule) -> None:
    """The same key, from the name alone; from the map when it was cut."""
    names = KeyMap(rule)
    name = names.name(key)
    assert names.key(name) == key
    assert len(name) <= rule.longest
    if not names.cut:
        assert decode(name) == key
    assert all(re.fullmatch(rule.allowed, char) for char in name)


@given(ANY)
def test_mlflow_takes_every_name(key: str) -> None:
    """Whatever the key: allowed characters, a clean path, 250 at most."""
    assert taken(encode(key, MLFLOW))


@given(st.lists(ANY, max_size=20, unique=True), st.sampled_from(RULES))
def test_no_two_keys_merge(keys: list[str], rule: KeyRule) -> None:
    """As many names as keys, names of other keys among them."""
    keys = list(dict.fromkeys([*keys, *(encode(key, rule) for key in keys)]))
    assert len({encode(key, rule) for key in keys}) == len(keys)


@pytest.mark.parametrize(
    "key", ["env/all/reward/total", "time/sample:mean", "optim_x/lr_x2", "a b-c.d", "naïve/ключ/鍵", "a..b", "kl", "_x"]
)
def test_a_key_that_is_taken_stays(key: str) -> None:
    """Its own name."""
    assert encode(key, MLFLOW) == key


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("mean@1", "mean_x0040_1"),
        ("timing(s)/gen", "timing_x0028_s_x0029_/gen"),
        ("a//b", "a/_x002F_b"),
        ("/a/", "_x002F_a_x002F_"),
        ("../b", "_x002E_./b"),
        ("a/./b", "a/_x002E_/b"),
        ("", "_x_"),
        ("_x0040_", "_x005F_x0040_"),
        ("_x0040@", "_x005F_x0040_x0040_"),
        ("🙂", "_x1F642_"),
    ],
)
def test_a_key_that_is_refused_is_encoded(key: str, name: str) -> None:
    """By the code points of what is refused, and read back."""
    assert encode(key, MLFLOW) == name
    assert decode(name) == key


def test_a_long_key_keeps_its_start() -> None:
    """250 characters that begin as the key does; decoded through the map, left as it is without."""
    key = "env/" + "k" * 300
    names = KeyMap(MLFLOW)
    name = names.name(key)
    assert len(name) == 250
    assert name.startswith("env/kkk")
    assert (names.key(name), decode(name)) == (key, name)
    assert names.changed == {name: key}


def test_a_foreign_code_that_is_no_character_is_left() -> None:
    """A name that somebody else made decodes to itself, without an error."""
    assert decode("a_x999999_b") == "a_x999999_b"
