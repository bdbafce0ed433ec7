"""Rows: what encode writes, decode reads, and a mirror sees."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from enum import IntEnum, StrEnum
from fractions import Fraction
from io import StringIO
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from runmirror.log import rows
from runmirror.log.rows import START, Position, Row, coerce, decode, digest, encode, json_line


def row_of(line: bytes) -> Row:
    data = decode(line)
    assert data is not None
    return Row(0, data, 0, 0.0, line.rstrip(b"\n"))


def written(metrics: Mapping[Any, Any]) -> dict[str, Any]:
    """What a strict JSON parser finds in the row, without the bookkeeping of every row."""

    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is no JSON")

    line, _ = encode(7, metrics, 1.5)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    row = json.loads(line, parse_constant=refuse)
    assert (row.pop("step"), row.pop("_timestamp")) == (7, 1.5)
    return row


def test_step_comes_first_then_the_time() -> None:
    """b'{"step":3,"_timestamp":2.5,"loss":0.5}' and a newline; no step in a summary row."""
    assert encode(3, {"loss": 0.5}, 2.5) == (b'{"step":3,"_timestamp":2.5,"loss":0.5}\n', {})
    assert encode(None, {"loss": 0.5}, 2.5)[0] == b'{"_timestamp":2.5,"loss":0.5}\n'


def test_plain_values_stay_as_they_are() -> None:
    """bool, int, float, text and None are their JSON counterparts."""
    plain = {"a": True, "b": 3, "c": 0.1, "d": "text", "e": None, "f": -(2**63), "g": 2**64 - 1, "ü/ключ": "日本"}
    assert written(plain) == plain


class Colour(StrEnum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


class Scalar:
    """Stands for a scalar of torch or jax: all that is known of it is ``.item()``."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def item(self) -> Any:
        return self.value


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float64(0.1), 0.1),
        (np.float32(0.5), 0.5),
        (np.float16(0.5), 0.5),
        (np.longdouble(0.5), 0.5),
        (np.int64(-3), -3),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.bool_(True), True),
        (np.array(2.5), 2.5),
        (np.array([7]), 7),
        (np.str_("t"), "t"),
        (Scalar(1.5), 1.5),
        (Scalar(np.float32(1.5)), 1.5),
        (Scalar(True), True),
        (Decimal("0.25"), 0.25),
        (Fraction(1, 4), 0.25),
        (Colour.RED, "red"),
        (Level.HIGH, 3),
    ],
)
def test_scalars_of_other_libraries_are_coerced(value: Any, expected: Any) -> None:
    """A plain value of the same kind."""
    found = coerce(value)
    assert (found, type(found)) == (expected, type(expected))
    assert written({"key": value}) == {"key": expected}


@pytest.mark.parametrize("make", [float, np.float64, np.float32, np.array, Scalar, lambda value: Decimal(str(value))])
def test_nonfinite_values_are_null_and_named(make: Any) -> None:
    """null in the row, nan, inf or -inf in _nonfinite, and restored in the points."""
    metrics = {name: make(float(name)) for name in ("nan", "inf", "-inf")} | {"fine": 1.0}
    assert written(metrics) == {
        "nan": None,
        "inf": None,
        "-inf": None,
        "fine": 1.0,
        "_nonfinite": {"nan": "nan", "inf": "inf", "-inf": "-inf"},
    }
    points = row_of(encode(0, metrics, 0.0)[0]).scalars()
    assert math.isnan(points.pop("nan"))
    assert points == {"inf": math.inf, "-inf": -math.inf, "fine": 1.0}


def test_a_nan_is_found_among_known_keys() -> None:
    """The short way for rows of known keys sees a NaN, two infinities that cancel out, and a type that changed."""
    keys = [f"known/{i}" for i in range(50)]
    encode(0, dict.fromkeys(keys, 1.0), 0.0)
    for odd in (
        {keys[3]: math.nan},
        {keys[0]: math.inf, keys[49]: -math.inf},
        {keys[7]: 2**70},
        {keys[7]: 2**5000},
        {keys[7]: "text"},
        {"step": 3.0},
        {"_x": 1.0},
    ):
        metrics: dict[str, Any] = dict.fromkeys(keys, 1.0) | odd
        line, left_out = encode(0, metrics, 0.0)
        row = json.loads(line)
        assert {*row.get("_nonfinite", ()), *left_out, *(k for k in odd if row.get(k) not in (None, 0))} == set(odd)


def test_sums_beyond_a_double_are_no_infinity() -> None:
    """Finite values whose sum overflows stay finite."""
    big = {"big/a": 1.7e308, "big/b": 1.7e308}
    assert written(big) == written(big) == big


def test_known_keys_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that makes up keys for ever doesn't fill the memory, and its rows stay right."""
    monkeypatch.setattr(rows, "_MAX_PLAIN_KEYS", 10)
    for i in range(100):
        assert written({f"made/{i}": 1.0}) == {f"made/{i}": 1.0}
        assert len(rows._plain_keys) <= 10


@pytest.mark.parametrize(
    "value", [2**64, -(2**63) - 1, 2**70, 10**5000, -(10**400)], ids=lambda value: value.bit_length()
)
def test_huge_integers_are_doubles_that_every_reader_takes(value: int) -> None:
    """The nearest double, or an infinity; pandas, which gives up on bigger integers, reads the row."""
    line, left_out = encode(0, {"n": value, "m": 1}, 0.0)
    expected = float(value) if abs(value) < 10**308 else math.inf if value > 0 else -math.inf
    assert left_out == {}
    assert row_of(line).scalars() == {"n": expected, "m": 1}
    assert pd.read_json(StringIO(line.decode()), lines=True)["m"].tolist() == [1]


class Broken:
    """Raises whatever one does with it."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("device lost")

    def __float__(self) -> float:
        raise RuntimeError("device lost")

    def __repr__(self) -> str:
        raise RuntimeError("device lost")

    __str__ = __repr__


@pytest.mark.parametrize(
    "value",
    [object(), [1.0], {"a": 1}, (1,), {1}, b"x", 1j, np.complex64(1j), np.array([1.0, 2.0]), Broken(), len, float],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_scalar_is_left_out_and_named(value: Any) -> None:
    """The key is in _rejected with a reason that names the type; the rest of the row is written."""
    line, left_out = encode(0, {"bad": value, "good": 1.0}, 0.0)
    assert type(value).__name__ in left_out["bad"]
    data = decode(line)
    assert data is not None
    assert ("bad" in data, data["good"], data["_rejected"]) == (False, 1.0, left_out)


def test_reserved_and_odd_keys_are_left_out_and_named() -> None:
    """step, keys with _ in front and keys that are no text: named in _rejected, the row's own step untouched."""
    line, left_out = encode(5, {"step": 9.0, "_timestamp": 1, "_x": 2, 3: 4.0, None: 1.0, Broken(): 1.0, "ok": 1}, 8.0)
    data = decode(line)
    assert data is not None
    assert set(left_out) == {"step", "_timestamp", "_x", "3", "None", "<Broken>"}
    assert (data["step"], data["_timestamp"], data["ok"]) == (5, 8.0, 1)
    assert row_of(line).scalars() == {"ok": 1}


def test_text_keys_of_another_type_are_text() -> None:
    """An enum of str as key is its value."""
    assert written({Colour.RED: 1.0}) == {"red": 1.0}


def test_lone_surrogates_become_the_replacement_character() -> None:
    """U+FFFD in keys and values; a pair of surrogates is the character it stands for."""
    assert written({"a\ud800b": "c\udfffd", "pair": "\ud83d\ude00", "n": math.nan}) == {
        "a\ufffdb": "c\ufffdd",
        "pair": "\U0001f600",
        "n": None,
        "_nonfinite": {"n": "nan"},
    }


def test_control_characters_never_break_the_line() -> None:
    """Newlines and NULs in keys and text are escaped: one line, also beside a lone surrogate."""
    odd = {"a\nb": "c\r\n\x00\u2028d"}
    assert written(odd) == odd
    assert written({**odd, "s": "\udc00"})["a\nb"] == odd["a\nb"]


def test_earlier_rejections_and_bookkeeping_go_into_the_row() -> None:
    """rejected= and extra= are in the row and left out of the points."""
    line, left_out = encode(1, {"a": 1.0}, 0.0, rejected={"step": "no"}, extra={"_error": "ValueError"})
    data = decode(line)
    assert data is not None
    assert (data["_rejected"], left_out, data["_error"]) == ({"step": "no"}, {"step": "no"}, "ValueError")
    assert row_of(line).scalars() == {"a": 1.0}


KEYS = st.text(max_size=12).filter(lambda key: key != "step" and key[:1] != "_" and key.isprintable())
VALUES = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.integers(),
    st.floats(width=32).map(np.float32),
    st.integers(-(2**63), 2**63 - 1).map(np.int64),
    st.none(),
    st.text(max_size=8),
)


def point(value: Any) -> float | None:
    """The point that a value is, None for none."""
    if value is None or isinstance(value, str):
        return None
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    return float(value) if not isinstance(value, (bool, int, np.int64)) else int(value)


@given(st.dictionaries(KEYS, VALUES, max_size=12), st.integers(-(2**63), 2**63 - 1), st.floats(0, 1e11))
@example({"a": 1.0, "b": 10**400}, 0, 0.0)
def test_encode_decode_scalars_round_trip(metrics: dict[str, Any], step: int, time: float) -> None:
    """The points of a row are those that were logged, bit by bit, in order; text stays text."""
    line, left_out = encode(step, metrics, time)
    assert left_out == {}
    row = row_of(line)
    expected = {
        key: value for key, value in ((key, point(value)) for key, value in metrics.items()) if value is not None
    }
    assert [(key, repr(value)) for key, value in row.scalars().items()] == [
        (key, repr(float(value) if type(value) is float else int(value))) for key, value in expected.items()
    ]
    assert row.text() == {key: value for key, value in metrics.items() if isinstance(value, str)}
    assert (row.data["step"], row.data["_timestamp"]) == (step, time)


ANYTHING = st.one_of(
    VALUES, st.binary(max_size=3), st.lists(st.none(), max_size=2), st.characters(), st.complex_numbers()
)


@given(st.dictionaries(st.one_of(ANYTHING.filter(lambda key: not isinstance(key, list)), KEYS), ANYTHING, max_size=8))
def test_encode_takes_anything(metrics: dict[Any, Any]) -> None:
    """One line of strict JSON for any keys and values."""
    written(metrics)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"a":NaN,"b":Infinity,"c":-Infinity}', {"b": math.inf, "c": -math.inf}),
        (b'{"a":1}\r', {"a": 1}),
        (b'\xef\xbb\xbf{"a":1}', {"a": 1}),
        (b'\x00\x00{"a":1}\x00', {"a": 1}),
        (b'{"a":1180591620717411303424}', {"a": 2.0**70}),
        (b'{"a":1e400}', {"a": math.inf}),
        (b'{"a":1,"a":2}', {"a": 2}),
        (b'{"a":"\\ud800"}', {}),
        (b'{"a":"\xff"}', {}),
        (b'{"data":{"a":1},"b":[1],"c":2.0}', {"c": 2.0}),
    ],
)
def test_decode_takes_what_others_write(line: bytes, expected: dict[str, float]) -> None:
    """The row's finite and infinite points; a NaN is left out of the comparison."""
    points = row_of(line).scalars()
    assert {key: value for key, value in points.items() if value == value} == expected


@pytest.mark.parametrize(
    "line", [b"", b"  ", b"\x00\x00", b"[1]", b"3", b'{"a":1', b'{"a":1}{', b"\xff", b"[" * 100_000]
)
def test_decode_of_no_object_is_none(line: bytes) -> None:
    """None, never an exception."""
    assert decode(line) is None


def test_every_truncation_of_a_row_is_none_or_the_row() -> None:
    """Half a row is never taken for a row."""
    line = encode(3, {"a": 0.5, "b": math.nan, "t": "日本"}, 1.0)[0].rstrip(b"\n")
    assert [decode(line[:end]) for end in range(len(line))] == [None] * len(line)


def test_bookkeeping_is_no_point() -> None:
    """Only keys without _ in front, and never the step, are points."""
    row = row_of(b'{"step":1,"_timestamp":5.0,"_x":1,"a":null,"b":true,"_nonfinite":{"z":"nan"}}')
    assert row.scalars() == {"b": True}


def test_a_row_knows_the_position_behind_it() -> None:
    """The next ordinal, its end, and the digest of its line; START is before everything."""
    row = Row(4, {}, 1, 2.0, b"{}", 17)
    assert row.position == Position(5, 17, digest(b"{}"))
    assert Position(0, 0) == START
    assert len(digest(b"")) == 16


def test_an_emptied_row_keeps_its_place() -> None:
    """Same ordinal and step, no values, a fault, and still the rewind."""
    row = Row(4, {"a": 1.0}, 3, 2.0, b"{}", 17, rewind=3)
    empty = row.emptied("broken")
    assert (empty.ordinal, empty.step, empty.scalars(), empty.fault, empty.rewind) == (4, 3, {}, "broken", 3)


def test_json_line_takes_what_orjson_refuses() -> None:
    """Big integers as they are, surrogates replaced, one line."""
    assert json_line({"n": 2**70, "s": "\ud800\n"}) == b'{"n":1180591620717411303424,"s":"\xef\xbf\xbd\\n"}\n'


class Odd(Mapping[str, float]):
    """A mapping that is no dict."""

    def __getitem__(self, key: str) -> float:
        return 1.0

    def __iter__(self) -> Iterator[str]:
        return iter(("a", "b"))

    def __len__(self) -> int:
        return 2


def test_any_mapping_is_taken() -> None:
    """A mapping of another type, and a pandas Series, are rows."""
    assert written(Odd()) == {"a": 1.0, "b": 1.0}
    assert written(pd.Series({"a": 1.0})) == {"a": 1.0}  # type: ignore[arg-type]
