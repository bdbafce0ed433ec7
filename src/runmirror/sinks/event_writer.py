"""The event files of one run: a row is put in once, whatever happened to the process that put it in before.

Guarantees:

- What is in the files is a function of the log: rows in order, and the order in which files of the log came in between.
  Killed at any byte, loaded again and given the rows from :attr:`RunWriter.rows` on, the files become byte for byte what
  they would have been. Nothing new writes nothing.
- The number of rows in the files is the position: rows below it are passed over when they come again.
- TensorBoard shows what survived of a resumed run in both loaders (see :mod:`runmirror.sinks.event_history`).
- ``load`` raises Refused when a file is damaged; other methods raise OSError, after which ``load`` must be called.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from runmirror.catalogue.entries import shipped
from runmirror.catalogue.models import Description
from runmirror.exceptions import Refused
from runmirror.log.layout import Kind
from runmirror.log.masking import mask_text, mask_values
from runmirror.log.rows import Row
from runmirror.sinks import event_file, event_notes
from runmirror.sinks.base import Rejected
from runmirror.sinks.event_file import Damaged, EventLog, RowShape, RowShapes, event_pb2, noted, tag_of
from runmirror.sinks.event_history import Again, History
from runmirror.sinks.resumes import changed

_INT64 = 2**63
_MAX_TAGS = 20_000
"""Tags that are told apart for their descriptions; later ones get none."""


class RunWriter:
    """Writes one run folder.

    Args:
        folder: the run's folder.
        started: Unix seconds of the run's start, for the header of a run that has files but no rows yet.
        config: the run's configuration, or None when it is not known.
        tombstones: after a rewind, mark tags that lost all their points with a NaN.
        resumes: the configurations of resumes that differ from it.
    """

    def __init__(
        self,
        folder: Path,
        started: float | None,
        config: Mapping[str, Any] | None,
        tombstones: bool = False,
        resumes: Sequence[dict[str, Any]] = (),
    ) -> None:
        self._log = EventLog(folder)
        self._started = started if started is not None and math.isfinite(started) else 0.0
        self._config = config
        self._tombstones = tombstones
        self._resumes = resumes
        self._reset()

    def _reset(self) -> None:
        self.rows = 0
        """Rows in the files: the ordinal of the next one."""
        self._shapes = RowShapes()
        self._history = History(self._shapes, self._log.read)
        self._has: set[str] = set()
        self._texts: dict[str, bytes] = {}
        self._rollouts: dict[str, dict[int, bytes]] = {}  # tag -> step -> the value's digest
        self._newest: dict[str, tuple[int, bytes]] = {}  # tag -> step and value of the last one
        self._epoch: float | None = None
        self._last_time: float | None = None
        self._rewind: int | None = None
        self._again = 0
        self._tags: set[str] = set()  # that have a point or a description
        self._shaped: set[int] = set()  # numbers of shapes whose tags are among them
        self._pending: list[bytes] = []
        self._place = 0
        self._begun = False

    # Reading what is there

    def load(self) -> None:
        """Read the files, and write what a crash kept from being written behind the last row."""
        self._reset()
        last: tuple[int, RowShape] | None = None
        current = str(event_file.ENCODER)
        try:
            for place, data in self._log.records():
                if self._log.segments[-1].version == current and event_file.is_row(data):
                    wall_time, step, body = event_file.split_row(data)
                    shape = self._shapes.recognise(body) or self._shape(event_pb2.Event.FromString(data))
                else:
                    event = event_pb2.Event.FromString(data)
                    what = noted(event)[1]
                    if what:
                        self._note(what, event, len(data))
                        continue
                    wall_time, step, shape = event.wall_time, event.step, self._shape(event)
                self._forget_rewind()
                self._new_tags(shape)
                self._history.add(step, place, shape.number)
                self._history.row_bytes += len(data)
                self._again = 0
                self.rows += 1
                self._last_time = wall_time
                last = step, shape
        except (Damaged, DecodeError) as error:
            self._log.close()
            raise Refused(
                f"{error}, behind row {self.rows}. TensorBoard reads no further, and rows may be hidden behind it: remove the "
                f"folder {self._log.folder} and mirror or import the run again"
            ) from None
        if last is not None and self._rewind is None:
            self._owed(*last)

    def _shape(self, event: Any) -> RowShape:
        return self._shapes.of(tuple(value.tag for value in event.summary.value if value.HasField("simple_value")))

    def _note(self, what: str, event: Any, size: int) -> None:
        if what == "version":
            self._has.discard("start")
            if self._epoch is None:
                self._epoch = event.wall_time
        elif what == "rewind":
            self._forget_rewind()
            self._rewind, self._again = event.step, 0
        elif what == "repair":
            self._again += 1
            self._history.again_bytes += size
        elif what == "describe":
            self._tags.update(value.tag for value in event.summary.value)
        elif what == "file":
            value = event.summary.value[0]
            self._texts[value.tag] = _digest(value.tensor.string_val[0])
        elif what == "rollouts":
            self._know(event.summary.value[0].tag, event.step, event.summary.SerializeToString(deterministic=True))
        self._has.add(what)

    def _owed(self, step: int, shape: RowShape) -> None:
        late = self._history.late(step, shape.tags)
        for again in self._history.later(step, late)[self._again :] if late else ():
            self._push_again(again)
        self._write_out()

    # Writing

    def put(self, rows: Sequence[Row]) -> list[Rejected]:
        """Append the rows that are not there yet."""
        rejected: list[Rejected] = []
        self._begun = False
        for row in rows:
            if row.ordinal == self.rows:
                self._put(row, rejected)
            elif row.ordinal > self.rows:
                raise Refused(
                    f"row {row.ordinal} came, but {self._log.folder} holds {self.rows} rows: its files changed while they "
                    "were written; start the mirror again"
                )
        self._write_out()
        return rejected

    def _put(self, row: Row, rejected: list[Rejected]) -> None:
        points = {} if row.fault else row.scalars()
        shape = self._shapes.of(tuple(points))
        step = row.step if -_INT64 <= row.step < _INT64 else _clamped(row.step)
        time = row.time if row.time - row.time == 0 else self._fallback_time()
        history = self._history
        if row.rewind is not None or self._rewind is not None:
            self._go_back(row.rewind, step, time, shape)
        late: set[str] = set()
        if (top := history.top) is not None and step < top:
            self._write_out()
            late = history.late(step, shape.tags)
            if late and not history.affordable(step, late):
                reason = f"comes after later steps of {{!r}}, like too many rows before (step {step} after {top})"
                rejected.extend(Rejected(row.ordinal, key, reason.format(key)) for key in points if tag_of(key) in late)
                points = {key: value for key, value in points.items() if tag_of(key) not in late}
                shape, late = self._shapes.of(tuple(points)), set()
        if shape.refused:
            rejected.extend(Rejected(row.ordinal, key, reason) for key, reason in shape.refused)
        texts = {} if row.fault else row.text()
        body = shape.body_with(points, _texts(texts)) if texts else shape.body(points)
        self._describe(shape, step, time)
        record = event_file.encode_row(time, step, body)
        history.add(step, self._push(record, step, time), shape.number)
        history.row_bytes += len(record) - 16
        self.rows += 1
        self._last_time = time
        if late:
            self._write_out()
            for again in history.later(step, late):
                self._push_again(again)

    def _new_tags(self, shape: RowShape) -> list[str]:
        """The tags of a row that neither had a point nor a description before, which count as seen now."""
        if shape.number in self._shaped or len(self._tags) >= _MAX_TAGS:
            return []
        if shape.number:
            self._shaped.add(shape.number)
        new = [tag for tag in shape.tags if tag not in self._tags]
        self._tags.update(new)
        return new

    def _describes(self) -> bool:
        """Whether the run was begun with descriptions, or is begun now."""
        return "describe" in self._has or (not self.rows and self._has <= {"version", "start"})

    def _describe(self, shape: RowShape, step: int, time: float) -> None:
        """Say before a row what its new tags mean. The shipped catalogue alone decides, so that the bytes depend on the log
        alone; in a run that was begun without descriptions there are none."""
        new = self._new_tags(shape)
        if not new or not self._describes():
            return
        found = {tag: shipped().describe(tag) for tag in new}
        texts = {tag: _meaning(one) for tag, one in found.items() if one is not None}
        if texts:
            self._push(event_notes.describe_record(self._header_time(), texts), step, time)

    def _go_back(self, rewind: int | None, step: int, time: float, shape: RowShape) -> None:
        """Write what has to come before a row that follows a rewind, less what a killed process has written of it."""
        written = self._again
        if self._rewind != rewind:
            self._forget_rewind()
        if rewind is None:
            return
        if self._rewind is None:
            written = 0
            self._push(event_notes.start_record("rewind", time, _clamped(rewind)), step, time)
        self._write_out()
        tags = self._history.abandoned(rewind)
        if step <= rewind:
            tags.difference_update(shape.tags)
        again = self._history.survivors(rewind, tags)
        if self._tombstones:
            lost = tags.difference(tag for row in again for tag, _ in row.points)
            if lost:
                again.append(Again(_clamped(rewind), time, [(tag, math.nan) for tag in sorted(lost)]))
        for row in again[written:]:
            self._push_again(row)
        self._rewind = rewind
        self._forget_rewind()
        self._rewind_rollouts(_clamped(rewind), time)

    def _forget_rewind(self) -> None:
        if self._rewind is not None:
            self._history.rewind(self._rewind)
            self._rewind = None

    def put_file(self, path: str, kind: Kind, content: bytes) -> None:
        """Append a file of the log as text, unless that is the last thing written of it."""
        text = event_notes.file_text(kind, content)
        tag, digest = event_notes.file_tag(path), _digest(text.encode("utf-8", "replace"))
        if self._texts.get(tag) != digest:
            self._write(event_notes.file_record(self._header_time(), path, text))
            self._texts[tag] = digest

    def put_rollouts(self, tag: str, step: int, value: bytes) -> None:
        """Append a value of an iteration's rollouts, unless it is the last thing written of them."""
        step = _clamped(step)
        if self._rollouts.get(tag, {}).get(step) != _digest(value):
            self._begun = False
            time = self._fallback_time()
            self._push(event_notes.rollout_record(time, step, value), None, time)
            self._write_out()
            self._know(tag, step, value)

    def _know(self, tag: str, step: int, value: bytes) -> None:
        self._rollouts.setdefault(tag, {})[step] = _digest(value)
        self._newest[tag] = step, value

    def _rewind_rollouts(self, rewind: int, time: float) -> None:
        """Values from the step on are taken back. That of the very step may be new already: files can be ahead of rows."""
        for tag, (step, value) in list(self._newest.items()):
            known = self._rollouts[tag]
            self._rollouts[tag] = {at: digest for at, digest in known.items() if at < rewind}
            if step == rewind:
                self._push(event_notes.rollout_record(time, step, value), None, time)
                self._know(tag, step, value)

    def note_config(self) -> None:
        """Append the configuration to a run that was begun before it was known."""
        if self._config is not None and "hparams" not in self._has and "start" in self._has and not self._log.torn:
            self._write(b"")  # what the header lacks

    def note_resumes(self) -> None:
        """Append what the configurations of resumes have otherwise, as text, to a run that is begun: its hyperparameters are
        those of its start. Once each."""
        if self._resumes and "start" in self._has and not self._log.torn:
            for number, given in enumerate(self._resumes, 1):
                other = json.dumps(mask_values(changed(self._config or {}, given)), ensure_ascii=False)
                self.put_file(f"resume_{number}", "config", other.encode("utf-8", "replace"))
            self._resumes = ()

    def end(self, time: float | None, succeeded: bool) -> None:
        """Append the end of the run, once: TensorBoard keeps the first. A run with nothing in it gets none."""
        if "end" not in self._has and self._log.segments:
            if time is None or not math.isfinite(time):
                time = self._fallback_time()
            self._write(event_notes.end_record(time, succeeded))
            self._has.add("end")

    def intact(self) -> bool:
        """Whether the file that is written is still the one at its path."""
        return self._log.intact()

    def close(self) -> None:
        """Close the files."""
        self._log.close()

    def _write(self, record: bytes) -> None:
        self._begun = False
        self._push(record, None, self._header_time())
        self._write_out()

    def _push_again(self, row: Again) -> None:
        record = event_notes.again_record(row.wall_time, row.step, row.points)
        self._history.again_bytes += len(record) - 16
        self._push(record, row.step, row.wall_time)

    def _push(self, record: bytes, step: int | None, time: float) -> int:
        """Take a record to be written; its place."""
        if not self._begun:
            self._begin(record, step, time)
        place = self._place
        self._place += len(record)
        self._pending.append(record)
        return place

    def _begin(self, record: bytes, step: int | None, time: float) -> None:
        """Before the first record of a call: add what the header lacks, and begin a new segment where one is needed."""
        self._begun = True
        if self._epoch is None:
            self._epoch = time
        log = self._log
        lead = self._lead(step)
        whole = b"".join(lead.values())
        if not log.takes(whole + record):
            if set(lead) <= {"hparams"} and log.takes(record):
                lead = {}  # complete what is torn first
            else:
                log.begin(self._epoch)
                self._has -= {"version", "start"}
                lead = self._lead(step)
        self._has.update(lead)
        self._pending.extend(lead.values())
        self._place = log.end + sum(map(len, lead.values()))

    def _lead(self, step: int | None) -> dict[str, bytes]:
        """Records of the header that the last segment lacks. Its START takes no points away."""
        lead: dict[str, bytes] = {}
        time = self._header_time()
        if "start" not in self._has:
            if "version" not in self._has:
                lead["version"] = event_notes.version_record(time)
            top = self._history.top
            first = 0 if step is None else step
            lead["start"] = event_notes.start_record(
                "start", time, first if top is None else _clamped(max(first, top + 1))
            )
        if self._describes() and "describe" not in self._has:
            lead["describe"] = event_notes.describe_record(time, {})
        if self._config is not None and "hparams" not in self._has:
            lead["hparams"] = event_notes.hparams_record(time, self._config)
        return lead

    def _write_out(self) -> None:
        if self._pending:
            data = b"".join(self._pending)
            self._pending.clear()
            self._log.append(data)

    def _header_time(self) -> float:
        return self._started if self._epoch is None else self._epoch

    def _fallback_time(self) -> float:
        return self._header_time() if self._last_time is None else self._last_time


def _meaning(found: Description) -> str:
    return f"{found.meaning} ({found.unit})" if found.unit else found.meaning


def _texts(texts: Mapping[str, str]) -> bytes:
    """Text values of a row, masked and capped, as what goes behind its points: one summary's values, without its own frame."""
    values = b""
    for key, text in texts.items():
        shown, note = event_notes.capped(mask_text(text))
        values += event_notes.text_value(f"runmirror/text/{key}", note + shown)
    return values


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()


def _clamped(step: int) -> int:
    return min(max(step, -_INT64), _INT64 - 1)
