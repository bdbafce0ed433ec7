"""The spool of one cloud log_path: what was written and where it stands, on the writer's own disk.

::

    RUNMIRROR_HOME/spools/<key>.lock      held by the writer for as long as it lives
    RUNMIRROR_HOME/spools/<key>/
        spool.json                        SpoolRecord: whose, and how far each growing file is uploaded
        files.jsonl                       one line per change of what the log_path holds: was there, waits, uploaded, gone
        rows/<base>/<path>                growing files, from byte <base> of the object on
        files/<path>                      whole files that wait to be uploaded

Guarantees:

- What was appended is here, whole, when the call returns; it outlives the process. It is removed only after the store has
  confirmed size and checksum.
- Any process on the machine can read it while it is written: each file is replaced by renaming or grows at its end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import socket
import sys
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from runmirror.exceptions import StateError
from runmirror.storage.home import home, homes
from runmirror.storage.local import LocalStorage, Stat, write_atomic
from runmirror.storage.remote import ABSENT, Object, crc_of

logger = logging.getLogger("runmirror")
FORMAT = 1
RECORD = "spool.json"
FILES = "files.jsonl"


class Grown(BaseModel):
    """A file that is appended to.

    Attributes:
        base: byte of the object at which the spool's copy begins.
        synced: bytes of the object that the store has confirmed.
        version: the object's version then, "" when there is none yet.
        crc: CRC32C of those bytes, None when the store didn't say it of a head that another writer left.
        rewrite: whether the object has to be replaced by the spool's copy (``base`` is 0 then).
    """

    model_config = ConfigDict(extra="allow")
    base: int = 0
    synced: int = 0
    version: str = ABSENT
    crc: int | None = 0
    rewrite: bool = False


class SpoolRecord(BaseModel):
    """The content of spool.json.

    Attributes:
        writer: id under which objects are written.
        enlisted: whether the store knows this writer yet; False while it was never in reach.
        files: the growing files.
        pid: of the writer, 0 once it let go.
        taken_by: who took the log_path over from this writer, "" while nobody did.
        dropped: whole files that were not kept because too much waits.
    """

    model_config = ConfigDict(extra="allow")
    format: int = FORMAT
    url: str
    writer: str = Field(default_factory=lambda: uuid.uuid4().hex)
    host: str = Field(default_factory=socket.gethostname)
    pid: int = Field(default_factory=os.getpid)
    started: float = Field(default_factory=time.time)
    enlisted: bool = False
    files: dict[str, Grown] = Field(default_factory=dict)
    last_upload: float | None = None
    error: str = ""
    taken_by: str = ""
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class Known:
    """A whole file of the log_path: what the store says of it, and whether a newer content waits in the spool."""

    object: Object
    waiting: bool = False


def spool_folder(url: str) -> Path:
    """Where the spool of a log_path is made. Raises StateError when there is no place for it."""
    return home() / _name(url)


def find_spool(url: str) -> Path | None:
    """Where the spool of a log_path lies, None when there is none. Makes nothing."""
    name = _name(url)
    return next((place / name for place in homes() if (place / name / RECORD).exists()), None)


def _name(url: str) -> str:
    return f"spools/{hashlib.sha256(url.encode()).hexdigest()[:16]}"


class Spool:
    """The files of a spool, read afresh whenever they changed. Only the writer calls what changes them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows = LocalStorage(folder / "rows")
        self.whole = LocalStorage(folder / "files")
        self.record: SpoolRecord | None = None
        self.known: dict[str, Known] = {}
        self.removed: dict[str, str] = {}  # files to be deleted -> the version the store has of them
        self._record_mark: tuple[int, int] | None = None
        self._files_mark = (0, 0)  # inode, bytes read
        self._lock = threading.RLock()
        self._saving = threading.RLock()
        self._saved = 0

    def refresh(self) -> bool:
        """Take up what changed. Whether there is a spool."""
        with self._lock:
            try:
                found = os.stat(self.folder / RECORD)
            except OSError:
                self.record = None
                return False
            mark = (found.st_ino, found.st_mtime_ns)
            if mark != self._record_mark or self.record is None:
                self.record = self.load()
                self._record_mark = mark
            self._refresh_files()
            return self.record is not None

    def load(self) -> SpoolRecord | None:
        """The record on the disk, None when missing or damaged.

        Raises:
            StateError: it was written by a newer version.
        """
        try:
            data = json.loads((self.folder / RECORD).read_bytes())
        except (OSError, ValueError):
            return None
        if isinstance(data, dict) and isinstance(data.get("format"), int) and data["format"] > FORMAT:
            raise StateError(
                f"{self.folder / RECORD}: spool format {data['format']}, written by a newer runmirror; this one reads up to "
                f"{FORMAT}: upgrade runmirror"
            )
        try:
            return SpoolRecord.model_validate(data)
        except ValidationError:
            return None

    def _refresh_files(self) -> None:
        try:
            with open(self.folder / FILES, "rb", buffering=0) as file:
                found = os.fstat(file.fileno())
                inode, read = self._files_mark
                if found.st_ino != inode or found.st_size < read:
                    self.known, self.removed, read = {}, {}, 0
                elif found.st_size == read:
                    return
                file.seek(read)
                data = file.readall()
        except OSError:
            self.known, self.removed, self._files_mark = {}, {}, (0, 0)
            return
        whole = data[: data.rfind(b"\n") + 1]
        for line in whole.splitlines():
            path, known, removed = _parse(line)
            self.removed.pop(path, None)
            if removed is not None:
                self.removed[path] = removed
            if known is None:
                self.known.pop(path, None)
            else:
                self.known[path] = known
        self._files_mark = (found.st_ino, read + len(whole))

    # -- reading

    def grown(self, path: str) -> Grown | None:
        """The growing file at a path."""
        return None if self.record is None else self.record.files.get(path)

    def end(self, path: str, grown: Grown) -> int:
        """Bytes of the growing file, those not uploaded included."""
        found = self.rows.stat(f"{grown.base}/{path}")
        return grown.base + (found.size if found is not None else 0)

    def stat(self, path: str) -> Stat | None:
        """Of a growing or a whole file, as the writer sees it."""
        grown = self.grown(path)
        if grown is not None and self.record is not None:
            found = self.rows.stat(f"{grown.base}/{path}")
            size = grown.base + (found.size if found is not None else 0)
            return Stat(size, found.mtime if found else time.time(), f"{size:x}-{self.record.writer[:8]}")
        known = self.known.get(path)
        return None if known is None else public(known.object)

    def paths(self, prefix: str = "") -> list[str]:
        """Every path below a folder, sorted."""
        folder = f"{prefix}/" if prefix else ""
        files = self.record.files if self.record is not None else {}
        return sorted(path for path in {*self.known, *files} if path.startswith(folder))

    def unsynced(self) -> tuple[int, int]:
        """(bytes of growing and whole files that wait, whole files among them)."""
        size = 0
        for path, grown in (self.record.files if self.record is not None else {}).items():
            size += self.end(path, grown) - (0 if grown.rewrite else grown.synced)
        waiting = [known.object.size for known in self.known.values() if known.waiting]
        return size + sum(waiting), len(waiting)

    # -- writing

    def save(self, record: SpoolRecord, data: bytes | None = None, number: int = 0) -> None:
        """Replace the record. Raises OSError.

        Args:
            data: the record as it was when the call was decided on; as it is when None.
            number: of that moment; an older one than was saved last is passed over.
        """
        with self._saving:  # not the lock that readers take: a disk can be slow
            if data is not None and number < self._saved:
                return
            self._saved = max(self._saved, number)
            write_atomic(self.folder / RECORD, data or record.model_dump_json().encode(), sync=True)
        with self._lock:
            self.record = record
            with contextlib.suppress(FileNotFoundError):
                found = os.stat(self.folder / RECORD)
                self._record_mark = (found.st_ino, found.st_mtime_ns)

    def start_files(self, known: dict[str, Known]) -> None:
        """Replace files.jsonl. What is to be removed stays so."""
        with self._lock:
            lines = [_line(path, one) for path, one in known.items() if path not in self.removed]
            lines += [_line(path, None, version) for path, version in self.removed.items()]
            write_atomic(self.folder / FILES, b"".join(lines))
            self._files_mark = (0, 0)
            self._refresh_files()

    def note(self, path: str, known: Known | None, removed: str | None = None) -> None:
        """Add to files.jsonl how a whole file stands now, None when it is gone; ``removed`` is the version that is still to be
        deleted."""
        with self._lock:
            descriptor = os.open(self.folder / FILES, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                os.write(descriptor, _line(path, known, removed))
            finally:
                os.close(descriptor)
            self._refresh_files()

    def mend(self) -> None:
        """After a writer was killed: end every growing ``.jsonl`` with a whole line. What is cut off becomes
        a file ``.runmirror/torn-N.txt`` of the log_path."""
        files = self.record.files if self.record is not None else {}
        for path, grown in list(files.items()):
            if self.end(path, grown) < grown.synced:  # a power cut took bytes that the store has
                files[path] = grown.model_copy(update={"base": grown.synced, "rewrite": False})
                self.rows.remove(f"{grown.base}/{path}")
                self.rows.remove(f"{grown.synced}/{path}")
                continue
            local = Path(self.rows.path(f"{grown.base}/{path}"))
            if not path.endswith(".jsonl") or not local.is_file():
                continue
            data = local.read_bytes() if local.stat().st_size < 1 << 20 else _tail(local)
            tail = data[data.rfind(b"\n") + 1 :]
            if not tail:
                continue
            if _is_json(tail):
                self.rows.append(f"{grown.base}/{path}", b"\n")
                continue
            number = next(n for n in range(1, len(self.known) + 2) if f".runmirror/torn-{n}.txt" not in self.known)
            kept = f".runmirror/torn-{number}.txt"
            self.whole.write(kept, tail)
            self.note(kept, Known(Object(len(tail), time.time(), ABSENT, crc_of(tail)), waiting=True))
            os.truncate(local, local.stat().st_size - len(tail))
            logger.warning(
                "%s/%s: the last line was cut short when its writer was killed; its %d bytes are kept in %s",
                self.record.url if self.record else "", path, len(tail), kept
            )  # fmt: skip

    def holds_anything(self) -> bool:
        """Whether there is a record, be it damaged, or any content. Only looks."""
        content = (path for part in ("rows", "files") for path in (self.folder / part).rglob("*"))
        return (self.folder / RECORD).exists() or any(
            path.is_file() and path.stat().st_size > 0 and not path.name.startswith(".nfs") for path in content
        )

    def set_aside(self, why: str) -> Path:
        """Move the spool out of the way, for good, and return where to."""
        record = self.record
        self.close()
        if record is not None:
            record.taken_by = why
            self.save(record)
        number = 1
        while (to := self.folder.with_name(f"{self.folder.name}.taken-{number}")).exists():
            number += 1
        os.rename(self.folder, to)
        self.forget()
        return to

    def discard(self) -> None:
        """Remove the spool: the store has it all."""
        self.close()
        (self.folder / RECORD).unlink(missing_ok=True)  # first: a reader never sees half a spool
        shutil.rmtree(self.folder, ignore_errors=True)
        self.forget()

    def close(self) -> None:
        """Let go of descriptors."""
        self.rows.close()
        self.whole.close()

    def forget(self) -> None:
        """Know nothing any more: the files are gone."""
        with self._lock:
            self.record, self.known, self.removed = None, {}, {}
            self._record_mark, self._files_mark = None, (0, 0)


def public(found: Object) -> Stat:
    """What a Storage says of an object: its version is its content's, where the CRC is known."""
    version = found.version if found.crc is None else f"{found.crc:08x}-{found.size:x}"
    return Stat(found.size, found.mtime, version)


def _line(path: str, known: Known | None, removed: str | None = None) -> bytes:
    line: dict[str, Any] = {"path": path} | ({} if removed is None else {"removed": removed})
    if known is not None:
        one = known.object
        line |= {"size": one.size, "mtime": one.mtime, "version": one.version, "crc": one.crc, "waiting": known.waiting}
    return json.dumps(line).encode() + b"\n"


def _parse(line: bytes) -> tuple[str, Known | None, str | None]:
    data = json.loads(line)
    if "size" not in data:
        return data["path"], None, data.get("removed")
    found = Object(data["size"], data["mtime"], data["version"], data["crc"])
    return data["path"], Known(found, data["waiting"]), None


def _tail(path: Path) -> bytes:
    size = path.stat().st_size
    length = 1 << 16
    with path.open("rb") as file:
        while True:
            file.seek(max(0, size - length))
            data = file.read(length)
            if b"\n" in data or length >= size:
                return data
            length *= 4


def _is_json(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def is_alive(record: SpoolRecord) -> bool:
    """Whether the process that wrote the record runs on this machine."""
    if record.pid <= 0 or record.host != socket.gethostname():
        return False
    if sys.platform == "win32":  # os.kill would end it
        return True
    try:
        os.kill(record.pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
