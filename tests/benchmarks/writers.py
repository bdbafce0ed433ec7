"""The writers that are compared, as ``log(row, step)``, and how many of their rows can be read back.

As a program it is the child of the kill benchmark: it logs rows at a pace and says after each call that it returned.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

Log = Callable[[dict[str, float], int], None]

KEYS = ["env/all/reward/total", *(f"{group}/some_metric_{n}" for n in range(7) for group in "abcdefg")]
"""50 keys."""


def make_rows(count: int, seed: int = 0) -> list[dict[str, float]]:
    """Rows of 50 random numbers."""
    rng = random.Random(seed)
    return [{key: rng.random() for key in KEYS} for _ in range(count)]


@contextmanager
def runmirror_writer(folder: Path) -> Iterator[Log]:
    import runmirror

    with runmirror.start(folder, code=False) as run:
        yield run.log_metrics


@contextmanager
def json_writer(folder: Path) -> Iterator[Log]:
    """What a careful person writes by hand: open, append, close for every row."""
    folder.mkdir(parents=True)
    path = folder / "metrics.jsonl"

    def log(row: dict[str, float], step: int) -> None:
        with open(path, "a") as file:
            file.write(json.dumps({"step": step, **row}) + "\n")

    yield log


@contextmanager
def tensorboardx_writer(folder: Path) -> Iterator[Log]:
    from tensorboardX import SummaryWriter

    writer = SummaryWriter(str(folder))

    def log(row: dict[str, float], step: int) -> None:
        for key, value in row.items():
            writer.add_scalar(key, value, step)

    yield log
    writer.close()


@contextmanager
def floor_writer(folder: Path) -> Iterator[Log]:
    """One system call with a line that is ready: what a row in a file costs at the least, on this machine at this pace."""
    folder.mkdir(parents=True)
    line = json.dumps(make_rows(1)[0]).encode() + b"\n"
    file = os.open(folder / "lines", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    yield lambda row, step: os.write(file, line) and None
    os.close(file)


@contextmanager
def wandb_writer(folder: Path) -> Iterator[Log]:
    """Offline: no network at all, which is wandb at its fastest."""
    import wandb

    settings = wandb.Settings(silent=True, console="off", x_disable_stats=True)
    run = wandb.init(project="benchmark", mode="offline", dir=str(folder), settings=settings, reinit="create_new")
    yield lambda row, step: run.log(row, step=step)
    run.finish()


@contextmanager
def mlflow_writer(folder: Path) -> Iterator[Log]:
    """A database on this disk; a server is slower."""
    import mlflow

    folder.mkdir(parents=True)
    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    mlflow.set_experiment("benchmark")
    with mlflow.start_run():
        yield lambda row, step: mlflow.log_metrics(row, step=step)


@contextmanager
def trackio_writer(folder: Path) -> Iterator[Log]:
    os.environ["TRACKIO_DIR"] = str(folder)
    import trackio

    run = trackio.init(project="benchmark", embed=False)
    yield lambda row, step: run.log(row, step=step)
    trackio.finish()


WRITERS: dict[str, Callable[[Path], AbstractContextManager[Log]]] = {
    "runmirror": runmirror_writer,
    "json: open, append, close": json_writer,
    "tensorboardX: add_scalar x 50": tensorboardx_writer,
}
"""Those whose rows can be counted on disk, for the kill benchmark too."""

TRACKERS: dict[str, Callable[[Path], AbstractContextManager[Log]]] = {
    "wandb: run.log, offline": wandb_writer,
    "mlflow: log_metrics, sqlite": mlflow_writer,
    "trackio: log": trackio_writer,
    "os.write of a line that is ready": floor_writer,
}


def readable_rows(folder: Path) -> int:
    """Whole rows that can be read of what a writer left behind."""
    metrics = folder / "metrics.jsonl"
    if metrics.exists():
        return sum(len(json.loads(line)) > len(KEYS) for line in metrics.read_bytes().splitlines() if line[-1:] == b"}")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    points: Counter[int] = Counter()
    for path in folder.glob("events*"):
        for event in EventFileLoader(str(path)).Load():
            points[event.step] += len(event.summary.value)
    return sum(count == len(KEYS) for count in points.values())


def main() -> None:
    """Log COUNT rows to FOLDER with WRITER, PAUSE seconds apart, then wait to be killed; a byte on stdout per return."""
    name, folder, count, pause = sys.argv[1:]
    with WRITERS[name](Path(folder)) as log:
        for step, row in enumerate(make_rows(int(count))):
            log(row, step)
            os.write(1, b".")
            time.sleep(float(pause))
        threading.Event().wait()


if __name__ == "__main__":
    main()
