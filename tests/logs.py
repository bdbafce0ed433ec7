"""Small logs in the shapes that real frameworks write, made in code so that the suite needs no sample folder.

Keys and shapes follow tinker-cookbook (flat and nested layout, its asynchronous mode, a resume from an older checkpoint).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

STARTED = 1_764_000_000.0
"""Modification time that :func:`write_rows` gives a metrics file, so that inferred times are the same everywhere."""


def write_rows(path: Path, rows: Iterable[dict[str, Any]], modified: float = STARTED) -> Path:
    """Write rows as a metrics file, as ``json`` does (bare NaN tokens included)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.utime(path, (modified, modified))
    return path


def train_row(step: int, shift: float = 0.0) -> dict[str, Any]:
    """A training row as tinker-cookbook writes it."""
    return {
        "step": step,
        "progress/batch": step,
        "progress/done_frac": (step + 1) / 12,
        "optim/lr": 4e-05,
        "env/all/reward/total": 0.1 * step + shift,
        "env/all/correct": step / 12,
        "env/all/total_episodes": 6,
        "entropy": 2.0 - 0.1 * step + shift,
        "kl_sample_train_v1": 0.001 * step,
        "time/policy_sample:mean": 0.02,
        "time/total": 1.5,
    }


def eval_row(step: int, shift: float = 0.0) -> dict[str, Any]:
    """An evaluation's keys at a step."""
    keys = ("env/all/reward/total", "env/all/correct", "env/arithmetic/format", "env/all/total_episodes", "time/eval")
    return {"step": step} | {f"held out/v2 (small)/{key}": step + shift + n / 8 for n, key in enumerate(keys)}


def flat_log(folder: Path, count: int = 12) -> Path:
    """A finished run in the flat layout, with config, code diff, checkpoints and reports."""
    rows = [train_row(step) | (eval_row(step) if step % 4 == 0 else {}) for step in range(count)]
    write_rows(folder / "metrics.jsonl", rows)
    _files(folder)
    for step in (0, 8):
        report = {
            "title": f"RL Iteration {step}",
            "started_at": f"2025-11-24T16:{step:02d}:00",
            "path": "x",
            "root": {},
        }
        (folder / f"train_iteration_{step:06d}_logtree.json").write_text(json.dumps(report, indent=2))
        (folder / f"train_iteration_{step:06d}.html").write_text("<html></html>")
    (folder / "train_iteration_000000_rollout_summaries.jsonl").write_text(json.dumps({"schema_version": 1}) + "\n")
    (folder / "eval_held_out_v2_small_iteration_000000_rollout_summaries.jsonl").write_text("{}\n")
    return folder


def nested_log(folder: Path) -> Path:
    """A finished run in the nested layout, whose last step has two rows."""
    rows = [train_row(step) | (eval_row(step) if step % 4 == 0 else {}) for step in range(12)]
    rows += [eval_row(12), {"step": 12, "cost/tokens_total": 11450, "cost/sampled": 1381}]
    write_rows(folder / "metrics.jsonl", rows)
    _files(folder)
    for step in (0, 8, 11):
        (folder / f"iteration_{step:06d}").mkdir(exist_ok=True)
        report = {
            "title": f"RL Iteration {step}",
            "started_at": f"2025-11-24T16:{step:02d}:00",
            "path": "x",
            "root": {},
        }
        (folder / f"iteration_{step:06d}" / "train_logtree.json").write_text(json.dumps(report, indent=2))
    return folder


def _files(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"learning_rate": 4e-05, "model": {"name": "tiny", "rank": 8}}))
    (folder / "code.diff").write_text("### repo: <repo_root> @ 5e9d034\ndiff --git a/x b/x\n-1\n+2\n")
    lines = [{"name": "000004", "batch": 4, "state_path": "tinker://a/4"}, {"name": "final", "batch": 12}]
    (folder / "checkpoints.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def async_rows() -> list[dict[str, Any]]:
    """Asynchronous mode: evaluation rows arrive late with an old step; no ``progress/batch``."""
    train = {step: {k: v for k, v in train_row(step).items() if not k.startswith("progress/")} for step in range(10)}
    order: list[dict[str, Any]] = [train[0], eval_row(0), *(train[n] for n in range(1, 6)), eval_row(3)]
    return [
        *order,
        train[6],
        train[7],
        train[8],
        eval_row(6),
        train[9],
        eval_row(9),
        {"step": 9, "cost/tokens_total": 9},
    ]


def resumed_rows() -> list[dict[str, Any]]:
    """A crash before step 6 and a resume from checkpoint 4: steps 4 and 5 come twice, with other values."""
    first = [train_row(step) | (eval_row(step) if step % 4 == 0 else {}) for step in range(6)]
    return first + [train_row(step, 0.5) | (eval_row(step, 0.5) if step % 4 == 0 else {}) for step in range(4, 9)]
