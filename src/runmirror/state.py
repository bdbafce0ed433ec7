"""What a mirror remembers of one run at one destination, and where.

Guarantees:

- One JSON file per (run, destination), written to a temporary name, synced and renamed: old or new, never half.
- A damaged file is moved aside and rebuilt, never trusted, never fatal. A file of a newer format is an error that names
  the version needed. Fields this version doesn't know are kept.
- One mirror per destination on this machine (a lock), held until :meth:`MirrorState.close`.

It lies in ``<log_path>/.runmirror/mirror/`` for local runs that runmirror wrote, else (foreign logs, cloud paths) below
RUNMIRROR_HOME. Of a cloud log_path that runmirror wrote, a copy goes there (:mod:`runmirror.state_copy`); on opening the
newer of the two counts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import socket
import time
from functools import lru_cache
from io import BufferedReader
from pathlib import Path
from typing import Any

from pydantic import Field

from runmirror.exceptions import MirrorBusyError, StateError
from runmirror.log.layout import OWN
from runmirror.log.locks import acquire
from runmirror.log.records import Identity, Record, Status
from runmirror.log.rows import Position
from runmirror.openers import follow_no_link, has_links, open_regular
from runmirror.state_copy import StateCopy
from runmirror.storage import LocalStorage, Storage
from runmirror.storage.home import home, homes
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
    starts: int = 0
    stretches: list[tuple[int, int]] = Field(default_factory=list)

    @property
    def position(self) -> Position:
        """The cursor: everything below it is in the tracker."""
        return Position(self.ordinal, self.offset, self.digest)

    @position.setter
    def position(self, position: Position) -> None:
        self.ordinal, self.offset, self.digest = position.ordinal, position.offset, position.digest


def run_folder(storage: Storage, identity: Identity, *, in_log: bool = False) -> Path:
    """Where the state of one run lies. ``in_log`` puts it into the log_path even when runmirror did not write that.

    A log_path can't lead it elsewhere, by its run id or by a symbolic link: one of the folder or of anything in it sends
    the state below RUNMIRROR_HOME.
    """
    if isinstance(storage, LocalStorage) and (identity.own or in_log):
        folder = storage.root / OWN / "mirror"
        try:
            if folder.resolve().is_relative_to(storage.root.resolve()):
                folder.mkdir(parents=True, exist_ok=True)
                if has_links(folder):
                    _warn_of_links(folder)
                elif os.access(folder, os.W_OK):
                    return folder
        except (OSError, RuntimeError):
            pass  # a read-only archive
    return home() / "runs" / _folder_name(identity.run_id)


@lru_cache(256)
def _warn_of_links(folder: Path) -> None:
    log.warning(
        "%s holds a symbolic link, which could lead out of the log_path: state is kept in %s. Remove that folder when you "
        "trust the log", folder, home()
    )  # fmt: skip


def _folder_name(run_id: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9_-]{1,100}", run_id):
        return run_id
    return hashlib.sha256(run_id.encode("utf-8", "replace")).hexdigest()[:32]


def known_states(storage: Storage, identity: Identity) -> list[tuple[str, StateRecord | StateError]]:
    """(sink, state) of every destination that a mirror on this machine has brought this run to, sorted by file name; the
    error in place of a state of a newer version. Only reads: no folder is made, no lock taken; damaged files are left out.
    """
    folders = [storage.root / OWN / "mirror"] if isinstance(storage, LocalStorage) else []
    folders += [folder / "runs" / _folder_name(identity.run_id) for folder in homes()]
    states: dict[str, tuple[str, StateRecord | StateError]] = {}
    paths = [path for folder in folders for path in sorted(folder.glob("*-*.json"))]
    found = [(path.name, _found(path)) for path in paths]
    if identity.own and not isinstance(storage, LocalStorage):  # those of other machines
        names = [name for name in storage.list_dir(f"{OWN}/mirror") if name.endswith(".json") and "-" in name]
        found += [(name, _found_copy(StateCopy(storage, name))) for name in names]
    for name, state in found:
        if isinstance(state, StateRecord) and state.run_id != identity.run_id:  # a copied log has the original's
            continue
        known = states.get(name, ("", None))[1]
        if state is not None and not (isinstance(known, StateRecord) and _when(known) >= _when(state)):
            states[name] = name.removesuffix(".json").rpartition("-")[0], state
    return list(states.values())


def _found(path: Path) -> StateRecord | StateError | None:
    try:
        return _read(path)
    except StateError as error:
        return error


def _found_copy(copy: StateCopy) -> StateRecord | StateError | None:
    try:
        return _parse(copy.load(), copy.path)
    except StateError as error:
        return error


def _when(state: StateRecord | StateError | None) -> float:
    return state.updated if isinstance(state, StateRecord) else 0.0


def state_path(folder: Path, sink: str, run_id: str, destination: str, policy: str) -> Path:
    """The state file of a run at a destination under a policy."""
    mark = hashlib.sha256(f"{run_id}\0{destination}\0{policy}".encode()).hexdigest()[:12]
    return folder / f"{sink}-{mark}.json"


def peek(
    folder: Path, sink: str, run_id: str, destination: str, policy: str, copy_in: Storage | None = None
) -> StateRecord | None:
    """The state as it is now, without the lock; None when there is none (or a damaged one). With ``copy_in``, the copy in
    that log_path when it is newer.

    Raises:
        StateError: it was written by a newer version.
    """
    path = state_path(folder, sink, run_id, destination, policy)
    here, copy = _read(path), StateCopy(copy_in, path.name) if copy_in is not None else None
    there = _parse(copy.load(), copy.path) if copy is not None else None
    return there if there is not None and there.run_id == run_id and there.updated > _when(here) else here


def _read(path: Path) -> StateRecord | None:
    try:
        with open_regular(path) as file:
            return _parse(file.read(), path)
    except OSError:
        return None


def _parse(content: bytes | None, path: object) -> StateRecord | None:
    """The record in a state file; None when it is missing or damaged. Raises StateError for one of a newer version."""
    try:
        data: Any = json.loads(content or b"")
        if isinstance(data, dict) and isinstance(data.get("format"), int) and data["format"] > FORMAT:
            raise StateError(
                f"{path}: state format {data['format']}, written by a newer runmirror; this one reads up to {FORMAT}: "
                "upgrade runmirror, or move the file away to start from what the tracker holds"
            )
        return StateRecord.model_validate(data)
    except (ValueError, RecursionError):
        return None


class MirrorState:
    """The state of one run at one destination, locked.

    Args:
        folder: from :func:`run_folder`.
        sink: the sink's name; part of the file's name.
        run_id, destination, policy: what the state is about; a state of another destination is another file.
        starts: how often the run was started or resumed, by its journal; 0 when it has none.
        copy_in: a cloud log_path that gets a copy of the state.

    Raises:
        MirrorBusyError: another mirror holds it.
        StateError: it was written by a newer version.
    """

    def __init__(
        self,
        folder: Path,
        sink: str,
        run_id: str,
        destination: str,
        policy: str,
        *,
        starts: int = 0,
        copy_in: Storage | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._abandoned = False
        self.path = state_path(folder, sink, run_id, destination, policy)
        self._copy = None if copy_in is None else StateCopy(copy_in, self.path.name)
        self.rejected_path = self.path.with_suffix(".rejected.jsonl")
        self._lock = acquire(
            str(self.path.with_suffix(".lock")),
            lambda holder: MirrorBusyError(
                f"{destination}: another mirror of this run is at work ({holder}); wait for it or stop it"
            ),
        )
        try:
            self.record = self._load(run_id) or StateRecord(run_id=run_id, destination=destination, policy=policy)
            owner = self.record.owner
            if (
                owner is not None
                and starts <= self.record.starts  # else the run was started anew, and the owner lets go
                and owner.host != socket.gethostname()
                and abs(time.time() - owner.heartbeat) < HEARTBEAT
            ):
                raise MirrorBusyError(f"{destination}: process {owner.pid} on {owner.host} mirrors this run right now")
        except BaseException:
            self._lock.release()
            raise

    def _load(self, run_id: str) -> StateRecord | None:
        record = _read(self.path)
        if record is None and self.path.exists():
            aside = self.path.with_suffix(f".damaged-{int(time.time())}")
            os.replace(self.path, aside)
            log.warning("%s is damaged: moved to %s, rebuilt from the tracker", self.path, aside.name)
        there = _parse(self._copy.load(), self._copy.path) if self._copy is not None else None
        if there is not None and there.run_id == run_id and (record is None or there.updated > record.updated):
            return there  # another machine was here
        return record

    def save(self, *, owner: bool = True, copy: bool = False) -> None:
        """Write the record, with or without this process as its owner; with ``copy`` the copy of it now, and wait for that,
        else when it is due. Raises OSError when the disk won't take it."""
        if self._abandoned or (self.path.parent.parent.name == OWN and not self.path.parent.is_dir()):
            return  # the log_path was removed: it is not made anew
        now = time.time()
        self.record.updated = now
        self.record.owner = Owner(host=socket.gethostname(), pid=os.getpid(), heartbeat=now) if owner else None
        text = json.dumps(self.record.model_dump(mode="json"), ensure_ascii=False)
        data = text.encode("utf-8", "replace")  # a path need not be UTF-8
        write_atomic(self.path, data, sync=True)
        if self._copy is not None:
            self._copy.save(data, now=copy)
            if copy:  # without it another machine could take rows for delivered that it has still to send
                self._copy.wait()

    def abandon(self) -> None:
        """The run was removed: nothing is written any more."""
        self._abandoned = True

    @property
    def has_copy(self) -> bool:
        """Whether a cloud log_path has a copy of it."""
        return self._copy is not None

    def reject(self, lines: list[dict[str, object]]) -> None:
        """Put rejected rows and keys, with reasons, into ``<sink>.rejected.jsonl`` beside the state."""
        with open(self.rejected_path, "ab", opener=follow_no_link) as file:
            file.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
        self.record.rejected += len(lines)

    def last_rejected(self) -> int:
        """The ordinal of the last row of which something was put aside, -1 for none."""
        last = -1
        with contextlib.suppress(OSError), BufferedReader(open_regular(self.rejected_path)) as file:
            for line in file:
                with contextlib.suppress(ValueError, KeyError, TypeError):  # torn
                    last = max(last, json.loads(line)["ordinal"])
        return last

    def close(self) -> None:
        """Let go of the lock, once the copy is written."""
        if self._copy is not None:
            self._copy.close()
        self._lock.release()
