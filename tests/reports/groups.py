"""Rollouts for tests: groups of a guessing game, with what a real one has."""

from __future__ import annotations

import json
from typing import Any


def trajectory(place: int = 0, turns: int = 3, text: str = "I guess {turn}.") -> dict[str, Any]:
    """A trajectory of so many turns; the last one is right."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Guess."},
        {"role": "user", "content": "What is it?"},
    ]
    steps = []
    for turn in range(turns):
        call = {
            "type": "function",
            "id": f"c{turn}",
            "function": {"name": "compare", "arguments": json.dumps({"n": turn})},
        }
        parts = [{"type": "thinking", "thinking": f"Perhaps {turn}?"}, {"type": "text", "text": text.format(turn=turn)}]
        messages.append({"role": "assistant", "content": parts, "tool_calls": [call]})
        messages.append({"role": "tool", "content": "Higher.", "tool_call_id": f"c{turn}", "name": "compare"})
        right = turn == turns - 1
        steps.append(
            {
                "ob_len": 80 + 20 * turn,
                "ac_len": 10 + turn,
                "reward": float(right),
                "metrics": {"correct": right, "distance": turns - turn - 1},
                "logs": {"guess": turn, "hint": "Higher."},
            }
        )
    return {
        "steps": steps,
        "final_reward": -0.25 * place,
        "trajectory_metrics": {"penalty": 0.25 * place},
        "final_ob_len": 200,
        "messages": messages,
    }


def groups(count: int = 2, size: int = 2, turns: int = 3, **options: Any) -> list[dict[str, Any]]:
    """So many groups of so many trajectories."""
    return [
        {
            "trajectories": [trajectory(place, turns, **options) for place in range(size)],
            "tags": ["guess"],
            "sampling_client_step": 3,
        }
        for _ in range(count)
    ]
