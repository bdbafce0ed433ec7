"""A TensorBoard logdir in a cloud: each run's folder is a local copy whose files are also appended to objects.

Guarantees:

- What the local copy gets is in the spool of :class:`~runmirror.storage.CloudStorage` when the call returns, and uploaded from
  there as that does it: a killed process loses nothing, nothing is sent twice, an object is always a prefix of the file.
- Opening brings copy and objects together first. The objects win: a folder that was removed, or that another machine went on
  with, is what the run is continued from.
- One process writes a run's folder, one machine at a time.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runmirror.exceptions import LogBusyError, Refused, Retry
from runmirror.storage import CloudStorage
from runmirror.storage.home import home

BLOCK = 1 << 16


def copy_folder(uri: str) -> Path:
    """Where the copy of a logdir lies."""
    return home() / "tensorboard" / hashlib.sha256(uri.encode()).hexdigest()[:16]


class CloudFolder:
    """The folder of one run.

    Args:
        uri: of the folder.
        options: for the fsspec file system.
        copy: the local copy.
        marker: the file that says whose folder it is; one without it is nobody's.
    """

    def __init__(self, uri: str, options: Mapping[str, Any], copy: Path, marker: str) -> None:
        self.uri = uri
        self._storage = CloudStorage(uri, dict(options))
        self._copy = copy
        self._marker = marker
        self._sent: dict[str, int] = {}

    def read(self, path: str) -> bytes | None:
        """A file of the folder as it is in the cloud (or waits to be uploaded); None when there is none."""
        try:
            return self._storage.read(path)
        except FileNotFoundError:
            return None

    def event_files(self) -> list[str]:
        """Names of the event files there."""
        return [name for name in self._storage.list_dir("") if "tfevents" in name]

    def open(self) -> None:
        """Become the writer, and make copy and objects one. Raises Retry when another process of this machine has it."""
        try:
            self._storage.claim(self.event_files())
        except LogBusyError as error:
            raise Retry(str(error)) from None
        if self._storage.stat(self._marker) is None:
            shutil.rmtree(self._copy, ignore_errors=True)
        self._copy.mkdir(parents=True, exist_ok=True)
        names = {self._marker, *self.event_files()} | {path.name for path in self._copy.glob("*tfevents*")}
        for name in names:
            self._join(name)

    def _join(self, name: str) -> None:
        path, there = self._copy / name, self._storage.stat(name)
        if there is None:
            return
        here = path.stat().st_size if path.exists() else 0
        both = min(here, there.size)
        start = max(0, both - BLOCK)
        with open(path, "ab+") as file:
            file.seek(start)
            if file.read(both - start) != self._storage.read_range(name, start, both - start):
                file.truncate(0)  # another machine went on with it
                here = 0
            if here < there.size:
                file.write(self._storage.read_range(name, here))
        self._sent[name] = there.size

    def send(self) -> None:
        """Hand what is new in the copy over to be uploaded. Raises OSError when the disk is full."""
        marker = self._copy / self._marker
        if self._marker not in self._sent and marker.exists():
            self._storage.write(self._marker, marker.read_bytes())
            self._sent[self._marker] = marker.stat().st_size
        for path in sorted(self._copy.glob("*tfevents*")):
            sent = self._sent.get(path.name, 0)
            if os.path.getsize(path) > sent:
                with open(path, "rb") as file:
                    file.seek(sent)
                    data = file.read()
                self._storage.append(path.name, data)
                self._sent[path.name] = sent + len(data)

    def check(self) -> None:
        """Raise Refused when another machine has taken the folder over."""
        status = self._storage.status()
        if status is not None and status.fenced:
            raise Refused(f"{self.uri} was taken over by {status.fenced}: it is written from there now")

    def close(self, seconds: float) -> None:
        """Upload the rest, for so long at most; what is left stays on this machine, and that is said."""
        self._storage.close(max(seconds, 0.0))
