"""Log into the report that is open, from anywhere: ``from runmirror import reports``.

Each function does what the method of the same name of :class:`~runmirror.reports.tree.Tree` does, in the scope that the
running code is in (``with run.report(...)``, ``with reports.scope(...)``). When no report is open they do nothing, so that
an environment or a grader can log without asking. Scopes follow asyncio tasks; a thread is in none unless it was started
with ``asyncio.to_thread`` or a copied context.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from runmirror.reports.rollouts import Group, Step, Trajectory
from runmirror.reports.tree import CURRENT, Tree

__all__ = [
    "Group",
    "Step",
    "Trajectory",
    "Tree",
    "code",
    "conversation",
    "current",
    "details",
    "exception",
    "folded",
    "header",
    "scope",
    "table",
    "text",
]

_NOWHERE = Tree("", "")


def current() -> Tree:
    """The report that is open here; one that records nothing when none is."""
    scope = CURRENT.get()
    return _NOWHERE if scope is None else scope.tree


def text(text: Any) -> None:
    """A paragraph."""
    current().text(text)


def header(text: Any, level: int | None = None) -> None:
    """A heading."""
    current().header(text, level)


def code(text: Any, language: str = "") -> None:
    """Text in a fixed-width font."""
    current().code(text, language)


def details(text: Any, summary: Any = "Details") -> None:
    """Text that is folded away."""
    current().details(text, summary)


def table(rows: Any, caption: Any = "") -> None:
    """A table."""
    current().table(rows, caption)


def exception(error: BaseException) -> None:
    """An exception with its traceback."""
    current().exception(error)


def conversation(messages: Sequence[Any]) -> None:
    """A conversation."""
    current().conversation(messages)


@contextlib.contextmanager
def scope(title: Any) -> Iterator[None]:
    """A section."""
    with current().scope(title):
        yield


@contextlib.contextmanager
def folded(summary: Any) -> Iterator[None]:
    """A part that is folded away."""
    with current().folded(summary):
        yield
