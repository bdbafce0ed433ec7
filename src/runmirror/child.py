"""The process that mirrors one run to one sink while it is trained: ``python -m runmirror.child``.

It is started by :mod:`runmirror.live` in a session of its own, reads what to do as one JSON object from stdin (so that
options are on no command line), and does what ``runmirror mirror LOG_PATH --to NAME`` does, until the run ends. What it
has to say goes as JSON lines to an inherited descriptor; it never waits for anyone to read them. It ends by itself soon
after the training process does.

Exit codes: 0 everything delivered, or handed over to a newer start; 3 left behind; 75 the sink hung (start a new one).
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import signal
import sys
import threading
from types import FrameType
from typing import Any

from runmirror.fence import OverdueError
from runmirror.loop import RunLoop
from runmirror.storage import storage_from_uri
from runmirror.targets import make_target

HUNG = 75


def main() -> int:
    """Read the order from stdin, follow the run, return the exit code."""
    order: dict[str, Any] = json.loads(sys.stdin.buffer.read())
    parent, events = order["parent"], order["events"]
    if events is not None:
        os.set_blocking(events, False)

    def tell(event: str, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # its log file, on a disk that may be full
            sys.stderr.write(f"{event} {text}".rstrip() + "\n")
        if events is not None:
            with contextlib.suppress(OSError):  # nobody reads any more, or not fast enough
                os.write(events, json.dumps({"event": event, "text": text[:2000]}).encode() + b"\n")

    target = make_target(order["sink"], order["options"])
    storage = storage_from_uri(order["log_path"])
    if order.get("storage"):
        storage = pickle.loads(base64.b64decode(order["storage"]))  # from the process that started this one
    loop = RunLoop(
        storage,
        target.make(),
        target.options,
        order["starts"],
        alive=lambda: os.getppid() == parent,
        tell=tell,
        drain_timeout=order["drain_timeout"],
        run_id=order["run_id"],
    )

    def hurry(signum: int, frame: FrameType | None) -> None:
        loop.hurry(float(order["grace"]))

    signal.signal(signal.SIGTERM, hurry)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        outcome = loop.run(threading.Event())
    except OverdueError:
        os._exit(HUNG)  # a hanging thread would keep the process
    tell("ended", outcome)
    return 3 if outcome == "left behind" else 0


if __name__ == "__main__":
    sys.exit(main())
