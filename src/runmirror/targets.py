"""Where to mirror to, as people say it: sink names, ``FIELD=VALUE`` options, and shorthands."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from runmirror.exceptions import OptionError, RunmirrorError
from runmirror.sinks.base import Sink, SinkOptions
from runmirror.sinks.registry import check_options, installed_sinks, load_sink
from runmirror.storage import Storage

log = logging.getLogger("runmirror")


@dataclass(frozen=True, slots=True)
class Target:
    """A sink by name, with its options checked."""

    name: str
    options: SinkOptions

    def make(self, group: str = "") -> Sink:
        """A fresh sink, for a run of the given ``group`` (see :func:`grouped`)."""
        return load_sink(self.name)(grouped(self.options, group))


def make_target(name: str, options: Mapping[str, Any] | SinkOptions | None = None) -> Target:
    """A target. Raises UnknownSinkError, MissingPackageError or OptionError, which say what there is."""
    sink = load_sink(name)
    return Target(
        name, options if isinstance(options, SinkOptions) else check_options(name, sink.Options, options or {})
    )


def grouped(options: SinkOptions, group: str) -> SinkOptions:
    """The options with ``group`` as the tracker's place for runs that belong together, where a sink has an option of that
    name and none was given."""
    if "group" not in type(options).model_fields or "group" in options.model_fields_set or not group:
        return options
    return options.model_copy(update={"group": group})


def watching(options: SinkOptions, pid: int) -> SinkOptions:
    """The options with ``pid`` as the process whose use of the machine is shown, where a sink can show that and no other
    one was named."""
    if "stats_pid" not in type(options).model_fields or "stats_pid" in options.model_fields_set:
        return options
    return options.model_copy(update={"stats_pid": pid})


def folder_name(storage: Storage) -> str:
    """The name of the folder that a run is in."""
    return os.path.basename(os.path.dirname(storage.url().split("://")[-1].rstrip("/")))


def parse_targets(names: Iterable[str], pairs: Iterable[str] = (), **shorthands: Any) -> list[Target]:
    """Targets from the command line.

    Args:
        names: of sinks, each once; a name may be a comma list.
        pairs: ``FIELD=VALUE`` for every named sink that has the field, or ``SINK.FIELD=VALUE`` for one.
        shorthands: field -> value, None when not given; like pairs.

    Raises:
        OptionError: a pair that no named sink takes, or one that is no pair.
    """
    wanted = list(dict.fromkeys(part.strip() for name in names for part in name.split(",") if part.strip()))
    if not wanted:
        raise OptionError("no sink named: say --to tensorboard, for example")
    given: dict[str, dict[str, Any]] = {name: {} for name in wanted}
    found = [(f"--{field.replace('_', '-')}", field, value) for field, value in shorthands.items() if value is not None]
    for pair in pairs:
        field, equals, value = pair.partition("=")
        if not equals:
            raise OptionError(f"-o {pair}: an option is FIELD=VALUE, such as -o logdir=/data/tb")
        found.append((f"-o {field}=...", field.strip().replace("-", "_"), value))  # the value may be a secret
    for said, field, value in found:
        sink, dot, name = field.partition(".")
        if dot and sink not in given:
            raise OptionError(f"{said}: {sink!r} is not among the sinks named ({', '.join(wanted)})")
        takers = [sink] if dot else [one for one in wanted if field in load_sink(one).Options.model_fields]
        if not takers and len(wanted) > 1:
            raise OptionError(f"{said}: none of {', '.join(wanted)} has an option {field!r}")
        for taker in takers or wanted:
            given[taker][name if dot else field] = value
    return [make_target(name, options) for name, options in given.items()]


def parse_report_to(report_to: Any, options: Mapping[str, Mapping[str, Any]] | None = None) -> list[Target | Sink]:
    """What ``report_to`` means, checked: names and options as targets, sink objects as they are.

    Args:
        report_to: None or "none"; a name or a comma list of names; "all" (every installed tracker that can be used); a dict
            name -> options; an Options object or a sink object; a list or tuple of any of these.
        options: name -> options for names that come without (a ``logging_dir`` given beside, for example).

    Raises:
        UnknownSinkError, MissingPackageError, OptionError: with what there is.
        OptionError: something that is none of these, or a sink named twice with different options.
    """
    found: dict[str, Target] = {}
    objects: list[Sink] = []
    for one in _flatten(report_to):
        if isinstance(one, str):
            new = _all(options or {}) if one == "all" else [make_target(one, (options or {}).get(one))]
        elif isinstance(one, Mapping):
            new = [make_target(str(name), value) for name, value in one.items()]
        elif isinstance(one, SinkOptions):
            new = [Target(_name_of(one), one)]
        elif isinstance(one, Sink):
            objects.append(one)
            continue
        else:
            raise OptionError(
                f"report_to can't be {one!r}: give names, a dict name -> options, options or sink objects"
            )
        for target in new:
            if found.setdefault(target.name, target).options != target.options and one != "all":
                raise OptionError(f"report_to names {target.name!r} twice, with different options")
    return [*found.values(), *objects]


def _flatten(report_to: Any) -> Iterator[Any]:
    if report_to is None:
        return
    if isinstance(report_to, str):
        yield from (part for part in map(str.strip, report_to.split(",")) if part and part != "none")
    elif isinstance(report_to, (list, tuple, set, frozenset)):
        for one in report_to:
            yield from _flatten(one)
    else:
        yield report_to


def _all(options: Mapping[str, Mapping[str, Any]]) -> list[Target]:
    """Every installed tracker that can be used; says which, and why one is left out."""
    found: list[Target] = []
    for name in installed_sinks():
        try:
            if not load_sink(name).capabilities.test_only:
                found.append(make_target(name, options.get(name)))
        except RunmirrorError as error:
            log.info('report_to="all" leaves out %s: %s', name, error)
    log.info(
        'report_to="all" means %s', ", ".join(target.name for target in found) or "nothing: no tracker is installed"
    )
    return found


def _name_of(options: SinkOptions) -> str:
    for name in installed_sinks():
        try:
            if load_sink(name).Options is type(options):
                return name
        except RunmirrorError:
            continue
    raise OptionError(f"report_to: no installed sink has options of the type {type(options).__name__}")
