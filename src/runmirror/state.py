"""What a mirror remembers of one run at one destination, and where.

Guarantees:

- One JSON file per (run, destination), written to a temporary name, synced and renamed: old or new, never half.
- A damaged file is moved aside and rebuilt, never trusted, never fatal. A file of a newer format is an error that names
  the version needed. Fields this version doesn't know are kept.
- One mirror per destination on this machine (a lock), held until :meth:`MirrorState.close`.

It lies in ``<log_path>/.runmirror/mirror/`` for local runs that runmirror wrote, else (foreign logs, cloud paths) below
RUNMIRROR_HOME.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import logging
import os
import re
import socket
import tempfile
import time
from pathlib import Path

import platformdirs
from pydantic import Field

from runmirror.exceptions import MirrorBusyError, StateError
from runmirror.log.layout import OWN
from runmirror.log.locks import acquire
from runmirror.log.records import Identity, Record, Status
from runmirror.log.rows import Position
from runmirror.storage import LocalStorage, Storage
from runmirror.storage.local import write_atomic

FORMAT = 1
HEARTBEAT = 120.0
"""Seconds for which an owner on another host counts as alive after its last save."""
log = logging.getLogger("runmirror")


class Owner(Record):
    """The process that mirrors right now; ``heartbeat`` in Unix seconds."""

    host: str
    pid: int
    heartbeat: float


class StateRecord(Record):
    """The content of a state file."""

    format: int = FORMAT
    run_id: str
    destination: str
    policy: str = "last"
    name: str | None = None
    tracker_run_id: str | None = None
    url: str | None = None
    ordinal: int = 0
    offset: int = 0
    digest: str = ""
    rejected: int = 0
    files: dict[str, str] = Field(default_factory=dict)
    closed: Status | None = None
    last_error: str | None = None
    updated: float = 0.0
    owner: Owner | None = None

    @property
    def position(self) -> Position:
        """The cursor: everything below it is in the tracker."""
        return Position(self.ordinal, self.offset, self.digest)

    @position.setter
    def position(self, position: Position) -> None:
        self.ordinal, self.offset, self.digest = position.ordinal, position.offset, position.digest


def home() -> Path:
    """The folder for state that can't live in a log_path: ``RUNMIRROR_HOME``, else the user's state directory, else (when
    that can't be written) a per-user temporary folder, with a warning."""
    wanted = Path(os.environ.get("RUNMIRROR_HOME") or platformdirs.user_state_path("runmirror"))
    try:
        folder = wanted.expanduser().absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: "~" of a user without a home
        pass
    spare = _spare_home()
    try:
        spare.mkdir(parents=True, exist_ok=True, mode=0o700)
        if hasattr(os, "getuid") and spare.lstat().st_uid != os.getuid():
            raise PermissionError(f"{spare} belongs to someone else")
    except OSError as error:
        raise StateError(
            f"no folder for state: {wanted} and {spare} can't be written ({error}); set RUNMIRROR_HOME"
        ) from error
    if str(wanted) not in _warned:
        _warned.add(str(wanted))
        log.warning(
            "state goes to %s, which may not outlive a reboot: %s can't be written; set RUNMIRROR_HOME", spare, wanted
        )
    return spare


_warned: set[str] = set()
"""Folders that could not be written, each named once."""


def _user() -> str:
    try:
        return re.sub(r"\W", "_", getpass.getuser())
    except (OSError, KeyError):  # a container user without a name
        return str(os.getuid()) if hasattr(os, "getuid") else "user"


def run_folder(storage: Storage, identity: Identity, *, in_log: bool = False) -> Path:
    """Where the state of one run lies. ``in_log`` puts it into the log_path even when runmirror did not write that.

    A log_path can't lead it elsewhere, by a symbolic link or by its run id.
    """
    if isinstance(storage, LocalStorage) and (identity.own or in_log):
        folder = storage.root / OWN / "mirror"
        try:
            if folder.resolve().is_relative_to(storage.root.resolve()):
                folder.mkdir(parents=True, exist_ok=True)
                if os.access(folder, os.W_OK):
                    return folder
        except (OSError, RuntimeError):
            pass  # a read-only archive
    return home() / "runs" / _folder_name(identity.run_id)


def _folder_name(run_id: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9_-]{1,100}", run_id):
        return run_id
    return hashlib.sha256(run_id.encode("utf-8", "replace")).hexdigest()[:32]


def known_states(storage: Storage, identity: Identity) -> list[tuple[str, StateRecord | StateError]]:
    """(sink, state) of every destination that a mirror on this machine has brought this run to, sorted by file name; the
    error in place of a state of a newer version. Only reads: no folder is made, no lock taken; damaged files are left out.
    """
    homes = [Path(os.environ.get("RUNMIRROR_HOME") or platformdirs.user_state_path("runmirror")), _spare_home()]
    folders = [storage.root / OWN / "mirror"] if isinstance(storage, LocalStorage) else []
    folders += [Path(os.path.expanduser(folder)) / "runs" / _folder_name(identity.run_id) for folder in homes]
    states: dict[Path, tuple[str, StateRecord | StateError]] = {}
    for path in [path for folder in folders for path in sorted(folder.glob("*-*.json"))]:
        sink = path.stem.rpartition("-")[0]
        try:
            state = _read(path)
        except StateError as error:
            states[path] = sink, error
            continue
        if state is not None and state.run_id == identity.run_id:  # a copied log brings the original's along
            states[path] = sink, state
    return list(states.values())


def _spare_home() -> Path:
    return Path(tempfile.gettempdir()) / f"runmirror-{_user()}"


def state_path(folder: Path, sink: str, run_id: str, destination: str, policy: str) -> Path:
    """The state file of a run at a destination under a policy."""
    mark = hashlib.sha256(f"{run_id}\0{destination}\0{policy}".encode()).hexdigest()[:12]
    return folder / f"{sink}-{mark}.json"


def peek(folder: Path, sink: str, run_id: str, destination: str, policy: str) -> StateRecord | None:
    """The state as it is now, without the lock; None when there is none (or a damaged one).

    Raises:
        StateError: it was written by a newer version.
    """
    return _read(state_path(folder, sink, run_id, destination, policy))


def _read(path: Path) -> StateRecord | None:
    try:
        data = json.loads(path.read_bytes())
        if isinstance(data, dict) and isinstance(data.get("format"), int) and data["format"] > FORMAT:
            raise StateError(
                f"{path}: state format {data['format']}, written by a newer runmirror; this one reads up to {FORMAT}: "
                "upgrade runmirror, or move the file away to start from what the tracker holds"
            )
        return StateRecord.model_validate(data)
    except (OSError, ValueError, RecursionError):
        return None


class MirrorState:
    """The state of one run at one destination, locked.

    Args:
        folder: from :func:`run_folder`.
        sink: the sink's name; part of the file's name.
        run_id, destination, policy: what the state is about; a state of another destination is another file.

    Raises:
        MirrorBusyError: another mirror holds it.
        StateError: it was written by a newer version.
    """

    def __init__(self, folder: Path, sink: str, run_id: str, destination: str, policy: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = state_path(folder, sink, run_id, destination, policy)
        self.rejected_path = self.path.with_suffix(".rejected.jsonl")
        self._lock = acquire(
            str(self.path.with_suffix(".lock")),
            lambda holder: MirrorBusyError(
                f"{destination}: another mirror of this run is at work ({holder}); wait for it or stop it"
            ),
        )
        try:
            self.record = self._load() or StateRecord(run_id=run_id, destination=destination, policy=policy)
            owner = self.record.owner
            if (
                owner is not None
                and owner.host != socket.gethostname()
                and abs(time.time() - owner.heartbeat) < HEARTBEAT
            ):
                raise MirrorBusyError(f"{destination}: process {owner.pid} on {owner.host} mirrors this run right now")
        except BaseException:
            self._lock.release()
            raise

    def _load(self) -> StateRecord | None:
        record = _read(self.path)
        if record is None and self.path.exists():
            aside = self.path.with_suffix(f".damaged-{int(time.time())}")
            os.replace(self.path, aside)
            log.warning("%s is damaged: moved to %s, rebuilt from the tracker", self.path, aside.name)
        return record

    def save(self, *, owner: bool = True) -> None:
        """Write the record, with or without this process as its owner. Raises OSError when the disk won't take it."""
        now = time.time()
        self.record.updated = now
        self.record.owner = Owner(host=socket.gethostname(), pid=os.getpid(), heartbeat=now) if owner else None
        text = json.dumps(self.record.model_dump(mode="json"), ensure_ascii=False)
        write_atomic(self.path, text.encode("utf-8", "replace"), sync=True)  # a path need not be UTF-8

    def reject(self, lines: list[dict[str, object]]) -> None:
        """Put rejected rows and keys, with reasons, into ``<sink>.rejected.jsonl`` beside the state."""
        with open(self.rejected_path, "ab") as file:
            file.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
        self.record.rejected += len(lines)

    def close(self) -> None:
        """Let go of the lock."""
        self._lock.release()
