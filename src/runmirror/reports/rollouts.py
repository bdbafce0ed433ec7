"""Rollouts: what is given of an iteration's trajectories, the records in ``*_rollout_summaries.jsonl``, and their metrics.

The record is tinker-cookbook's (schema_version 1), a line per trajectory. It is strict JSON: NaN and infinities are null,
and named in ``_nonfinite`` (JSON pointer -> "nan", "inf" or "-inf") of the records that have any.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from runmirror.log.rows import coerce
from runmirror.reports.plain import text_of, to_json
from runmirror.reports.tree import Tree

SCHEMA_VERSION = 1


def _number(value: Any) -> Any:
    """numpy, torch and jax scalars as plain numbers; anything else as it is, for pydantic to judge."""
    found = value if type(value) in (int, float, bool) else coerce(value)
    return found if type(found) in (int, float, bool) else value


_PLAIN = frozenset((int, float, bool, str))


def _metrics(value: Any) -> Any:
    if type(value) is dict and _PLAIN.issuperset(map(type, value.values())):
        return value
    return {text_of(key): _number(one) for key, one in value.items()} if isinstance(value, Mapping) else value


Int = Annotated[int, BeforeValidator(_number)]
Float = Annotated[float, BeforeValidator(_number)]
Metrics = Annotated[dict[str, Any], BeforeValidator(_metrics)]


class _Given(BaseModel):
    """What is given may be a mapping, or an object with these attributes (a dataclass, a framework's own class)."""

    model_config = ConfigDict(extra="forbid", from_attributes=True, arbitrary_types_allowed=True)


class Step(_Given):
    """One turn of a trajectory.

    Attributes:
        ob_len, ac_len: tokens of the observation (the prompt so far) and of the action (the answer).
        reward: of this turn.
        step_idx: its number; default its place in the list.
        episode_done: whether the episode ended with it; default: whether it is the last.
        metrics: numbers; their means are ``env/all/<name>``.
        logs: what grading tells: numbers or text.
    """

    ob_len: Int
    ac_len: Int
    reward: Float
    step_idx: Int | None = None
    episode_done: bool | None = None
    metrics: Metrics = Field(default_factory=dict)
    logs: Metrics = Field(default_factory=dict)


class Trajectory(_Given):
    """One answer, or one episode of several turns.

    Attributes:
        steps: its turns.
        final_reward: added at the end, such as by a grader that compares the group; default 0.
        trajectory_metrics: numbers of the whole; their means are ``env/all/<name>``.
        final_ob_len: tokens of the last observation; default 0.
        messages: the conversation (:meth:`~runmirror.reports.tree.Tree.conversation`); goes into the report only.
    """

    steps: list[Step]
    final_reward: Float = 0.0
    trajectory_metrics: Metrics = Field(default_factory=dict)
    final_ob_len: Int = 0
    messages: list[Any] | None = None


class Group(_Given):
    """Trajectories that began alike, such as the answers to one question.

    Attributes:
        trajectories: Trajectory objects, or what makes them.
        tags: what kind of group it is, such as the names of data sets.
        sampling_client_step: the step of the weights that sampled it.
        title: what the report calls it; default its number.
    """

    trajectories: list[Any]
    tags: list[str] = Field(default_factory=list)
    sampling_client_step: Int | None = None
    title: str = ""


@dataclass(slots=True)
class Checked:
    """What is left of given groups: records, and as lines, their conversations (None for none), titles by group, and what
    was left out: (group, trajectory or None, reason, what was given as JSON)."""

    records: list[dict[str, Any]] = field(default_factory=list)
    lines: list[bytes] = field(default_factory=list)
    messages: list[list[Any] | None] = field(default_factory=list)
    titles: dict[int, str] = field(default_factory=dict)
    rejected: list[tuple[int, int | None, str, bytes]] = field(default_factory=list)


def check(groups: Iterable[Any], split: str, iteration: int) -> Checked:
    """The records of groups. What is not as it should be is left out, one trajectory at a time, with the reason."""
    checked = Checked()
    for number, given in enumerate(groups):
        try:
            bare = isinstance(given, Sequence) and not isinstance(given, str | bytes)
            group = Group.model_validate({"trajectories": list(given)} if bare else given)
        except ValidationError as error:
            checked.rejected.append((number, None, _reasons(error), to_json(given)))
            continue
        checked.titles[number] = group.title
        for place, one in enumerate(group.trajectories):
            try:
                trajectory = one if type(one) is Trajectory else Trajectory.model_validate(one)
            except ValidationError as error:
                checked.rejected.append((number, place, _reasons(error), to_json(one)))
                continue
            checked.records.append(_record(trajectory, group, split, iteration, number, place))
            checked.lines.append(encode(checked.records[-1]))
            checked.messages.append(trajectory.messages)
    return checked


def _record(one: Trajectory, group: Group, split: str, iteration: int, number: int, place: int) -> dict[str, Any]:
    last = len(one.steps) - 1
    return {
        "schema_version": SCHEMA_VERSION,
        "split": split,
        "iteration": iteration,
        "group_idx": number,
        "traj_idx": place,
        "tags": group.tags,
        "sampling_client_step": group.sampling_client_step,
        "total_reward": sum(step.reward for step in one.steps) + one.final_reward,
        "final_reward": one.final_reward,
        "trajectory_metrics": one.trajectory_metrics,
        "steps": [
            {
                "step_idx": at if step.step_idx is None else step.step_idx,
                "ob_len": step.ob_len,
                "ac_len": step.ac_len,
                "reward": step.reward,
                "episode_done": at == last if step.episode_done is None else step.episode_done,
                "metrics": step.metrics,
                "logs": step.logs,
            }
            for at, step in enumerate(one.steps)
        ],
        "final_ob_len": one.final_ob_len,
    }


def _reasons(error: ValidationError) -> str:
    """``steps.0.ac_len: Field required; ...``, the first few."""
    found = [f"{'.'.join(map(str, one['loc'])) or 'it'}: {one['msg']}" for one in error.errors()]
    return "; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")


def encode(record: Mapping[str, Any]) -> bytes:
    """The record's line, with its newline."""
    line = to_json(record)
    if line.count(b"null") > (record["sampling_client_step"] is None):  # perhaps a NaN, which JSON has not
        named = dict(_nonfinite(record, ""))
        line = to_json({**record, "_nonfinite": named}) if named else line
    return line + b"\n"


def _nonfinite(value: Any, pointer: str) -> Iterator[tuple[str, str]]:
    if type(value) is float:
        if value - value != 0.0:
            yield pointer, "nan" if value != value else "inf" if value > 0 else "-inf"
    elif isinstance(value, Mapping):
        for key, one in value.items():
            if type(one) is float or type(one) is list or isinstance(one, Mapping):
                yield from _nonfinite(one, f"{pointer}/{text_of(key).replace('~', '~0').replace('/', '~1')}")
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from _nonfinite(one, f"{pointer}/{number}")


def restore(record: dict[str, Any]) -> dict[str, Any]:
    """A record as it was read, with its NaN and infinities back in place."""
    named = record.pop("_nonfinite", None)
    for pointer, name in named.items() if isinstance(named, dict) else ():
        target: Any = record
        *above, last = [part.replace("~1", "/").replace("~0", "~") for part in str(pointer).split("/")[1:]] or [""]
        try:
            for part in above:
                target = target[int(part)] if isinstance(target, list) else target[part]
            if isinstance(target, list):
                target[int(last)] = float(name)
            else:
                target[last] = float(name)
        except (KeyError, IndexError, ValueError, TypeError):
            continue
    return record


def metrics(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """``reward/total`` (mean over trajectories), ``ac_tokens_per_turn``, and the mean of every metric over the turns and
    trajectories that have it. {} without records."""
    found: dict[str, list[float]] = defaultdict(list)
    turns = [step for record in records for step in record["steps"]]
    for record in records:
        found["reward/total"].append(record["total_reward"])
        for name, value in record["trajectory_metrics"].items():
            found[name].append(value)
    for step in turns:
        for name, value in step["metrics"].items():
            found[name].append(value)
    means = {name: _mean(values) for name, values in found.items()}
    if turns:
        means["ac_tokens_per_turn"] = _mean([step["ac_len"] for step in turns])
    return {name: mean for name, mean in means.items() if mean is not None}


def _mean(values: Sequence[Any]) -> float | None:
    numbers = [float(value) for value in values if type(value) in (int, float, bool)]
    try:
        return math.fsum(numbers) / len(numbers) if numbers else None
    except (ValueError, OverflowError):  # infinities of both signs
        return math.nan


def write(tree: Tree, checked: Checked, most: int) -> None:
    """The first ``most`` groups in full, and what is known of every trajectory as a table."""
    by_group: dict[int, list[int]] = {}
    for at, record in enumerate(checked.records):
        by_group.setdefault(record["group_idx"], []).append(at)
    for number, places in by_group.items():
        if number >= most:
            continue
        rewards = [checked.records[at]["total_reward"] for at in places]
        tags = ", ".join(checked.records[places[0]]["tags"])
        title = checked.titles.get(number) or f"Group {number}" + (f" ({tags})" if tags else "")
        with tree.scope(f"{title}: reward {_mean(rewards):.3f}"):
            for at in places:
                record = checked.records[at]
                with tree.scope(f"Trajectory {record['traj_idx']}: reward {record['total_reward']:.3f}"):
                    messages = checked.messages[at]
                    if messages is not None:
                        tree.conversation(messages)
                    tree.data(b'{"type":"trajectory",' + checked.lines[at][1:-1])
    if checked.records:
        with tree.scope("Trajectory Details"):
            tree.data(_details(checked.records))


def _details(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = list(dict.fromkeys(name for record in records for name in record["trajectory_metrics"]))
    turn_names = list(dict.fromkeys(name for record in records for step in record["steps"] for name in step["metrics"]))
    whole = ["group_idx", "traj_idx", "turns", "ac_tokens", "step_reward", "final_reward", "total_reward", *names]
    turn = ["group_idx", "traj_idx", "turn", "ob_len", "ac_len", "reward", *turn_names]
    trajectories, turns = [], []
    for record in records:
        ids = [record["group_idx"], record["traj_idx"]]
        steps, found = record["steps"], record["trajectory_metrics"]
        sums = [len(steps), sum(step["ac_len"] for step in steps), record["total_reward"] - record["final_reward"]]
        trajectories.append(
            [*ids, *sums, record["final_reward"], record["total_reward"], *(found.get(name) for name in names)]
        )
        for step in steps:
            row = [step["step_idx"], step["ob_len"], step["ac_len"], step["reward"]]
            turns.append([*ids, *row, *(step["metrics"].get(name) for name in turn_names)])
    for row in (*trajectories, *turns):
        row[:] = [str(cell) if type(cell) is float and not math.isfinite(cell) else cell for cell in row]
    return {
        "type": "trajectory_details",
        "trajectories": {"columns": whole, "rows": trajectories},
        "turns": {"columns": turn, "rows": turns},
    }
