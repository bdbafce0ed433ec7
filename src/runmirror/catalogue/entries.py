"""What metric keys mean: the shipped files, and those of a user.

Guarantees:

- ``describe`` and ``best`` never raise for a key.
- A user's file goes before the shipped ones, so it can say something else of a key.
- Reading happens once, when something is first asked.

A user's file is named by ``RUNMIRROR_CATALOGUE`` (several with the path separator between them) or given to
:meth:`Catalogue.load`.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from runmirror.catalogue.models import Best, Description, Family, Metric, Rule
from runmirror.catalogue.patterns import Pattern, fill
from runmirror.exceptions import CatalogueError

SHIPPED = ("trl-ppo", "trl-grpo", "tinker-rl")
VARIABLE = "RUNMIRROR_CATALOGUE"
TRAINING = ("train/",)
EVALUATION = ("eval/", "test/", "eval_", "test_")
"""What trackers and trainers put in front of a key."""
_BEST: dict[str, Best] = {"up": "max", "down": "min"}
_REMEMBERED = 20_000


class Catalogue:
    """The metrics of some files. Ask :func:`shipped` or :meth:`load` for one.

    Args:
        families: the files, the first match first.
    """

    def __init__(self, families: Iterable[Family]) -> None:
        self.families = tuple(families)
        self._literal: dict[str, tuple[Metric, str]] = {}
        self._patterns: list[tuple[Pattern, Metric, str]] = []
        for family in self.families:
            for metric in family.metric:
                pattern = Pattern(metric.key)
                if pattern.is_literal:
                    self._literal.setdefault(metric.key, (metric, family.family))
                else:
                    self._patterns.append((pattern, metric, family.family))
        self._known: dict[str, Description | None] = {}

    @classmethod
    def load(cls, *paths: str | os.PathLike[str]) -> Catalogue:
        """The shipped catalogue with a user's files before it: ``paths``, then those of ``RUNMIRROR_CATALOGUE``.

        Raises:
            CatalogueError: a file can't be read, or says something that is no catalogue.
        """
        named = [os.fspath(path) for path in paths]
        named += [path for path in os.environ.get(VARIABLE, "").split(os.pathsep) if path]
        return _with(tuple(named)) if named else shipped()

    def describe(self, key: str) -> Description | None:
        """What is known of a key, or None. Names that trackers put in front (``train/``, ``eval/``, ``test/``, ``eval_``)
        are seen through."""
        try:
            return self._known[key]
        except KeyError:
            pass
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        found = self._known[key] = self._describe(key)
        return found

    def _describe(self, key: str) -> Description | None:
        found = self._literally(key, key)
        for prefix in TRAINING:
            if found is None and key.startswith(prefix):
                found = self._find(key, key[len(prefix) :])
        found = found or self._find(key, key)
        for prefix in EVALUATION:
            if found is None and key.startswith(prefix):
                inner = self._find(key, key[len(prefix) :])
                found = inner and inner.model_copy(
                    update={"evaluation": True, "meaning": f"In the evaluation: {inner.meaning}"}
                )
        return found

    def _find(self, key: str, inner: str) -> Description | None:
        found = self._literally(key, inner)
        if found is not None:
            return found
        for pattern, metric, family in self._patterns:
            parts = pattern.match(inner)
            if parts is not None:
                return _described(key, metric, family, parts)
        return None

    def _literally(self, key: str, inner: str) -> Description | None:
        literal = self._literal.get(inner)
        return None if literal is None else _described(key, *literal, {})

    def best(self, key: str) -> Best | None:
        """Which value of a metric sums it up: "max" or "min" when it has a better direction, "last" for one that has none
        or should stay where it is, None for a key that is not known."""
        found = self.describe(key)
        return None if found is None else _BEST.get(found.better, "last")

    @cached_property
    def main_rewards(self) -> tuple[str, ...]:
        """Keys that are a run's main reward, the best first."""
        ranked = [(metric.main, metric.key) for metric, _ in self._literal.values() if metric.main is not None]
        return tuple(key for _, key in sorted(ranked, key=lambda one: one[0]))


def _described(key: str, metric: Metric, family: str, parts: dict[str, str]) -> Description:
    return Description(
        key=key,
        meaning=fill(metric.meaning, parts),
        family=family,
        pattern=metric.key,
        parts=parts,
        evaluation="evaluator" in parts,
        metric=metric,
    )


def read_family(path: str | os.PathLike[str]) -> Family:
    """A user's file. Raises CatalogueError."""
    try:
        family = Family.model_validate(tomllib.loads(Path(path).expanduser().read_text(encoding="utf-8")))
    except OSError as error:
        raise CatalogueError(f"{os.fspath(path)}: the catalogue can't be read: {error.strerror or error}") from error
    except ValidationError as error:
        raise CatalogueError(f"{os.fspath(path)}: {_first(error)}") from error
    except ValueError as error:  # no TOML, no UTF-8
        raise CatalogueError(f"{os.fspath(path)} is no TOML: {error}") from error
    for metric in family.metric:
        for check in metric.checks:
            if check.rule not in rules():
                raise CatalogueError(
                    f"{os.fspath(path)}: {metric.key}: no rule {check.rule!r}; there is {', '.join(rules())}"
                )
    return family


def _first(error: ValidationError) -> str:
    """What is wrong first, and where."""
    one = error.errors()[0]
    where = ".".join(str(part) for part in one["loc"])
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{where}: {one['msg']}{more}" if where else f"{one['msg']}{more}"


def _data(name: str) -> dict[str, Any]:
    return tomllib.loads((files("runmirror.catalogue") / f"{name}.toml").read_text(encoding="utf-8"))


@cache
def shipped() -> Catalogue:
    """The catalogue that comes with runmirror: what it says depends on nothing but its version."""
    return Catalogue([Family.model_validate(_data(name)) for name in SHIPPED])


@cache
def _with(named: tuple[str, ...]) -> Catalogue:
    return Catalogue([*map(read_family, named), *shipped().families])


@cache
def rules() -> dict[str, Rule]:
    """rule -> what it finds, means, and what people try."""
    return TypeAdapter(dict[str, Rule]).validate_python(_data("rules"))


def describe(key: str) -> Description | None:
    """What is known of a metric key, by the shipped catalogue and the files of ``RUNMIRROR_CATALOGUE``; None: nothing.

    Raises:
        CatalogueError: a file of ``RUNMIRROR_CATALOGUE`` can't be read.
    """
    return Catalogue.load().describe(key)


def best(key: str) -> Best | None:
    """Which value of a metric sums it up, "min", "max" or "last"; None for a key that is not known. Never raises."""
    try:
        return Catalogue.load().best(key)
    except CatalogueError:
        return shipped().best(key)
