"""``runmirror health``: what is wrong with runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from runmirror.catalogue import Catalogue, RunHealth, check_runs
from runmirror.cli import common
from runmirror.cli.common import INCOMPLETE, count, errors, out
from runmirror.cli.show import clean

COLOURS = {"fail": "red", "warn": "yellow"}


def health(
    paths: common.Paths,
    catalogue: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A file with the meaning and the checks of your own metrics; repeat it."),
    ] = None,
    step_key: common.StepKey = None,
    storage_option: common.StorageOptions = None,
    as_json: common.Json = False,
    debug: common.Debug = False,
) -> None:
    """Check runs: training that goes wrong, faults of the log, mirrors that are behind. Writes nothing."""
    with errors(debug):
        read = common.read_options(step_key, "UTC", storage_option=storage_option)
        runs = check_runs(common.paths(paths), catalogue=Catalogue.load(*(catalogue or [])), read=read)
        if as_json:
            print(json.dumps([run.as_dict() for run in runs], indent=2))  # noqa: T201
        else:
            for run in runs:
                _print(run)
            ill = sum(not run.ok for run in runs)
            out.print(
                f"{count(len(runs), 'run')}: {ill} with findings" if ill else f"{count(len(runs), 'run')}: healthy"
            )
    if not all(run.ok for run in runs):
        raise typer.Exit(INCOMPLETE)


def _print(run: RunHealth) -> None:
    if run.error is not None:
        out.print(Text(clean(f"{run.name}: {run.error}"), style="red"))
        return
    told: set[str] = set()
    for finding in run.findings:
        line = Text(clean(f"{run.name}: "))
        line.append(finding.level, style=COLOURS[finding.level])
        line.append(clean(f" {finding.rule}: {finding}"))
        out.print(line)
        if finding.rule not in told:  # once for each run
            told.add(finding.rule)
            out.print(Text(f"  means: {finding.means}\n  try:   {finding.tries}", style="dim"))
