"""MLflow as a mirror of runs: a tracking server, or a database that is opened directly.

Guarantees:

- A tag of the run holds the position, written in one request with the points before it, so it never tells more than MLflow
  has. A request whose answer got lost is repeated with the same points, which MLflow's stores keep once (times and steps
  come from the log alone). It stays below a row with a rejected key until the mirror had the chance to record that.
- Steps are exact, times whole milliseconds, values 64-bit; NaN is kept. Infinite values are left out (MLflow would show
  1.8e308) and counted in the tag ``runmirror.infinite``.
- A key that MLflow refuses gets another name by which no two keys merge (:mod:`runmirror.sinks.keys`); the artifact
  ``runmirror/keys.json`` lists those.
- The user's own active run, tracking URI and environment stay as they are (:mod:`runmirror.sinks.mlflow_client`).
  Importing this module and checking its options imports no MLflow.
"""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

from runmirror.exceptions import Refused, Retry
from runmirror.log.layout import Kind
from runmirror.log.masking import mask_url
from runmirror.log.repository import parse_code_header
from runmirror.log.rows import Row, decode
from runmirror.sinks.base import Capabilities, Check, LogFile, Opened, Point, Rejected, RunInfo, SinkOptions
from runmirror.sinks.checks import check_disk, check_folder
from runmirror.sinks.keys import MLFLOW, KeyMap, encode
from runmirror.sinks.mlflow_client import Invalid, explained, make_client, resolve_uri, run_url, sqlite_file
from runmirror.sinks.mlflow_files import TAG, artifact_name, listed, masked, rollout_table
from runmirror.sinks.mlflow_note import NOTE, first_note, with_metrics
from runmirror.sinks.mlflow_options import MlflowOptions
from runmirror.sinks.mlflow_run import (
    CURSOR,
    IMPORT,
    INFINITE,
    KEY,
    KEYS,
    STATUS,
    TAG_LENGTH,
    HeldRun,
    Runs,
    describe,
    send,
    text_for,
)
from runmirror.sinks.texts import row_texts

ENTITIES = 1000
"""Points and tags that MLflow takes in a request; the position is one."""
LONGEST_KEY = 5000
TEXT = "runmirror.text."
"""Tag of the last text that rows have under a key, which follows."""
TEXTS, LONGEST_TAG = 50, 250
"""Keys whose texts are told at most, and characters of a tag's name."""
PUT_SECONDS = 45.0
"""After this long, a put is cut short: the mirror then sends fewer rows at once."""
log = logging.getLogger("runmirror")
_ALL: frozenset[Kind] = frozenset({"config", "code", "checkpoints", "report", "logtree", "rollouts"})


class MlflowSink:
    """Mirrors one run into MLflow."""

    name: ClassVar[str] = "mlflow"
    Options: ClassVar[type[SinkOptions]] = MlflowOptions
    requires: ClassVar[tuple[str, ...]] = ("mlflow",)
    capabilities: ClassVar[Capabilities] = Capabilities(
        max_rows=500,  # a server takes seconds for so many, and after a failure they are the ones to repeat
        precision="float64",
        keys="letters, digits and _ / . - : and space, as a clean path of 250 characters; others are encoded as _xHHHH_",
        nonfinite="nan",
        rewinds="append",
        records=_ALL,
        default_records=frozenset({"config", "code", "checkpoints"}),
        time_precision=0.001,
        equal_points="once",
    )

    def __init__(self, options: MlflowOptions) -> None:
        self._options = options
        self._uri = resolve_uri(options.tracking_uri)
        self._client: Any = None
        self._runs: Runs | None = None
        self._held: HeldRun | None = None
        self._keys = KeyMap(MLFLOW)
        self._position = self._infinite = 0  # as the tags say
        self._reached = 0  # what MLflow has, perhaps more than the tag says
        self._left_out: list[int] = []  # ordinals of infinite values behind the position
        self._told: set[str] = set()  # hashes of cut keys whose tag is there
        self._texts: dict[str, str] = {}  # tag -> the last text of a key
        self._listed = 0  # changed names that keys.json has
        self._made = self._fresh = self._noted = False
        self._rebuilt: str | None = None

    def destination(self) -> str:
        """The tracking URI, credentials masked, and the experiment when one was named."""
        named = self._options.experiment_id or self._options.experiment
        return mask_url(self._uri) + (f"#{named}" if named else "")

    def open(self, run: RunInfo, tracker_run_id: str | None) -> Opened:
        """Find or make the run, and read the position from its tag."""
        self.close(None, 0)
        with self._explained():
            held = self._find(run, tracker_run_id)
            fresh = held is None
            if held is None:
                held = self._connect().create(run, self._new_tags(run), self._options.name)
                if self._options.rebuild:
                    self._rebuilt = held.run_id
            self._held, self._fresh, self._made = held, bool(self._import_tag()), fresh
            self._keys = KeyMap(MLFLOW)
            self._told = {tag[len(KEY) :] for tag in held.tags if tag.startswith(KEY)}
            self._keys.cut = {tag[len(KEY) :]: key for tag, key in held.tags.items() if tag.startswith(KEY)}
            for name in held.metrics:
                self._keys.name(self._keys.key(name))
            self._listed = _number(held.tags.get(KEYS)) or 0
            position, self._infinite = _number(held.tags.get(CURSOR)), _number(held.tags.get(INFINITE)) or 0
            self._position = self._reached = position or 0
            self._left_out, self._noted = [], False
            self._texts = {tag: text for tag, text in held.tags.items() if tag.startswith(TEXT)}
            self._connect().add_params(held, run.config, run.resumes)
            return Opened(run_url(self._uri, held.experiment_id, held.run_id), held.run_id, position)

    def put(self, rows: Sequence[Row]) -> list[Rejected]:
        """Send rows, up to 999 points at a time. Those that MLflow has are passed over."""
        self._opened()
        before = self._reached
        try:
            return self._put(rows, [])
        except Retry as error:
            if self._reached > before and error.after is None:
                error.after = 0.5  # it took some: no reason to wait ever longer
            raise

    def _put(self, rows: Sequence[Row], rejected: list[Rejected]) -> list[Rejected]:
        from_now = time.monotonic() + PUT_SECONDS
        with self._explained():
            self._confirm()
            rows = [row for row in rows if row.ordinal >= self._position]
            if not rows:
                return rejected
            self._revive()
            batch: list[tuple[int, str, Any]] = []
            for row in rows:
                batch += self._points(row, rejected)
                while len(batch) >= (room := self._room()):
                    rest = batch[room:]
                    whole = rest[0][0] if rest else row.ordinal + 1
                    self._send(batch[:room], whole, rejected)
                    batch = rest
                if time.monotonic() > from_now and row is not rows[-1]:
                    break
            else:
                self._send(batch, rows[-1].ordinal + 1, rejected)
                return rejected
        raise TimeoutError(f"MLflow took {PUT_SECONDS:g} s for less than {len(rows)} rows")

    def put_file(self, file: LogFile) -> None:
        """Send a file as an artifact, rollouts also as a table. Of a code diff only commit and branch are told, unless
        ``records`` names ``code``."""
        held = self._opened()
        content = file.read()
        with self._explained():
            if file.kind == "config" and isinstance(
                late := decode(content), dict
            ):  # log_config adds to it while a run goes on
                self._connect().add_params(held, late)
            if file.kind == "code":
                for name, value in parse_code_header(content.decode("utf-8", "replace")).items():
                    tag = f"mlflow.source.git.{name}"
                    told = str(value).lower() if name == "dirty" else str(value)
                    if held.tags.get(tag) != told:
                        self._client.set_tag(held.run_id, tag, told)
                if self._options.records is None or "code" not in self._options.records:
                    return
            self._upload(artifact_name(file.path), masked(file.kind, content))
            table = rollout_table(file.path, content) if file.kind == "rollouts" else None
            if table is not None:
                self._upload(*table)
                tables = listed(held.tags.get(TAG), table[0])
                if tables is not None:
                    self._client.set_tag(held.run_id, TAG, tables)
                    held.tags[TAG] = tables

    def flush(self, deadline: float) -> int:
        """The position: ``put`` leaves nothing in memory. Also looks, once, whether another importer made this run first."""
        held = self._opened()
        if not self._noted:
            self._note(held, new=self._made)
            self._noted = True
        with self._explained():
            self._confirm()
        if self._made and self._runs is not None:
            with self._explained():
                kept = self._runs.settle(self._run, held)
            self._made = False
            if kept.run_id != held.run_id:
                raise Retry("another importer made this run first; going on with that one", after=0.01)
        return self._position

    def close(self, run: RunInfo | None, deadline: float) -> None:
        """Tell how the run ended, list the keys with other names, and let go of the run."""
        held = self._held
        if held is None:
            return
        try:
            with self._explained():
                if run is not None and run.status != "running":
                    self._note(held)
                    last = run.start if run.end is None else run.end  # without any MLflow would take the present
                    end = None if last is None else max(1, round(last * 1000))
                    self._client.set_terminated(held.run_id, STATUS[run.status], end)
                self._list_keys(held)
        finally:
            self._held = None

    def read_back(self, run: RunInfo, tracker_run_id: str | None) -> Iterator[Point] | None:
        """Every point of the run; None when MLflow has none, or has it deleted."""
        database = sqlite_file(self._uri)
        if database is not None and not database.exists():
            return None
        with self._explained():
            held = self._look(run, tracker_run_id)
        return None if held is None or held.deleted else self._history(held)

    def refuses(self, key: str) -> str | None:
        """Why MLflow can't keep a metric of this name: it is too long to be told in a tag."""
        return f"longer than {LONGEST_KEY:,} characters" if len(key) > LONGEST_KEY else None

    def check(self) -> list[Check]:
        """Whether the server answers or the database can be opened. Writes nothing."""
        database = sqlite_file(self._uri)
        if database is not None and not database.exists():
            return [
                check_folder("database", database.parent, "another place: --tracking-uri sqlite:///DIR/mlflow.db"),
                check_disk("database's disk", database.parent),
            ]
        try:
            with self._explained():
                self._connect()
                self._client.search_experiments(max_results=1)
        except (Refused, Retry, Invalid) as error:
            fix = "start it (`mlflow server --host 127.0.0.1`), or name another one: --tracking-uri URI"
            return [Check("tracker", False, str(error), fix if isinstance(error, Retry) else "do what it says")]
        return [Check("tracker", True, f"{mask_url(self._uri)} answers")]

    # -- the run

    def _explained(self) -> AbstractContextManager[None]:
        return explained(self._uri)

    def _opened(self) -> HeldRun:
        if self._held is None:
            raise RuntimeError("the sink is not open")
        return self._held

    def _connect(self) -> Runs:
        if self._runs is None:
            self._client = make_client(self._uri)
            named = self._options.experiment or self._options.group or "runmirror"
            self._runs = Runs(self._client, self._uri, named, self._options.experiment_id, self._options.restore)
        return self._runs

    def _look(self, run: RunInfo, tracker_run_id: str | None) -> HeldRun | None:
        """The run as MLflow has it, deleted or not."""
        runs = self._connect()
        held = runs.get(tracker_run_id) if tracker_run_id else None
        if held is not None and held.owner_is(run):
            return held
        named = self._options.experiment or self._options.experiment_id
        found = runs.find(run, everywhere=not named)
        return found[0] if found else None

    def _find(self, run: RunInfo, tracker_run_id: str | None) -> HeldRun | None:
        """The run to go on with; None when a new one is due."""
        self._run = run
        held = self._look(run, tracker_run_id)
        if held is not None and self._options.rebuild and held.run_id != self._rebuilt:
            self._connect().set_aside(held)
            return None
        return self._connect().restored(held) if held is not None and held.deleted else held

    def _new_tags(self, run: RunInfo) -> dict[str, str]:
        """Tags that only a new run gets, beside those that say which it is."""
        given = {key: text_for(value)[:TAG_LENGTH] for key, value in self._options.tags.items()}
        return given | first_note(describe(run), text_for(self._options.notes or "")) | self._import_tag()

    def _import_tag(self) -> dict[str, str]:
        return {IMPORT: self._options.import_id} if self._options.import_id else {}

    def _revive(self) -> None:
        """A run that ended and goes on is running again."""
        held = self._opened()
        if held.status != "RUNNING":
            self._client.update_run(held.run_id, status="RUNNING")
            held.status = "RUNNING"

    def _note(self, held: HeldRun, new: bool = False) -> None:
        """Say in the description what the metrics mean, unless somebody has changed it since the run was opened."""
        from mlflow.entities import RunTag

        tags = with_metrics(held.tags, self._keys.keys())
        if not tags:
            return
        with self._explained():
            now = held if new else self._connect().get(held.run_id)
            if now is None or now.deleted or now.tags.get(NOTE) != held.tags.get(NOTE):
                return
            self._client.log_batch(
                held.run_id, tags=[RunTag(name, text) for name, text in tags.items()], synchronous=True
            )
            held.tags |= tags

    # -- points

    def _points(self, row: Row, rejected: list[Rejected]) -> Iterator[tuple[int, str, Any]]:
        """(ordinal, key, MLflow's metric) of what a row brings."""
        from mlflow.entities import Metric

        when = max(0, round(row.time * 1000))
        for key, text in row_texts(row).items():
            tag = TEXT + encode(key, MLFLOW)
            if len(tag) <= LONGEST_TAG and (tag in self._texts or len(self._texts) < TEXTS):
                self._texts[tag] = text_for(text)
        for key, value in row.scalars().items():
            number = float(value)
            if math.isinf(number):
                self._left_out.append(row.ordinal)
            elif refused := self.refuses(key):
                rejected.append(Rejected(row.ordinal, key, refused))
            else:
                yield row.ordinal, key, Metric(self._keys.name(key), number, when, row.step)

    def _send(self, batch: list[tuple[int, str, Any]], reached: int, rejected: list[Rejected]) -> None:
        """Send points and, with the last of them, the position that MLflow has then; add to what was ``rejected``."""
        self._tell_cut_keys(self._opened())
        metrics, texts = [metric for *_, metric in batch], self._new_texts()
        try:
            self._log(metrics, self._about(reached, rejected) | texts)
        except Invalid:
            self._log([], {"runmirror.format": "1"})  # refuses this too? then it is not about the points
            names = {id(metric): (ordinal, key) for ordinal, key, metric in batch}
            rejected += [Rejected(*names[id(metric)], reason) for metric, reason in send(self._log, metrics)]
            self._log([], self._about(reached, rejected) | texts)
        self._moved(reached, rejected)
        self._opened().tags |= texts

    def _log(self, metrics: list[Any], tags: Mapping[str, str] | None = None) -> None:
        from mlflow.entities import RunTag

        named = [RunTag(name, value) for name, value in (tags or {}).items()]
        with self._explained():
            self._client.log_batch(self._opened().run_id, metrics=metrics, tags=named, synchronous=True)

    def _room(self) -> int:
        """Points beside the tags that :meth:`_about` will tell, and those of texts."""
        return ENTITIES - 1 - bool(self._infinite or self._left_out) - self._fresh - len(self._new_texts())

    def _new_texts(self) -> dict[str, str]:
        """The tags of texts that are others than MLflow has."""
        tags = self._opened().tags
        return {tag: text for tag, text in self._texts.items() if tags.get(tag) != text}

    def _about(self, reached: int, rejected: Sequence[Rejected] = ()) -> dict[str, str]:
        """The tags that tell how far MLflow is: not beyond a row with something that is rejected."""
        position = min([reached, *(one.ordinal for one in rejected)])
        infinite = self._infinite + sum(ordinal < position for ordinal in self._left_out)
        about = {CURSOR: str(position)} | ({INFINITE: str(infinite)} if infinite else {})
        return about | (self._import_tag() if self._fresh else {})

    def _moved(self, reached: int, rejected: Sequence[Rejected] = ()) -> None:
        about = self._about(reached, rejected)
        self._reached, self._position, self._fresh = reached, int(about[CURSOR]), False
        self._infinite = int(about.get(INFINITE, "0"))
        self._left_out = [ordinal for ordinal in self._left_out if ordinal >= self._position]

    def _confirm(self) -> None:
        """Let the tag tell all that MLflow has: what was rejected of it has been recorded by now."""
        if self._reached > self._position:
            self._log([], self._about(self._reached))
            self._moved(self._reached)

    def _tell_cut_keys(self, held: HeldRun) -> None:
        for mark, key in self._keys.cut.items():
            if mark not in self._told:
                self._client.set_tag(held.run_id, KEY + mark, text_for(key))
                self._told.add(mark)

    def _list_keys(self, held: HeldRun) -> None:
        """keys.json, when there are more of them than it has. A place for files that can't be used is no reason to fail."""
        if len(self._keys.changed) <= self._listed:
            return
        text = json.dumps(dict(sorted(self._keys.changed.items())), indent=2, ensure_ascii=True) + "\n"
        try:
            self._upload("runmirror/keys.json", text.encode())
            self._client.set_tag(held.run_id, KEYS, str(len(self._keys.changed)))
        except Exception as error:
            if isinstance(error, OSError) or getattr(error, "error_code", None):
                raise  # may pass
            log.warning("mlflow: the list of encoded keys could not be stored: %s", error)
        self._listed = len(self._keys.changed)

    def _history(self, held: HeldRun) -> Iterator[Point]:
        cut = {tag[len(KEY) :]: key for tag, key in held.tags.items() if tag.startswith(KEY)}
        names = KeyMap(MLFLOW, cut=cut)
        for name in held.metrics:
            key = names.key(name).encode("utf-8", "replace").decode()
            with self._explained():
                metrics = self._client.get_metric_history(held.run_id, name)
            for metric in metrics:
                yield Point(key, int(metric.step), metric.timestamp / 1000, float(metric.value))

    def _upload(self, name: str, content: bytes) -> None:
        folder, _, base = name.rpartition("/")
        with tempfile.TemporaryDirectory(prefix="runmirror-") as temporary:
            Path(temporary, base).write_bytes(content)
            self._client.log_artifact(self._opened().run_id, os.path.join(temporary, base), folder or None)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None
