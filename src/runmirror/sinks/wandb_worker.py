"""The process in which wandb lives: one run, driven by :class:`runmirror.sinks.wandb.WandbSink` over a socket.

Guarantees: when the other side goes away, wandb's own process is ended and this one exits, whatever wandb is doing. An
error is answered as (kind, text) with kind "refused" or "retry", never with a key in it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

LEAN = {"console": "off", "silent": True, "disable_git": True, "disable_code": True}
PRIVATE = {"x_disable_meta": True, "x_save_requirements": False, "x_file_stream_transmit_interval": 1}
NEEDS_A_PERSON = ("api key", "api_key", "login", "permission", "unauthorized", "authentication", "401", "403")


class Worker:
    """Verbs that the sink calls by name; each returns what is sent back."""

    def __init__(self, place: dict[str, Any]) -> None:
        self.place = place
        self.run: Any = None
        self.path = ""

    def init(self, run_id: str, new: dict[str, Any], config: dict[str, Any], stats: bool) -> dict[str, Any]:
        """Create or resume the run. ``config`` is set once: a run that has one keeps it."""
        import wandb

        settings = wandb.Settings(**self._settings(stats))
        self.run = wandb.init(
            id=run_id,
            project=self.place["project"],
            entity=self.place["entity"],
            resume="allow",
            reinit="create_new",
            dir=self.place["folder"],
            settings=settings,
            **new,
        )
        run = self.run
        if run.id != run_id:
            raise RuntimeError(f"wandb opened the run {run.id} instead of {run_id}")
        if "runmirror" not in dict(run.config):
            run.config.update(config, allow_val_change=True)
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step", step_sync=False)
        self.path = f"{run.entity}/{run.project}/{run.id}"
        return {"id": run.id, "position": run.starting_step, "url": run.url, "path": self.path}

    def _settings(self, stats: bool) -> dict[str, Any]:
        import wandb

        known = getattr(wandb.Settings, "model_fields", {})
        wanted = LEAN | PRIVATE | {"x_disable_stats": not stats, "base_url": self.place["base_url"], "init_timeout": 30}
        return {name: value for name, value in wanted.items() if name in known}

    def put(self, rows: list[tuple[int, dict[str, Any]]], texts: dict[str, str]) -> None:
        """Log rows, each under its ordinal."""
        for ordinal, data in rows:
            self.run.log(data, step=ordinal, commit=True)
        if texts:
            self.run.summary.update(texts)

    def end(self, config: dict[str, Any] | None, code: int) -> None:
        """Finish the run, which sends all that is left."""
        if config:
            self.run.config.update(config, allow_val_change=True)
        self.run.finish(exit_code=code)
        self.run = None

    def _api(self) -> Any:
        import wandb

        return wandb.Api(overrides={"base_url": self.place["base_url"]}, timeout=20)

    def held(self, path: str) -> int:
        """Rows the server shows."""
        return int(self._api().run(path).lastHistoryStep) + 1

    def upload(self, path: str, file: str, root: str) -> None:
        """A run file, acknowledged when this returns."""
        self._api().run(path).upload_file(file, root=root)

    def viewer(self) -> str:
        """Who the credentials are for."""
        return str(self._api().default_entity)

    def history(self, run_id: str, path: str | None) -> list[dict[str, Any]] | None:
        """Every row the server has; None when it has no such run."""
        api = self._api()
        entity = self.place["entity"] or api.default_entity
        try:
            run = api.run(path or f"{entity}/{self.place['project']}/{run_id}")
        except Exception as error:
            if "could not find" in str(error).lower():
                return None
            raise
        return list(run.scan_history(page_size=1000))


def core_pids() -> Iterator[int]:
    """wandb's own processes that this one started."""
    me = str(os.getpid())
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                with open(f"/proc/{name}/stat") as file:
                    parent = file.read().rpartition(")")[2].split()[1]
                if parent == me:
                    yield int(name)


def main() -> None:
    """Read calls until the other side goes away."""
    peer = Connection(int(sys.argv[1]))
    calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
    worker = Worker(peer.recv())
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def listen() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                calls.put(peer.recv())
        for pid in core_pids():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        verb, arguments = calls.get()
        try:
            answer = "ok", getattr(worker, verb)(*arguments)
        except BaseException as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
            answer = "refused" if any(word in text.lower() for word in NEEDS_A_PERSON) else "retry", text
        with contextlib.suppress(OSError):
            peer.send(answer)


if __name__ == "__main__":
    main()
