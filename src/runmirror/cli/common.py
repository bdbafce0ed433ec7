"""What the commands share: consoles, common options, errors as one line, progress."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated, Any, cast
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from runmirror import importer
from runmirror.exceptions import MissingPackageError, OptionError, RunmirrorError
from runmirror.find import ReadOptions
from runmirror.find_remote import is_remote
from runmirror.log.records import Status

INCOMPLETE = 3
"""Exit code: some runs are not whole in the tracker."""
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
    list[str],
    typer.Argument(
        help="Runs, folders of runs, metrics files, globs, URIs (gs://bucket/runs); '-' reads them from stdin."
    ),
]
To = Annotated[str, typer.Option("--to", help="The sink: tensorboard, mlflow, wandb, or the name of an installed one.")]
ManyTo = Annotated[
    list[str],
    typer.Option(
        "--to", help="The sink: tensorboard, mlflow, wandb, or the name of an installed one; repeat it for several."
    ),
]
Options = Annotated[
    list[str] | None, typer.Option("-o", "--option", metavar="FIELD=VALUE", help="An option of the sink; repeat it.")
]
Logdir = Annotated[str | None, typer.Option(help="TensorBoard's logdir (default ./tensorboard-mirror).")]
TrackingUri = Annotated[
    str | None,
    typer.Option(help="MLflow's server or database (default MLFLOW_TRACKING_URI, else sqlite:///mlflow.db)."),
]
Experiment = Annotated[
    str | None, typer.Option(help="MLflow's experiment (default: the name of the folder of the runs).")
]
Project = Annotated[str | None, typer.Option(help="W&B's project (default WANDB_PROJECT, else runmirror).")]
Entity = Annotated[
    str | None, typer.Option(help="W&B's user or team (default WANDB_ENTITY, else that of the credentials).")
]
StorageOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option",
        metavar="KEY=VALUE",
        help="For runs in a cloud: an option of the fsspec file system, such as a credential; repeat it.",
    ),
]
StepKey = Annotated[str | None, typer.Option(help="The key that is the step, instead of the usual ones.")]
Timezone = Annotated[str, typer.Option(help="The zone of times in the log that name none.")]
RewindsOption = Annotated[
    Rewinds, typer.Option("--rewinds", help="After a resume from an older checkpoint: the last points only, or all.")
]
Identity = Annotated[
    IdentityBy,
    typer.Option(
        "--identity", help="Know logs of other tools by their place, or by their content (archives that move)."
    ),
]
StatusUnknown = Annotated[Unknown, typer.Option(help="What a run counts as that stopped without saying how it ended.")]
StateInLog = Annotated[
    bool, typer.Option("--state-in-log", help="Keep the state inside logs that runmirror did not write.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Debug = Annotated[bool, typer.Option(help="Show the traceback of an error.")]


@contextmanager
def errors(debug: bool) -> Iterator[None]:
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


def paths(paths: list[str]) -> list[str]:
    """The paths given, with the lines of stdin in the place of '-'."""
    result: list[str] = []
    for path in paths:
        result += [line.strip() for line in sys.stdin if line.strip()] if path == "-" else [path]
    return result


def options(
    pairs: list[str] | None = None,
    storage: list[str] | None = None,
    logdir: str | None = None,
    tracking_uri: str | None = None,
    experiment: str | None = None,
    project: str | None = None,
    entity: str | None = None,
) -> dict[str, Any]:
    """``-o FIELD=VALUE`` pairs and the shorthands that were given, as a dict. The options in ``storage`` are also those of a
    logdir in a cloud."""
    said = {
        "logdir": logdir,
        "tracking_uri": tracking_uri,
        "experiment": experiment,
        "project": project,
        "entity": entity,
    }
    found: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not equals:
            raise OptionError(f"-o {pair}: an option is FIELD=VALUE, such as -o logdir=/data/tb")
        found[name.strip().replace("-", "_")] = value
    place = found.get("logging_dir") or found.get("logdir") or ""
    if storage and is_remote(place):
        found.setdefault("storage_options", storage_options(storage))
    return found


def storage_options(pairs: list[str] | None) -> dict[str, Any]:
    """``--storage-option KEY=VALUE`` pairs; a value that is JSON (``true``, ``3``, an object) is taken as that."""
    found: dict[str, Any] = {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():  # what was said may be a secret: it is not repeated
            raise OptionError("--storage-option: an option is KEY=VALUE, such as --storage-option project=mine")
        try:
            found[name.strip()] = json.loads(value)
        except ValueError:
            found[name.strip()] = value
    return found


def zone(name: str) -> ZoneInfo:
    """The zone of this name, or an OptionError that says how zones are called."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):  # OSError: "Europe" is a folder
        raise OptionError(f"--timezone {name}: no such zone; give one like UTC, Europe/Berlin or Asia/Tokyo") from None


@contextmanager
def progress() -> Iterator[Any]:
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


@contextmanager
def executor(dask: str | None) -> Iterator[Executor | None]:
    """The workers of the Dask scheduler at this address; None without one.

    Raises:
        MissingPackageError: Dask's ``distributed`` is not installed.
        OptionError: no scheduler answers there.
    """
    if dask is None:
        yield None
        return
    try:
        from distributed import Client
    except ImportError:
        raise MissingPackageError("--dask needs Dask: pip install 'runmirror[dask]', here and on its workers") from None
    try:
        client = Client(dask, timeout=5)
    except (OSError, TimeoutError, ValueError) as error:
        raise OptionError(
            f"--dask {dask}: no Dask scheduler answers there ({error}); give one like tcp://host:8786"
        ) from None
    with client:
        yield client.get_executor()


def count(number: int, what: str, many: str | None = None) -> str:
    """``1 run``, ``2 runs``."""
    return f"{number:,} {what if number == 1 else many or what + 's'}"


def read_options(
    step_key: str | None,
    timezone: str,
    identity: IdentityBy = IdentityBy.place,
    status_unknown: Unknown = Unknown.killed,
    state_in_log: bool = False,
    storage_option: list[str] | None = None,
) -> ReadOptions:
    """How logs are read, from the common options."""
    options = storage_options(storage_option)
    status = None if status_unknown is Unknown.killed else cast(Status, status_unknown.value)
    return ReadOptions(step_key, zone(timezone), identity is IdentityBy.content, status, state_in_log, options)
