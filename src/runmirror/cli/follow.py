"""``runmirror mirror``."""

from __future__ import annotations

import re
import signal
import threading
from types import FrameType
from typing import Annotated

import typer

from runmirror.cli import common
from runmirror.cli.common import INCOMPLETE, err, errors
from runmirror.exceptions import OptionError
from runmirror.follow import Follower
from runmirror.targets import parse_targets

FILES = 8192
"""Open files with which 1,024 runs can be open at a time."""


def mirror(
    paths: common.Paths,
    to: common.ManyTo,
    option: common.Options = None,
    logdir: common.Logdir = None,
    tracking_uri: common.TrackingUri = None,
    experiment: common.Experiment = None,
    project: common.Project = None,
    entity: common.Entity = None,
    rewinds: common.RewindsOption = common.Rewinds.all,
    step_key: common.StepKey = None,
    timezone: common.Timezone = "UTC",
    identity: common.Identity = common.IdentityBy.place,
    status_unknown: common.StatusUnknown = common.Unknown.killed,
    state_in_log: common.StateInLog = False,
    storage_option: common.StorageOptions = None,
    interval: Annotated[
        float | None,
        typer.Option(min=0.01, help="Seconds between two looks at the runs; default 1, for runs in a cloud 10."),
    ] = None,
    exit_idle: Annotated[
        str | None, typer.Option(metavar="TIME", help="End when no row came for this long, such as 30m, 45s or 2h.")
    ] = None,
    debug: common.Debug = False,
) -> None:
    """Keep trackers equal to growing runs, for ever: new runs are found, new rows sent as they appear."""
    with errors(debug):
        given = common.options(None, storage_option, logdir, tracking_uri, experiment, project, entity)
        follower = Follower(
            paths=common.paths(paths),
            targets=parse_targets(to, option or [], **given),
            policy=rewinds.value,
            read=common.read_options(step_key, timezone, identity, status_unknown, state_in_log, storage_option),
            interval=interval,
            exit_idle=None if exit_idle is None else seconds(exit_idle),
            tell=lambda line: err.print(line, markup=False),
        )
        stop = threading.Event()

        def end(signum: int, frame: FrameType | None) -> None:
            stop.set()
            signal.signal(signum, signal.SIG_DFL)  # said again, it ends at once: nothing is lost by that

        signal.signal(signal.SIGTERM, end)
        signal.signal(signal.SIGINT, end)
        raise_file_limit()
        delivered = follower.run(stop)
    if not delivered:
        raise typer.Exit(INCOMPLETE)


def raise_file_limit() -> None:
    """Let this process have :data:`FILES` files open, where the system allows it: an open run takes a few."""
    try:
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (ImportError, OSError, ValueError):  # Windows; a system that has a lower limit than it says
        return


def seconds(text: str) -> float:
    """``90``, ``45s``, ``30m`` or ``2h`` in seconds. Raises OptionError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if not found:
        raise OptionError(f"{text!r} is no time: say 45s, 30m or 2h")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]
