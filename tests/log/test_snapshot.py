"""Configs of every kind become strict JSON, whatever they hold."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import enum
import functools
import json
import math
import pathlib
import sys
import types
import uuid
from typing import Any, NamedTuple

import attrs
import chz
import numpy as np
import orjson
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from runmirror.log import snapshot
from runmirror.log.snapshot import dump_config, encode_config


def reward(answer: str) -> float:
    return float(len(answer))


class Loss(enum.Enum):
    PPO = "ppo"
    CUSTOM = (1, 2)


class Level(enum.IntEnum):
    HIGH = 3


@dataclasses.dataclass
class Optimizer:
    lr: float = 3e-5
    betas: tuple[float, float] = (0.9, 0.95)


@dataclasses.dataclass
class Training:
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    loss: Loss = Loss.PPO
    api_key: str = "abc"


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow", arbitrary_types_allowed=True)
    name: str = "tiny"
    optimizer: Optimizer = Optimizer()
    password: pydantic.SecretStr = pydantic.SecretStr("hunter2")
    hidden: int = pydantic.Field(default=1, exclude=True)


@chz.chz
class Cookbook:
    learning_rate: float = 4e-5
    optimizer: Optimizer = chz.field(default_factory=Optimizer)
    hf_token: str = "abc"


@attrs.define
class Attrs:
    x: int = 1
    optimizer: Optimizer = attrs.Factory(Optimizer)


class Point(NamedTuple):
    x: int
    y: Any


class Plain:
    rollouts = 8
    _hidden_class = 2

    def __init__(self) -> None:
        self.seed = 7
        self._hidden = 1
        self.reward = reward

    def method(self) -> None: ...


class Arguments:
    """Like transformers' TrainingArguments: to_dict() is how it wants to be read."""

    def __init__(self) -> None:
        self.internal = object()

    def to_dict(self) -> dict[str, Any]:
        return {"learning_rate": 1e-4, "hub_token": "<HUB_TOKEN>", "optim": Loss.PPO}


class Raises:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __str__(self) -> str:
        raise ValueError("no text")

    def to_dict(self) -> dict[str, Any]:
        raise OSError("no dict")


OPTIMIZER = {"lr": 3e-5, "betas": [0.9, 0.95]}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, {}),
        ({}, {}),
        ({"a": {"b": [1, (2, 3)]}}, {"a": {"b": [1, [2, 3]]}}),
        (Training(), {"optimizer": OPTIMIZER, "loss": "ppo", "api_key": "***"}),
        (Model(extra=2), {"name": "tiny", "optimizer": OPTIMIZER, "password": "***", "extra": 2}),  # type: ignore[call-arg]
        (pydantic.RootModel[list[int]]([1, 2]), {"config": [1, 2]}),
        (Cookbook(), {"learning_rate": 4e-5, "optimizer": OPTIMIZER, "hf_token": "***"}),
        (Attrs(), {"x": 1, "optimizer": OPTIMIZER}),
        (argparse.Namespace(lr=1.0, out=pathlib.PurePosixPath("a/b")), {"lr": 1.0, "out": "a/b"}),
        (types.SimpleNamespace(a=1), {"a": 1}),
        (Point(1, Point(2, None)), {"x": 1, "y": {"x": 2, "y": None}}),
        (Plain(), {"rollouts": 8, "seed": 7, "reward": f"{__name__}.reward"}),
        (Arguments(), {"learning_rate": 1e-4, "hub_token": "***", "optim": "ppo"}),
        (collections.OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (collections.ChainMap({"a": 1}, {"b": 2}), {"a": 1, "b": 2}),
        ([1, "two"], {"config": [1, "two"]}),
        ("config.yaml", {"config": "config.yaml"}),
        (3, {"config": 3}),
        (Plain, {"config": f"{__name__}.Plain"}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_holders(config: Any, expected: dict[str, Any]) -> None:
    """Its fields as a dict, for everything people hold configs in; {"config": ...} for what has no fields."""
    assert dump_config(config) == expected


def test_omegaconf() -> None:
    """Values with interpolations resolved, and the missing ones named, for an OmegaConf config."""
    config = OmegaConf.create({"lr": 1e-5, "twice": "${lr}", "nested": [{"path": "x"}], "m": "???", "bad": "${gone}"})
    assert dump_config(config) == {
        "lr": 1e-5,
        "twice": 1e-5,
        "nested": [{"path": "x"}],
        "m": "<unreadable: MissingMandatoryValue>",
        "bad": "<unreadable: InterpolationKeyError>",
    }


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, True),
        (2**70, 2**70),
        (-(10**5000), "<integer of 16610 bits>"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (Loss.CUSTOM, "CUSTOM"),
        (Level.HIGH, 3),
        (b"abc", "<3 bytes>"),
        (bytearray(5), "<5 bytes>"),
        (datetime.datetime(2024, 1, 2, 3, 4, tzinfo=datetime.UTC), "2024-01-02T03:04:00+00:00"),
        (datetime.date(2024, 1, 2), "2024-01-02"),
        (datetime.timedelta(hours=1), "1:00:00"),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (1 + 2j, "(1+2j)"),
        (range(10**9), "range(0, 1000000000)"),
        ({3, 1, 2}, [1, 2, 3]),
        (frozenset({"b", "a", 1}), [1, "a", "b"]),
        (collections.deque([1, 2]), [1, 2]),
        ({"b": 1, "a": 2}.keys(), ["b", "a"]),
        (reward, f"{__name__}.reward"),
        (len, "len"),
        (Optimizer, f"{__name__}.Optimizer"),
        (list[int], "list[int]"),
        (functools.partial(reward), {"function": f"{__name__}.reward"}),
        (
            functools.partial(reward, 1, token="abc"),
            {"function": f"{__name__}.reward", "args": [1], "kwargs": {"token": "***"}},
        ),
        (object(), "object"),
        (json, "<module 'json'"),
        ("a\ud800b", "a\ufffdb"),
        ("\ud83d\ude00", "\U0001f600"),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.float64("nan"), "nan"),
        (np.arange(4).reshape(2, 2), [[0, 1], [2, 3]]),
        (np.zeros((100, 2), np.float32), "<ndarray: float32 (100, 2)>"),
        (np.longdouble(2), "2.0"),
        (np.dtype("float32"), "float32"),
        (np.float32, "numpy.float32"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values(value: Any, expected: Any) -> None:
    """A JSON value, or text that names what has none."""
    plain = dump_config({"value": value})["value"]
    if value is json:  # followed by its place, which differs
        assert plain.startswith(expected)
    else:
        assert plain == expected
        assert type(plain) is type(expected)


def test_array_types_of_other_libraries() -> None:
    """Lists for small tensors, notes for large ones and tables: by their attributes, with nothing imported."""

    class Tensor:
        dtype = "torch.bfloat16"
        device = "cuda:0"

        def __init__(self, *shape: int) -> None:
            self._shape = shape

        @property
        def shape(self) -> tuple[int, ...]:
            return self._shape

        def tolist(self) -> list[float]:
            return [1.0] * self._shape[0]

    class Frame:
        dtypes = shape = (1000, 3)

    expected = {"small": [1.0, 1.0], "large": "<Tensor: torch.bfloat16 (1000,)>", "frame": "<Frame: table (1000, 3)>"}
    assert dump_config({"small": Tensor(2), "large": Tensor(1000), "frame": Frame()}) == expected


def test_keys_are_text() -> None:
    """Text keys without losing any: 1 and "1" both stay."""
    config = {1: "a", "1": "b", None: "c", (1, 2): "d", Loss.PPO: "e", "\ud800": "f"}
    assert dump_config(config) == {"1": "a", "1 (str)": "b", "None": "c", "(1, 2)": "d", "ppo": "e", "\ufffd": "f"}


def test_cycles() -> None:
    """ "<cycle>" where a value contains itself; a value used twice is written twice."""
    loop: dict[str, Any] = {"shared": [1]}
    loop["again"] = loop["shared"]
    loop["self"] = loop
    assert dump_config(loop) == {"shared": [1], "again": [1], "self": "<cycle>"}


def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A note where a config is too deep, too long or too large; dumping that again changes nothing."""
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    deep = dump_config(deep)
    assert "<too deep>" in json.dumps(deep)
    assert dump_config(deep) == deep
    long = dump_config({"x": list(range(5000)), "text": "y" * 10**6})
    assert long["x"] == [*range(1000), "<more left out>"]
    assert long["text"].endswith("... <cut, 1000000 characters>")
    assert len(long["text"]) < 20_000
    assert dump_config(long) == long
    monkeypatch.setattr(snapshot, "MAX_NODES", 50)
    large = dump_config({f"k{i}": [1] * 10 for i in range(100)})
    assert large["..."] == "<more left out>"
    assert len(large) < 10
    assert dump_config(large) == large


class TestNeverRaises:
    """A note in place of what can't be read, whatever raises."""

    def test_methods_that_raise(self) -> None:
        """Its attributes when to_dict raises, a note when it has none."""
        config = {"with": Raises(lr=1), "without": Raises(), "key": {Raises(): 1}}
        assert dump_config(config) == {
            "with": {"lr": 1},
            "without": "<unreadable: OSError>",
            "key": {"<unreadable: ValueError>": 1},
        }

    def test_fields_that_raise(self) -> None:
        """Only the field that raises is a note."""

        class Bad(Point):
            @property
            def x(self) -> int:  # type: ignore[override]
                raise RuntimeError

        assert dump_config(Bad(1, 2)) == {"x": "<unreadable: RuntimeError>", "y": 2}

    def test_unset_field(self) -> None:
        """A note for a dataclass field that was never set."""

        @dataclasses.dataclass
        class Late:
            x: int = dataclasses.field(init=False)

        assert dump_config(Late()) == {"x": "<unreadable: AttributeError>"}

    def test_iteration_that_raises(self) -> None:
        """A note for a mapping that can't be listed."""

        class Broken(dict[str, int]):
            def __iter__(self) -> Any:
                raise KeyError("gone")

        assert dump_config({"a": Broken(x=1), "b": 1}) == {"a": "<unreadable: KeyError>", "b": 1}

    def test_endless_to_dict(self) -> None:
        """An end, at the depth bound, for objects that make new ones for ever."""

        class Endless:
            def to_dict(self) -> dict[str, Any]:
                return {"next": Endless()}

        assert "<too deep>" in json.dumps(dump_config(Endless()))

    def test_iterators_are_left_alone(self) -> None:
        """The iterator's name, and all of its items still in it."""
        items = iter([1, 2])
        generator = (i for i in [1, 2])
        plain = dump_config({"items": items, "generator": generator})
        assert plain["items"] == "list_iterator"
        assert plain["generator"].startswith("<generator object")
        assert "0x" not in plain["generator"]
        assert (list(items), list(generator)) == ([1, 2], [1, 2])

    def test_stack_nearly_used_up(self) -> None:
        """A dump or a note, not a RecursionError, close to the recursion limit."""

        def dive(levels: int) -> dict[str, Any]:
            return dump_config({"a": {"b": {"c": 1}}}) if levels == 0 else dive(levels - 1)

        frame, depth = sys._getframe(), 0
        while frame.f_back:
            frame, depth = frame.f_back, depth + 1
        plain = dive(sys.getrecursionlimit() - depth - 20)
        assert "<unreadable: RecursionError>" in json.dumps(plain)


class TestSecrets:
    """Masked by key, at any depth, and in any text."""

    def test_nested_below_a_secret_key(self) -> None:
        """*** for every text below a key that says secret; numbers and empty text stay."""
        config = {"credentials": {"user": "me", "list": ["x", 3]}, "token": "", "password": None, "secret": b"x"}
        assert dump_config(config) == {
            "credentials": {"user": "***", "list": ["***", 3]},
            "token": "",
            "password": None,
            "secret": "***",
        }

    def test_command_lines(self) -> None:
        """*** for the argument behind a secret option and for its joined form."""
        argv = ["train.py", "--api-key", "abc", "--hf-token=abcdef", "--use-token", "--lr", "1"]
        assert dump_config({"argv": argv}) == {
            "argv": ["train.py", "--api-key", "***", "--hf-token=***", "--use-token", "--lr", "1"]
        }

    def test_text_anywhere(self) -> None:
        """*** for known shapes in values, keys, paths and text made from objects."""
        token = "hf_" + "a1" * 10
        config = {"note": f"use {token}", token: 1, "p": pathlib.PurePosixPath(f"x/{token}"), "e": ValueError(token)}
        assert dump_config(config) == {"note": "use ***", "***": 1, "p": "x/***", "e": "***"}


def test_encoding_is_strict_json() -> None:
    """Indented strict JSON that ends its last line, with integers beyond 64 bits too."""
    assert encode_config({"a": 1}) == b'{\n  "a": 1\n}\n'
    assert json.loads(encode_config({"a": 2**70, "ü": math.nan})) == {"a": 2**70, "ü": "nan"}


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(st.characters())  # lone surrogates included
    | st.binary(max_size=9)
    | st.datetimes()
    | st.timedeltas()
    | st.complex_numbers()
    | st.uuids()
    | st.sampled_from([Loss.PPO, Loss.CUSTOM, Level.HIGH, reward, Plain, object(), Raises(), Raises(a=1), Arguments()])
    | st.sampled_from(["--token", "-api_key", "token=abcdefgh1", "https://u:p@h", "sk-" + "a" * 20, "...", "***"])
)
keys = st.text(max_size=5) | st.integers() | st.none() | st.sampled_from(["token", "password", "...", "1 (int)"])
configs = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(keys, inner)
        | st.tuples(inner, inner)
        | st.sets(scalars.filter(lambda value: not isinstance(value, Raises)))
        | st.builds(Point, st.none(), inner)
        | st.builds(Training, optimizer=inner)
        | st.builds(lambda value: argparse.Namespace(value=value), inner)
    ),
    max_leaves=20,
)


@given(configs)
def test_any_nesting(config: Any) -> None:
    """Plain strict JSON that both encoders take, equal to itself when dumped again."""
    plain = dump_config(config)
    orjson.dumps(plain)
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert dump_config(plain) == plain
