"""The process in which wandb lives: one run at a time, driven by :mod:`runmirror.sinks.wandb_process` over a socket.

Guarantees: when the other side goes away, or nothing was asked for a minute while no run is open, wandb's own process is
ended, the folder of both is removed, and this one exits, whatever wandb is doing. An error is answered as (kind, text)
with kind "refused" or "retry".
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any

from runmirror.sinks.resumes import changed
from runmirror.sinks.wandb_rows import digest

IDLE_SECONDS = 60.0
LEAN = {"console": "off", "silent": True, "disable_git": True, "disable_code": True, "x_disable_meta": True}
LEAN |= {"x_save_requirements": False, "x_skip_transaction_log": True, "x_file_stream_transmit_interval": 1}
LEAN |= {
    "host": "",
    "program": "runmirror",
}  # where it is mirrored from says nothing of the run, and host names are kept out
NEEDS_A_PERSON = re.compile(
    r"api key|api_key|\blogin\b|logged in|permission|unauthorized|authentication|\b40[134]\b|previously created and deleted"
)
"""In an error, lower case. Codes are whole numbers: ports and run ids have such digits too."""
NO_REASON = (
    "W&B refused the run without a reason, as it does for HTTP 400 to 404: see that the entity, the project and WANDB_BASE_URL "
    "are right and that the API key may write there"
)


class Worker:
    """Verbs that the sink calls by name; each returns what is sent back."""

    def __init__(self, place: dict[str, Any]) -> None:
        self.place = place
        self.run: Any = None
        self.ending: threading.Thread | None = None
        self._failure: Exception | None = None
        self._known: Any = None
        self._history: Iterator[dict[str, Any]] = iter(())
        self._numbers: set[str] = set()
        self._texts: dict[str, int] = {}
        self._room = 0
        self._made: Any = None
        self._told_cores = ""

    def start(self) -> None:
        """Import wandb and start its own process, before anyone asks."""
        import wandb

        wandb.setup()
        self._record()

    def look(self, entity: str | None, project: str, run_id: str) -> dict[str, Any]:
        """Where the run is or would be, and what the server shows of it; nothing is written."""
        api = self._api()
        path = f"{entity or api.default_entity}/{project}/{run_id}"
        run = self._find(api, path)
        found: dict[str, Any] = {"path": path, "exists": run is not None}
        if run is not None:
            told = run.config.get("runmirror") or {}
            found |= {"url": run.url, "held": self.held(path), "state": run.state, "told": told}
        return found

    def _find(self, api: Any, path: str) -> Any:
        try:
            return api.run(path)
        except Exception as error:
            if "could not find" in str(error).lower():
                return None
            raise

    def init(
        self, path: str, new: dict[str, Any], configs: list[dict[str, Any]], times: dict[str, Any], watch: int | None
    ) -> dict[str, Any]:
        """Create or resume the run. ``configs`` are the first one and those of resumes. A config that the run has stays, what
        differs goes to ``runmirror.resumes``."""
        import wandb

        entity, project, run_id = path.rsplit("/", 2)
        run: Any = wandb.init(
            id=run_id,
            project=project,
            entity=entity,
            resume="allow",
            reinit="create_new",
            dir=self.place["folder"],
            settings=wandb.Settings(**self._settings(watch)),
            **new,
        )
        self.run = run
        self._record()
        if run.id != run_id:
            raise RuntimeError(f"wandb opened the run {run.id} instead of {run_id}")
        self._numbers, self._texts, self._known = set(), {}, None
        self._room = self.place["text_room"]
        self.configure(configs, times)
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step", step_sync=False)
        return {"position": run.starting_step, "url": run.url}

    def configure(self, configs: list[dict[str, Any]], times: dict[str, Any]) -> None:
        """Keys that are new in the first configuration; what differs otherwise, there and in those of resumes, is told."""
        have = dict(self.run.config)
        told = have.get("runmirror") or {}
        new = {key: value for key, value in configs[0].items() if key not in have}
        if new:
            self.run.config.update(new)
            have |= new
        if not told.get("config") or not changed(have, configs[0]):
            told = told | {"config": digest(configs[0])}
        resumes = dict(told.get("resumes") or {})
        for config in configs:
            if digest(config) not in (told["config"], *(one.get("config") for one in resumes.values())):
                resumes[str(len(resumes) + 1)] = {"config": digest(config), "changes": changed(have, config)}
        self.tell(told | times | ({"resumes": resumes} if resumes else {}))

    def tell(self, about: dict[str, Any]) -> None:
        """What is said of the run under ``runmirror`` in its config."""
        have = dict(self.run.config).get("runmirror") or {}
        now = {**have, **about, "mirrored": have.get("mirrored") or about["mirrored"]}
        if now != have:
            self.run.config.update({"runmirror": now}, allow_val_change=True)

    def _settings(self, watch: int | None) -> dict[str, Any]:
        import wandb

        known = getattr(wandb.Settings, "model_fields", {})
        wanted = LEAN | {"base_url": self.place["base_url"], "init_timeout": 30, "x_disable_stats": watch is None}
        wanted |= {"x_stats_pid": watch} if watch is not None else {}
        return {name: value for name, value in wanted.items() if name in known}

    def put(self, rows: list[tuple[int, dict[str, Any]]], texts: dict[str, str], summaries: dict[str, str]) -> None:
        """Log rows, each under its ordinal, and the latest texts to the summary, where no number has their name; before that,
        say what the summary shows of some keys."""
        for key, how in summaries.items():
            self.run.define_metric(key, step_metric="step", step_sync=False, summary=how)
        for ordinal, data in rows:
            self.run.log(data, step=ordinal, commit=True)
            self._numbers |= data.keys()
        shown: dict[str, str] = {}
        for key, text in texts.items():
            size, old = len(key) + len(text), self._texts.get(key, 0)
            if key in self._numbers or self._room + old < size:
                continue
            if old or not isinstance(self.run.summary.get(key), (int, float)):
                shown[key], self._texts[key] = text, size
                self._room += old - size
        if shown:
            self.run.summary.update(shown)

    def end(self, times: dict[str, Any], code: int, path: str, rows: int) -> tuple[int, int | None]:
        """Let wandb finish the run, which sends all that is left; it goes on when this returns, if that takes long."""
        self.tell(times)
        run, self.run = self.run, None

        def finish() -> None:
            try:
                run.finish(exit_code=code)
            except Exception as error:
                self._failure = error

        self._failure = None
        self.ending = threading.Thread(target=finish, daemon=True)
        self.ending.start()
        self.ending.join(2.0)
        return self.held(path)

    def ended(self, seconds: float) -> None:
        """Wait until the end is told. Raises when it can't be."""
        if self.ending is not None:
            self.ending.join(seconds)
            if self.ending.is_alive():
                raise TimeoutError(f"wandb has not finished the run within {seconds:g} s")
            self.ending = None
            if self._failure is not None:
                raise self._failure
        shutil.rmtree(os.path.join(self.place["folder"], "wandb"), ignore_errors=True)

    def held(self, path: str) -> tuple[int, int | None]:
        """(number of the last row that the server shows, plus one; rows that it has, None when it doesn't say)."""
        if self._known is None or "/".join(self._known.path) != path:
            self._known = self._api().run(path)
        else:
            self._known.load(force=True)
        keys, count = getattr(self._known, "historyKeys", None), getattr(self._known, "historyLineCount", None)
        last = keys.get("lastStep") if isinstance(keys, dict) else None
        return int(self._known.lastHistoryStep if last is None else last) + 1, count

    def upload(self, path: str, file: str, root: str) -> None:
        """A run file, acknowledged when this returns."""
        self._api().run(path).upload_file(file, root=root)

    def viewer(self) -> str:
        """Who the credentials are for."""
        return str(self._api().default_entity)

    def history(self, entity: str | None, project: str, run_id: str) -> bool:
        """Whether there is such a run; its rows come by :meth:`more`."""
        api = self._api()
        run = self._find(api, f"{entity or api.default_entity}/{project}/{run_id}")
        rows = run.scan_history(page_size=1000) if run is not None else ()
        self._history = (row for row in rows)  # iter() of a scan begins anew
        return run is not None

    def more(self) -> list[dict[str, Any]]:
        """The next rows; none at the end."""
        return list(islice(self._history, 1000))

    def _api(self) -> Any:
        import wandb

        if self._made is None:
            self._made = wandb.Api(overrides={"base_url": self.place["base_url"]}, timeout=20)
        self._made.flush()  # what it remembers of runs
        return self._made

    def _record(self) -> None:
        """Write down the processes that wandb started, for whoever finds them without us."""
        cores = "".join(f"{pid}\n" for pid in sorted(children()))
        if cores != self._told_cores:
            with open(os.path.join(self.place["folder"], "cores"), "w") as file:
                file.write(cores)
            self._told_cores = cores


def children() -> Iterator[int]:
    """The processes that this one started."""
    me = str(os.getpid())
    if not os.path.isdir("/proc"):
        listed = subprocess.run(["ps", "-axo", "pid=,ppid="], capture_output=True, text=True, check=False).stdout
        yield from (int(pid) for pid, parent in (line.split() for line in listed.splitlines()) if parent == me)
        return
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                with open(f"/proc/{name}/stat") as file:
                    parent = file.read().rpartition(")")[2].split()[1]
                if parent == me:
                    yield int(name)


def leave(folder: str) -> None:
    """End wandb's own process, leave nothing on the disk, exit."""
    with contextlib.suppress(Exception):
        for pid in children():
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def explained(error: BaseException) -> tuple[str, str]:
    """(kind, text) of an error, as it is answered."""
    text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    if text in ("CommError: ", "CommError:", "CommError: <no message>"):
        return "refused", NO_REASON
    return "refused" if NEEDS_A_PERSON.search(text.lower()) else "retry", text


def main() -> None:
    """Read calls until the other side goes away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    peer = Connection(int(sys.argv[1]))
    calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
    place = peer.recv()
    worker = Worker(place)

    def listen() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                calls.put(peer.recv())
        leave(place["folder"])

    threading.Thread(target=listen, daemon=True).start()
    with contextlib.suppress(Exception):  # what is wrong is said when something is asked
        worker.start()
    while True:
        try:
            verb, arguments = calls.get(timeout=None if worker.run else IDLE_SECONDS)
        except queue.Empty:
            leave(place["folder"])
        try:
            answer = "ok", getattr(worker, verb)(*arguments)
        except BaseException as error:
            answer = explained(error)
        with contextlib.suppress(OSError):
            peer.send(answer)


if __name__ == "__main__":
    main()
