"""``report_to``: mirroring a run while it is trained, from where nothing can reach training.

Guarantees:

- Each named sink runs in a process of its own (:mod:`runmirror.child`), a sink object in a thread of its own. Training
  never waits for one: not at the start, not in ``log_metrics``.
- A child that dies is started again, at once at first and after up to 30 s when it keeps dying, and one whose sink hangs in a
  call (:mod:`runmirror.fence`), but not one that hangs elsewhere, in an import or in reading the log. What it did not
  deliver is in the log.
- :meth:`Live.finish` waits until everything is delivered, ``deadline`` seconds at most, and not for a tracker that has
  been out of reach for 30 s. What is left then is named, with the command that delivers it.
- A forked copy of the training process neither owns nor keeps the children alive.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import pickle
import random
import selectors
import shlex
import site
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any, Literal

from runmirror.exceptions import RunmirrorError
from runmirror.log.masking import MASK, mask_url
from runmirror.loop import DRAIN_TIMEOUT, RunLoop, log_folder
from runmirror.notices import say
from runmirror.sinks.base import Sink, SinkOptions
from runmirror.storage import CloudStorage, Storage, local_root
from runmirror.targets import Target, folder_name, grouped, watching

FINISH_DEADLINE = 60.0
GRACE = 20.0
"""Seconds to finish in after a SIGTERM, unless ``RUNMIRROR_GRACE`` says otherwise."""
UNREACHABLE_AFTER = 30.0
logger = logging.getLogger("runmirror")

TELL_AFTER = 2.0
"""Seconds of waiting at the end before people are told what for."""
_FOLDERS = ("logdir", "logging_dir", "folder")

SinkState = Literal["starting", "current", "behind", "delivered", "left behind"]


@dataclass(frozen=True, slots=True)
class SinkStatus:
    """How a sink of a live run is doing.

    ``state``: starting; current (it had everything at its last look); behind (the tracker fails, with ``error``);
    delivered (the run ended and all of it is there); left behind (it ended and some is not).
    """

    state: SinkState
    url: str | None
    error: str | None
    restarts: int


def grace() -> float:
    """Seconds to finish in after a SIGTERM."""
    try:
        return max(0.0, float(os.environ.get("RUNMIRROR_GRACE", GRACE)))
    except ValueError:
        return GRACE


class _Worker:
    """What the parent knows of one sink, whether it is a child or a thread."""

    def __init__(self, name: str, finish_command: str) -> None:
        self.name = name
        self.finish_command = finish_command
        self.state: SinkState = "starting"
        self.url: str | None = None
        self.error: str | None = None
        self.restarts = 0
        self.behind_since: float | None = None

    @property
    def ended(self) -> bool:
        return self.state in ("delivered", "left behind")

    def note(self, event: str, text: str) -> None:
        """Take in what the child or thread told, and pass on what people should know, once."""
        if event == "url":
            self.url, self.error, self.behind_since = text, None, None
            self.state = "current"
            say(f"{self.name}: {text}")
        elif event in ("behind", "refused"):
            if self.behind_since is None or (event == "refused" and self.error != text):
                hint = "needs you" if event == "refused" else "is behind, trying again; training is not affected"
                say(f"{self.name} {hint}: {text}", logging.WARNING)
            self.behind_since = self.behind_since or time.monotonic()
            self.state, self.error = "behind", text
        elif event == "note":
            say(f"{self.name}: {text}")
        elif event == "moving":
            self.behind_since = time.monotonic()  # it fails, but it is not out of reach
        elif event == "current":
            if self.behind_since is not None:
                say(f"{self.name} has caught up")
            self.state, self.error, self.behind_since = "current", None, None
        elif event == "ended":
            self.state = "left behind" if text == "left behind" else "delivered"
            if self.state == "delivered":
                self.error = self.behind_since = None

    def unreachable(self) -> bool:
        return self.behind_since is not None and time.monotonic() - self.behind_since >= UNREACHABLE_AFTER


class _Child(_Worker):
    """A sink in a process of its own."""

    def __init__(self, target: Target, storage: Storage, starts: int, drain_timeout: float, run_id: str | None) -> None:
        super().__init__(target.name, _command(target, storage))
        self._order = {
            "log_path": storage.url(),
            "storage": _pickled(storage),
            "sink": target.name,
            "options": watching(grouped(target.options, folder_name(storage)), os.getpid()).model_dump(mode="json"),
            "starts": starts,
            "run_id": run_id,
            "parent": os.getpid(),
            "drain_timeout": drain_timeout,
            "grace": grace(),
        }
        self._storage = storage
        self._cwd = _folder_now()
        self._buffer = b""
        self._tries = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.events: int | None = None
        self.again_at: float | None = 0.0  # when to start it (again); None: it runs or is done

    def spawn(self) -> None:
        """Start the process. A machine that can't is told, and it is tried again."""
        self.again_at = None
        try:
            reading, writing = os.pipe()
        except OSError as error:
            self.note("behind", f"no process could be started: {error}")
            self._again()
            return
        self.events = reading
        os.set_blocking(reading, False)
        try:
            with self._output() as output:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "runmirror.child"],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    pass_fds=(writing,),
                    start_new_session=True,
                    cwd=self._cwd if self._cwd and os.path.isdir(self._cwd) else None,
                    env=_environment(),
                )
            order = json.dumps(self._order | {"events": writing}).encode()
            if self.process.stdin is not None:
                with self.process.stdin as stdin:
                    stdin.write(order)
        except (OSError, RunmirrorError) as error:
            self.note("behind", f"no process could be started: {error}")
            self.reap()
        finally:
            os.close(writing)

    def _output(self) -> IO[bytes]:
        try:
            folder = log_folder(self._storage)
            folder.mkdir(parents=True, exist_ok=True)
            return (folder / f"{self.name}.log").open("ab")
        except (OSError, RunmirrorError):
            return open(os.devnull, "wb")

    def read(self) -> bool:
        """Take in what the child wrote; False when it is gone."""
        if self.events is None:
            return False
        try:
            data = os.read(self.events, 65536)
        except BlockingIOError:
            return True
        except OSError:
            return False
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            try:
                told = json.loads(line)
                self.note(told["event"], told["text"])
            except (ValueError, KeyError, TypeError):
                continue
            self._tries = 0 if told["event"] in ("url", "current") else self._tries
        return bool(data)

    def reap(self) -> None:
        """The child is gone, or could not be started: note it, and have it started again unless it was done."""
        if self.events is not None:
            self.read()  # its last words; a process that it forked may still hold the pipe
            os.close(self.events)
            self.events, self._buffer = None, b""
        process, self.process = self.process, None
        if process is not None:
            try:
                code = process.wait(5)  # it has closed its end of the pipe
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            if code == 0 and not self.ended:
                self.note("ended", "done")  # what it told last did not fit into the pipe
            if self.ended:
                return
            self.restarts += 1
            self.note("behind", f"its process ended with code {code}; see {self.name}.log beside the state")
        self._again()

    def _again(self) -> None:
        self.again_at = time.monotonic() + min(30.0, 0.25 * 2.0 ** min(self._tries, 8)) * random.uniform(0.5, 1.0)
        self._tries += 1

    def forget(self) -> None:
        """In a forked copy: this is not our child."""
        if self.events is not None:
            os.close(self.events)
            self.events = None
        if self.process is not None:
            self.process.returncode = 0
            self.process = None


class _Thread(_Worker):
    """A sink object, in a thread of the training process."""

    def __init__(self, sink: Sink, storage: Storage, starts: int, run_id: str | None) -> None:
        name = getattr(sink, "name", type(sink).__name__)
        super().__init__(name, "a sink object is delivered by the next start() that is given one")
        options = getattr(sink, "options", None)
        self._loop = RunLoop(
            storage,
            sink,
            options if isinstance(options, SinkOptions) else SinkOptions(),
            starts,
            tell=self.note,
            run_id=run_id,
        )
        self.sink = sink
        self._stop = threading.Event()
        self.thread = threading.Thread(target=self._run, name=f"runmirror-live-{name}", daemon=True)

    def _run(self) -> None:
        try:
            self.note("ended", self._loop.run(self._stop))
        except Exception as error:
            self.note("behind", f"{type(error).__name__}: {error}")
            self.note("ended", "left behind")

    def stop(self) -> None:
        self._stop.set()


class Live:
    """The mirrors of one run that is being written.

    Args:
        storage: its log_path.
        targets: from :func:`runmirror.targets.parse_report_to`.
        starts: starts and resumes in the journal, this one included.
        drain_timeout: seconds for which a child goes on after the end of the run.
        run_id: what run.json says now.
    """

    def __init__(
        self,
        storage: Storage,
        targets: Sequence[Target | Sink],
        starts: int,
        drain_timeout: float = DRAIN_TIMEOUT,
        run_id: str | None = None,
    ) -> None:
        self._children = [
            _Child(one, storage, starts, drain_timeout, run_id) for one in targets if isinstance(one, Target)
        ]
        self._threads = [_Thread(one, storage, starts, run_id) for one in targets if not isinstance(one, Target)]
        self._changed = threading.Condition()
        self._forgotten = False  # this is a forked copy
        self._released = False  # nobody waits any more
        for worker in self._threads:
            _begin(worker.thread, [worker])
        for child in self._children:
            child.spawn()  # here, not in the thread: a run that is killed at once still has its mirror
        if self._children:
            _begin(threading.Thread(target=self._watch, name="runmirror-live", daemon=True), self._children)

    @property
    def _workers(self) -> list[_Worker]:
        return [*self._children, *self._threads]

    def delivers(self, sink: Any) -> bool:
        """Whether a thread here still uses this sink object."""
        return any(thread.sink is sink and not thread.ended for thread in self._threads)

    @property
    def urls(self) -> dict[str, str]:
        """Sink -> where people find the run, once it is known."""
        return {worker.name: worker.url for worker in self._workers if worker.url}

    def status(self) -> dict[str, SinkStatus]:
        """Sink -> how it is doing."""
        return {w.name: SinkStatus(w.state, w.url, w.error, w.restarts) for w in self._workers}

    def _watch(self) -> None:
        """Start the children, take in what they tell, and start those again that died; until all are done."""
        while not self._forgotten and not all(child.ended and child.process is None for child in self._children):
            now = time.monotonic()
            for child in self._children:
                if child.again_at is not None and now >= child.again_at and not self._let_go(child):
                    child.spawn()
            with selectors.DefaultSelector() as selector:
                for child in self._children:
                    if child.events is not None:
                        selector.register(child.events, selectors.EVENT_READ, child)
                ready = [key.data for key, _ in selector.select(self._pause())]
            for child in self._children:
                gone = child.process is not None and child.process.poll() is not None
                if (child in ready and not child.read()) or (gone and child.process is not None):
                    child.reap()
            with self._changed:
                self._changed.notify_all()

    def _let_go(self, child: _Child) -> bool:
        """After the end nobody waits for a child that keeps dying."""
        if self._released and child.process is None and not child.ended:
            child.note("ended", "left behind")
        return child.ended

    def _pause(self) -> float:
        due = [child.again_at - time.monotonic() for child in self._children if child.again_at is not None]
        return max(0.01, min([0.5, *due]))

    def finish(self, deadline: float = FINISH_DEADLINE) -> None:
        """Wait for what is still on its way, then let go. The journal must say before that the run has ended. With a
        ``deadline`` of 0 nothing is waited for or said."""
        until = time.monotonic() + deadline
        try:
            self._await_delivery(until)
        finally:  # also after a Ctrl-C
            self._let_all_go(deadline > 0)

    def _await_delivery(self, until: float) -> None:
        tell_at = time.monotonic() + TELL_AFTER
        while (now := time.monotonic()) < until:
            late = [worker.name for worker in self._workers if not (worker.ended or worker.unreachable())]
            if not late:
                return
            if now >= tell_at:
                tell_at = until
                say(
                    f"waiting up to {until - now:.0f} s for {', '.join(late)}; Ctrl-C leaves the rest to the background"
                )
            with self._changed:
                self._changed.wait(0.05)

    def _let_all_go(self, tell: bool) -> None:
        self._released = True
        for thread in self._threads:
            thread.stop()
        for worker in self._workers:
            if tell and worker.state != "delivered":
                why = f" ({worker.error})" if worker.error else ""
                say(
                    f"{worker.name} does not have everything yet{why}; nothing is lost. "
                    f"To deliver it later: {worker.finish_command}",
                    logging.WARNING,
                )

    def forget(self) -> None:
        """In a forked copy of the process: nothing here is ours."""
        self._forgotten = True
        for child in self._children:
            child.forget()
        self._children, self._threads = [], []


def _begin(thread: threading.Thread, workers: Sequence[_Worker]) -> None:
    """Start a thread; where the system gives none, its sinks are left behind, and training goes on."""
    try:
        thread.start()
    except RuntimeError as error:
        for worker in workers:
            worker.note("behind", f"its thread could not be started ({error})")
            worker.note("ended", "left behind")


def _pickled(storage: Storage) -> str | None:
    """A Storage in a cloud with its options, for the child's stdin; None where the URI says it all."""
    return base64.b64encode(pickle.dumps(storage)).decode() if isinstance(storage, CloudStorage) else None


def _folder_now() -> str | None:
    """The folder that relative places are meant from, also when training changes it later; None when it is gone."""
    try:
        return os.getcwd()
    except OSError:
        return None


def _environment() -> dict[str, str]:
    """The training process's environment, in which the child finds this package also when it is not installed."""
    environment = dict(os.environ)
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if package not in (*site.getsitepackages(), site.getusersitepackages()):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), package]))
    return environment


def _command(target: Target, storage: Storage) -> str:
    """What a user can run to deliver what is left; secrets are left to the environment, and ``***`` in URLs."""
    place = local_root(storage.url()) or storage.url()
    words = ["runmirror", "import", place, "--to", target.name, "--rewinds", "all"]
    given = target.options.to_deliver()
    for name in _FOLDERS:  # a default too
        if name in type(target.options).model_fields and isinstance(folder := getattr(target.options, name), str):
            given.setdefault(name, folder)
    for name, value in given.items():
        extra = type(target.options).model_fields[name].json_schema_extra
        if isinstance(extra, dict) and extra.get("secret"):
            continue
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        if name in _FOLDERS and "://" not in text:
            text = os.path.abspath(os.path.expanduser(text))  # the command may be given elsewhere
        text = mask_url(text) if "://" in text else text
        words += ["-o", f"{name}={text}"]
    if isinstance(storage, CloudStorage):
        words += [word for name in storage.options for word in ("--storage-option", f"{name}={MASK}")]
    return shlex.join(words)
