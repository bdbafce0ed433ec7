"""Processes with wandb in them, seen from outside: started, asked, used again, ended.

Guarantees:

- wandb and its own process ("core") live in a session of their own, in a folder of their own below RUNMIRROR_HOME, which
  is also their temporary folder. Whoever of the three is killed, the rest ends and the folder goes: the worker does that
  when this process goes away, and the next worker that is started here does it for those that left neither alive to do so.
- Every call has a deadline; after a failure a worker is never used again.
- Nothing of the environment shapes a run but what :class:`runmirror.sinks.wandb.WandbOptions` took from it.
- A forked copy of this process neither owns nor keeps the workers alive.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from runmirror.exceptions import MirrorBusyError, Refused, Retry
from runmirror.log.locks import acquire
from runmirror.log.masking import mask_text
from runmirror.sinks.wandb_rows import TEXT_ROOM
from runmirror.storage.home import home

KEPT = 2
"""Idle workers kept for the next run, at most: starting wandb takes a second."""
LONGEST_FOLDER = 55
SAID = 1 << 16
"""Bytes at the end of wandb's output in which its last words are looked for."""
_PASSED_ON = re.compile(
    r"WANDB_(API_KEY|IDENTITY_TOKEN_FILE|CREDENTIALS_FILE|CONFIG_DIR|INSECURE\w*|\w*HTTP\w*|X_STATS_\w+|ERROR_REPORTING)"
)


class WandbProcess:
    """A process with wandb in it, for one server."""

    def __init__(self, base_url: str) -> None:
        self._made_for = base_url, _settings()
        self._owner = os.getpid()
        self.folder = _new_folder()
        self._lock = acquire(str(self.folder / "lock"), MirrorBusyError)
        temporary = _short(self.folder)
        ours, theirs = socket.socketpair()
        with theirs, open(self.folder / "output.log", "wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-W", "ignore", "-m", "runmirror.sinks.wandb_worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                cwd=self.folder,
                env=_environment(base_url, self.folder, temporary),
            )
        (self.folder / "worker").write_text(f"{self._process.pid}\n")
        self._peer = Connection(ours.detach())
        self._pending = 0
        _all.add(self)
        self._peer.send({"base_url": base_url, "folder": str(self.folder), "text_room": TEXT_ROOM})

    def call(self, verb: str, arguments: tuple[Any, ...], seconds: float) -> Any:
        """What the verb answers, after all that was sent before. Raises Retry or Refused."""
        self.send(verb, arguments, seconds)
        while self._pending > 1:
            self._receive(verb, seconds)
        return self._receive(verb, seconds)

    def send(self, verb: str, arguments: tuple[Any, ...], seconds: float) -> None:
        """Have the verb done without waiting for it, but for those sent before the last one. Raises Retry or Refused, also
        for what was sent before."""
        while self._pending > 1:
            self._receive(verb, seconds)
        try:
            self._peer.send((verb, arguments))
        except OSError as error:
            raise Retry(f"wandb's process is gone{self.said()}") from error
        self._pending += 1

    def _receive(self, verb: str, seconds: float) -> Any:
        try:
            if not self._peer.poll(seconds):
                raise Retry(f"wandb did not return from {verb} within {seconds:g} s")
            kind, answer = self._peer.recv()
        except (EOFError, OSError) as error:
            raise Retry(f"wandb's process ended during {verb}{self.said()}") from error
        self._pending -= 1
        if kind == "refused":
            raise Refused(f"W&B needs you: {mask_text(answer)}")
        if kind == "retry":
            raise Retry(f"W&B failed: {mask_text(answer)}")
        return answer

    def said(self) -> str:
        """The last warning or error that wandb printed, in parentheses; "" when there is none."""
        with contextlib.suppress(OSError), open(self.folder / "output.log", "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - SAID))
            lines = file.read().decode("utf-8", "replace").splitlines()
            told = [line.partition(": ")[2] for line in lines if "WARNING" in line or "ERROR" in line]
            return f" (wandb: {mask_text(told[-1])[:300]})" if told else ""
        return ""

    def fits(self, base_url: str) -> bool:
        """Whether it was made for this server and the environment as it is now."""
        return self._made_for == (base_url, _settings())

    @property
    def alive(self) -> bool:
        """Whether it can be asked something."""
        return self._owner == os.getpid() and self._process.poll() is None

    def end(self) -> None:
        """End the process and wandb's own with it, and remove their folder."""
        self._peer.close()
        if self._owner != os.getpid():
            self._process.returncode = 0  # not our child
            return
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _clear(self.folder)
        self._lock.release()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.end()


def take(base_url: str) -> WandbProcess:
    """A worker for a run on this server: an idle one, else a new one."""
    while True:
        with _guard:
            found = next((worker for worker in _idle if worker.fits(base_url)), None)
            if found is not None:
                _idle.remove(found)
        if found is None:
            return WandbProcess(base_url)
        if found.alive:
            return found
        found.end()


def give_back(worker: WandbProcess) -> None:
    """The worker has no run any more: keep it for the next one. Those kept longest are ended."""
    with _guard:
        _idle.append(worker)
        surplus = _idle[:-KEPT]
        del _idle[:-KEPT]
    for one in surplus:
        one.end()


def end_idle() -> None:
    """End the workers that are kept."""
    with _guard:
        kept = list(_idle)
        _idle.clear()
    for worker in kept:
        worker.end()


_guard = threading.Lock()
_idle: list[WandbProcess] = []
_all: weakref.WeakSet[WandbProcess] = weakref.WeakSet()
atexit.register(end_idle)


def _after_fork() -> None:
    """In a forked copy: these are not our children, and must not live longer because of us."""
    global _guard
    _guard = threading.Lock()
    _idle.clear()
    for worker in list(_all):
        worker.end()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _settings() -> dict[str, str]:
    """What of the environment a worker is made with."""
    return {name: value for name, value in os.environ.items() if _passed_on(name)}


def _passed_on(name: str) -> bool:
    return _PASSED_ON.fullmatch(name) is not None or name == "RUNMIRROR_HOME"


def _short(folder: Path) -> Path:
    """A temporary folder for wandb's sockets, whose paths the system limits to about 100 bytes: without them wandb shows no
    system statistics. The worker's own folder when that is short enough, else one that goes with it."""
    if len(os.fsencode(folder)) <= LONGEST_FOLDER:
        return folder
    temporary = Path(tempfile.mkdtemp(prefix="runmirror-"))
    (folder / "temporary").write_text(str(temporary))
    return temporary


def _environment(base_url: str, folder: Path, temporary: Path) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name[:6] != "WANDB_" or _passed_on(name)}
    environment.setdefault("WANDB_ERROR_REPORTING", "false")
    environment["WANDB_BASE_URL"] = base_url
    for name in ("WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_ARTIFACT_DIR"):
        environment[name] = str(folder)
    environment["TMPDIR"] = str(temporary)
    if not os.path.isdir(os.path.expanduser("~/.config/wandb")):  # older versions would make it
        environment.setdefault("WANDB_CONFIG_DIR", str(folder))
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), package]))
    return environment


def _host() -> str:
    return re.sub(r"\W", "-", socket.gethostname())[:40]


def _new_folder() -> Path:
    """A folder for a worker; those that nobody uses any more are cleared first."""
    parent = home() / "wandb"
    parent.mkdir(parents=True, exist_ok=True)
    for folder in parent.glob(f"{_host()}.*"):
        if time.time() - folder.stat().st_mtime > 5 or (folder / "worker").exists():  # else: it is being made
            with contextlib.suppress(_InUseError, OSError):
                lock = acquire(str(folder / "lock"), _InUseError)
                _clear(folder)
                lock.release()
    folder = parent / f"{_host()}.{secrets.token_hex(4)}"
    folder.mkdir(mode=0o700)
    return folder


class _InUseError(Exception):
    """Somebody holds the lock."""


def _clear(folder: Path) -> None:
    """End what is left of a worker and wandb's own processes, by their recorded ids, and remove their folder."""
    for name in ("worker", "cores"):
        with contextlib.suppress(OSError, ValueError):
            for pid in map(int, (folder / name).read_text().split()):
                if _is_wandb(pid, folder):
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        temporary = (folder / "temporary").read_text()
        if os.path.basename(temporary).startswith("runmirror-"):
            shutil.rmtree(temporary, ignore_errors=True)
    for _ in range(3):  # a process that is dying may still write
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            break
        time.sleep(0.05)


def _is_wandb(pid: int, folder: Path) -> bool:
    """Whether this is still the process that was meant, and not another one that got its number."""
    if os.path.isdir("/proc"):
        try:
            return os.readlink(f"/proc/{pid}/cwd").removesuffix(" (deleted)") == os.path.realpath(folder)
        except OSError:
            return False
    shown = subprocess.run(["ps", "-o", "command=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return "wandb" in shown.stdout
