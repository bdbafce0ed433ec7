"""Bringing a spool to its objects: who may write, what is sent, and what an unexpected version means.

Guarantees:

- An object is a prefix of what was appended, cut where an append ended, at every moment; a row never gets there twice.
- Per round: whole files first, then growing ones, checkpoints.jsonl last; what a row mentions is there before the row. A line
  of the journal comes after the rows before it and before the rows after it.
- One writer. ``.runmirror/writer.json`` names it; a second one on another machine puts its own name there and touches every
  growing object, so that the first one's next write is refused and it stops, its spool kept.
- After every answer the object's size and CRC32C are compared with what the spool holds.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from runmirror.exceptions import LogError
from runmirror.storage.kinds import JOURNAL, ORDER, kind_of
from runmirror.storage.lease import LEASE, TakenError, lease_of, whom
from runmirror.storage.remote import ABSENT, ANY, Bytes, ConflictError, Content, LocalFile, Object, Remote, crc_of
from runmirror.storage.spool import Grown, Known, Spool, SpoolRecord

logger = logging.getLogger("runmirror")
SMALL = 256 << 10
"""Up to this size a growing object is sent whole: one request instead of two."""
GAP = 1.05
"""Seconds between two writes of one object: a store allows about one a second."""


class Uploads:
    """What one writer has to upload. One thread calls :meth:`enlist` and :meth:`round`.

    Args:
        spool: locked by this process.
        record: its content, changed here.
        remote: gives the objects.
        lock: guards the record and the attributes below.
        wait: sleeps.
        take_over: whether another writer's log_path is taken over.

    Attributes:
        ends: growing file -> bytes that were appended whole.
        barriers: for each line of the journal that is not uploaded: where it ends, and where the other files ended then.
        keys: growing file -> the key that ``append`` takes for it, for those that were appended to.
        waiting: whole file -> a mark that changes with its content, in the order of writing.
        abandoned: set when this writer let go while a request was under way: nothing more is sent or saved.
    """

    def __init__(
        self,
        spool: Spool,
        record: SpoolRecord,
        remote: Callable[[], Remote],
        lock: threading.RLock,
        wait: Callable[[float], None],
        take_over: bool = True,
    ) -> None:
        self.spool, self.record = spool, record
        self.remote, self.lock, self._wait, self.take_over = remote, lock, wait, take_over
        self.extends = False  # until the store is connected: the longer intervals
        self.ends: dict[str, int] = {path: spool.end(path, grown) for path, grown in record.files.items()}
        self.keys: dict[str, str] = {}
        self.append = spool.rows.append
        self.barriers: list[tuple[int, dict[str, int]]] = []
        self.waiting: dict[str, object] = {path: object() for path, known in spool.known.items() if known.waiting}
        self._mutated: dict[str, float] = {}
        self.abandoned = False
        self._saves, self._save_failed = 0, False

    # -- who may write

    def enlist(self, paths: Iterable[str] = ()) -> None:
        """Make this writer the one the store knows, and learn what the log_path holds.

        Raises:
            TakenError: another writer has it, and this spool holds rows that it doesn't, or :attr:`take_over` is
                False.
            OSError: the store is out of reach or refuses.
        """
        remote, record = self.remote(), self.record
        self.extends = remote.extends
        before: dict[str, Any] = {}  # who is being taken over
        for _ in range(5):
            found = dict(remote.scan())
            lease = lease_of(remote) if LEASE in found else {}
            ours = lease.get("id") == record.writer
            if not ours and (record.enlisted or (lease and not self.take_over)):
                raise TakenError(whom(lease))
            before = before if ours else lease
            try:
                if not ours:
                    mine = {"id": record.writer, "host": record.host, "pid": record.pid, "since": record.started}
                    version = found[LEASE].version if LEASE in found else ABSENT
                    found[LEASE] = self._put(LEASE, Bytes(json.dumps(mine).encode() + b"\n"), version)
                if before and remote.unique_versions:
                    for path in paths:
                        found[path] = self._fence(path, found.get(path))
            except (ConflictError, FileNotFoundError):
                continue  # the other one wrote meanwhile, or an answer was lost
            break
        else:
            raise ConnectionError(
                f"{record.url}: another writer keeps changing it; is it started on two machines at once?"
            )
        if before:
            logger.warning("%s: taken over from %s", record.url, whom(before))
        with self.lock:
            if not record.enlisted:
                self._give_way(found)
            pending = {path: known for path, known in self.spool.known.items() if known.waiting}
            known = {path: Known(one) for path, one in found.items() if path not in record.files}
            self.spool.start_files(known | pending)
            record.enlisted = True
        for path in list(record.files):
            self._reconcile(path, found.get(path))
        self.save()

    def _give_way(self, found: dict[str, Object]) -> None:
        """A log_path that was taken for new, because the store was out of reach, is not: files that are there stay, those that
        were meant to be there go to ``.runmirror/late/``."""
        spool = self.spool
        for path, known in list(spool.known.items()):
            there = found.get(path)
            if not known.waiting or there is None or there.crc == known.object.crc:
                continue
            late = f".runmirror/late/{path.replace('/', '_')}"
            spool.whole.write(late, spool.whole.read(path))
            spool.note(late, known)
            spool.note(path, None)
            spool.whole.remove(path)
            del self.waiting[path]
            self.waiting[late] = object()
            logger.warning("%s/%s was there already: the new one is kept as %s", self.record.url, path, late)

    def _fence(self, path: str, head: Object | None) -> Object:
        """Give an object a new version with the same content, or make it, so that another writer's next write fails. It isn't
        marked as written by us: what is in it is another's."""
        writer = f"{self.record.writer} fence"
        if head is None:
            return self.remote().put(path, Bytes(b""), kind_of(path), writer, ABSENT)
        return self.remote().extend(path, head, Bytes(b""), kind_of(path), writer)

    def _put(self, path: str, content: Content, expect: str) -> Object:
        remote = self.remote()
        expect = expect if remote.conditional else ANY
        return remote.put(path, content, kind_of(path), self.record.writer, expect)

    def check_lease(self) -> None:
        """Raise TakenError unless this writer still has the log_path."""
        lease = lease_of(self.remote())
        if lease.get("id") != self.record.writer:
            raise TakenError(whom(lease))

    def leave(self) -> None:
        """After the last round: take back the lease and the part objects."""
        remote = self.remote()
        for path in self.record.files:
            remote.forget_parts(path, self.record.writer)
        if self.record.enlisted:
            remote.delete(LEASE)

    # -- a round

    def open_grown(self, path: str, found: Object | None) -> Grown:
        """How a file begins to grow that has no bytes in the spool yet. A store that can't extend needs the whole of it."""
        if found is None or found.size == 0:
            return Grown(version=found.version if found is not None else ABSENT)
        if self._can_extend(found):
            return Grown(base=found.size, synced=found.size, version=found.version, crc=found.crc)
        data = self.remote().read(path)
        self.spool.rows.write(f"0/{path}", data)
        return Grown(synced=len(data), version=found.version, crc=crc_of(data))

    def _can_extend(self, head: Object) -> bool:
        remote = self.remote()
        return remote.extends and head.size >= remote.smallest_head

    def busy(self) -> bool:
        """Whether anything waits."""
        with self.lock:
            grown = any(one.rewrite or self.ends[path] > one.synced for path, one in self.record.files.items())
            return grown or bool(self.waiting or self.spool.removed)

    def round(self) -> None:
        """Upload everything that was there when it began.

        Raises:
            TakenError: another writer has the log_path.
            OSError: the store is out of reach or refuses; what was uploaded so far counts.
        """
        with self.lock:
            ends, waiting, removed = dict(self.ends), dict(self.waiting), list(self.spool.removed)
            lines = len(self.barriers)
        self.spool.rows.flush()
        failed: OSError | None = None
        try:
            if waiting or not self.remote().unique_versions:  # a new file has no version that could be refused
                self.check_lease()
            for path, mark in waiting.items():
                try:
                    self._upload_whole(path, mark)
                except (ConnectionError, TimeoutError):
                    raise
                except OSError as error:  # this one is refused: it must not hold up the rows
                    failed = error
            for _ in range(lines):  # "resumed" comes before the rows after it, "finished" after the rows before it
                end, before = self.barriers[0]  # others only add to it
                self._upload_all({path: ends for path, ends in before.items() if path != JOURNAL})
                self._upload_grown(JOURNAL, end)
                del self.barriers[0]
            self._upload_all(ends)
            for path in removed:
                self._remove(path)
            self.record.last_upload = time.time()
        finally:
            self.save()
        if failed is not None:
            raise failed

    def _upload_all(self, ends: dict[str, int]) -> None:
        for path in sorted(ends, key=lambda path: ORDER.get(path, 0)):
            self._upload_grown(path, ends[path])

    def _remove(self, path: str) -> None:
        with self.lock:
            if path in self.spool.removed and path in self.record.files:
                self.spool.note(path, None)
            if path not in self.spool.removed:
                return  # it was written again
        self._pause(path)
        self.remote().delete(path)
        with self.lock:
            version = self.spool.removed.get(path)
            known = self.spool.known.get(path)
            if version is not None:
                self.spool.note(path, None)
            elif known is not None and known.waiting:  # written again while it was deleted: there is no version now
                one = known.object
                self.spool.note(path, Known(Object(one.size, one.mtime, ABSENT, one.crc), waiting=True))

    def save(self) -> None:
        """Write the record down; a disk that is full is said once, and the uploads go on."""
        with self.lock:
            if self.abandoned:
                return
            self._saves += 1
            number, data = self._saves, self.record.model_dump_json().encode()
        try:
            self.spool.save(self.record, data, number)  # outside the lock: a slow disk must not hold up an append
        except OSError as error:
            if not self._save_failed:
                self._save_failed = True
                logger.warning(
                    "%s can't be written (%s): uploads go on; make room on the disk", self.spool.folder, error
                )

    def _upload_whole(self, path: str, mark: object) -> None:
        with self.lock:
            known = self.spool.known.get(path)
            if known is None or self.waiting.get(path) is not mark:
                return  # removed or written anew meanwhile
        try:
            content = LocalFile(self.spool.whole.path(path))
        except FileNotFoundError:  # a power cut took it
            with self.lock:
                if self.waiting.get(path) is mark:
                    del self.waiting[path]
                    self.spool.note(path, None)
            return
        with contextlib.closing(content):
            crc = content.crc()
            stored = self._put_whole(path, content, crc, known.object.version)
        stored = Object(stored.size, stored.mtime, stored.version, crc)
        with self.lock:
            anew = self.waiting.get(path) is not mark
            if path not in self.spool.known:  # it was removed, or it grows now
                if (grown := self.record.files.get(path)) is not None:
                    grown.version = stored.version
                else:
                    self.spool.note(path, None, stored.version)
                return
            latest = self.spool.known[path].object
            if anew:  # its next content replaces this version
                stored = Object(latest.size, latest.mtime, stored.version, latest.crc)
            self.spool.note(path, Known(stored, waiting=anew))
            if not anew:
                del self.waiting[path]
                self.spool.whole.remove(path)

    def _put_whole(self, path: str, content: LocalFile, crc: int, expect: str) -> Object:
        for _ in range(4):
            self._pause(path)
            try:
                stored = self._put(path, content, expect)
                break
            except ConflictError:
                found = self.remote().stat(path)
                if found is not None and found.writer == self.record.writer and found.crc == crc:
                    stored = found  # an answer that was lost
                    break
                self.check_lease()
                expect = found.version if found is not None else ABSENT
        else:
            raise ConnectionError(f"{self.record.url}/{path}: another program keeps writing it")
        if stored.size != content.size or stored.crc not in (None, crc):
            raise ConnectionError(f"{self.record.url}/{path} did not arrive as it was sent; it is sent again")
        return stored

    def _upload_grown(self, path: str, end: int) -> None:
        remote, record = self.remote(), self.record
        for _ in range(6):
            with self.lock:
                now = record.files.get(path)
                end = min(end, self.ends.get(path, 0))
                if now is None or (now.synced >= end and not now.rewrite):
                    return
                grown = now.model_copy()
            local = self.spool.rows.path(f"{grown.base}/{path}")
            small = grown.base == 0 and (end <= SMALL or grown.synced < remote.smallest_head)
            whole = grown.rewrite or not remote.extends or small or grown.version == ABSENT
            crc = self._crc(path, grown, end)
            self._pause(path)
            try:
                if whole:
                    with contextlib.closing(LocalFile(local, 0, end)) as content:
                        stored = self._put(path, content, grown.version)
                else:
                    head = Object(grown.synced, 0.0, grown.version)
                    tail = LocalFile(local, grown.synced - grown.base, end - grown.synced)
                    with contextlib.closing(tail):
                        stored = remote.extend(path, head, tail, kind_of(path), record.writer)
            except (ConflictError, FileNotFoundError):
                end += self._reconcile(path, remote.stat(path))
                continue
            wrong = stored.size != end or (None not in (stored.crc, crc) and stored.crc != crc)
            with self.lock:
                latest = record.files.get(path)
                if latest is None:  # it was removed
                    self.spool.note(path, None, stored.version)
                    return
                if latest.base != grown.base or (latest.rewrite and not grown.rewrite):
                    latest.version = stored.version
                    continue  # rewritten meanwhile
                latest.version, latest.synced, latest.rewrite = stored.version, end, False
                latest.crc = stored.crc if crc is None else crc
            if wrong:
                self._distrust(path, stored)
                continue
            return
        raise ConnectionError(f"{record.url}/{path}: another program keeps writing it")

    def _crc(self, path: str, grown: Grown, end: int) -> int | None:
        """CRC32C of the object once it ends at ``end``."""
        start, crc = (0, 0) if grown.rewrite else (grown.synced, grown.crc)
        if crc is None:
            return None
        if end == start:
            return crc
        local = LocalFile(self.spool.rows.path(f"{grown.base}/{path}"), start - grown.base, end - start)
        with contextlib.closing(local):
            return local.crc(crc)

    def _pause(self, path: str) -> None:
        """Before a write: keep the distance to the last one of that object. Raises when this writer let go."""
        left = self._mutated.get(path, -GAP) + GAP - time.monotonic()
        if left > 0:
            self._wait(left)
        self._mutated[path] = time.monotonic()
        if self.abandoned:
            raise ConnectionError(f"{self.record.url} was closed")

    # -- what an unexpected version means

    def _reconcile(self, path: str, found: Object | None) -> int:
        """Bring what is known of a growing object in line with what the store holds: an answer that was lost, bytes that the
        previous writer added while it was being fenced, or an object that is gone. Returns by how much positions moved."""
        with self.lock:
            grown = self.record.files[path]
            if found is None and grown.version == ABSENT:
                return 0
            if found is None:
                logger.warning("%s/%s is gone: it is written anew from what the spool holds", self.record.url, path)
                return self._shift(path, grown, Grown(), grown.base)
            if found.version == grown.version:
                return 0
        if grown.rewrite:
            self.check_lease()
            grown.version = found.version
            return 0
        if found.writer is None or found.crc is None:  # the store doesn't say: look
            self.check_lease()
        fits = grown.synced <= found.size <= self.ends[path]
        if fits and found.writer in (self.record.writer, None):
            crc = self._crc(path, grown, found.size)
            there = found.crc if found.crc is not None else crc_of(self.remote().read(path))
            if crc is None or crc == there:
                with self.lock:
                    grown.version, grown.synced, grown.crc = found.version, found.size, there
                return 0
        self.check_lease()
        if fits and grown.base == 0 and found.writer == self.record.writer:
            self._distrust(path, found)
            return 0
        # another writer's bytes are in the object: what it has of ours stays, the rest goes behind it
        to = Grown(base=found.size, synced=found.size, version=found.version, crc=found.crc)
        if self._can_extend(found):
            return self._shift(path, grown, to, grown.synced)
        head = self.remote().read(path)
        to.base, to.crc = 0, crc_of(head)
        return self._shift(path, grown, to, grown.synced, head)

    def _shift(self, path: str, grown: Grown, to: Grown, start: int, head: bytes = b"") -> int:
        """Keep the spool's bytes from ``start`` on, behind ``head``, as those of a file that grows from ``to.base``."""
        with self.lock:
            old = f"{grown.base}/{path}"
            stat = self.spool.rows.stat(old)
            data = self.spool.rows.read_range(old, start - grown.base) if stat is not None else b""
            new = f"{to.base}/{path}"
            self.spool.rows.write(new, head + data)
            self.record.files[path] = to
            self.keys.pop(path, None)
            self.ends[path] = to.base + len(head) + len(data)
            self.save()
            if new != old:
                self.spool.rows.remove(old)
            moved = to.base + len(head) - start
            self.barriers = [
                (end + moved * (path == JOURNAL), {one: at + moved * (one == path) for one, at in before.items()})
                for end, before in self.barriers
            ]
            return moved

    def _distrust(self, path: str, stored: Object) -> None:
        """The object is not what was sent."""
        with self.lock:
            grown = self.record.files[path]
            if grown.base == 0:
                logger.warning("%s/%s is not what was sent: it is sent again, whole", self.record.url, path)
                grown.rewrite, grown.version = True, stored.version
                return
        raise LogError(
            f"{self.record.url}/{path} is not what was written to it ({stored.size} bytes, CRC32C {stored.crc}): nothing more "
            f"is uploaded; what this run wrote is in {self.spool.folder}"
        )
