"""``runmirror show``: runs as a table, one run in detail, the differences of their configurations."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from runmirror.cli import common, rollouts
from runmirror.cli.common import INCOMPLETE, count, errors, out
from runmirror.cursors import SinkState
from runmirror.read import read_run
from runmirror.show import ShownRun, Uploads, Watch, differences, flatten, shorten

BARS = "▁▂▃▄▅▆▇█"
PIPE_WIDTH = 160
"""Columns of a table that goes to no terminal."""
CELL = 28
"""Characters of a configuration's value that are shown at most."""
MOST = 12
"""Keys of a configuration, and groups of metrics, that the detail names."""
COLOURS = {"running": "green", "failed": "red", "killed": "yellow"}


def show(
    paths: common.Paths,
    diff_config: Annotated[
        bool, typer.Option("--diff-config", help="Only the config keys in which the runs differ.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Draw it again and again, until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two drawings.")] = 2.0,
    key: Annotated[str | None, typer.Option(help="The metric that is the reward, instead of the usual ones.")] = None,
    iteration: Annotated[
        int | None, typer.Option(min=0, help="What was said and how it was graded in this iteration of one run.")
    ] = None,
    split: Annotated[str, typer.Option(help="With --iteration: train, or an evaluation's name.")] = "train",
    full: Annotated[bool, typer.Option("--full", help="With --iteration: long texts and tables as a whole.")] = False,
    storage_option: common.StorageOptions = None,
    as_json: common.Json = False,
    debug: common.Debug = False,
) -> None:
    """Show runs: how far they are, their reward, and how far each mirror got; one run in detail. Writes nothing."""
    if watch and as_json:
        raise typer.BadParameter("--watch draws for people; run --json again and again instead")
    if iteration is not None:
        if watch or diff_config or len(paths) != 1:
            raise typer.BadParameter("--iteration shows one run: give its path, without --watch and --diff-config")
        with errors(debug):
            found = rollouts.load(read_run(common.paths(paths)[0]), iteration, split)
            if as_json:
                print(json.dumps(found, indent=2))  # noqa: T201
            else:
                _console().print(rollouts.draw(found, full=full))
        return
    with errors(debug):
        reader = Watch(
            common.paths(paths),
            key=key,
            details=True if as_json else None,
            storage_options=common.storage_options(storage_option),
        )
        if watch:
            redraw(lambda width: draw(reader.read(), width, diff_config=diff_config, active_first=True), interval)
            return
        runs = reader.read()
        if as_json:
            data: Any = differences(runs) if diff_config else [run.as_dict() for run in runs]
            print(json.dumps(data, indent=2))  # noqa: T201
        else:
            console = _console()
            console.print(draw(runs, console.width, diff_config=diff_config))
    if any(run.error for run in runs):
        raise typer.Exit(INCOMPLETE)


def redraw(
    drawing: Callable[[int], RenderableType], interval: float, console: Console | None = None, times: int | None = None
) -> None:
    """Draw again every ``interval`` seconds until Ctrl-C, or ``times`` times: in place on a terminal, else one below the
    other."""
    console = console or _console()
    try:
        with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
            while times is None or times > 0:
                if console.is_terminal:
                    live.update(drawing(console.width), refresh=True)
                else:
                    console.print(drawing(console.width))
                times = None if times is None else times - 1
                if times != 0:
                    time.sleep(interval)
    except KeyboardInterrupt:
        return


def draw(
    runs: Sequence[ShownRun], width: int, *, diff_config: bool = False, active_first: bool = False
) -> RenderableType:
    """What is shown of runs in so many columns."""
    if diff_config:
        return _draw_differences(runs, width)
    if len(runs) == 1 and runs[0].error is None:
        return _draw_one(runs[0], width)
    if active_first:
        runs = sorted(runs, key=lambda run: run.status != "running")
    return _draw_table(runs, width)


def _draw_table(runs: Sequence[ShownRun], width: int) -> Group:
    keys = {run.reward_key for run in runs if run.reward_key and run.curve}
    bars = 20 if width >= 120 else 12 if width >= 90 else 8 if width >= 76 else 0
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run", overflow="ellipsis", no_wrap=True, min_width=6)
    table.add_column("status", no_wrap=True)
    table.add_column("rows", justify="right", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("reward", justify="right", no_wrap=True)
    if bars:
        table.add_column("", no_wrap=True)
    if len(keys) > 1:
        table.add_column("of", overflow="ellipsis", no_wrap=True)
    table.add_column("age", justify="right", no_wrap=True)
    table.add_column("sinks", overflow="fold", min_width=6)
    notes: list[Text] = []
    for run in runs:
        if run.error is not None:
            notes.append(Text(clean(f"{run.name}: {run.error}"), style="red"))
            continue
        cells = [Text(clean(run.name)), _status(run), Text(f"{run.rows:,}"), Text(_number(run.last_step))]
        cells += [Text(_number(run.reward))]
        cells += [Text(sparkline(run.curve, bars))] if bars else []
        cells += [Text(clean(run.reward_key or "") if run.curve else "")] if len(keys) > 1 else []
        table.add_row(*cells, Text(_age(run)), Text(", ".join(map(_sink, run.sinks))))
        notes += [Text(clean(f"{run.name}: {s.sink}: {s.last_error}")) for s in run.sinks if s.last_error]
        if run.uploads is not None and (run.uploads.error or (run.uploads.unsynced and not run.uploads.alive)):
            notes.append(Text(clean(f"{run.name}: {_uploads(run.uploads)}")))
        notes += [Text(clean(f"{run.name}: {count(run.lost, 'row')} lost to a full disk"))] if run.lost else []
        notes += [Text(clean(f"{run.name}: {count(run.broken_lines, 'broken line')}"))] if run.broken_lines else []
    units = {run.reward_unit for run in runs if run.reward_key in keys} - {"", "reward"}
    unit = f" ({units.pop()})" if len(units) == 1 else ""
    legend = [Text(clean(f"reward: {key}{unit}"), style="dim") for key in keys] if len(keys) == 1 else []
    return Group(*([table] if table.rows else []), *legend, *notes)


def _draw_one(run: ShownRun, width: int) -> Group:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")

    def add(label: str, text: str | Text) -> None:
        table.add_row(label, text if isinstance(text, Text) else Text(clean(text)))

    add("run", run.name)
    add("log_path", run.path)
    add("id", f"{run.run_id} ({run.source})")
    add("status", _status(run))
    times = [f"{name} {_when(at)}" for name, at in (("started", run.start), ("ended", run.end)) if at is not None]
    times += [f"took {how_long(run.duration)}"] if run.duration is not None else []
    add("time", ", ".join(times))
    last = f", last step {run.last_step}, {_age(run)} ago" if run.last_row is not None else ""
    broken = f", {count(run.broken_lines, 'broken line')}" if run.broken_lines else ""
    broken += f", {count(run.lost, 'row')} lost to a full disk" if run.lost else ""
    add("rows", f"{run.rows:,}{last}{broken}")
    if run.curve:
        unit = f" ({run.reward_unit})" if run.reward_unit not in ("", "reward") else ""
        line = sparkline(run.curve, min(40, max(8, width - 50)))
        add("reward", f"{_number(run.reward)}  {line}  {run.reward_key}{unit}")
    if run.latest:
        latest = [f"{key} {_number(value)} {run.units.get(key, '')}".rstrip() for key, value in run.latest.items()]
        add("latest", ", ".join(latest))
    groups = [f"{name}/ {number}" for name, number in list(run.groups.items())[:MOST]]
    add("keys", f"{run.keys}" + (f": {', '.join(groups)}" if groups else ""))
    if run.config is not None:
        flat = flatten(run.config)
        shown = [f"{key}={_value(value)}" for key, value in list(flat.items())[:MOST]]
        more = [f"and {len(flat) - MOST} more"] if len(flat) > MOST else []
        add("config", ", ".join(shown + more))
    if run.checkpoints:
        add("checkpoints", f"{run.checkpoints}, the latest is {run.latest_checkpoint}")
    if run.rollout_files:
        add("files", ", ".join(f"{number} {kind}" for kind, number in sorted(run.rollout_files.items())))
    if run.uploads is not None:
        add("uploads", _uploads(run.uploads))
    for sink in run.sinks:
        add(sink.sink, _sink(sink, named=False))
        add("", sink.destination if sink.url in (None, sink.destination) else f"{sink.destination}  {sink.url}")
        if sink.last_error:
            add("", f"last error: {sink.last_error}")
    if not run.sinks:
        add("sinks", "none yet")
    return Group(table)


def _draw_differences(runs: Sequence[ShownRun], width: int) -> Group:
    """Runs or keys as columns, whichever are fewer; what doesn't fit beside one another goes below."""
    found = differences(runs)
    names = [run.name for run in runs if run.error is None]
    notes = [Text(clean(f"{run.name}: {run.error}"), style="red") for run in runs if run.error is not None]
    if not found:
        return Group(Text(f"{count(len(names), 'run')}: no config key differs"), *notes)
    cells = {(name, key): _value(values[name]) for key, values in found.items() for name in values}
    by_run = len(names) > len(found)
    rows, columns = (names, list(found)) if by_run else (list(found), names)
    grid = [[cells.get((row, column) if by_run else (column, row), "-") for column in columns] for row in rows]
    label = min(max(map(len, rows)), max(8, width // 3))
    tables: list[RenderableType] = []
    start = 0
    while start < len(columns):
        end, used = start, label
        while end < len(columns):
            used += 1 + max(min(len(columns[end]), CELL), *(len(line[end]) for line in grid))
            if used > width and end > start:
                break
            end += 1
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
        table.add_column("run" if by_run else "key", max_width=label, overflow="fold")
        for column in columns[start:end]:
            table.add_column(Text(clean(column)), overflow="fold", max_width=CELL)
        for row, line in zip(rows, grid, strict=True):
            table.add_row(Text(clean(row)), *(Text(cell) for cell in line[start:end]))
        tables += [Text(""), table] if tables else [table]
        start = end
    return Group(*tables, *notes)


def sparkline(values: Sequence[float], width: int) -> str:
    """The course of values in ``width`` characters at most; a value that is not finite is a space."""
    shown = shorten(values, width)
    finite = [value for value in shown if math.isfinite(value)]
    low, high = (min(finite) / 2, max(finite) / 2) if finite else (0.0, 0.0)  # halves: no distance is infinite
    top = len(BARS) - 1
    return "".join(
        BARS[round((value / 2 - low) / ((high - low) or 1.0) * top)] if math.isfinite(value) else " " for value in shown
    )


def how_long(seconds: float) -> str:
    """``12 s``, ``5 min``, ``3.2 h``, ``4 d``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} d"


def _age(run: ShownRun) -> str:
    return "" if run.last_row is None else how_long(max(0.0, time.time() - run.last_row))


def _when(at: float) -> str:
    try:
        return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S %z")
    except (ValueError, OverflowError, OSError):
        return f"{at:g}"


def _status(run: ShownRun) -> Text:
    told = run.status or ""
    return Text(told if run.status_known else f"{told}?", style=COLOURS.get(told, ""))


def _sink(sink: SinkState, named: bool = True) -> str:
    """``tensorboard``, ``wandb 12 behind``; in the detail ``1,000 rows, 0 behind, run closed as finished``."""
    behind = "log changed" if sink.behind is None else f"{sink.behind:,} behind"
    rejected = f"{sink.rejected:,} rejected" if sink.rejected else ""
    if named:
        parts: Iterable[str] = (behind if sink.behind != 0 else "", rejected)
        return clean(" ".join(part for part in (sink.sink, *parts) if part))
    closed = f"closed as {sink.closed}" if sink.closed else "open"
    updated = f"updated {how_long(max(0.0, time.time() - sink.updated))} ago" if sink.updated else ""
    return ", ".join(part for part in (f"{sink.rows:,} rows", behind, rejected, closed, updated) if part)


def _uploads(uploads: Uploads) -> str:
    last = "" if uploads.last_upload is None else f", last upload {how_long(time.time() - uploads.last_upload)} ago"
    wait = f"{count(uploads.unsynced, 'byte')} on this machine only" if uploads.unsynced else "all uploaded"
    gone = "; its writer is gone: run `runmirror push`" if uploads.unsynced and not uploads.alive else ""
    return f"{wait}{last}{gone}{f' ({uploads.error})' if uploads.error else ''}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value}" if isinstance(value, int) else f"{value:.4g}"


def _value(value: Any) -> str:
    text = clean(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    return text if len(text) <= CELL else text[: CELL - 1] + "…"


def clean(text: str) -> str:
    """Text that can't steer a terminal, whatever a log has in it."""
    return "".join(char if char.isprintable() else "�" for char in text)


def _console() -> Console:
    """Where tables go: as wide as the terminal, wide when there is none."""
    narrow = out.is_terminal or "COLUMNS" in os.environ
    return Console(highlight=False, width=None if narrow else PIPE_WIDTH)
