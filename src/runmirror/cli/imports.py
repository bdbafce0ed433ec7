"""``runmirror import`` and ``runmirror demo``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from runmirror import importer
from runmirror.cli import common
from runmirror.cli.common import INCOMPLETE, count, errors, out
from runmirror.find import other_logs
from runmirror.sinks.registry import load_sink


def import_(
    paths: common.Paths,
    to: common.To,
    option: common.Options = None,
    logdir: common.Logdir = None,
    tracking_uri: common.TrackingUri = None,
    experiment: common.Experiment = None,
    project: common.Project = None,
    entity: common.Entity = None,
    rewinds: common.RewindsOption = common.Rewinds.last,
    step_key: common.StepKey = None,
    timezone: common.Timezone = "UTC",
    identity: common.Identity = common.IdentityBy.place,
    status_unknown: common.StatusUnknown = common.Unknown.killed,
    state_in_log: common.StateInLog = False,
    storage_option: common.StorageOptions = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Only runs whose name matches; repeat it for several.")
    ] = None,
    since: Annotated[
        datetime | None,
        typer.Option(
            formats=["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S"], metavar="DATE", help="Only runs whose log changed then or later."
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Processes that share the runs.")] = 1,
    dask: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="A Dask scheduler whose workers share the runs.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Rows a second at most, over all workers of one machine.")
    ] = None,
    experiment_per_folder: Annotated[
        bool, typer.Option("--experiment-per-folder", help="MLflow: an experiment for each folder of runs.")
    ] = False,
    restore: Annotated[bool, typer.Option("--restore", help="MLflow: take back runs that were deleted there.")] = False,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="MLflow: make the runs anew; the old ones are renamed and kept.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be done.")] = False,
    as_json: common.Json = False,
    debug: common.Debug = False,
) -> None:
    """Bring runs that exist into a tracker.

    Run it again and nothing changes; kill it, run it again, and it finishes.
    """
    with errors(debug):
        options = common.options(option, storage_option, logdir, tracking_uri, experiment, project, entity)
        options |= {name: True for name, said in (("restore", restore), ("rebuild", rebuild)) if said}
        select = importer.Selection(tuple(only or ()), since.timestamp() if since else None)
        read = common.read_options(step_key, timezone, identity, status_unknown, state_in_log, storage_option)
        runs = common.paths(paths)
        if dry_run:
            _show_plan(importer.plan(runs, to, options, rewinds=rewinds.value, read=read, select=select), as_json)
            _show_others(runs, as_json)
            return
        with common.progress() as tell, common.executor(dask) as executor:
            summary = importer.import_runs(
                runs,
                to,
                options,
                rewinds=rewinds.value,
                read=read,
                select=select,
                workers=workers,
                executor=executor,
                rate=rate,
                per_folder=experiment_per_folder,
                on_progress=tell,
            )
        _show_summary(summary, as_json)
        if not summary.runs and not as_json:
            chose = " and ".join(
                filter(None, [f"--only {', '.join(only)}" if only else "", "--since" if since else ""])
            )
            out.print(f"No run there is chosen by {chose}; `runmirror show` tells their names", markup=False)
        _show_others(runs, as_json)
    if not summary.ok:
        raise typer.Exit(INCOMPLETE)


def demo(
    folder: Annotated[Path, typer.Option(help="Where the run is written.")] = Path("runmirror-demo"),
    iterations: Annotated[int, typer.Option(min=2, help="Training iterations.")] = 40,
    seed: Annotated[int, typer.Option(help="Seed of the run.")] = 0,
    logdir: common.Logdir = None,
    debug: common.Debug = False,
) -> None:
    """Train a small policy for about 20 seconds, write its log, and mirror it to TensorBoard."""
    with errors(debug):
        load_sink("tensorboard")  # say what is missing before training, not after; numpy comes with the same extra
        from runmirror.demo import run_demo

        out.print("Training a small policy with reinforcement learning (numpy only) ...")
        log_path = run_demo(folder, iterations=iterations, seed=seed, on_iteration=out.print)
        options = common.options(logdir=logdir)
        summary = importer.import_runs([log_path], "tensorboard", options)
        out.print(f"\nThe log:       {log_path}")
        _show_summary(summary, as_json=False)
    if not summary.ok:
        raise typer.Exit(INCOMPLETE)


def _show_plan(runs: list[importer.PlannedRun], as_json: bool) -> None:
    if as_json:
        print(json.dumps([asdict(run) for run in runs], indent=2))  # noqa: T201
        return
    table = Table("run", "state", "rows", "MB", "log", box=None, pad_edge=False)
    for run in runs:
        table.add_row(run.name, run.state, f"{run.rows:,}", f"{run.size / 1e6:.1f}", run.error or run.source)
    out.print(table)


def _show_others(paths: Sequence[str], as_json: bool) -> None:
    """Files beside the runs that look like logs."""
    if not as_json and (others := other_logs(paths)):
        more = ", ..." if len(others) > 5 else ""
        out.print(
            f"Not taken: {', '.join(others[:5])}{more} ({count(len(others), 'file')} that may be logs too: name them to "
            "import them)",
            markup=False,
        )


def _show_summary(summary: importer.Summary, as_json: bool) -> None:
    if as_json:
        print(json.dumps(summary.as_dict(), indent=2))  # noqa: T201
        return
    totals = summary.as_dict()["totals"]
    states = [
        f"{summary.count(state)} {state}"
        for state in ("complete", "running", "behind", "broken")
        if summary.count(state)
    ]
    for run in summary.runs:
        notes = [run.error] if run.error else []
        notes += [f"{count(run.rejected, 'row or key', 'rows or keys')} put aside"] if run.rejected else []
        notes += [f"{count(run.broken_lines, 'broken line')} left out"] if run.broken_lines else []
        if notes:
            out.print(f"{run.state}  {run.name}: {'; '.join(notes)}", markup=False)
    sources = Counter(run.source for run in summary.runs if run.source)
    if set(sources) - {"runmirror"}:
        out.print(f"logs: {', '.join(f'{n} {source}' for source, n in sorted(sources.items()))}", markup=False)
    inferred = [run for run in summary.runs if run.time_source != "row" and run.rows]
    if inferred:
        out.print(
            f"{count(len(inferred), 'run')} whose rows carry no time: theirs comes from reports and file dates",
            markup=False,
        )
    numbered = [run.name for run in summary.runs if run.numbered]
    if numbered:
        out.print(
            f"{count(len(numbered), 'run')} without a step ({', '.join(numbered[:3])}): rows are numbered; --step-key names "
            "the key that is the step",
            markup=False,
        )
    out.print(
        f"{count(len(summary.runs), 'run')}: {', '.join(states) or 'none was chosen'}; sent {count(totals['rows'], 'row')}, "
        f"{count(totals['points'], 'point')}, {count(totals['files'], 'file')} in {summary.seconds:.1f} s",
        markup=False,
    )
    if summary.sink == "tensorboard" and any(run.url for run in summary.runs):
        from runmirror.sinks.tensorboard import tensorboard_command

        them = "it" if len(summary.runs) == 1 else "them"
        out.print(f"See {them} with: {tensorboard_command(summary.destination)}", markup=False)
    if summary.sink == "mlflow" and totals["points"]:
        from runmirror.sinks.mlflow_client import how_to_see

        out.print(
            f"See: {how_to_see(summary.destination, filter(None, (run.url for run in summary.runs)))}", markup=False
        )
        out.print(f"Find them there with: tags.`runmirror.import` = '{summary.import_id}'", markup=False)
    if summary.count("behind"):
        out.print("Some runs are behind: run the same command again to go on.", markup=False)
