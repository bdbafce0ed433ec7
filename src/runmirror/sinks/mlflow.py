"""MLflow as a mirror of runs: a tracking server, or a database that is opened directly.

Guarantees:

- A tag of the run holds the position, written in one request with the points before it, so it never tells more than MLflow
  has. A request whose answer got lost is repeated with the same points, which MLflow's stores keep once (times and steps
  come from the log alone).
- Steps are exact, times whole milliseconds, values 64-bit; NaN is kept. Infinite values are left out (MLflow would show
  1.8e308) and counted in the tag ``runmirror.infinite``.
- A key that MLflow refuses gets another name by which no two keys merge (:mod:`runmirror.sinks.keys`); the artifact
  ``runmirror/keys.json`` lists those.
- The user's own active run, tracking URI and environment stay as they are (:mod:`runmirror.sinks.mlflow_client`).
  Importing this module and checking its options imports no MLflow.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, model_validator

from runmirror.exceptions import Refused, Retry
from runmirror.log.layout import Kind
from runmirror.log.masking import mask_url
from runmirror.log.repository import parse_code_header
from runmirror.log.rows import Row
from runmirror.sinks.base import Capabilities, Check, LogFile, Opened, Point, Rejected, RunInfo, SinkOptions, env_field
from runmirror.sinks.checks import check_disk, check_folder
from runmirror.sinks.keys import ARTIFACT, MLFLOW, KeyMap, encode
from runmirror.sinks.mlflow_client import Invalid, explained, make_client, resolve_uri, sqlite_file
from runmirror.sinks.mlflow_run import CURSOR, IMPORT, INFINITE, KEY, STATUS, HeldRun, Runs, send

POINTS = 999
"""Points in a request: MLflow takes 1,000 entities, and the position is one."""
LONGEST_KEY = 5000
PUT_SECONDS = 45.0
"""After this long, a put is cut short: the mirror then sends fewer rows at once."""
_ALL: frozenset[Kind] = frozenset({"config", "code", "checkpoints", "report", "logtree", "rollouts"})


class MlflowOptions(SinkOptions):
    """Options of the MLflow sink."""

    tracking_uri: str | None = env_field(
        None, "MLFLOW_TRACKING_URI", "server or database; default sqlite:///mlflow.db in the working directory"
    )
    experiment: str | None = env_field(None, "MLFLOW_EXPERIMENT_NAME", "experiment to use; made when it is not there")
    experiment_id: str | None = env_field(None, "MLFLOW_EXPERIMENT_ID", "id of an experiment that is there")
    group: str = Field(
        "runmirror", description="experiment to use when none is named; an import says its folder's name"
    )
    restore: bool = Field(False, description="take a deleted run or experiment back instead of leaving it deleted")
    rebuild: bool = Field(False, description="make the run anew; the old one is renamed '... (superseded)' and kept")
    import_id: str | None = Field(None, description="tag for the runs that get something; an import makes one")

    @model_validator(mode="before")
    @classmethod
    def _one_experiment(cls, given: Any) -> Any:
        """A name or an id that was given stands for itself, whatever the environment says of the other one
        (``mlflow.set_experiment`` leaves an id there); of two in the environment the name counts."""
        if isinstance(given, dict):
            if given.get("experiment") or ("experiment_id" not in given and os.environ.get("MLFLOW_EXPERIMENT_NAME")):
                return {"experiment_id": None, **given}
            if given.get("experiment_id"):
                return {"experiment": None, **given}
        return given


class MlflowSink:
    """Mirrors one run into MLflow."""

    name: ClassVar[str] = "mlflow"
    Options: ClassVar[type[SinkOptions]] = MlflowOptions
    requires: ClassVar[tuple[str, ...]] = ("mlflow",)
    capabilities: ClassVar[Capabilities] = Capabilities(
        max_rows=1000,
        precision="float64",
        keys="letters, digits and _ / . - : and space, as a clean path of 250 characters; others are encoded as _xHHHH_",
        nonfinite="nan",
        rewinds="append",
        records=_ALL,
        default_records=frozenset({"config", "code", "checkpoints"}),
        time_precision=0.001,
    )

    def __init__(self, options: MlflowOptions) -> None:
        self._options = options
        self._uri = resolve_uri(options.tracking_uri)
        self._client: Any = None
        self._runs: Runs | None = None
        self._held: HeldRun | None = None
        self._keys = KeyMap(MLFLOW)
        self._position = self._infinite = 0
        self._left_out: list[int] = []  # ordinals of infinite values behind the position
        self._told: set[str] = set()  # hashes of cut keys whose tag is there
        self._listed = 0  # changed names that keys.json has
        self._made = self._fresh = False
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
                held = self._connect().create(run, self._import_tag())
                if self._options.rebuild:
                    self._rebuilt = held.run_id
            self._held, self._fresh, self._made = held, bool(self._import_tag()), fresh
            self._keys = KeyMap(MLFLOW)
            self._told = {tag[len(KEY) :] for tag in held.tags if tag.startswith(KEY)}
            self._keys.cut = {tag[len(KEY) :]: key for tag, key in held.tags.items() if tag.startswith(KEY)}
            for name in held.metrics:
                self._keys.name(self._keys.key(name))
            self._listed = len(self._keys.changed)
            position, self._infinite = _number(held.tags.get(CURSOR)), _number(held.tags.get(INFINITE)) or 0
            self._position, self._left_out = position or 0, []
            self._connect().add_params(held, run.config)
            return Opened(self._url(held), held.run_id, position)

    def put(self, rows: Sequence[Row]) -> list[Rejected]:
        """Send rows, 999 points at a time. Those that MLflow has are passed over."""
        self._opened()
        rows = [row for row in rows if row.ordinal >= self._position]
        rejected: list[Rejected] = []
        if not rows:
            return rejected
        from_now = time.monotonic() + PUT_SECONDS
        with self._explained():
            self._revive()
            batch: list[tuple[int, str, Any]] = []
            for row in rows:
                batch += self._points(row, rejected)
                while len(batch) >= POINTS:
                    rest = batch[POINTS:]
                    whole = rest[0][0] if rest else row.ordinal + 1
                    rejected += self._send(batch[:POINTS], whole)
                    batch = rest
                    if time.monotonic() > from_now and row is not rows[-1]:
                        raise TimeoutError(f"MLflow took {PUT_SECONDS:g} s for less than {len(rows)} rows")
            rejected += self._send(batch, rows[-1].ordinal + 1)
        return rejected

    def put_file(self, file: LogFile) -> None:
        """Send a file as an artifact. Of a code diff only commit and branch are told, unless ``records`` names ``code``."""
        held = self._opened()
        content = file.read()
        with self._explained():
            if file.kind == "code":
                for name, value in parse_code_header(content.decode("utf-8", "replace")).items():
                    tag = f"mlflow.source.git.{name}"
                    if held.tags.get(tag) != str(value).lower():
                        self._client.set_tag(held.run_id, tag, str(value).lower() if name == "dirty" else str(value))
                if self._options.records is None or "code" not in self._options.records:
                    return
            self._upload(artifact_name(file.path), content)

    def flush(self, deadline: float) -> int:
        """The position: ``put`` leaves nothing in memory. Also looks, once, whether another importer made this run first."""
        held = self._opened()
        if self._made and self._runs is not None:
            with self._explained():
                kept = self._runs.settle(self._run, held)
            self._made = False
            if kept.run_id != held.run_id:
                raise Retry("another importer made this run first; going on with that one", after=0.01)
        return self._position

    def close(self, run: RunInfo | None, deadline: float) -> None:
        """List the keys with other names, tell how the run ended, and let go of it."""
        held, self._held = self._held, None
        if held is None:
            return
        with self._explained():
            if len(self._keys.changed) > self._listed:
                text = json.dumps(dict(sorted(self._keys.changed.items())), indent=2, ensure_ascii=True) + "\n"
                self._held = held
                self._upload("runmirror/keys.json", text.encode())
                self._held = None
            if run is not None and run.status != "running":
                end = None if run.end is None else max(1, round(run.end * 1000))
                self._client.set_terminated(held.run_id, STATUS[run.status], end)

    def read_back(self, run: RunInfo, tracker_run_id: str | None) -> Iterator[Point] | None:
        """Every point of the run; None when MLflow has none, or has it deleted."""
        database = sqlite_file(self._uri)
        if database is not None and not database.exists():
            return None
        with self._explained():
            held = self._look(run, tracker_run_id)
            return None if held is None or held.deleted else iter(list(self._history(held)))

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
        found = runs.find(run) or (runs.find(run, everywhere=True) if not named else [])
        return found[0] if found else None

    def _find(self, run: RunInfo, tracker_run_id: str | None) -> HeldRun | None:
        """The run to go on with; None when a new one is due."""
        self._run = run
        held = self._look(run, tracker_run_id)
        if held is not None and self._options.rebuild and held.run_id != self._rebuilt:
            self._connect().set_aside(held)
            return None
        return self._connect().restored(held) if held is not None and held.deleted else held

    def _import_tag(self) -> dict[str, str]:
        return {IMPORT: self._options.import_id} if self._options.import_id else {}

    def _url(self, held: HeldRun) -> str:
        mark = "/#" if self._uri.startswith("http") else "#"
        return f"{mask_url(self._uri)}{mark}/experiments/{held.experiment_id}/runs/{held.run_id}"

    def _revive(self) -> None:
        """A run that ended and goes on is running again."""
        held = self._opened()
        if held.status != "RUNNING":
            self._client.update_run(held.run_id, status="RUNNING")
            held.status = "RUNNING"

    # -- points

    def _points(self, row: Row, rejected: list[Rejected]) -> Iterator[tuple[int, str, Any]]:
        """(ordinal, key, MLflow's metric) of what a row brings."""
        from mlflow.entities import Metric

        when = max(0, round(row.time * 1000))
        for key, value in row.scalars().items():
            number = float(value)
            if math.isinf(number):
                self._left_out.append(row.ordinal)
            elif refused := self.refuses(key):
                rejected.append(Rejected(row.ordinal, key, refused))
            else:
                yield row.ordinal, key, Metric(self._keys.name(key), number, when, row.step)

    def _send(self, batch: list[tuple[int, str, Any]], position: int) -> list[Rejected]:
        """Send points and, with the last of them, the position that MLflow has then."""
        from mlflow.entities import RunTag

        held = self._opened()
        self._tell_cut_keys(held)
        infinite = self._infinite + sum(ordinal < position for ordinal in self._left_out)
        about = {CURSOR: str(position)} | ({INFINITE: str(infinite)} if infinite else {})
        about |= self._import_tag() if self._fresh else {}
        tags = [RunTag(name, value) for name, value in about.items()]
        room = POINTS + 1 - len(tags)

        def log(metrics: list[Any], tags: Sequence[Any] = ()) -> None:
            with self._explained():
                self._client.log_batch(held.run_id, metrics=metrics, tags=tags, synchronous=True)

        metrics = [metric for *_, metric in batch]
        early, last = metrics[: max(0, len(metrics) - room)], metrics[max(0, len(metrics) - room) :]
        refused: list[tuple[Any, str]] = send(log, early) if early else []
        try:
            log(last, tags)
        except Invalid:
            log([], [RunTag("runmirror.format", "1")])  # refuses this too? then it is not about the points
            refused += send(log, last)
            log([], tags)
        self._position, self._infinite, self._fresh = position, infinite, False
        self._left_out = [ordinal for ordinal in self._left_out if ordinal >= position]
        names = {id(metric): (ordinal, key) for ordinal, key, metric in batch}
        return [Rejected(*names[id(metric)], reason) for metric, reason in refused]

    def _tell_cut_keys(self, held: HeldRun) -> None:
        for mark, key in self._keys.cut.items():
            if mark not in self._told:
                self._client.set_tag(held.run_id, KEY + mark, key)
                self._told.add(mark)

    def _history(self, held: HeldRun) -> Iterator[Point]:
        cut = {tag[len(KEY) :]: key for tag, key in held.tags.items() if tag.startswith(KEY)}
        names = KeyMap(MLFLOW, cut=cut)
        for name in held.metrics:
            key = names.key(name).encode("utf-8", "replace").decode()
            for metric in self._client.get_metric_history(held.run_id, name):
                yield Point(key, int(metric.step), metric.timestamp / 1000, float(metric.value))

    def _upload(self, name: str, content: bytes) -> None:
        folder, _, base = name.rpartition("/")
        with tempfile.TemporaryDirectory(prefix="runmirror-") as temporary:
            Path(temporary, base).write_bytes(content)
            self._client.log_artifact(self._opened().run_id, os.path.join(temporary, base), folder or None)


def artifact_name(path: str) -> str:
    """The name of a file of the log among a run's artifacts: MLflow shows ``code.diff.txt``, not ``code.diff``."""
    return encode(f"{path}.txt" if path.endswith((".diff", ".patch")) else path, ARTIFACT)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None
