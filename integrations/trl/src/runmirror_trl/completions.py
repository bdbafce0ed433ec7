"""TRL's ``completions/*.parquet`` (``log_completions=True``) as rollouts: one group per prompt, one trajectory per row.

TRL writes a step's file just after ``on_log``, under the name of the step, so an evaluation replaces the file of training.
A file is read once, at the next event, as what the row before it was. TRL's rows are the last of one generation batch: a
training row without ``reward`` repeats them, and an evaluation's begin with what was there before; neither is taken again.

Source: trl/trainer/grpo_trainer.py, ``log`` and ``_logs``.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from typing import Any

import runmirror

logger = logging.getLogger("runmirror")


class Completions:
    """The file that is to come next, and what was in the last one. Nothing raises."""

    def __init__(self) -> None:
        self.expected: tuple[str, int, str, dict[str, float], Any] | None = None
        self._before: list[str] = []
        self._told: set[str] = set()

    def expect(self, args: Any, state: Any, logs: Mapping[str, Any], tokenizer: Any) -> None:
        """A row was logged: if it tells of new completions, their file comes next."""
        keys = [key for key in logs if isinstance(key, str)]
        evaluated = [
            key.removesuffix("_runtime") for key in keys if key.startswith("eval_") and key.endswith("_runtime")
        ]
        prefix = "eval_" if evaluated or "eval_reward" in logs else ""
        wanted = getattr(args, "log_completions", False) and state.is_world_process_zero
        if not wanted or f"{prefix}reward" not in logs:
            return
        split = "eval/" + (evaluated or ["eval"])[0].removeprefix("eval_") if prefix else "train"
        start, end = f"{prefix}rewards/", "/mean"
        names = [key[len(start) : -len(end)] for key in keys if key.startswith(start) and key.endswith(end)]
        given = getattr(args, "reward_weights", None) or []
        weights = dict(zip(names, given if len(given) == len(names) else [1.0] * len(names), strict=True))
        path = os.path.join(args.output_dir, "completions", f"completions_{state.global_step:05d}.parquet")
        self.expected = (path, state.global_step, split, weights, tokenizer)

    def take(self, run: runmirror.Run) -> None:
        """Write the rollouts of the file that was expected."""
        if self.expected is None:
            return
        (path, step, split, weights, tokenizer), self.expected = self.expected, None
        try:
            from pyarrow.parquet import ParquetFile

            with ParquetFile(path) as file:
                rows = file.read().to_pylist()
            as_text = [json.dumps(row | {"step": 0}, default=str) for row in rows]
            old = 0 if split == "train" else _overlap(self._before, as_text)
            self._before = as_text
            groups: dict[str, list[dict[str, Any]]] = {}
            tokens = _tokens(rows[old:], tokenizer)
            for row in rows[old:]:
                one = _trajectory(row, weights, tokens)
                groups.setdefault(json.dumps(row["prompt"], default=str), []).append(one)
            if groups:
                run.log_rollouts(step, [{"trajectories": found} for found in groups.values()], split=split)
        except ImportError:
            self._tell("completions are not in the log as rollouts: pyarrow is missing (pip install pyarrow)")
        except Exception as error:
            self._tell(f"completions are not in the log as rollouts: {path}: {type(error).__name__}: {error}")

    def _tell(self, text: str) -> None:
        kind = text.partition(".parquet: ")[2].partition(":")[0]  # the same trouble with every step's file is told once
        if kind not in self._told:
            self._told.add(kind)
            logger.warning("%s", text)


def _overlap(before: list[str], now: list[str]) -> int:
    """How many of the first rows are the last ones of before; never all of them, for some were sampled since."""
    return next((n for n in range(min(len(before), len(now) - 1), 0, -1) if before[-n:] == now[:n]), 0)


def _trajectory(row: dict[str, Any], weights: dict[str, float], tokens: dict[str, int]) -> dict[str, Any]:
    """``reward`` is the weighted sum that TRL logs: over the functions that gave one, NaN when none did."""
    rewards = {name: math.nan if row[name] is None else float(row[name]) for name in weights}
    scored = [weights[name] * value for name, value in rewards.items() if not math.isnan(value)]
    known = {"step", "prompt", "completion", "advantage", *weights}
    metrics = {f"rewards/{name}": value for name, value in rewards.items()} | {"advantage": row["advantage"]}
    prompt, answer = _messages(row["prompt"], "user"), _messages(row["completion"], "assistant")
    turn = {
        "ob_len": tokens.get(_text(row["prompt"]), 0),
        "ac_len": tokens.get(_text(row["completion"]), 0),
        "reward": math.fsum(scored) if scored else math.nan,
        "logs": {key: value for key, value in row.items() if key not in known},
    }
    return {"steps": [turn], "trajectory_metrics": metrics, "messages": [*prompt, *answer]}


def _messages(given: Any, role: str) -> list[Any]:
    """Text as a message of this role; messages without the fields that parquet has filled up with nothing."""
    if not isinstance(given, list):
        return [{"role": role, "content": given}]
    return [{key: value for key, value in one.items() if value is not None} for one in given]


def _text(given: Any) -> str:
    texts = [one.get("content") for one in given] if isinstance(given, list) else [given]
    return "".join(text for text in texts if isinstance(text, str))


def _tokens(rows: list[dict[str, Any]], tokenizer: Any) -> dict[str, int]:
    """Tokens of each text, counted again in one call: a chat template's own are not in them. {} without a tokenizer."""
    texts = list(dict.fromkeys(_text(row[column]) for row in rows for column in ("prompt", "completion")))
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor for images and text has one
    if not callable(tokenizer):
        return {}
    return dict(zip(texts, map(len, tokenizer(texts, add_special_tokens=False)["input_ids"]), strict=True))
