"""Rows for the TensorBoard tests, a sink that is driven as a mirror drives it, and what TensorBoard has to show then."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runmirror.log.rows import Row
from runmirror.sinks.base import LogFile, RunInfo
from runmirror.sinks.event_file import event_files
from runmirror.sinks.tensorboard import TensorBoardOptions, TensorBoardSink

START = 1_700_000_000.0
Shown = dict[str, dict[int, tuple[float, float]]]
Op = list[Row] | LogFile | RunInfo


def make_run(name: str = "run", **fields: Any) -> RunInfo:
    return RunInfo(run_id="abcdef0123456789", name=name, **{"start": START, **fields})


def make_sink(logdir: Path, **options: Any) -> TensorBoardSink:
    return TensorBoardSink(TensorBoardOptions(logdir=str(logdir), **options))


def row(ordinal: int, step: int, metrics: dict[str, Any], rewind: int | None = None, **fields: Any) -> Row:
    return Row(ordinal, {"step": step, **metrics}, step, START + ordinal, rewind=rewind, **fields)


def file(path: str, kind: Any, content: bytes) -> LogFile:
    return LogFile(path, kind, "1", lambda: content)


def mirror(logdir: Path, rows: Sequence[Row], run: RunInfo | None = None, **options: Any) -> Path:
    """Open, put what is missing, close; the run's folder."""
    sink = make_sink(logdir, **options)
    opened = sink.open(run or make_run(), None)
    sink.put(rows)
    sink.close(None, 10)
    return Path(opened.url)


def play(sink: TensorBoardSink, ops: Sequence[Op]) -> None:
    """What a mirror does with an open sink: rows, files, and the end of the run."""
    for op in ops:
        if isinstance(op, RunInfo):
            sink.close(op, 10)
        elif isinstance(op, LogFile):
            sink.put_file(op)
        else:
            sink.put(op)


def the_bytes(folder: Path) -> dict[str, bytes]:
    """Event file name -> content."""
    return {path.name: path.read_bytes() for path in event_files(folder)}


def surviving(rows: Sequence[Row]) -> Shown:
    """tag -> step -> (wall time, value): the rule of DESIGN.md. A rewind supersedes every point at its step or later, and
    else the last write of a (key, step) counts."""
    shown: Shown = {}
    for one in rows:
        if one.rewind is not None:
            for points in shown.values():
                for step in [step for step in points if step >= one.rewind]:
                    del points[step]
        for key, value in one.scalars().items():
            shown.setdefault(key, {})[one.step] = (one.time, value)
    return {tag: dict(sorted(points.items())) for tag, points in shown.items() if points}


def eventful_rows() -> list[Row]:
    """24 rows with everything that makes a log hard: late evaluations, repeated steps, two rewinds, text, empty rows."""
    rows: list[Row] = []

    def add(step: int, metrics: dict[str, Any], rewind: int | None = None, **fields: Any) -> None:
        rows.append(row(len(rows), step, metrics, rewind, **fields))

    for step in range(6):
        add(step, {"loss": 1.0 / (step + 1), "reward/mean": step * 0.25} | ({"eval/acc": step / 8} if step % 2 else {}))
    add(3, {"eval/late": 0.5})
    add(3, {"eval/acc": 0.625})
    add(6, {}, fault="the line is broken")
    add(6, {"note": "a sample\nanswer", "loss": 0.125})
    add(7, {"loss": float("nan"), "only/once": 4.0, "reward/mean": 1e300})
    add(7, {"loss": 0.0625})
    add(5, {"loss": 2.0}, rewind=4)
    add(4, {"eval/acc": 0.75, "reward/mean": 3.0})
    for step in range(6, 11):
        add(step, {"loss": 2.0 + step, "reward/mean": step * 0.5})
    add(2, {"loss": -1.0, "eval/acc": -1.0}, rewind=2)
    for step in range(3, 6):
        add(step, {"loss": -1.0 - step, "eval/acc": -float(step)})
    add(6, {"final/score": 1.0}, summary=True)
    return rows
