"""File names of a log_path, in both layouts, in one place.

``flat`` is the layout of tinker-cookbook's "training outputs" page: ``train_iteration_000010.html``. ``nested`` is the one
it writes since v0.2.0: ``iteration_000010/train.html``. The reader takes both, even mixed in one log_path.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

METRICS = "metrics.jsonl"
CONFIG = "config.json"
CHECKPOINTS = "checkpoints.jsonl"
CODE = "code.diff"
OWN = ".runmirror"
"""Folder of our own bookkeeping; a log_path that has RUN in it was written by runmirror."""
RUN = f"{OWN}/run.json"
INSIDE = "runmirror"
"""Folder of our log inside the folder of another framework's run."""
JOURNAL = f"{OWN}/journal.jsonl"
LOCK = f"{OWN}/writer.lock"

Layout = Literal["flat", "nested"]
LAYOUTS: tuple[str, ...] = get_args(Layout)

Kind = Literal["config", "code", "checkpoints", "report", "logtree", "rollouts"]
"""What a file of a log_path is. ``report`` is the HTML, ``logtree`` the same tree as JSON, ``rollouts`` a trajectory a line."""

ROLLOUT_KINDS: frozenset[Kind] = frozenset({"report", "logtree", "rollouts"})

_SUFFIXES: dict[str, Kind] = {".html": "report", "_logtree.json": "logtree", "_rollout_summaries.jsonl": "rollouts"}
_TOP: dict[str, Kind] = {CONFIG: "config", CODE: "code", CHECKPOINTS: "checkpoints"}
_FLAT = re.compile(r"(?P<split>train|eval_.+)_iteration_(?P<iteration>\d{6,})")
_NESTED = re.compile(r"iteration_(?P<iteration>\d{6,})/(?P<split>train|eval_.+)")


@dataclass(frozen=True, slots=True)
class FileName:
    """What a path below a log_path means. ``split`` is "train" or "eval/<name>" for rollout files, else None."""

    path: str
    kind: Kind
    split: str | None = None
    iteration: int | None = None


@lru_cache(1 << 17)
def parse(path: str) -> FileName | None:
    """The meaning of a path below a log_path, or None when it is not a file of ours (metrics and journal included)."""
    if path in _TOP:
        return FileName(path, _TOP[path])
    for suffix, kind in _SUFFIXES.items():
        if path.endswith(suffix):
            stem = path[: -len(suffix)]
            found = _FLAT.fullmatch(stem) or _NESTED.fullmatch(stem)
            if found and "/" not in found["split"]:
                split = found["split"]
                split = f"eval/{split[5:]}" if split.startswith("eval_") else split
                return FileName(path, kind, split, int(found["iteration"]))
    return None


def is_iteration(name: str) -> bool:
    """Whether a folder of this name holds one iteration's files (nested layout)."""
    return re.fullmatch(r"iteration_\d{6,}", name) is not None


def clean_name(name: str) -> str:
    """An evaluation's name as tinker-cookbook cleans it for file names: ``held out/v2 (small)`` -> ``held_out_v2_small``."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip("._") or "unnamed"


def file_name(kind: Kind, split: str, iteration: int, layout: Layout = "flat") -> str:
    """The path of a rollout file. ``split`` is "train" or an evaluation's name (``eval/`` in front is allowed)."""
    clean = split if split == "train" else f"eval/{clean_name(split.removeprefix('eval/'))}"
    return clean_file(kind, clean, iteration, layout)


def clean_file(kind: Kind, split: str, iteration: int, layout: Layout = "flat") -> str:
    """The path of a rollout file of a split as records have it: "train", or ``eval/`` and a name that is clean already."""
    suffix = next(suffix for suffix, known in _SUFFIXES.items() if known == kind)
    stem = split.replace("eval/", "eval_", 1)
    if layout == "nested":
        return f"iteration_{iteration:06d}/{stem}{suffix}"
    return f"{stem}_iteration_{iteration:06d}{suffix}"
