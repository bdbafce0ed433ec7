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
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runmirror.exceptions import Refused
from runmirror.log.masking import mask_url, mask_values
from runmirror.sinks.base import RunInfo
from runmirror.sinks.keys import MLFLOW, KeyMap
from runmirror.sinks.mlflow_client import Invalid, sqlite_file
from runmirror.sinks.resumes import changed

RUN, CREATED, IMPORT = "runmirror.run", "runmirror.created", "runmirror.import"
CURSOR, INFINITE, PARAMS = "runmirror.cursor", "runmirror.infinite", "runmirror.params"
RESUME = "runmirror.resume."
"""Tag of what a resume's configuration has otherwise; its number follows."""
KEYS = "runmirror.keys"
"""Tag that counts the keys in keys.json."""
KEY = "runmirror.key."
"""Tag of a key that had to be cut; its hash follows."""
PARAM_LENGTH = 6000
PARAMS_AT_ONCE = 100
TAG_LENGTH = 5000
KEYS_AT_ONCE = 100
"""So many keys an old server takes at once when it has points of them."""
STATUS = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED", "running": "RUNNING"}
_CUT = " ... (cut; whole in config.json)"
_THERE = re.compile(r"unique constraint|duplicate (key|entry)", re.IGNORECASE)
"""What databases say of a point that is there; the error may name the metric, so a word alone says nothing."""
EXPERIMENTS_SECONDS = 60.0
"""For so long the list of all experiments counts as fresh."""
_experiments: dict[tuple[str, str], str] = {}
_everywhere: dict[str, tuple[float, list[str]]] = {}


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
        self._client, self._uri, self._name, self._restore = client, uri, text_for(experiment)[:250], restore
        self._given = experiment_id
        self._id: str | None = None
        self._place = uri, self._name if experiment_id is None else f"id {experiment_id}"

    def experiment(self, make: bool = True) -> str | None:
        """The id of the experiment; None when it is not there and not to be made. Raises Refused when it is deleted, or was
        given by an id that is not there."""
        if self._id is None:
            self._id = _experiments.get(self._place)
        if self._id is not None:
            return self._id
        found = self._experiment()
        if found is None and self._given is not None:
            raise Refused(
                f"{mask_url(self._uri)} has no experiment with the id {self._given}: say a name, --experiment NAME, and it is "
                "made when it is not there"
            )
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
                    f"the experiment {found.name!r} was deleted in {mask_url(self._uri)}: say --restore "
                    "(-o restore=true), or name another one with --experiment"
                )
            self._client.restore_experiment(found.experiment_id)
        self._id = _experiments[self._place] = str(found.experiment_id)
        return self._id

    def _experiment(self) -> Any:
        if self._given is None:
            return self._client.get_experiment_by_name(self._name)
        try:
            return self._client.get_experiment(self._given)
        except Exception as error:
            if getattr(error, "error_code", None) in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return None
            raise

    def _all_experiments(self) -> list[str]:
        """The ids of all that are not deleted."""
        when, known = _everywhere.get(self._uri, (-math.inf, []))
        if time.monotonic() - when > EXPERIMENTS_SECONDS:
            known, page = [], None
            while page is None or page.token:
                page = self._client.search_experiments(max_results=1000, page_token=page.token if page else None)
                known += [str(one.experiment_id) for one in page]
            _everywhere[self._uri] = time.monotonic(), known
        ours = [found for (uri, _), found in _experiments.items() if uri == self._uri]
        return list(dict.fromkeys([*known, *ours]))

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
        known = self.experiment(make=False)
        experiments = [] if known is None else [known]
        if everywhere:
            experiments = list(dict.fromkeys(experiments + self._all_experiments()))
        if not experiments:
            return []
        query = f"tags.`{RUN}` = '{token(run)}'"
        found = [HeldRun.of(one) for one in self._client.search_runs(experiments, query, 3, 20)]  # 3: deleted too
        return sorted(
            found, key=lambda one: (one.deleted, one.experiment_id != known, one.tags.get(CREATED, ""), one.run_id)
        )

    def create(self, run: RunInfo, tags: Mapping[str, str], name: str | None = None) -> HeldRun:
        """A new run, unless another importer made one at the same time: then that."""
        experiment = self.experiment()
        about = {"mlflow.source.name": "runmirror", "mlflow.source.type": "LOCAL", **tags}
        about |= {RUN: token(run), CREATED: f"{time.time_ns():020d}", CURSOR: "0"}
        start = None if run.start is None else max(1, round(run.start * 1000))
        try:
            name = text_for(name or run.name or "run")[:250]
            made = self._client.create_run(experiment, start_time=start, tags=about, run_name=name)
        except Exception:
            self._id = None  # the experiment may be gone: look again next time
            _experiments.pop(self._place, None)
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

    def add_params(
        self, held: HeldRun, config: Mapping[str, Any] | None, resumes: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """The configuration as params: those that are new. Changed and refused ones are told in a tag, and in another what the
        configurations of ``resumes`` have otherwise."""
        from mlflow.entities import Param

        names = KeyMap(MLFLOW)
        wanted = {names.name(key): value for key, value in flatten(config or {})}
        notes = {name: f"now {value[:200]}" for name, value in wanted.items() if held.params.get(name, value) != value}
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
        self._tell(held, PARAMS, notes)
        for number, given in enumerate(resumes, 1):
            other = {name: value[:200] for name, value in flatten(changed(config or {}, given))}
            self._tell(held, f"{RESUME}{number}", other)

    def _tell(self, held: HeldRun, tag: str, notes: dict[str, str]) -> None:
        """Notes as JSON in a tag, as many as it takes; nothing when there are none, or it has them."""
        text = json.dumps(notes, ensure_ascii=False)
        while len(text) > TAG_LENGTH:
            notes = dict(list(notes.items())[: (len(notes) - 1) // 2]) | {"...": "and more"}
            text = json.dumps(notes, ensure_ascii=False)
        if notes and held.tags.get(tag) != text:
            self._client.set_tag(held.run_id, tag, text)
            held.tags[tag] = text

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


def text_for(text: str) -> str:
    """Text as every server and its database takes it: without lone surrogates and NUL."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")


def flatten(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """A configuration as (``a.b.c``, text) pairs: lists as JSON, text as it is, cut to what MLflow takes, secrets masked."""
    yield from _flat(mask_values(config), "")


def _flat(config: Mapping[str, Any], above: str) -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        name = f"{above}.{key}" if above else str(key)
        if isinstance(value, Mapping) and value:
            yield from _flat(value, name)
            continue
        text = text_for(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))
        if len(text) > PARAM_LENGTH:
            text = text[: PARAM_LENGTH - len(_CUT)] + _CUT
        yield name, text


def send(put: Callable[[list[Any]], None], metrics: list[Any]) -> list[tuple[Any, str]]:
    """Hand over metrics, in halves where MLflow refuses some; (metric, reason) of those it can never take.

    Servers before 3.16 refuse a whole batch for points that they have when there are more than 100 keys in it, or a NaN:
    they get those apart, and a single one that they have counts as delivered.
    """
    try:
        put(metrics)
        return []
    except Invalid as error:
        known = _THERE.search(str(error)) is not None
        if len(metrics) > 1:
            size = (len(metrics) + 1) // 2
            parts = [metrics[:size], metrics[size:]]
            if known and size > KEYS_AT_ONCE:
                numbers = [one for one in metrics if one.value == one.value]
                parts = [numbers[at : at + KEYS_AT_ONCE] for at in range(0, len(numbers), KEYS_AT_ONCE)]
                nan = [one for one in metrics if one.value != one.value]
                parts += [nan[:size], nan[size:]]
            return [refused for part in parts if part for refused in send(put, part)]
        return [] if known or not metrics else [(metrics[0], str(error))]
