"""The small JSON records of a log_path: who it is, what happened to it, which checkpoints it has.

Every record keeps fields it doesn't know (``extra="allow"``), so a file written by a newer version survives.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Status = Literal["running", "finished", "failed", "killed"]
"""How a run is. ``killed`` also stands for a run that stopped writing without saying why."""


class Record(BaseModel):
    """Base of the records: unknown fields are kept."""

    model_config = ConfigDict(extra="allow")


class RunRecord(Record):
    """``.runmirror/run.json``: the identity of a log_path.

    ``url`` is where it was made; when the same id is found elsewhere while the original is still there, the other one
    is a copy (see :func:`runmirror.log.identity.identify`). ``name`` is what its writer calls it, None for its folder's name.
    """

    format: int = 1
    run_id: str
    url: str
    created: float
    version: str = ""
    name: str | None = None


class JournalEntry(Record):
    """One line of ``.runmirror/journal.jsonl``.

    ``offset`` is the size of metrics.jsonl in bytes when it happened, so a reader knows which rows came after a resume.
    ``step`` is the last step in the log then. ``status`` is set on "finished" only. ``lost`` counts
    rows that a full disk cost. ``wrote`` names the files that a start
    or a resume made (config.json, code.diff), so that one which came to nothing may be replaced.
    """

    event: Literal["started", "resumed", "finished"]
    time: float
    offset: int = 0
    step: int | None = None
    status: Status | None = None
    wrote: list[str] | None = None
    lost: int | None = None


class Checkpoint(Record):
    """One line of ``checkpoints.jsonl``, in tinker-cookbook's shape; loop state and other extra fields are kept.

    Source: tinker_cookbook/checkpoint_utils.py (fields name, batch, epoch, final, state_path, sampler_path).
    """

    name: str
    batch: int | None = None
    epoch: int | None = None
    final: bool | None = None
    state_path: str | None = None
    sampler_path: str | None = None

    @property
    def loop_state(self) -> dict[str, Any]:
        """The fields beyond the known ones."""
        return dict(self.model_extra or {})


class Identity(Record):
    """Who a log_path is for a mirror: its id, and whether it was made by runmirror."""

    run_id: str
    own: bool = Field(description="written by runmirror, so state may live inside it")
