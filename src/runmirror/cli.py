"""The command line: one call into the library per command.

Results go to stdout, progress and errors to stderr. Exit codes: 0 everything is where it should be; 1 an error, told in
one line; 2 the command line is wrong; 3 some runs could not be brought over whole; 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from runmirror import importer
from runmirror.exceptions import OptionError, RunmirrorError
from runmirror.find import ReadOptions
from runmirror.log.records import Status

INCOMPLETE = 3
app = typer.Typer(
    name="runmirror",
    help="Write the log of an RL run once, and see it in every tracker.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
)
out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


class Rewinds(StrEnum):
    """What a tracker gets of points that a resume superseded."""

    last = "last"
    all = "all"


class IdentityBy(StrEnum):
    """What a log that runmirror did not write is known by."""

    place = "place"
    content = "content"


class Unknown(StrEnum):
    """What a run counts as that stopped without saying how it ended."""

    killed = "killed"
    failed = "failed"
    finished = "finished"
    running = "running"


Paths = Annotated[
    list[str], typer.Argument(help="Runs, folders of runs, metrics files, globs; '-' reads them from stdin.")
]
To = Annotated[str, typer.Option("--to", help="The sink: tensorboard, or the name of an installed one.")]
Options = Annotated[
    list[str] | None, typer.Option("-o", "--option", metavar="FIELD=VALUE", help="An option of the sink; repeat it.")
]
Logdir = Annotated[str | None, typer.Option(help="TensorBoard's logdir (default ./tensorboard-mirror).")]
StepKey = Annotated[str | None, typer.Option(help="The key that is the step, instead of the usual ones.")]
Timezone = Annotated[str, typer.Option(help="The zone of times in the log that name none.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Debug = Annotated[bool, typer.Option(help="Show the traceback of an error.")]


@app.command("import")
def import_(
    paths: Paths,
    to: To,
    option: Options = None,
    logdir: Logdir = None,
    rewinds: Annotated[
        Rewinds, typer.Option(help="After a resume from an older checkpoint: the last points only, or all.")
    ] = Rewinds.last,
    step_key: StepKey = None,
    timezone: Timezone = "UTC",
    identity: Annotated[
        IdentityBy,
        typer.Option(help="Know logs of other tools by their place, or by their content (archives that move)."),
    ] = IdentityBy.place,
    status_unknown: Annotated[
        Unknown, typer.Option(help="What a run counts as that stopped without saying how it ended.")
    ] = Unknown.killed,
    state_in_log: Annotated[
        bool, typer.Option("--state-in-log", help="Keep the state inside logs that runmirror did not write.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be done.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Bring runs that exist into a tracker. Run it again and nothing changes; kill it, run it again, and it finishes."""
    with _errors(debug):
        options = _options(option or [], logdir=logdir)
        status: Status | None = None if status_unknown is Unknown.killed else status_unknown.value  # type: ignore[assignment]
        read = ReadOptions(
            step_key=step_key,
            zone=_zone(timezone),
            by_content=identity is IdentityBy.content,
            status_unknown=status,
            state_in_log=state_in_log,
        )
        runs = _paths(paths)
        if dry_run:
            _show_plan(importer.plan(runs, to, options, rewinds=rewinds.value, read=read), as_json)
            return
        with _progress() as tell:
            summary = importer.import_runs(runs, to, options, rewinds=rewinds.value, read=read, on_progress=tell)
        _show_summary(summary, as_json)
    if not summary.ok:
        raise typer.Exit(INCOMPLETE)


@app.command()
def demo(
    folder: Annotated[Path, typer.Option(help="Where the run is written.")] = Path("runmirror-demo"),
    iterations: Annotated[int, typer.Option(min=2, help="Training iterations.")] = 40,
    seed: Annotated[int, typer.Option(help="Seed of the run.")] = 0,
    logdir: Logdir = None,
    debug: Debug = False,
) -> None:
    """Train a small policy for about 20 seconds, write its log, and mirror it to TensorBoard."""
    with _errors(debug):
        from runmirror.demo import run_demo  # numpy comes with the tensorboard extra

        out.print("Training a small policy with reinforcement learning (numpy only) ...")
        log_path = run_demo(folder, iterations=iterations, seed=seed, on_iteration=out.print)
        options = _options([], logdir=logdir)
        summary = importer.import_runs([log_path], "tensorboard", options)
        out.print(f"\nThe log:       {log_path}")
        _show_summary(summary, as_json=False)
    if not summary.ok:
        raise typer.Exit(INCOMPLETE)


def main() -> None:
    """Entry point of the ``runmirror`` command."""
    app()


# -- help for the commands


@contextmanager
def _errors(debug: bool) -> Iterator[None]:
    """One plain line for an error of ours or the system's, the traceback with ``--debug``."""
    try:
        yield
    except KeyboardInterrupt:
        err.print("stopped; run the same command again to go on where it stopped", markup=False)
        raise typer.Exit(130) from None
    except BrokenPipeError:
        raise typer.Exit(1) from None
    except (RunmirrorError, OSError, ImportError) as error:
        if debug:
            raise
        err.print(f"runmirror: {error}", markup=False)
        raise typer.Exit(1) from None


def _paths(paths: list[str]) -> list[str]:
    """The paths given, with the lines of stdin in the place of '-'."""
    result: list[str] = []
    for path in paths:
        result += [line.strip() for line in sys.stdin if line.strip()] if path == "-" else [path]
    return result


def _options(pairs: list[str], **shorthands: str | None) -> dict[str, Any]:
    options: dict[str, Any] = {name: value for name, value in shorthands.items() if value is not None}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise OptionError(f"-o {pair}: an option is FIELD=VALUE, such as -o logdir=/data/tb")
        options[name.strip().replace("-", "_")] = value
    return options


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError):
        raise OptionError(f"--timezone {name}: no such zone; give one like UTC, Europe/Berlin or Asia/Tokyo") from None


@contextmanager
def _progress() -> Iterator[Any]:
    """A callback for the importer: a bar on a terminal, a line a minute elsewhere; both on stderr."""
    if err.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Bar(*columns, TextColumn("{task.fields[points]:,} points"), console=err, transient=True) as bar:
            task = bar.add_task("runs", total=None, points=0)
            points = 0

            def draw(progress: importer.Progress) -> None:
                nonlocal points
                points += progress.points
                bar.update(
                    task, total=progress.total, completed=progress.number, description=progress.name, points=points
                )

            yield draw
        return
    last, rows, points = time.monotonic(), 0, 0

    def line(progress: importer.Progress) -> None:
        nonlocal last, rows, points
        rows, points = rows + progress.rows, points + progress.points
        if time.monotonic() - last >= 60:
            last = time.monotonic()
            err.print(
                f"run {progress.number + 1} of {progress.total}: {rows:,} rows, {points:,} points sent", markup=False
            )

    yield line


def _show_plan(runs: list[importer.PlannedRun], as_json: bool) -> None:
    if as_json:
        from dataclasses import asdict

        print(json.dumps([asdict(run) for run in runs], indent=2))  # noqa: T201
        return
    table = Table("run", "state", "rows", "MB", "log", box=None, pad_edge=False)
    for run in runs:
        table.add_row(run.name, run.state, f"{run.rows:,}", f"{run.size / 1e6:.1f}", run.error or run.source)
    out.print(table)


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
        notes += [f"{run.rejected} rows or keys put aside"] if run.rejected else []
        notes += [f"{run.broken_lines} broken lines left out"] if run.broken_lines else []
        if notes:
            out.print(f"{run.state}  {run.name}: {'; '.join(notes)}", markup=False)
    inferred = [run for run in summary.runs if run.time_source != "row" and run.rows]
    if inferred:
        out.print(f"{len(inferred)} runs carry no times: told from their reports or files", markup=False)
    out.print(
        f"{len(summary.runs)} runs: {', '.join(states)}; sent {totals['rows']:,} rows, {totals['points']:,} points, "
        f"{totals['files']:,} files in {summary.seconds:.1f} s",
        markup=False,
    )
    if summary.sink == "tensorboard":
        from runmirror.sinks.tensorboard import tensorboard_command

        out.print(f"See them with: {tensorboard_command(summary.destination)}", markup=False)
    if summary.count("behind"):
        out.print("Some runs are behind: run the same command again to go on.", markup=False)
