"""``runmirror sinks``."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from runmirror.cli import common
from runmirror.cli.common import errors, out
from runmirror.sinks.describe import SinkDescription, describe_sink, describe_sinks


def sinks(
    name: Annotated[str | None, typer.Argument(help="One sink: what it can do, and its options.")] = None,
    as_json: common.Json = False,
    debug: common.Debug = False,
) -> None:
    """List the sinks that are installed, or describe one: what it can do, and every option."""
    with errors(debug):
        found = describe_sinks() if name is None else [describe_sink(name)]
    if as_json:
        listed = [one.as_dict() for one in found]
        print(json.dumps(listed if name is None else listed[0], indent=2))  # noqa: T201
    elif name is None:
        _show_all(found)
    else:
        _show_one(found[0])


def _show_all(found: list[SinkDescription]) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("sink", "version", "package", "usable", "values", "rewinds", "files"):
        table.add_column(title, overflow="fold", no_wrap=title in ("sink", "version"))
    for one in found:
        able = one.capabilities or {}
        usable = "no" if not one.usable else "yes, for tests" if able["test_only"] else "yes"
        able_to = (able.get("precision", ""), able.get("rewinds", ""), ", ".join(able.get("records", ())))
        row = (one.name, one.version, one.package, usable, *able_to)
        table.add_row(*map(escape, row))
    out.print(table)
    for one in found:
        if not one.usable:
            out.print(f"{one.name}: {one.error}\n  fix: {one.fix}", markup=False)
    out.print("runmirror sinks NAME tells the options of one", markup=False)


def _show_one(one: SinkDescription) -> None:
    out.print(f"{one.name} ({one.target}), of {one.package} {one.version}", markup=False)
    for need in one.requirements:
        state = need.installed if need.ok else f"{need.installed or 'not installed'} (problem)"
        out.print(f"  needs {need.package}{need.wanted}: {state}", markup=False)
    if one.capabilities is None:
        out.print(f"not usable: {one.error}\n  fix: {one.fix}", markup=False)
        return
    out.print()
    for name, value in one.capabilities.items():
        out.print(f"{name}: {', '.join(value) or 'none' if isinstance(value, list) else value}", markup=False)
    out.print("\noptions, as -o NAME=VALUE:")
    for option in one.options:
        notes = [f"default {option.default}"] if option.default else []
        notes += [f"environment {option.env}"] if option.env else []
        about = f" ({'; '.join(notes)})" if notes else ""
        out.print(f"  {option.name}: {option.type}{about}\n      {option.description}", markup=False)
