"""A training process: ``python -m tests.storage.cloud_writer HOW URI OPTIONS COUNT PAUSE``.

It continues the numbers it finds in metrics.jsonl, one row each, and says every number whose append returned.
"""

from __future__ import annotations

import json
import os
import sys
import time

from runmirror.storage import CloudStorage, remote, upload

METRICS = "metrics.jsonl"


def write_until_killed(home: str, out: str, uri: str, options: str) -> None:
    """The same in a process that was forked from one with everything imported: what it says goes to a file."""
    os.environ["RUNMIRROR_HOME"] = home
    os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    work("close", uri, options, "1000000", "0.002")


def work(how: str, uri: str, options: str, count: str, pause: str) -> None:
    upload.GAP = 0.0  # the server has no limit here
    remote.PAUSES = (0.05, 0.1, 0.2)
    storage = CloudStorage(uri, {"upload_interval": 0.05, **json.loads(options)})
    storage.claim((METRICS,))
    stat = storage.stat(METRICS)
    end = stat.size if stat is not None else 0
    tail = storage.read_range(METRICS, max(0, end - 4096)) if end else b""
    first = json.loads(tail.splitlines()[-1])["step"] + 1 if tail else 0
    for step in range(first, first + int(count)):
        if step % 5 == 0:
            storage.write(f"train_iteration_{step:06}.html", b"<p>%d" % step)
        storage.append(METRICS, json.dumps({"step": step, "text": "x" * 1000}).encode() + b"\n")
        os.write(1, b"%d\n" % step)
        time.sleep(float(pause))
    if how == "close":
        storage.close()
    elif how == "raise":
        raise RuntimeError("training failed")
    elif how == "fork":
        child = os.fork()
        if child == 0:
            sys.exit(0)
        os.waitpid(child, 0)
        storage.append(METRICS, json.dumps({"step": first + int(count)}).encode() + b"\n")


if __name__ == "__main__":
    work(*sys.argv[1:])
