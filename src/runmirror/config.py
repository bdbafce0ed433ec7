"""LogConfig: the fields of :func:`runmirror.start` as a model, to embed in a training script's own configuration."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from runmirror.log.layout import Layout


class LogConfig(BaseModel):
    """How a run is logged. A config that is one, or holds one, fills what is not passed to :func:`runmirror.start`.

    Attributes:
        log_path: where the log is written.
        report_to: as for ``start``.
        logging_dir: TensorBoard's logdir, as transformers and TRL call it.
        layout: names of rollout files, "flat" or "nested".
        storage_options: for a log_path in a cloud: credentials, endpoint. Left out of every dump.
        resume: "auto", True or False.
        total_iterations: how many iterations there will be.
        num_groups_to_log: groups of rollouts that get a detailed report, for the code that writes reports.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    log_path: str | None = None
    report_to: Any = None
    logging_dir: str | None = None
    layout: Layout = "flat"
    storage_options: dict[str, Any] | None = Field(default=None, exclude=True, repr=False)
    resume: Literal["auto"] | bool = "auto"
    total_iterations: int | None = Field(default=None, gt=0)
    num_groups_to_log: int = Field(default=4, ge=0)


def find_log_config(config: Any) -> LogConfig:
    """``config`` itself, or the first of its values, when that is a LogConfig; else one with the defaults."""
    if isinstance(config, LogConfig):
        return config
    return next((value for value in _values(config) if isinstance(value, LogConfig)), LogConfig())


def _values(config: Any) -> Iterator[Any]:
    """What a config holds, at its top; a value that can't be had (one that OmegaConf misses) is passed over."""
    if isinstance(config, Mapping):
        for key in config:
            with contextlib.suppress(Exception):
                yield config[key]
        return
    yield from getattr(config, "__dict__", {}).values()
    for kind in type(config).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        yield from (getattr(config, slot, None) for slot in ([slots] if isinstance(slots, str) else slots))
