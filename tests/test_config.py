"""LogConfig: what start takes from a user's config when it is not passed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from pydantic import BaseModel, ValidationError

import runmirror
from runmirror import LogConfig
from runmirror.config import find_log_config


@dataclasses.dataclass
class Plain:
    lr: float
    log: LogConfig


class Model(BaseModel):
    lr: float = 1.0
    log: LogConfig = LogConfig()


class Derived(LogConfig):
    lr: float = 1.0


@pytest.mark.parametrize("how", ["itself", "derived", "dataclass", "model", "dict"])
def test_start_takes_what_is_not_passed(how: str, tmp_path: Path) -> None:
    """log_path, layout and total_iterations from the config; what is passed wins."""
    log = LogConfig(log_path=str(tmp_path / "run"), layout="nested", total_iterations=4)
    config: Any = {
        "itself": log,
        "derived": Derived(**log.model_dump(), lr=2.0),
        "dataclass": Plain(1.0, log),
        "model": Model(log=log),
        "dict": {"lr": 1.0, "log": log},
    }[how]
    with runmirror.start(config=config, code=False) as run:
        assert (run.log_path, run.layout, run.total_iterations) == (str(tmp_path / "run"), "nested", 4)
    with runmirror.start(tmp_path / "other", config, layout="flat", total_iterations=9, code=False) as run:
        assert (run.log_path, run.layout, run.total_iterations) == (str(tmp_path / "other"), "flat", 9)


def test_report_to_and_logging_dir_of_the_config(tmp_path: Path) -> None:
    """TensorBoard at the config's logging_dir."""
    log = LogConfig(log_path=str(tmp_path / "run"), report_to="tensorboard", logging_dir=str(tmp_path / "tb"))
    with runmirror.start(config=log, code=False) as run:
        run.log_metrics({"i": 0})
    assert run.urls == {"tensorboard": str(tmp_path / "tb" / "run")}


def test_without_a_log_path_nothing_starts() -> None:
    """ValueError that says where it may come from."""
    with pytest.raises(ValueError, match="LogConfig"):
        runmirror.start(config={"lr": 1})


def test_defaults_and_wrong_fields() -> None:
    """num_groups_to_log is 4, as in tinker-cookbook; a field that is none is an error."""
    assert find_log_config(None) == LogConfig()
    assert LogConfig().num_groups_to_log == 4
    with pytest.raises(ValidationError):
        LogConfig(loging_dir="x")  # type: ignore[call-arg]


@dataclasses.dataclass(slots=True)
class Slots:
    log: LogConfig


class Below(Slots):
    __slots__ = "more"


def test_a_config_with_slots_holds_it_too() -> None:
    """Its own fields and those of the class it is derived from."""
    log = LogConfig(log_path="runs/x")
    assert find_log_config(Slots(log)) is log
    assert find_log_config(Below(log)) is log


def test_a_config_with_missing_values_is_taken(tmp_path: Path) -> None:
    """A value that OmegaConf refuses to give stops no start."""
    config = OmegaConf.create({"model": "???", "name": "${nowhere}", "lr": 0.1})
    with runmirror.start(tmp_path / "run", config, code=False) as run:
        run.log_metrics({"loss": 1.0})
    assert json.loads((tmp_path / "run" / "config.json").read_text())["lr"] == 0.1
