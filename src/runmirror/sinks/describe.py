"""Sinks as data, for people: what is installed, whether it can be used, what it can do, which options it has.

Describing a sink imports it. One that can't be imported is described with the reason and the command that helps.
"""

from __future__ import annotations

import importlib.metadata
import re
import typing
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

from pydantic.fields import FieldInfo

from runmirror.exceptions import MissingPackageError, UnknownSinkError
from runmirror.sinks.base import Capabilities, SinkOptions
from runmirror.sinks.registry import SinkEntry, install_command, installed_sinks, load_sink


@dataclass(frozen=True, slots=True)
class Requirement:
    """A package that a sink needs: its name, the versions that do, and the one installed (None: none)."""

    package: str
    wanted: str
    installed: str | None

    @property
    def ok(self) -> bool:
        """Whether it is there and new enough; a bound other than ``>=`` is not checked."""
        least = re.search(r">=\s*([\d.]+)", self.wanted)
        return self.installed is not None and (least is None or _numbers(self.installed) >= _numbers(least[1]))


@dataclass(frozen=True, slots=True)
class OptionField:
    """An option of a sink: ``-o name=...``. ``env`` is the environment variable that gives its default, or None."""

    name: str
    type: str
    default: str
    description: str
    env: str | None = None


@dataclass(frozen=True, slots=True)
class SinkDescription:
    """What is known of an installed sink.

    Attributes:
        name, package, version, target: the entry point and the package it comes from.
        usable: whether it can be imported.
        error, fix: why not, and the command that helps; else "".
        capabilities: name -> value in plain data; None when it is not usable.
        options: its options in the order it names them; empty when it is not usable.
        requirements: the packages it needs.
    """

    name: str
    package: str
    version: str
    target: str
    usable: bool
    error: str = ""
    fix: str = ""
    capabilities: dict[str, Any] | None = None
    options: tuple[OptionField, ...] = ()
    requirements: tuple[Requirement, ...] = ()

    @property
    def built_in(self) -> bool:
        """Whether it comes with runmirror."""
        return self.package == "runmirror"

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for ``--json``."""
        return asdict(self) | {"built_in": self.built_in}


def describe_sinks() -> list[SinkDescription]:
    """Every installed sink, sorted by name."""
    return [_describe(entry) for entry in installed_sinks().values()]


def describe_sink(name: str) -> SinkDescription:
    """One sink. Raises UnknownSinkError, which lists those there are."""
    entry = installed_sinks().get(name)
    if entry is None:
        load_sink(name)  # its error says what there is
        raise UnknownSinkError(f"no sink is called {name!r}")
    return _describe(entry)


def _describe(entry: SinkEntry) -> SinkDescription:
    requirements = tuple(_requirements(entry))
    known = (entry.name, entry.package, entry.version, entry.target)
    try:
        sink = load_sink(entry.name)
    except MissingPackageError as error:
        return SinkDescription(*known, False, str(error), install_command(entry), requirements=requirements)
    return SinkDescription(
        *known,
        True,
        capabilities=_plain(sink.capabilities),
        options=tuple(describe_options(sink.Options)),
        requirements=requirements,
    )


def _plain(capabilities: Capabilities) -> dict[str, Any]:
    found = {field.name: getattr(capabilities, field.name) for field in fields(capabilities)}
    return {name: sorted(value) if isinstance(value, frozenset) else value for name, value in found.items()}


def describe_options(model: type[SinkOptions]) -> Iterable[OptionField]:
    """The options of a sink, its own before those that every sink has."""
    shared = set(SinkOptions.model_fields)
    for name, option in sorted(model.model_fields.items(), key=lambda item: item[0] in shared):
        extra = option.json_schema_extra
        env = extra.get("env") if isinstance(extra, dict) else None
        yield OptionField(
            name,
            _type_name(option.annotation),
            _default(option),
            option.description or "",
            env if isinstance(env, str) else None,
        )


def _type_name(annotation: Any) -> str:
    """A type as people read it: ``text``, ``number``, ``true or false``, ``config, code or checkpoints (a list)``."""
    if annotation in _TYPES:
        return _TYPES[annotation]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return "|".join(map(str, arguments))
    if origin in (tuple, frozenset, list, set):
        return f"comma list of {_type_name(arguments[0])}"
    if origin is dict:
        return "JSON object"
    names = [_type_name(one) for one in arguments if one is not type(None)]
    return " or ".join(names) or getattr(annotation, "__name__", str(annotation))


_TYPES: dict[Any, str] = {str: "text", int: "integer", float: "number", bool: "true|false"}


def _default(option: FieldInfo) -> str:
    if option.is_required():
        return "required"
    value = option.get_default(call_default_factory=True)
    if value in (None, (), frozenset(), {}):
        return ""
    if isinstance(value, (tuple, frozenset)):
        return ",".join(sorted(map(str, value)))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _requirements(entry: SinkEntry) -> Iterable[Requirement]:
    """The packages that a sink's own package asks for: ours by the extra of the sink's name."""
    try:
        lines = importlib.metadata.requires(entry.package) or []
    except importlib.metadata.PackageNotFoundError:
        return
    for line in lines:
        what, _, condition = line.partition(";")
        extra = re.search(r"""extra\s*==\s*["']([^"']+)["']""", condition)
        found = re.match(r"\s*([A-Za-z0-9._-]+)\s*(?:\[[^]]*\])?\s*(.*)", what)
        if found is None or (extra[1] if extra else None) != (entry.name if entry.package == "runmirror" else None):
            continue
        try:
            installed = importlib.metadata.version(found[1])
        except importlib.metadata.PackageNotFoundError:
            installed = None
        yield Requirement(found[1], found[2].strip(), installed)


def _numbers(version: str) -> list[int]:
    """The first three numbers of a version, missing ones as 0."""
    found = [int(part) for part in re.findall(r"\d+", version.partition("+")[0])]
    return [*found, 0, 0, 0][:3]
