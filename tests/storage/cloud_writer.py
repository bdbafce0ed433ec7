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


def main() -> None:
    how, uri, options, count, pause = sys.argv[1:]
    upload.GAP = 0.0  # the server has no limit here
    remote.PAUSES = (0.05, 0.1, 0.2)
    storage = CloudStorage(uri, {"upload_interval": 0.05, **json.loads(options)})
    storage.claim((METRICS,))
    stat = storage.stat(METRICS)
    end = stat.size if stat is not None else 0
    tail = storage.read_range(METRICS, max(0, end - 4096)) if end else b""
    first = json.loads(tail.splitlines()[-1])["step"] + 1 if tail else 0
    for step in range(first, first + int(count)):
        storage.append(METRICS, json.dumps({"step": step, "text": "x" * 1000}).encode() + b"\n")
        os.write(1, b"%d\n" % step)
        if step % 5 == 0:
            storage.write(f"train_iteration_{step:06}.html", b"<p>%d" % step)
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
    main()
