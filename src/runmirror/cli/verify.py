"""``runmirror verify``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from runmirror import verifier
from runmirror.cli import common
from runmirror.cli.common import INCOMPLETE, count, errors, out
from runmirror.compare import Difference, VerifiedRun

KNOWN = {
    "rounded": "{:,} matching points rounded to the tracker's precision",
    "superseded": "{:,} superseded points that the tracker still shows",
    "rejected": "{:,} points put aside because the tracker can't take them",
    "left_out": "{:,} points left out by include and exclude",
    "repeated": "{:,} points that the tracker shows twice",
    "once": "{:,} matching points that the tracker keeps once, being equal to another one",
    "nonfinite": "{:,} NaN or infinite points that the tracker can't keep",
    "tombstones": "{:,} NaN that stand for superseded points",
    "orphaned": "{:,} points of rows that never reached the log, for another machine took the run over",
}


def verify(
    paths: common.Paths,
    to: common.To,
    option: common.Options = None,
    logdir: common.Logdir = None,
    tracking_uri: common.TrackingUri = None,
    experiment: common.Experiment = None,
    project: common.Project = None,
    entity: common.Entity = None,
    rewinds: Annotated[
        common.Rewinds | None,
        typer.Option(help="The policy for superseded points; default: the one the run was mirrored with."),
    ] = None,
    step_key: common.StepKey = None,
    timezone: common.Timezone = "UTC",
    identity: common.Identity = common.IdentityBy.place,
    state_in_log: common.StateInLog = False,
    storage_option: common.StorageOptions = None,
    as_json: common.Json = False,
    debug: common.Debug = False,
) -> None:
    """Read the tracker back and compare it with the log: every key, step, value and time. Writes nothing."""
    with errors(debug):
        result = verifier.verify(
            common.paths(paths),
            to,
            common.options(option, storage_option, logdir, tracking_uri, experiment, project, entity),
            rewinds=rewinds.value if rewinds else None,
            read=common.read_options(
                step_key, timezone, identity, state_in_log=state_in_log, storage_option=storage_option
            ),
        )
        if as_json:
            print(json.dumps(result.as_dict(), indent=2))  # noqa: T201
        else:
            _show(result)
    if not result.ok:
        raise typer.Exit(INCOMPLETE)


def _show(result: verifier.Verification) -> None:
    for run in result.runs:
        out.print(f"{run.state}  {run.name}: {_told(run, result.destination)}", markup=False)
        if run.state != "absent":
            for example in run.examples:
                out.print(f"  {_example(example)}", markup=False)
            if len(run.examples) < run.missing + run.extra + run.different:
                out.print("  ...")
    totals = result.totals()
    for reason, text in KNOWN.items():
        if totals["known"][reason]:
            out.print(f"known: {text.format(totals['known'][reason])}", markup=False)
    out.print(
        f"{count(len(result.runs), 'run')}: {totals['matching']:,} of {count(totals['points'], 'point')} match; "
        f"{totals['missing']:,} missing, {totals['extra']:,} extra, {totals['different']:,} different",
        markup=False,
    )
    if any(run.not_sent for run in result.runs):
        out.print("What is not sent yet comes with the next import or mirror of these runs.", markup=False)


def _told(run: VerifiedRun, destination: str) -> str:
    if run.error:
        return run.error
    if run.state == "absent":
        never = "mirrored before, but no longer in" if run.mirrored else "never mirrored to"
        return f"{never} {destination}: all of {count(run.points, 'point')} missing"
    unsent = f" ({run.not_sent:,} not sent yet)" if run.not_sent else ""
    apart = run.points - run.matching - run.missing - run.different
    wrong = [f"{apart:,} known to be shown otherwise"] if apart > 0 and not run.missing else []
    wrong += [f"{run.missing:,} missing{unsent}"] if run.missing else []
    wrong += [f"{run.extra:,} extra"] if run.extra else []
    wrong += [f"{run.different:,} different"] if run.different else []
    return "; ".join([f"{run.matching:,} of {count(run.points, 'point')} match", *wrong])


def _example(one: Difference) -> str:
    what = "another time" if one.kind == "time" else "different" if one.kind == "value" else one.kind
    sides = [f"expected {one.expected!r}"] if one.expected is not None else []
    sides += [f"found {one.found!r}"] if one.found is not None else []
    return f"{what}: {one.key} at step {one.step}: {', '.join(sides)}"
