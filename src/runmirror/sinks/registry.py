"""Sinks by name, from entry points: ours and those of other packages, registered the same way.

A package names its sinks in the group ``runmirror.sinks`` (``mine = "my_package.sink:MySink"``). Nothing is imported until
a sink is used, and a broken plugin breaks nothing but itself.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from runmirror.exceptions import MissingPackageError, OptionError, UnknownSinkError
from runmirror.log.masking import mask_text
from runmirror.sinks.base import Sink, SinkOptions

ENTRY_POINTS = "runmirror.sinks"


@dataclass(frozen=True, slots=True)
class SinkEntry:
    """A sink that is installed: its name, ``module:class``, and the package that names it."""

    name: str
    target: str
    package: str
    version: str


def installed_sinks() -> dict[str, SinkEntry]:
    """Every sink by name, sorted; on a clash of names ours wins, then the first package by name."""
    return dict(_scan(tuple(sys.path)))


@functools.cache
def _scan(path: tuple[str, ...]) -> dict[str, SinkEntry]:
    """Measured: 3 ms with some hundred packages on the path, a quarter of a re-import that has nothing to do."""
    found: dict[str, SinkEntry] = {}
    points = importlib.metadata.entry_points(group=ENTRY_POINTS)
    for point in sorted(
        points, key=lambda point: (point.dist is None or point.dist.name != "runmirror", str(point.dist))
    ):
        package, version = (point.dist.name, point.dist.version) if point.dist else ("?", "?")
        found.setdefault(point.name, SinkEntry(point.name, point.value, package, version))
    return dict(sorted(found.items()))


def load_sink(name: str) -> type[Sink]:
    """The class of the sink called ``name``.

    Raises:
        UnknownSinkError: no such sink; the message lists those there are.
        MissingPackageError: it needs a package that is not installed; the message names the extra.
    """
    sinks = installed_sinks()
    entry = sinks.get(name)
    if entry is None:
        near = difflib.get_close_matches(name, sinks, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise UnknownSinkError(f"no sink is called {name!r}{hint} There are: {', '.join(sinks) or 'none'}")
    module, _, attribute = entry.target.partition(":")
    try:
        kind: type[Sink] = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        if entry.package == "runmirror" and isinstance(error, ImportError):
            raise MissingPackageError(
                f"the sink {name!r} needs a package that is not installed ({error}): {install_command(entry)}"
            ) from error
        raise MissingPackageError(
            f"the sink {name!r} of package {entry.package} can't be imported: {type(error).__name__}: {error}"
        ) from error
    absent = [module for module in getattr(kind, "requires", ()) if not _installed(module)]
    if absent:
        raise MissingPackageError(
            f"the sink {name!r} needs {', '.join(absent)}, which is not installed: {install_command(entry)}"
        )
    missing = [verb for verb in _PARTS if not hasattr(kind, verb)]
    if missing:
        raise MissingPackageError(f"the sink {name!r} of package {entry.package} lacks {', '.join(missing)}")
    return kind


_PARTS = ("name", "Options", "capabilities", "destination", "open", "put", "put_file", "flush", "close")


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def install_command(entry: SinkEntry) -> str:
    """The command that installs what a sink needs."""
    if entry.package == "runmirror":
        return f"pip install 'runmirror[{entry.name}]'"
    return f"pip install --upgrade {entry.package}"


def make_sink(name: str, options: Mapping[str, Any] | SinkOptions | None = None) -> Sink:
    """A sink by name, with its options checked.

    Raises:
        OptionError: an option the sink doesn't have, or a value it can't take; the message lists what it takes.
    """
    sink = load_sink(name)
    if isinstance(options, SinkOptions):
        return sink(options)
    return sink(check_options(name, sink.Options, options or {}))


def check_options(name: str, model: type[SinkOptions], given: Mapping[str, Any]) -> SinkOptions:
    """``given`` as the sink's own options. Raises OptionError that names the option and what there is."""
    unknown = [key for key in given if key not in model.model_fields]
    if unknown:
        near = difflib.get_close_matches(unknown[0], model.model_fields, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise OptionError(
            f"the sink {name!r} has no option {unknown[0]!r}{hint} It has: {', '.join(sorted(model.model_fields))}"
        )
    try:
        return model.model_validate(dict(given))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "options"
        extra = getattr(model.model_fields.get(where.partition(".")[0]), "json_schema_extra", None)
        secret = isinstance(extra, dict) and extra.get("secret")
        got = "" if secret else f" (got {mask_text(repr(first.get('input')))})"
        raise OptionError(f"option {where!r} of the sink {name!r}: {first['msg']}{got}") from None
