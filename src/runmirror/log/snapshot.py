"""What a run was made of: its configuration as data that is safe to keep and to send; its code by ``repository``.

Guarantees:

- :func:`dump_config` never raises for what it finds: what can't be read is named in its place.
- Its result is plain, strict JSON data: dicts with text keys, lists, bool, int, float, str, None. NaN and infinities
  are the texts ``"nan"``, ``"inf"``, ``"-inf"``. Integers stay integers at any practical size; orjson refuses those
  beyond 64 bits, :func:`encode_config` doesn't. Dumping a result again changes nothing.
- Secrets are ``***``: values whose key names one, and in any text what :mod:`runmirror.log.masking` can tell.
- No object of the user is changed, no iterator consumed, no tracker, array or configuration library imported.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import re
import sys
import types
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, KeysView, Mapping, Sequence, Set, ValuesView
from enum import Enum
from typing import Any

import orjson
from pydantic import BaseModel, RootModel

from runmirror.log.masking import MASK, is_secret_key, mask_text, mask_url
from runmirror.log.repository import code_diff, parse_code_header

__all__ = ["code_diff", "dump_config", "encode_config", "is_secret_key", "mask_text", "mask_url", "parse_code_header"]

MAX_DEPTH, MAX_ITEMS, MAX_NODES, MAX_ARRAY = 50, 1000, 20_000, 64
"""Bounds of a dumped config: levels, entries of one container, values in all, elements of an array shown as a list."""
MAX_TEXT, MAX_KEY = 20_000, 500
_MORE = "<more left out>"


def dump_config(config: Any) -> dict[str, Any]:
    """``config.json`` from whatever people hold a configuration in.

    Takes mappings (OmegaConf's too), dataclasses, pydantic models, chz, attrs and msgspec classes, named tuples,
    ``argparse.Namespace``, anything with ``to_dict()`` such as transformers' TrainingArguments, and objects with
    attributes, nested in any way. Functions and classes become ``module.qualname``; enums their value; paths, dates,
    dtypes and devices text; sets sorted lists; small arrays lists and large ones a note. None is ``{}``; what has no
    fields is ``{"config": ...}``.
    """
    if config is None:
        return {}
    plain = _Dump().value(config)
    if not isinstance(plain, dict):
        plain = _Dump().value({"config": config})
    return plain if isinstance(plain, dict) else {"config": plain}


def encode_config(config: Any) -> bytes:
    """The bytes of config.json: :func:`dump_config` as strict, indented JSON."""
    plain = dump_config(config)
    try:
        return orjson.dumps(plain, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # an integer beyond 64 bits
        return json.dumps(plain, ensure_ascii=False, allow_nan=False, indent=2).encode() + b"\n"


class _Dump:
    """One dump: what is open on the way down (for cycles and depth), and how many values it has taken (for size)."""

    def __init__(self) -> None:
        self._open: set[int] = set()
        self._nodes = 0

    def value(self, value: Any, secret: bool = False) -> Any:
        try:
            plain = self._plain(value, secret)
        except Exception as error:
            plain = _unreadable(error)
        return MASK if secret and isinstance(plain, str) and plain else plain

    def _plain(self, value: Any, secret: bool) -> Any:
        scalar = _scalar(value)
        if scalar is not _NO_SCALAR:
            return scalar
        if id(value) in self._open:
            return "<cycle>"
        if len(self._open) >= MAX_DEPTH:
            return "<too deep>"
        self._open.add(id(value))
        try:
            return self._structure(value, secret)
        finally:
            self._open.discard(id(value))

    def _structure(self, value: Any, secret: bool) -> Any:
        kind = type(value)
        if isinstance(value, type) or inspect.isroutine(value):
            return _name(value)
        if isinstance(value, functools.partial):
            parts = {"function": value.func, "args": value.args, "kwargs": value.keywords}
            return self._plain({name: part for name, part in parts.items() if name == "function" or part}, secret)
        if isinstance(value, (bytes, bytearray, memoryview)):
            return f"<{len(value)} bytes>"
        if hasattr(kind, "get_secret_value"):  # pydantic's SecretStr and its like
            return MASK
        if hasattr(kind, "shape") and (hasattr(kind, "dtype") or hasattr(kind, "dtypes")):
            return self._array(value, secret)
        if isinstance(value, RootModel):
            return self._plain(value.root, secret)
        named = _named(value)
        if named is not None:
            return self._mapping(*named, secret)
        if isinstance(value, Set) and not isinstance(value, KeysView):
            return self._sequence(sorted(value, key=_order), secret)
        if isinstance(value, (Sequence, deque, KeysView, ValuesView)) and not isinstance(value, range):
            return self._sequence(value, secret)
        return _text(value)

    def _array(self, value: Any, secret: bool) -> Any:
        shape = tuple(value.shape)
        if math.prod(shape) > MAX_ARRAY or not hasattr(value, "tolist"):
            return f"<{type(value).__name__}: {getattr(value, 'dtype', 'table')} {shape}>"
        plain = value.tolist()
        return self._plain(str(plain) if type(plain) is type(value) else plain, secret)

    def _full(self, size: int) -> bool:
        self._nodes += 1
        return size >= MAX_ITEMS or self._nodes > MAX_NODES

    def _mapping(self, names: Iterable[Any], get: Callable[[Any], Any], secret: bool) -> dict[str, Any]:
        plain: dict[str, Any] = {}
        for name in names:
            if self._full(len(plain)):
                plain["..."] = _MORE
                break
            key = _key(name, plain)
            try:
                value = get(name)
            except Exception as error:
                value = _unreadable(error)
            plain[key] = self.value(value, secret or is_secret_key(key))
        return plain

    def _sequence(self, values: Iterable[Any], secret: bool) -> list[Any]:
        plain: list[Any] = []
        for value in values:
            if self._full(len(plain)):
                plain.append(_MORE)
                break
            before = plain[-1] if plain else None
            option = isinstance(before, str) and before[:1] == "-" and is_secret_key(before)  # "--api-key", "..."
            plain.append(self.value(value, secret or (option and not (isinstance(value, str) and value[:1] == "-"))))
        return plain


_NO_SCALAR = object()


def _scalar(value: Any) -> Any:
    """A JSON scalar for plain values, their subclasses, enums, paths and times; else ``_NO_SCALAR``."""
    if isinstance(value, Enum):
        inner = value.value
        value = inner if inner is None or isinstance(inner, (bool, int, float, str)) else value.name
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        number = int(value)
        return number if number.bit_length() <= 10_000 else f"<integer of {number.bit_length()} bits>"
    if isinstance(value, float):
        real = float(value)
        return real if math.isfinite(real) else "nan" if real != real else "inf" if real > 0 else "-inf"
    if isinstance(value, str):
        return _clean(str.__str__(value))
    if isinstance(value, os.PathLike) and not isinstance(value, type):
        return _clean(os.fsdecode(value))
    if hasattr(type(value), "isoformat"):
        return _clean(value.isoformat())
    return _NO_SCALAR


def _clean(text: str) -> str:
    """Masked, cut to MAX_TEXT, without lone surrogates."""
    length = len(text)
    try:
        text[: MAX_TEXT + 1000].encode()
    except UnicodeEncodeError:
        text = text[: MAX_TEXT + 1000].encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    text = mask_text(text[: MAX_TEXT + 1000])
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 50]}... <cut, {length} characters>"


def _key(name: Any, taken: Mapping[str, Any]) -> str:
    try:
        scalar = _scalar(name)
        text = _clean(scalar if isinstance(scalar, str) else str(name if scalar is _NO_SCALAR else scalar))[:MAX_KEY]
    except Exception as error:
        text = _unreadable(error)
    while text in taken:
        text = f"{text} ({type(name).__name__})"
    return text


def _named(value: Any) -> tuple[Iterable[Any], Callable[[Any], Any]] | None:
    """The names of a value's fields and how to get one, or None for a value that has no fields."""
    kind = type(value)
    get = functools.partial(getattr, value)
    if isinstance(value, Mapping):
        return value, value.__getitem__
    if isinstance(value, tuple):
        return (kind._fields, get) if hasattr(kind, "_fields") else None
    if isinstance(value, BaseModel):
        known = [name for name, field in kind.model_fields.items() if not field.exclude]
        return [*known, *(value.model_extra or {})], get
    for attribute in ("__chz_fields__", "__struct_fields__"):
        if hasattr(kind, attribute):
            return list(getattr(kind, attribute)), get
    if hasattr(kind, "__attrs_attrs__"):
        return [field.name for field in kind.__attrs_attrs__], get
    failed: Exception | None = None
    if callable(getattr(kind, "to_dict", None)):
        try:
            converted = value.to_dict()
            if isinstance(converted, Mapping):
                return converted, converted.__getitem__
        except Exception as error:  # its attributes say more than a note that it failed
            failed = error
    if hasattr(kind, "__dataclass_fields__"):
        return list(kind.__dataclass_fields__), get
    if isinstance(value, (Namespace, types.SimpleNamespace)):
        return list(vars(value)), get
    own = hasattr(value, "__dict__") and kind.__module__.partition(".")[0] not in sys.stdlib_module_names
    names = _attributes(value) if own else []
    if failed and not names:
        raise failed
    return (names, get) if names else None


def _attributes(value: Any) -> list[str]:
    """The public attributes of a plain object, with those its classes hold as plain data."""
    data = (bool, int, float, str, list, tuple, dict, set, types.NoneType)
    classes = [kind for kind in reversed(type(value).__mro__) if kind is not object]
    shared = [name for kind in classes for name, held in vars(kind).items() if isinstance(held, data)]
    return [name for name in dict.fromkeys([*shared, *vars(value)]) if not name.startswith("_")]


def _order(value: Any) -> tuple[str, Any]:
    return ("", value) if isinstance(value, (int, float)) else (type(value).__name__, str(value))


def _name(value: Any) -> str:
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None) or str(value)
    return f"{module}.{name}" if module and module != "builtins" else str(name)


def _text(value: Any) -> str:
    """What ``str`` says, without addresses; the class's name when it says no more than that."""
    text = re.sub(r"^<([\w.<>]+) object at 0x[0-9A-Fa-f]+>$", r"\1", str(value))
    return _clean(re.sub(r" at 0x[0-9A-Fa-f]+", "", text))


def _unreadable(error: Exception) -> str:
    return f"<unreadable: {type(error).__name__}>"
