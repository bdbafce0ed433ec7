"""One row of metrics.jsonl: encoding, decoding, and what a mirror sees of it.

Guarantees:

- ``encode`` never raises for a key or a value: what can't be stored is left out and named in ``_rejected``.
- The bytes are strict JSON, one line with its newline: NaN and infinities are ``null`` and named in ``_nonfinite``.
- Every reader takes the line: an integer beyond 64 bits, at which pandas gives up the whole file, is written as the
  nearest double (beyond those as an infinity), and a lone surrogate as U+FFFD.
- ``decode`` takes what other writers write: bare NaN / Infinity tokens, huge integers, CRLF, a byte order mark.
- Keys that start with ``_`` are bookkeeping and never metrics.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, SupportsFloat, cast

import orjson

_RESERVED_KEY = (
    "'step' and keys that start with '_' are bookkeeping (the row's own step is step=); name the metric otherwise"
)
_NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_INT64 = 2**63


@dataclass(frozen=True, slots=True)
class Position:
    """How far a log was read or delivered: every row below ``ordinal`` is behind it.

    ``offset`` is the byte behind the last such row in metrics.jsonl and ``digest`` that row's :func:`digest` (hex),
    both unset (-1, "") when only a count is known, as from a tracker.
    """

    ordinal: int = 0
    offset: int = -1
    digest: str = ""


START = Position(0, 0)
"""Before the first row."""


@dataclass(slots=True)
class Row:
    """One row of a log, as a sink gets it.

    Attributes:
        ordinal: its number in the log, from 0, dense, never used twice (see ``Source``).
        data: the decoded object; use :meth:`scalars` and :meth:`text` for what a tracker shows.
        step: training step (int64).
        time: Unix seconds; a row's ``_timestamp`` or what the log tells.
        line: the bytes it was read from, for its digest.
        end: byte offset behind it, -1 when its source has none.
        summary: final numbers of the run (a row without a step).
        rewind: the step this row goes back to when it follows a resume from an older checkpoint: every earlier point at
            ``step >= rewind`` is superseded. Else None.
        fault: why the row carries nothing (a broken line, a row lost before it was delivered), else "".
    """

    ordinal: int
    data: dict[str, Any]
    step: int
    time: float
    line: bytes = b""
    end: int = -1
    summary: bool = False
    rewind: int | None = None
    fault: str = ""
    _points: dict[str, float] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def position(self) -> Position:
        """The position just behind this row."""
        return Position(self.ordinal + 1, self.end, digest(self.line))

    def scalars(self) -> dict[str, float]:
        """key -> value of every point, in file order: ints and floats as they are, bools as 0 or 1, NaN and infinities
        restored from ``_nonfinite``, an integer beyond a double as infinity."""
        if self._points is not None:
            return self._points
        points: dict[str, float] = {}
        nonfinite = self.data.get("_nonfinite")
        for key, value in self.data.items():
            kind = type(value)
            if kind is float:
                if key[:1] != "_":
                    points[key] = value
            elif kind is bool:
                if key != "step" and key[:1] != "_":
                    points[key] = int(value)
            elif kind is int:
                if key != "step" and key[:1] != "_":
                    points[key] = value if -_INT64 <= value < _INT64 else _big(value)
            elif value is None and isinstance(nonfinite, dict) and key in nonfinite:
                points[key] = _NONFINITE.get(nonfinite[key], math.nan)
        points.pop("step", None)
        self._points = points
        return points

    def text(self) -> dict[str, str]:
        """key -> text of every string value."""
        return {key: value for key, value in self.data.items() if type(value) is str and key[:1] != "_"}

    def emptied(self, fault: str) -> Row:
        """The same row without its values: keeps the ordinals of a tracker dense."""
        return replace(self, data={}, fault=fault)


def _big(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def digest(line: bytes) -> str:
    """16 hex characters that stand for a line (BLAKE2b, 8 bytes)."""
    return hashlib.blake2b(line, digest_size=8).hexdigest()


def encode(
    step: int | None,
    metrics: Mapping[Any, Any],
    timestamp: float,
    *,
    rejected: Mapping[str, str] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> tuple[bytes, dict[str, str]]:
    """One row as a line of strict JSON, and what was left out as key -> reason.

    Args:
        step: the row's step, or None for a row without one (final numbers).
        metrics: key -> bool, int, float, str, None, or anything with ``.item()`` for a single number (numpy, torch,
            jax scalars and 0-d arrays). Other values, keys that are no text, and the reserved ones (``step``,
            ``_...``) are left out.
        timestamp: Unix seconds.
        rejected: what was left out before, key -> reason.
        extra: bookkeeping of the row, keys with ``_`` in front.
    """
    row: dict[str, Any] = {} if step is None else {"step": step}
    row["_timestamp"] = timestamp
    if not rejected and not extra and type(metrics) is dict and _is_plain(metrics):
        whole = row | metrics
        if named := _find_nonfinite(metrics):
            whole["_nonfinite"] = named  # orjson writes the values themselves as null
        try:
            return orjson.dumps(whole, option=orjson.OPT_APPEND_NEWLINE), {}
        except TypeError:  # an integer beyond 64 bits
            pass
    nonfinite: dict[str, str] = {}
    left_out: dict[str, str] = dict(rejected) if rejected else {}
    for key, value in metrics.items():
        if type(key) is not str:
            if not isinstance(key, str):
                left_out[_shown(key)] = f"a metric's key is text, not {type(key).__name__}"
                continue
            key = str.__str__(key)
        if key[:1] == "_" or key == "step":
            left_out[key] = _RESERVED_KEY
            continue
        kind = type(value)
        if kind is not float and kind is not int and kind is not bool and kind is not str and value is not None:
            value = coerce(value)
            kind = type(value)
            if kind is _Unfit:
                left_out[key] = value.reason
                continue
        if kind is float and value - value != 0.0:
            nonfinite[key] = _nonfinite_name(value)
            value = None
        row[key] = value
        if kind in _PLAIN:
            _plain_keys.add(key)
    if len(_plain_keys) > _MAX_PLAIN_KEYS:
        _plain_keys.clear()
    if extra:
        row.update(extra)
    if nonfinite:
        row["_nonfinite"] = nonfinite
    if left_out:
        row["_rejected"] = left_out
    try:
        return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE), left_out
    except TypeError:  # an integer beyond 64 bits or a lone surrogate
        return _encode_slow(row, nonfinite), left_out


_plain_keys: set[str] = set()
"""Keys seen before that orjson takes and that are not reserved: checked as one set instead of one by one."""
_MAX_PLAIN_KEYS = 20_000
_PLAIN = frozenset((float, int, bool))


def _is_plain(metrics: dict[Any, Any]) -> bool:
    """Whether a row is plain numbers under known keys: nearly every row of a run, at a third of the cost."""
    return _plain_keys.issuperset(metrics) and _PLAIN.issuperset(map(type, metrics.values()))


def _find_nonfinite(metrics: dict[str, float]) -> dict[str, str]:
    """key -> name of every NaN and infinity; one of them shows in the sum of all values."""
    try:
        total = sum(metrics.values())
    except OverflowError:
        total = math.inf
    if total - total == 0:
        return {}
    return {key: _nonfinite_name(value) for key, value in metrics.items() if value - value != 0}


def _nonfinite_name(value: float) -> str:
    return "nan" if value != value else "inf" if value > 0 else "-inf"


def _shown(key: object) -> str:
    try:
        return repr(key)[:100]
    except Exception:
        return f"<{type(key).__name__}>"


def _encode_slow(row: dict[str, Any], nonfinite: dict[str, str]) -> bytes:
    """For what orjson refuses: huge integers as doubles, lone surrogates as U+FFFD."""
    for key, value in row.items():
        if type(value) is int and not -_INT64 <= value < 2 * _INT64:
            row[key] = number = _big(value)
            if math.isinf(number):
                nonfinite[key], row[key] = ("inf" if number > 0 else "-inf"), None
    if nonfinite and "_nonfinite" not in row:
        row["_nonfinite"] = nonfinite
    return json_line(row)


def json_line(data: dict[str, Any]) -> bytes:
    """Any JSON object as one line with its newline; a lone surrogate becomes U+FFFD."""
    try:
        return orjson.dumps(data, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode() + b"\n"


@dataclass(frozen=True, slots=True)
class _Unfit:
    reason: str


def coerce(value: Any) -> Any:
    """A JSON scalar (bool, int, float, str, None) for ``value``, or an ``_Unfit`` with the reason.

    Takes numpy, torch and jax scalars and one-element arrays (by ``.item()``), ``fractions`` and ``decimal`` numbers,
    and subclasses of the plain types (enums of int or str included).
    """
    try:
        return _coerce(value)
    except (
        Exception
    ) as error:  # an array of several numbers, a tensor on a lost device, an object that raises when looked at
        return _Unfit(f"{type(value).__name__} is not a single number: {_message(error)}")


def _coerce(value: Any) -> Any:
    given = type(value).__name__
    item = getattr(value, "item", None)
    if callable(item):
        found = item()
        if found is None or type(found) in (float, int, bool, str):
            return found
        value = found
    for plain in (bool, int, float, str):
        if isinstance(value, plain):
            return plain.__str__(value) if plain is str else plain(value)
    if hasattr(type(value), "__float__") and not isinstance(value, complex):
        return float(cast(SupportsFloat, value))
    parts = (
        "; log what is in it as metrics of their own, such as 'name/part'" if isinstance(value, (dict, list)) else ""
    )
    return _Unfit(f"{given} is neither a number nor text{parts}")


def _message(error: Exception) -> str:
    try:
        return str(error)[:120]
    except Exception:
        return type(error).__name__


def decode(line: bytes) -> dict[str, Any] | None:
    """The object of one line, or None when the line is blank or no JSON object."""
    try:
        data = orjson.loads(line)
    except orjson.JSONDecodeError:
        data = _decode_slow(line)
    return data if type(data) is dict else None


def _decode_slow(line: bytes) -> Any:
    """For what orjson refuses: NaN and Infinity tokens, integers beyond 64 bits, a byte order mark, lone surrogates."""
    try:
        return json.loads(line.decode("utf-8-sig", "replace").strip("\x00"))
    except (ValueError, RecursionError):
        return None


def list_rejected(left_out: dict[str, str], step: int | None) -> str:
    """What was left out of a row, for the error of ``strict=True``."""
    named = "; ".join(f"{key!r}: {reason}" for key, reason in left_out.items())
    return f"left out of the row at step {step}, which is written without them (strict=True): {named}"
