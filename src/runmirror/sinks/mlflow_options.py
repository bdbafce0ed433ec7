"""What can be said of runs in MLflow. Importing this imports no MLflow."""

from __future__ import annotations

import json
import os
from typing import Any

from pydantic import Field, field_validator, model_validator

from runmirror.sinks.base import SinkOptions, env_field
from runmirror.sinks.keys import MLFLOW, encode


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
    name: str | None = Field(None, description="name of the run; default: that of the log")
    tags: dict[str, str] = env_field(
        {}, "MLFLOW_TAGS", "tags of the run: KEY=VALUE or words, with commas between, or a JSON object"
    )
    notes: str | None = Field(None, description="notes of the run, as Markdown in its description")
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

    @field_validator("tags", mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if isinstance(value, str) and value.lstrip().startswith("{"):
            try:
                return {key: one if isinstance(one, str) else json.dumps(one) for key, one in json.loads(value).items()}
            except ValueError:
                raise ValueError("expected KEY=VALUE, several with commas between, or a JSON object") from None
        if isinstance(value, str):
            value = [part for part in value.split(",") if part.strip()]
        if not isinstance(value, (list, tuple)):
            return value
        pairs = [str(part).partition("=") for part in value]  # a word alone, as W&B has tags, is set
        return {key.strip(): one.strip() if equals else "true" for key, equals, one in pairs}

    @field_validator("tags")
    @classmethod
    def _takes(cls, tags: dict[str, str]) -> dict[str, str]:
        for key in tags:
            if key.startswith("runmirror.") or encode(key, MLFLOW) != key:
                raise ValueError(
                    f"{key!r}: the name of a tag is a clean path of letters, digits and _ / . - : and space, and those that "
                    "begin with 'runmirror.' are runmirror's own"
                )
        return tags

    def to_deliver(self) -> dict[str, Any]:
        """The options; tags as they are typed."""
        return super().to_deliver() | ({"tags": json.dumps(self.tags)} if self.tags else {})
