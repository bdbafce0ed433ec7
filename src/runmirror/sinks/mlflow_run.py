"""A run of ours in MLflow: found, made, restored or set aside, and described.

Guarantees:

- A log has one run: it is known by a tag that is a hash of our run id. Of several, made by importers on two hosts that
  did not see each other, all keep the one made first; whoever made another one removes it.
- A run that somebody deleted stays deleted, unless ``restore`` says otherwise.
- What is written as a param is never changed: the first value stays, a later one is told in a tag.
- Nothing else of anybody's is touched.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from runmirror.exceptions import Refused
from runmirror.log.masking import MASK, is_secret_key, mask_text, mask_url
from runmirror.sinks.base import RunInfo
from runmirror.sinks.keys import MLFLOW, KeyMap
from runmirror.sinks.mlflow_client import Invalid, sqlite_file

RUN, CREATED, IMPORT = "runmirror.run", "runmirror.created", "runmirror.import"
CURSOR, INFINITE, PARAMS = "runmirror.cursor", "runmirror.infinite", "runmirror.params"
KEY = "runmirror.key."
"""Tag of a key that had to be cut; its hash follows."""
PARAM_LENGTH = 6000
PARAMS_AT_ONCE = 100
STATUS = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED", "running": "RUNNING"}
_CUT = " ... (cut; whole in config.json)"
_experiments: dict[tuple[str, str], str] = {}


@dataclass(slots=True)
class HeldRun:
    """A run as MLflow has it."""

    run_id: str
    experiment_id: str
    status: str
    deleted: bool
    name: str
    tags: dict[str, str]
    params: dict[str, str]
    metrics: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, run: Any) -> HeldRun:
        """From MLflow's own."""
        info, data = run.info, run.data
        deleted = info.lifecycle_stage == "deleted"
        name = info.run_name or ""
        return cls(
            info.run_id,
            info.experiment_id,
            info.status,
            deleted,
            name,
            dict(data.tags),
            dict(data.params),
            list(data.metrics),
        )

    def owner_is(self, run: RunInfo) -> bool:
        """Whether this is the run of that log."""
        return self.tags.get(RUN) == token(run)


class Runs:
    """The runs of one experiment.

    Args:
        client: an MlflowClient.
        uri: its tracking URI.
        experiment: the name of the experiment; made when it is not there.
        experiment_id: its id, when that is what was given; wins.
        restore: take deleted runs and experiments back.
    """

    def __init__(self, client: Any, uri: str, experiment: str, experiment_id: str | None, restore: bool) -> None:
        self._client, self._uri, self._name, self._restore = client, uri, experiment[:250], restore
        self._id = self._given = experiment_id

    def experiment(self, make: bool = True) -> str | None:
        """The id of the experiment; None when it is not there and not to be made. Raises Refused when it is deleted."""
        if self._id is None:
            self._id = _experiments.get((self._uri, self._name))
        if self._id is not None:
            return self._id
        found = self._client.get_experiment_by_name(self._name)
        if found is None and make:
            try:
                self._client.create_experiment(
                    self._name, self._artifacts(), {"mlflow.experimentKind": "custom_model_development"}
                )
            except Exception:  # somebody else made it just now, says MLflow in one way or another
                if self._client.get_experiment_by_name(self._name) is None:
                    raise
            found = self._client.get_experiment_by_name(self._name)
        if found is None:
            return None
        if found.lifecycle_stage == "deleted":
            if not make:
                return str(found.experiment_id)
            if not self._restore:
                raise Refused(
                    f"the experiment {self._name!r} was deleted in {mask_url(self._uri)}: say --restore "
                    "(-o restore=true), or name another one with --experiment"
                )
            self._client.restore_experiment(found.experiment_id)
        self._id = _experiments[self._uri, self._name] = str(found.experiment_id)
        return self._id

    def _artifacts(self) -> str | None:
        """Where files of a new experiment go: beside a SQLite database, else where the server says. (MLflow itself would take
        the working directory.)"""
        database = sqlite_file(self._uri)
        safe = hashlib.sha256(self._name.encode("utf-8", "replace")).hexdigest()[:12]
        return None if database is None else (database.parent / "mlartifacts" / safe).as_uri()

    def get(self, run_id: str) -> HeldRun | None:
        """A run by its id; None when it is gone for good."""
        try:
            return HeldRun.of(self._client.get_run(run_id))
        except Exception as error:
            if getattr(error, "error_code", None) == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise

    def find(self, run: RunInfo, everywhere: bool = False) -> list[HeldRun]:
        """The runs of a log, the one to keep first: those that are not deleted, by when they were made.

        ``everywhere`` looks in every experiment, for imports of one log under two roots.
        """
        if everywhere:
            experiments = [str(one.experiment_id) for one in self._client.search_experiments(max_results=500)]
        else:
            known = self.experiment(make=False)
            experiments = [] if known is None else [known]
        if not experiments:
            return []
        query = f"tags.`{RUN}` = '{token(run)}'"
        found = [HeldRun.of(one) for one in self._client.search_runs(experiments, query, 3, 20)]  # 3: deleted too
        return sorted(found, key=lambda one: (one.deleted, one.tags.get(CREATED, ""), one.run_id))

    def create(self, run: RunInfo, tags: Mapping[str, str]) -> HeldRun:
        """A new run, unless another importer made one at the same time: then that."""
        experiment = self.experiment()
        about = {RUN: token(run), CREATED: f"{time.time_ns():020d}", CURSOR: "0", "mlflow.source.type": "LOCAL"}
        about |= {"mlflow.source.name": "runmirror", "mlflow.note.content": describe(run), **tags}
        start = None if run.start is None else max(1, round(run.start * 1000))
        try:
            made = self._client.create_run(experiment, start_time=start, tags=about, run_name=(run.name or "run")[:250])
        except Exception:
            self._id = self._given  # the experiment may be gone: look again next time
            _experiments.pop((self._uri, self._name), None)
            raise
        return self.settle(run, HeldRun.of(made))

    def settle(self, run: RunInfo, made: HeldRun) -> HeldRun:
        """The run to keep, after one was made: the first. Our own is removed when it is another."""
        found = [one for one in self.find(run) if not one.deleted]
        if not found or found[0].run_id == made.run_id:
            return made
        self._client.set_tag(made.run_id, RUN, f"double of {found[0].run_id}")
        self._client.delete_run(made.run_id)
        return found[0]

    def restored(self, held: HeldRun) -> HeldRun:
        """A deleted run, taken back. Raises Refused unless that was asked for."""
        if not self._restore:
            raise Refused(
                f"the run {held.name!r} was deleted in {mask_url(self._uri)} and stays deleted; say --restore "
                "(-o restore=true) to take it back"
            )
        self._client.restore_run(held.run_id)
        return self.get(held.run_id) or held

    def set_aside(self, held: HeldRun) -> None:
        """Rename a run that a rebuilt one replaces; nothing is deleted."""
        self._client.set_tag(held.run_id, "mlflow.runName", f"{held.name[:200]} (superseded)")
        self._client.set_tag(held.run_id, RUN, f"superseded: {held.tags.get(RUN, '')}")

    def add_params(self, held: HeldRun, config: Mapping[str, Any] | None) -> None:
        """The configuration as params: those that are new. Changed and refused ones are told in a tag."""
        from mlflow.entities import Param

        names = KeyMap(MLFLOW)
        wanted = {names.name(key): value for key, value in flatten(config or {})}
        notes = {name: f"now {value}" for name, value in wanted.items() if held.params.get(name, value) != value}
        new = [(name, value) for name, value in wanted.items() if name not in held.params]
        for start in range(0, len(new), PARAMS_AT_ONCE):
            some = [Param(name, value) for name, value in new[start : start + PARAMS_AT_ONCE]]
            try:
                self._client.log_batch(held.run_id, params=some, synchronous=True)
            except Exception as error:
                if getattr(error, "error_code", None) not in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST"):
                    raise
                notes |= dict(self._one_by_one(held.run_id, some))
        held.params = wanted | held.params
        text = json.dumps(notes, ensure_ascii=False)[:8000]
        if notes and held.tags.get(PARAMS) != text:
            self._client.set_tag(held.run_id, PARAMS, text)
            held.tags[PARAMS] = text

    def _one_by_one(self, run_id: str, params: list[Any]) -> Iterator[tuple[str, str]]:
        for param in params:
            try:
                self._client.log_batch(run_id, params=[param], synchronous=True)
            except Exception as error:
                if getattr(error, "error_code", None) not in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST"):
                    raise
                yield param.key, f"refused: {str(error)[:200]}"


def token(run: RunInfo) -> str:
    """The opaque name of a log: safe in a filter, whatever the run id is."""
    return hashlib.sha256(run.run_id.encode("utf-8", "replace")).hexdigest()[:32]


def describe(run: RunInfo) -> str:
    """The description of a run, in Markdown."""
    times = {"row": "", "arrival": " Times: when the rows were seen."}.get(
        run.time_source, " Times: told from reports and files."
    )
    return f"Mirrored by runmirror from a {run.source} log.{times}"


def flatten(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """A configuration as (``a.b.c``, text) pairs: lists as JSON, text as it is, cut to what MLflow takes."""
    for key, value in config.items():
        name = f"{above}.{key}" if above else str(key)
        if isinstance(value, Mapping) and value:
            yield from flatten(value, name)
            continue
        if is_secret_key(str(key)) and not isinstance(value, (bool, type(None))):
            value = MASK
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        text = mask_text(text[: 2 * PARAM_LENGTH].encode("utf-8", "replace").decode())
        if len(text) > PARAM_LENGTH:
            text = text[: PARAM_LENGTH - len(_CUT)] + _CUT
        yield name, text


def send(put: Callable[[list[Any]], None], metrics: list[Any]) -> list[tuple[Any, str]]:
    """Hand over metrics, in halves where MLflow refuses some; (metric, reason) of those it can never take.

    Servers before 3.16 refuse a whole batch for a point that they have: that point counts as delivered.
    """
    try:
        put(metrics)
        return []
    except Invalid as error:
        if len(metrics) > 1:
            half = len(metrics) // 2
            return send(put, metrics[:half]) + send(put, metrics[half:])
        known = any(word in str(error).lower() for word in ("unique", "duplicate"))
        return [] if known or not metrics else [(metrics[0], str(error))]
