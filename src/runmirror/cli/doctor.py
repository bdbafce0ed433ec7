"""``runmirror doctor``."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer

from runmirror.cli import common
from runmirror.cli.common import INCOMPLETE, count, errors, out
from runmirror.doctor import examine
from runmirror.find import ReadOptions


def doctor(
    paths: common.Paths,
    to: common.To,
    option: common.Options = None,
    logdir: common.Logdir = None,
    tracking_uri: common.TrackingUri = None,
    experiment: common.Experiment = None,
    storage_option: common.StorageOptions = None,
    project: common.Project = None,
    entity: common.Entity = None,
    as_json: common.Json = False,
    debug: common.Debug = False,
) -> None:
    """Check whether an import or a mirror would work here.

    Writes nothing; one line per check, one fix per problem.
    """
    with errors(debug):
        checks = examine(
            common.paths(paths),
            to,
            common.options(option, storage_option, logdir, tracking_uri, experiment, project, entity),
            read=ReadOptions(storage_options=common.storage_options(storage_option)),
        )
    problems = [check for check in checks if not check.ok]
    if as_json:
        print(json.dumps({"ok": not problems, "checks": [asdict(check) for check in checks]}, indent=2))  # noqa: T201
    else:
        for check in checks:
            out.print(f"{'ok' if check.ok else 'problem':8} {check.name}: {check.found}", markup=False)
            if not check.ok:
                out.print(f"         fix: {check.fix}", markup=False)
        out.print("All is well." if not problems else f"{count(len(problems), 'problem')}.", markup=False)
    if problems:
        raise typer.Exit(INCOMPLETE)
