"""Metric keys for trackers that refuse some: one spelling per key, and the way back.

Guarantees:

- No two keys ever get one name: :func:`decode` gives the key back from the name alone, or, for a key so long that it was
  cut, from the map (``KeyMap.cut``), which a sink keeps beside the points.
- A key that the tracker takes, and that doesn't look like an encoded one, is its own name.
- A name depends on the key and the rule alone: not on other keys, their order, or the process.

A refused character becomes ``_xHHHH_``, its code point in upper-case hexadecimal (``mean@1`` -> ``mean_x0040_1``), and so
does the ``_`` of a key that would read like that by itself. The empty key is ``_x_``. A name that is too long ends with
``_xh`` and 16 digits of its SHA-256 instead.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_CODE = r"_x(?:[0-9A-F]{4,6}|h[0-9a-f]{16}|)_"
_LOOKALIKE = re.compile(_CODE)
_ENCODED = re.compile(r"_x([0-9A-F]{4,6}|)_")
_CUT = re.compile(r"_xh([0-9a-f]{16})_\Z")


@dataclass(frozen=True, slots=True)
class KeyRule:
    """Which names a tracker takes.

    Attributes:
        allowed: a regular expression for one character that may stand in a name.
        longest: characters in a name at most.
        path: whether a name has to be a clean relative path: no ``/`` at an end or twice, no ``.`` or ``..`` between.
    """

    allowed: str
    longest: int = 250
    path: bool = False


MLFLOW = KeyRule(r"[\w/. :-]", 250, path=True)
"""MLflow's rule for metrics and params (every store, 2.16 and newer)."""
ARTIFACT = KeyRule(r"[A-Za-z0-9_./-]", 250, path=True)
"""Names that survive MLflow's artifact proxy, which doesn't quote ``#``, ``?`` and ``%``."""


def encode(key: str, rule: KeyRule) -> str:
    """The name of a key under a rule."""
    if not key:
        return "_x_"
    allowed = re.compile(rule.allowed)
    parts = [char if allowed.fullmatch(char) else _escaped(char) for char in key]
    if rule.path:
        _clean_path(parts)
    name = "".join(parts)
    if "_x" in name:
        at = 0
        for number, part in enumerate(parts):
            if part == "_" and _LOOKALIKE.match(name, at):
                parts[number] = _escaped("_")
            at += len(part)
        name = "".join(parts)
    if len(name) > rule.longest:
        mark = f"_xh{key_hash(key)}_"
        name = name[: rule.longest - len(mark)] + mark
    return name


def decode(name: str, cut: Mapping[str, str] | None = None) -> str:
    """The key of a name. ``cut`` is hash -> key of keys that were cut; one that isn't in it stays as its name says."""
    found = _CUT.search(name)
    if found:
        return (cut or {}).get(found[1], name)
    return _ENCODED.sub(_character, name)


def key_hash(key: str) -> str:
    """The 16 digits that a cut name ends with."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _clean_path(parts: list[str]) -> None:
    """Encode the characters that make ``parts`` an unclean path."""
    for number, part in enumerate(parts):
        if part == "/" and (number in (0, len(parts) - 1) or parts[number - 1] == "/"):
            parts[number] = _escaped("/")
    start = 0
    for end in [number for number, part in enumerate(parts) if part == "/"] + [len(parts)]:
        segment = "".join(parts[start:end])
        if segment in (".", "..") or (start == 0 and segment.startswith("..")):
            parts[start] = _escaped(".")
        start = end + 1


def _escaped(char: str) -> str:
    return f"_x{ord(char):04X}_"


def _character(found: re.Match[str]) -> str:
    code = int(found[1] or "0", 16)
    return "" if not found[1] else chr(code) if code < 0x110000 else found[0]


@dataclass(slots=True)
class KeyMap:
    """The names of keys under a rule, remembered. ``changed`` is name -> key of those that are not their own name, ``cut``
    hash -> key of those that can't be told from their name."""

    rule: KeyRule
    changed: dict[str, str] = field(default_factory=dict)
    cut: dict[str, str] = field(default_factory=dict)
    _names: dict[str, str] = field(default_factory=dict)

    def name(self, key: str) -> str:
        """The name of a key."""
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = encode(key, self.rule)
            if name != key:
                self.changed[name] = key
                if _CUT.search(name):
                    self.cut[key_hash(key)] = key
        return name

    def key(self, name: str) -> str:
        """The key of a name."""
        return decode(name, self.cut)
