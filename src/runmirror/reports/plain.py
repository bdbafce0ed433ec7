"""Any Python value as JSON: what people put into reports and rollouts.

Guarantees: never raises; the result is strict JSON in UTF-8 (NaN and infinities are null, a lone surrogate is U+FFFD, an
integer beyond 64 bits the nearest double); the value is copied, so that changing it later changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

import orjson

from runmirror.log.rows import coerce

OPTIONS = orjson.OPT_NON_STR_KEYS
MAX_ARRAY = 1000
"""Elements of an array that are written out; a larger one is described."""
MAX_DEPTH = 100
_INT64 = 2**63


def to_json(value: Any) -> bytes:
    """``value`` as compact JSON. Arrays become lists, models and dataclasses objects, what is no data its ``str``."""
    try:
        return orjson.dumps(value, default=_data, option=OPTIONS)
    except Exception:  # a surrogate, a huge integer, a cycle, an object that raises when looked at
        return orjson.dumps(_plain(value, ()), option=OPTIONS)


def text_of(value: Any) -> str:
    """``str(value)``, whatever it does, without lone surrogates."""
    try:
        text = str(value)
        return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    except Exception:
        return f"<{type(value).__name__}>"


def _data(value: Any) -> Any:
    """What orjson doesn't know, one level at a time."""
    dump = getattr(value, "model_dump", None)
    if callable(dump):
        return dump()
    shape = getattr(value, "shape", None)
    if shape is not None and callable(getattr(value, "tolist", None)):
        size = 1
        for length in shape:
            size *= int(length)
        return value.tolist() if size <= MAX_ARRAY else f"<{type(value).__name__} of shape {tuple(shape)}>"
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value)} bytes>"
    if isinstance(value, Set):
        return sorted(value, key=text_of)
    number = coerce(value)
    if number is None or type(number) in (bool, int, float, str):
        return number
    return list(value) if isinstance(value, list | tuple) else text_of(value)


def _plain(value: Any, above: tuple[int, ...]) -> Any:
    if value is None or type(value) in (bool, float):
        return value
    if type(value) is str:
        return text_of(value)
    if type(value) is int:
        try:
            return value if -_INT64 <= value < _INT64 else float(value)
        except OverflowError:
            return text_of(value)
    if id(value) in above or len(above) >= MAX_DEPTH:
        return "<cycle>" if id(value) in above else "<too deep>"
    above = (*above, id(value))
    try:
        if isinstance(value, Mapping):
            return {text_of(key): _plain(one, above) for key, one in value.items()}
        if isinstance(value, Iterable) and isinstance(value, list | tuple):
            return [_plain(one, above) for one in value]
        return _plain(_data(value), above)
    except Exception as error:
        return f"<{type(value).__name__}: {type(error).__name__}>"
