"""The writers of the cloud benchmark, as programs: ``cloud_writer.py KIND WHERE OPTIONS ROWS PAUSE EVERY``.

Each writes ROWS rows of some 4 KB, PAUSE seconds apart, asking for an upload after every EVERY rows (0: never), says after
each row that its call returned, and at the end how long each call took. It needs no more than its own writer, so that it runs
in that one's environment.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

SIZE = 4000
Write = Callable[[int], None]


def row(number: int) -> bytes:
    return json.dumps({"step": number, "text": "x" * SIZE}).encode() + b"\n"


def run_writer(where: str, options: dict[str, Any]) -> tuple[Write, Callable[[], object], Callable[[], object]]:
    """``log_metrics`` of 50 scalars, by a Run."""
    import runmirror
    from runmirror.storage import storage_from_uri

    rows = [{f"group{n % 7}/metric{n}": number * 0.1 + n for n in range(50)} for number in range(100)]
    run = runmirror.start(storage_from_uri(where, **options), code=False)
    return lambda number: run.log_metrics(rows[number % 100], number), lambda: run.storage.flush(), run.finish


def storage_writer(where: str, options: dict[str, Any]) -> tuple[Write, Callable[[], object], Callable[[], object]]:
    """Storage.append of runmirror."""
    from runmirror.storage import storage_from_uri

    storage = storage_from_uri(where, **options)
    return lambda number: storage.append("metrics.jsonl", row(number)), storage.flush, storage.close


def tinker_writer(where: str, options: dict[str, Any]) -> tuple[Write, Callable[[], object], Callable[[], object]]:
    """FsspecStorage.append of tinker-cookbook, over gcsfs's core class (its default one asks a server that isn't there)."""
    from gcsfs.core import GCSFileSystem  # type: ignore[import-untyped, unused-ignore]
    from tinker_cookbook.stores.storage import FsspecStorage  # type: ignore[import-not-found, unused-ignore]

    storage = FsspecStorage(GCSFileSystem(**options), where.split("://")[1])
    return lambda number: storage.append("metrics.jsonl", row(number)), storage.flush, storage.flush


KINDS = {"run": run_writer, "storage": storage_writer, "tinker": tinker_writer}


def main() -> None:
    kind, where, options, rows, pause, every = sys.argv[1:]
    write, upload, close = KINDS[kind](where, json.loads(options))
    times: list[int] = []
    for number in range(int(rows)):
        start = time.perf_counter_ns()
        write(number)
        times.append(time.perf_counter_ns() - start)
        os.write(1, b".")
        if int(every) and number % int(every) == int(every) - 1:
            upload()
        time.sleep(float(pause))
    os.write(1, b"\n" + json.dumps(times).encode() + b"\n")
    close()


if __name__ == "__main__":
    main()
