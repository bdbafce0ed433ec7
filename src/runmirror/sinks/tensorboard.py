"""A TensorBoard logdir as a mirror of runs: one folder and one event file per run.

Guarantees:

- The event file is the cursor: ``open`` counts the rows in it, so a row is never in it twice, and what a crash tore is
  completed (see :mod:`runmirror.sinks.event_writer`). Nothing new writes nothing.
- A row is with the operating system when ``put`` returns: it survives the process. It is not synced to disk, because the
  log is, and a file that lost its end with the machine is continued from where it ends.
- A run's folder belongs to one run id, told by a marker in it; another run of the same name gets a folder of its own.
  No name leads out of the logdir. One process at a time writes a run (a lock), the second gets Retry.
- A logdir in a cloud (``gs://bucket/tb``) is written by way of a local copy (:mod:`runmirror.sinks.event_cloud`).
- Importing this module and checking its options import no TensorBoard: that happens where a run is opened, which is never
  the training process. TensorFlow and torch are not imported at all.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, field_validator

from runmirror.exceptions import OptionError, Refused, Retry, RunmirrorError
from runmirror.log.locks import Lock, acquire
from runmirror.log.masking import mask_url
from runmirror.log.rows import Row
from runmirror.sinks.base import Capabilities, Check, LogFile, Opened, Point, Rejected, RunInfo, SinkOptions, env_field
from runmirror.sinks.checks import check_disk, check_folder
from runmirror.sinks.event_cloud import CloudFolder, copy_folder
from runmirror.storage import local_root
from runmirror.storage.home import homes
from runmirror.storage.view import canonical_uri

if TYPE_CHECKING:
    from runmirror.sinks.event_writer import RunWriter

MARKER = ".runmirror.json"
LOCK = ".runmirror.lock"
CLOSE_SECONDS = 30.0
"""Seconds for which closing waits for uploads."""

_NAME_BYTES = 200
_NEEDS_A_PERSON = (PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError)


class TensorBoardOptions(SinkOptions):
    """Options of the TensorBoard sink."""

    logdir: str = env_field(
        "./tensorboard-mirror",
        "TENSORBOARD_LOGGING_DIR",
        "folder that TensorBoard is pointed at; a run is a folder in it",
    )
    logging_dir: str | None = Field(None, description="another name for logdir, as in transformers; wins over it")
    storage_options: dict[str, Any] = Field(
        default_factory=dict,
        repr=False,
        description="for a logdir in a cloud: options of its fsspec file system, as JSON",
        json_schema_extra={"secret": True},
    )
    tombstones: bool = Field(
        False, description="after a resume from an older checkpoint, end metrics that lost all their points with a NaN"
    )

    @field_validator("storage_options", mode="before")
    @classmethod
    def _from_json(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except ValueError:
            raise ValueError("expected a JSON object") from None

    @property
    def folder(self) -> str:
        """The logdir, whichever name it was given by."""
        return self.logdir if self.logging_dir is None else self.logging_dir


class TensorBoardSink:
    """Mirrors one run into a TensorBoard logdir."""

    name: ClassVar[str] = "tensorboard"
    Options: ClassVar[type[SinkOptions]] = TensorBoardOptions
    requires: ClassVar[tuple[str, ...]] = ("tensorboard", "google_crc32c")
    capabilities: ClassVar[Capabilities] = Capabilities(
        max_rows=1000,
        precision="float32",
        keys="any text but the empty one; 'runmirror/...' and '_hparams_/...' are reserved",
        nonfinite="all",
        rewinds="native",
        records=frozenset({"config", "code", "checkpoints", "logtree"}),
        default_records=frozenset({"config", "code", "checkpoints"}),
        derives=frozenset({"rollouts"}),
    )

    def __init__(self, options: TensorBoardOptions) -> None:
        self._options = options
        self._uri = ""
        try:
            folder = local_root(options.folder) if options.folder else ""
            if folder is None:
                self._uri = canonical_uri(options.folder)
        except ValueError as error:
            raise OptionError(f"logdir {mask_url(options.folder)!r}: {error}") from None
        if folder == "":
            raise OptionError("logdir is empty: name a folder, such as ./tensorboard-mirror")
        self._local = folder
        self._cloud: CloudFolder | None = None
        self._lock: Lock | None = None
        self._writer: RunWriter | None = None
        self._stale = False

    def destination(self) -> str:
        """The logdir."""
        return self._uri or str(self._logdir)

    @property
    def _logdir(self) -> Path:
        """The folder that is written, of a logdir in a cloud its copy."""
        return Path(self._local) if self._local is not None else copy_folder(self._uri)

    def open(self, run: RunInfo, tracker_run_id: str | None) -> Opened:
        """Find or make the run's folder, lock it, and count the rows in it."""
        from runmirror.sinks.event_writer import RunWriter

        self.close(None, 0)
        with self._guarded():
            name = self._claim(run, tracker_run_id)
            folder = self._logdir / name
            self._writer = RunWriter(folder, run.start, run.config, self._options.tombstones, run.resumes)
            self._writer.load()
            self._writer.note_config()
            self._stale = False
            self._send()
            url = f"{self._uri}/{name}" if self._uri else str(folder)
            return Opened(url=url, tracker_run_id=name, position=self._writer.rows)

    def put(self, rows: Sequence[Row]) -> list[Rejected]:
        """Append rows, in one write as a rule. Those already there are passed over."""
        with self._guarded():
            rejected = self._opened().put(rows)
            self._send()
            return rejected

    def put_file(self, file: LogFile) -> None:
        """Append a configuration, code diff or list of checkpoints as text, of rollouts the distribution of their rewards, of
        a report some of what was said. Other kinds are not shown."""
        if file.kind not in self.capabilities.records | self.capabilities.derives:
            return
        content = file.read()
        if file.kind in ("rollouts", "logtree"):
            from runmirror.sinks.event_rollouts import rollout_value

            found = rollout_value(file.path, content)
            if found is not None:
                with self._guarded():
                    self._opened().put_rollouts(*found)
                    self._send()
            return
        with self._guarded():
            self._opened().put_file(file.path, file.kind, content)
            self._send()

    def flush(self, deadline: float) -> int:
        """Every row that was put: ``put`` leaves nothing in memory."""
        with self._guarded():
            writer = self._opened()
            if not writer.intact():
                raise Refused(
                    f"the event file in {self._logdir} was removed or replaced while it was written; start the mirror again "
                    "and the run is written anew"
                )
            writer.note_resumes()
            if self._cloud is not None:
                self._cloud.send()
                self._cloud.check()
            return writer.rows

    def _send(self) -> None:
        if self._cloud is not None:
            self._cloud.send()

    def close(self, run: RunInfo | None, deadline: float) -> None:
        """Write the end of a run that is known to have ended, once, and let go of the folder. A status that was only
        inferred is not written: TensorBoard never takes another."""
        try:
            if run is not None and self._writer is not None and run.status_known and run.status != "running":
                with self._guarded():
                    self._opened().end(run.end, run.status == "finished")
                    self._send()
        finally:
            writer, self._writer = self._writer, None
            lock, self._lock = self._lock, None
            if writer is not None:
                writer.close()
            cloud, self._cloud = self._cloud, None
            try:
                if cloud is not None:
                    cloud.close(min(deadline / 2, CLOSE_SECONDS))
            finally:
                if lock is not None:
                    lock.release()

    def read_back(self, run: RunInfo, tracker_run_id: str | None) -> Iterator[Point] | None:
        """The points that TensorBoard's default loader shows of a run; None when the logdir has no folder of it."""
        from runmirror.sinks.event_file import event_files

        known = None if tracker_run_id is None else safe_name(tracker_run_id)
        for name in ([known] if known else []) + _names(run):
            if self._uri:
                there = self._in_cloud(name)
                owner = _owner_in(there.read(MARKER))
                if owner == run.run_id or (name == known and not owner and there.event_files()):
                    return _fetched(there)
                continue
            folder = self._logdir / name
            owner = _owner(folder)
            if owner == run.run_id or (name == known and not owner and event_files(folder)):
                return _shown(folder)
        return None

    def _in_cloud(self, name: str) -> CloudFolder:
        options = self._options.storage_options
        return CloudFolder(f"{self._uri}/{name}", options, self._logdir / name, MARKER)

    def refuses(self, key: str) -> str | None:
        """Why there is no tag for a metric of this name; None when there is one."""
        from runmirror.sinks.event_file import RowShape

        return next((reason for _, reason in RowShape(0, (key,)).refused), None)

    def check(self) -> list[Check]:
        """Whether the logdir can be written and has room, and whether checksums are made by the fast implementation."""
        import google_crc32c

        kind = google_crc32c.implementation
        folder = homes()[0] if self._uri else self._logdir
        fix_folder = "another place: RUNMIRROR_HOME" if self._uri else "another one: --logdir DIR"
        fix = "pip install --force-reinstall google-crc32c, for a Python that it has a binary wheel for"
        return [
            *([self._check_cloud()] if self._uri else []),
            check_folder("logdir's copy" if self._uri else "logdir", folder, fix_folder),
            check_disk("logdir's disk", folder),
            Check("checksums", kind == "c", f"google-crc32c in {'C' if kind == 'c' else 'Python: slow'}", fix),
        ]

    def _check_cloud(self) -> Check:
        try:
            self._in_cloud("run").event_files()
        except (OSError, RunmirrorError, ValueError) as error:
            fix = "see that it is reachable: credentials by --storage-option or fsspec's configuration"
            return Check("logdir", False, f"{type(error).__name__}: {error}", fix)
        return Check("logdir", True, f"{self._uri} answers")

    def _opened(self) -> RunWriter:
        """The writer, after it looked again at files that a failed write left in an unknown state."""
        if self._writer is None:
            raise RuntimeError("the sink is not open")
        if self._stale:
            self._writer.load()
            self._stale = False
        return self._writer

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._stale = True
            if isinstance(error, OSError):
                person = isinstance(error, _NEEDS_A_PERSON) or error.errno in (errno.EROFS, errno.ENAMETOOLONG)
                kind = Refused if person else Retry
                raise kind(f"can't write to {self._uri or self._logdir}: {error}") from error
            raise

    def _claim(self, run: RunInfo, tracker_run_id: str | None) -> str:
        """The name of the run's folder, made, marked and locked."""
        from runmirror.sinks.event_file import event_files

        known = None if tracker_run_id is None else safe_name(tracker_run_id)
        for name in ([known] if known else []) + _names(run):
            folder = self._logdir / name
            if folder.exists() and not folder.is_dir():
                continue
            if self._uri:
                if self._claim_in_cloud(name, run.run_id, folder, ours=name == known):
                    return name
                continue
            owner = _owner(folder)
            if owner == "" and name == known:
                owner = None  # a damaged marker in the folder we had
            elif owner is None and name != known and event_files(folder):
                continue  # somebody's own event files
            if owner not in (None, run.run_id):
                continue
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = acquire(str(folder / LOCK), partial(_busy, folder))
            if owner is None and _owner(folder) in (None, "", run.run_id):
                _mark(folder, run.run_id)
            if _owner(folder) == run.run_id:
                return name
            self._lock.release()
            self._lock = None
        raise Refused(
            f"no folder for the run {run.name!r} in {self._uri or self._logdir}: every name for it is taken by another run"
        )

    def _claim_in_cloud(self, name: str, run_id: str, folder: Path, *, ours: bool) -> bool:
        """Whether the run's folder in the cloud is ours now."""
        there = self._in_cloud(name)
        found = there.read(MARKER)
        owner = _owner_in(found)
        strangers = found is None and not ours and there.event_files()
        if strangers or (owner != run_id and not (found is None or (owner == "" and ours))):
            there.close(0)
            return False
        self._cloud = there
        there.open()
        if _owner(folder) != run_id:
            _mark(folder, run_id)
        return True


def _busy(folder: Path, holder: str) -> Retry:
    return Retry(f"another mirror writes {folder} right now ({holder})")


def safe_name(name: str) -> str:
    """``name`` as a relative path that stays inside its folder: no ``..``, nothing absolute, none of our own file names."""
    parts = []
    for part in name.replace("\\", "/").split("/"):
        part = re.sub(r"[\x00-\x1f\x7f]", "_", part.encode("utf-8", "replace").decode())
        if part in ("", ".", ".."):
            continue
        if part.startswith((MARKER, LOCK)):
            part = f"_{part}"
        if len(part.encode()) > _NAME_BYTES:
            cut = part.encode()[: _NAME_BYTES - 9].decode("utf-8", "ignore")
            part = f"{cut}-{hashlib.sha256(part.encode()).hexdigest()[:8]}"
        parts.append(part)
    return "/".join(parts)


def _names(run: RunInfo) -> list[str]:
    """Names for a run's folder, the best first: its name, then with more and more of its id."""
    run_id = re.sub(r"[^A-Za-z0-9_-]", "_", run.run_id)
    name = safe_name(run.name) or "run"
    hashed = hashlib.sha256(run.run_id.encode("utf-8", "replace")).hexdigest()
    return list(
        dict.fromkeys([name, *(f"{name}-{part}" for part in (run_id[:6], run_id[:12], hashed[:12], hashed[:32]))])
    )


def _shown(folder: Path) -> Iterator[Point]:
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    from runmirror.sinks.event_file import Damaged
    from runmirror.sinks.event_reader import read_points

    try:
        shown = read_points(folder)
    except (Damaged, DecodeError) as error:
        raise Refused(
            f"{error}: TensorBoard reads no further; remove the folder {folder} and mirror or import the run again"
        ) from None
    for tag, points in shown.items():
        for time, step, value in points:
            yield Point(tag, step, time, value)


def _fetched(there: CloudFolder) -> Iterator[Point]:
    """The points of a folder in a cloud."""
    with tempfile.TemporaryDirectory(prefix="runmirror-") as folder:
        for name in there.event_files():
            Path(folder, name).write_bytes(there.read(name) or b"")
        yield from _shown(Path(folder))


def _owner(folder: Path) -> str | None:
    """The run id a folder is marked with; None when it has no marker, "" when that can't be read."""
    try:
        return _owner_in((folder / MARKER).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None


def _owner_in(marker: bytes | None) -> str | None:
    try:
        return None if marker is None else str(json.loads(marker)["run_id"])
    except (ValueError, KeyError, TypeError):
        return ""


def _mark(folder: Path, run_id: str) -> None:
    temporary = folder / f"{MARKER}.new"
    temporary.write_text(json.dumps({"format": 1, "run_id": run_id}) + "\n", encoding="utf-8")
    os.replace(temporary, folder / MARKER)


def tensorboard_command(logdir: str | Path) -> str:
    """The command that shows a logdir, with every point: TensorBoard keeps 1,000 of each metric unless told otherwise."""
    return f"tensorboard --logdir {shlex.quote(str(logdir))} --samples_per_plugin scalars=100000"
