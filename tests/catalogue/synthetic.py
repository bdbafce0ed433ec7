"""Random runs as three frameworks log them: healthy ones, and faults to put into them.

A healthy run learns: noisy reward that rises and levels off, entropy that shrinks to a part of its start, a divergence that
grows slowly, some truncation and some groups without a signal. How noisy and how much is drawn for each run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from runmirror.log.rows import Row

Data = dict[str, Any]
FAMILIES = ("ppo", "grpo", "tinker")
REWARD = {"ppo": "objective/rlhf_reward", "grpo": "reward", "tinker": "env/all/reward/total"}
ENTROPY = {"ppo": "objective/entropy", "grpo": "entropy", "tinker": "optim/entropy"}
KL = {"ppo": "objective/kl", "grpo": "kl", "tinker": "kl_policy_base"}
CLIP = {"ppo": "policy/clipfrac_avg", "grpo": "clip_ratio/region_mean"}
STARTED = 1_764_000_000.0


def healthy(random: Random, family: str, count: int = 0) -> list[Data]:
    """The rows of a healthy run; ``step`` and ``_timestamp`` are in them."""
    count = count or random.randint(60, 240)
    curve = Curves(random, count)
    rows = [
        {"step": n, "_timestamp": STARTED + 10 * n} | {"ppo": ppo, "grpo": grpo, "tinker": tinker}[family](curve, n)
        for n in range(count)
    ]
    if family != "ppo" and random.random() < 0.5:  # an evaluation now and then, in a row of its own or not
        every, apart = random.choice((5, 10, 25)), random.random() < 0.5
        prefix = "eval_" if family == "grpo" else "held out/v2 (small)/"
        for n in range(count - 1, -1, -1):
            if n % every == 0:
                shown = {f"{prefix}{REWARD[family]}": curve.reward(n)}
                rows[n:n] = [{"step": n, "_timestamp": STARTED + 10 * n - 1} | shown] if apart else []
                rows[n] |= {} if apart else shown
    return rows


class Curves:
    """How the numbers of one run go."""

    def __init__(self, random: Random, count: int) -> None:
        self.random, self.count = random, count
        self.low = random.uniform(-1.0, 0.5)
        self.gain = random.uniform(0.3, 2.0)
        self.pace = random.uniform(0.05, 0.4) * count
        self.noise = random.uniform(0.0, 0.15) * self.gain
        self.entropy_start = random.choice((0.3, 0.9, 2.5, 5.7))
        self.entropy_end = random.uniform(0.25, 1.0)
        self.kl_end = 10 ** random.uniform(-3, -0.3)
        self.truncated = random.uniform(0.0, 0.3)
        self.idle = random.uniform(0.0, 0.5)
        self.clipped = random.uniform(0.0, 0.06)
        self.norm = 10 ** random.uniform(-1, 1)

    def done(self, n: int) -> float:
        return 1 - math.exp(-n / self.pace)

    def reward(self, n: int) -> float:
        return self.low + self.gain * self.done(n) + self.random.gauss(0, self.noise)

    def entropy(self, n: int) -> float:
        share = 1 + (self.entropy_end - 1) * self.done(n)
        return self.entropy_start * share * self.random.uniform(0.93, 1.07)

    def kl(self, n: int) -> float:
        return self.kl_end * self.done(n) * self.random.uniform(0.7, 1.3)

    def share(self, around: float) -> float:
        return min(1.0, max(0.0, around + self.random.gauss(0, 0.05)))

    def grad(self) -> float:
        return self.norm * math.exp(self.random.gauss(0, 0.4))


def ppo(c: Curves, n: int) -> Data:
    score, kl = c.reward(n), 50 * c.kl(n) + c.random.gauss(0, 0.3)
    return {
        "eps": 4,
        "objective/kl": kl,
        "objective/entropy": 50 * c.entropy(n),
        "objective/non_score_reward": -0.01 * kl,
        "objective/rlhf_reward": score - 0.01 * kl,
        "objective/scores": score,
        "policy/approxkl_avg": abs(c.random.gauss(0.002, 0.001)),
        "policy/clipfrac_avg": c.share(c.clipped),
        "loss/policy_avg": c.random.gauss(-0.02, 0.02),
        "loss/value_avg": 0.5 * (1.1 - c.done(n)) * math.exp(c.random.gauss(0, 0.3)),
        "val/clipfrac_avg": c.share(c.clipped),
        "policy/entropy_avg": c.entropy(n),
        "val/ratio": c.random.gauss(1, 0.02),
        "val/ratio_var": abs(c.random.gauss(0, 1e-4)),
        "val/num_eos_tokens": c.random.randint(1, 9),
        "lr": 1e-5,
        "episode": 8 * (n + 1),
        "epoch": 0.01 * (n + 1),
    }


def grpo(c: Curves, n: int) -> Data:
    reward, truncated = c.reward(n), c.share(c.truncated)
    return {
        "loss": c.random.gauss(0, 0.02),
        "grad_norm": c.grad(),
        "learning_rate": 1e-6,
        "num_tokens": 1000.0 * (n + 1),
        "completions/mean_length": c.random.gauss(200, 20),
        "completions/min_length": 20.0,
        "completions/max_length": 256.0,
        "completions/clipped_ratio": truncated,
        "completions/mean_terminated_length": c.random.gauss(180, 20),
        "rewards/correct/mean": reward,
        "rewards/correct/std": 0.4,
        "reward": reward,
        "reward_std": c.random.uniform(0.1, 0.5),
        "frac_reward_zero_std": c.share(c.idle),
        "kl": c.kl(n),
        "entropy": c.entropy(n),
        "clip_ratio/low_mean": 0.0,
        "clip_ratio/high_mean": 0.0,
        "clip_ratio/region_mean": c.share(c.clipped),
        "sampling/importance_sampling_ratio/mean": c.random.gauss(1, 0.02),
        "step_time": c.random.uniform(1, 3),
        "epoch": 0.01 * (n + 1),
    }


def tinker(c: Curves, n: int) -> Data:
    row = {
        "progress/batch": n,
        "progress/done_frac": (n + 1) / c.count,
        "optim/lr": 4e-5,
        "env/all/reward/total": c.reward(n),
        "env/all/correct": c.share(c.done(n)),
        "env/all/ac_tokens_per_turn": c.random.gauss(100, 10),
        "env/all/total_episodes": 64,
        "env/all/by_group/frac_mixed": max(0.05, c.share(1 - c.idle)),
        "optim/entropy": c.entropy(n),
        "optim/kl_sample_train_v1": c.random.gauss(0, 0.002),
        "optim/kl_sample_train_v2": abs(c.random.gauss(0.0005, 0.0001)),
        "kl_policy_base": c.kl(n) + c.random.gauss(0, 1e-3),
        "tokens/cumulative/sampled": 6400 * (n + 1),
        "time/total": c.random.uniform(10, 20),
    }
    row["time/sample" if n % 3 else "time/sample:mean"] = c.random.uniform(1, 2)  # the same span in two forms
    if n % 4 == 0:
        row["env/all/num_truncations_max_turn_tokens"] = 1.0
    return row


@dataclass(frozen=True)
class Fault:
    """A fault: ``put(rows, at, family, random)`` puts it into rows from ``rows[at]`` on, and says which key it is about."""

    rule: str
    families: tuple[str, ...]
    put: Callable[[list[Data], int, str, Random], str | None]


def usual(rows: list[Data], key: str, at: int) -> list[float]:
    return [row[key] for row in rows[max(0, at - 30) : at] if key in row]


def from_on(rows: list[Data], at: int, key: str, change: Callable[[float], float]) -> str:
    for row in rows[at:]:
        if key in row:
            row[key] = change(row[key])
    return key


def _nan(rows: list[Data], at: int, family: str, random: Random) -> str:
    key = random.choice(
        [key for key in rows[at] if key[:1] != "_" and key not in ("step", "grad_norm", "val/ratio_var")]
    )
    key = REWARD[family] if key.startswith("rewards/") or "env/all/" in key else key
    rows[at][key] = random.choice((math.nan, math.inf, -math.inf))
    return key


def _hidden(rows: list[Data], at: int, family: str, random: Random) -> str:
    rows[at] |= {"loss": 0.0, "grad_norm": math.nan}
    return "grad_norm"


def _ratio(rows: list[Data], at: int, family: str, random: Random) -> str:
    key = "val/ratio" if family == "ppo" else "sampling/importance_sampling_ratio/mean"
    if random.random() < 0.5:
        rows[at][key] = random.choice((1.4, 2.0, 1000.0, 0.6, 0.1))
        return key
    off = random.choice((1.3, 1.6, 0.7, 0.4))
    return from_on(rows, at, key, lambda value: off)


def _negative(rows: list[Data], at: int, family: str, random: Random) -> str:
    far = random.choice((6, 0.3)) * max(map(abs, usual(rows, KL[family], at)))
    if family != "grpo":  # an estimate that is noisy itself: far below 0, or it takes longer
        far = max(far, 6 * (1.0 if family == "ppo" else 0.004))
    return from_on(rows, at, KL[family], lambda value: -far * random.uniform(0.9, 1.1))


def _explodes(rows: list[Data], at: int, family: str, random: Random) -> str:
    far = max(20 * max(usual(rows, KL[family], at)), 15 if family == "ppo" else 0.2)
    return from_on(rows, at, KL[family], lambda value: far * random.uniform(0.95, 1.05))


def _collapse(rows: list[Data], at: int, family: str, random: Random) -> str:
    if family == "ppo":
        return from_on(rows, at, "policy/entropy_avg", lambda value: 0.01 * value)
    return from_on(rows, at, ENTROPY[family], lambda value: random.choice((0.01, 0.001)) * value)


def _truncation(rows: list[Data], at: int, family: str, random: Random) -> str:
    if family == "tinker":
        key = "env/all/num_truncations_max_turn_tokens"
        rows[at - 1].pop(key, None)
        for row in rows[at:]:
            row[key] = 1.0
        return key
    return from_on(rows, at, "completions/clipped_ratio", lambda value: random.uniform(0.55, 1.0))


def _no_signal(rows: list[Data], at: int, family: str, random: Random) -> str:
    if family == "tinker":
        return from_on(rows, at, "env/all/by_group/frac_mixed", lambda value: 0.0)
    if random.random() < 0.5:
        return from_on(rows, at, "frac_reward_zero_std", lambda value: 1.0)
    return from_on(rows, at, "reward_std", lambda value: 0.0)


def _falling(rows: list[Data], at: int, family: str, random: Random) -> str:
    key = REWARD[family]
    values = [row[key] for row in rows[:at] if key in row]
    far = 3 * (max(values) - min(values)) + abs(max(values))
    return from_on(rows, at, key, lambda value: value - far)


def _clipping(rows: list[Data], at: int, family: str, random: Random) -> str:
    return from_on(rows, at, CLIP[family], lambda value: random.uniform(0.4, 1.0))


def _back(rows: list[Data], at: int, family: str, random: Random) -> str:
    key = {"ppo": "episode", "grpo": "num_tokens", "tinker": "tokens/cumulative/sampled"}[family]
    back = rows[at][key] - usual(rows, key, at)[-1] / 2
    return from_on(rows, at, key, lambda value: value - back)


def _vanished(rows: list[Data], at: int, family: str, random: Random) -> str:
    key = random.choice((REWARD[family], ENTROPY[family], KL[family]))
    for row in rows[at:]:
        row.pop(key, None)
    return key


def _gap(rows: list[Data], at: int, family: str, random: Random) -> None:
    lost = random.randint(1, 9)
    for row in rows[at:]:
        row["step"] += lost


def _no_time(rows: list[Data], at: int, family: str, random: Random) -> None:
    del rows[at]["_timestamp"]


def _broken(rows: list[Data], at: int, family: str, random: Random) -> None:
    rows[at] = {"_broken": '{"step": 7, "los'}


ALL, TRL = FAMILIES, ("ppo", "grpo")
FAULTS = {
    "nan": Fault("non-finite", ALL, _nan),
    "hidden nan": Fault("hidden-nan-step", ("grpo",), _hidden),
    "ratio": Fault("ratio", TRL, _ratio),
    "kl negative": Fault("kl-negative", ALL, _negative),
    "kl explodes": Fault("kl-exploding", ALL, _explodes),
    "entropy": Fault("entropy-collapse", ALL, _collapse),
    "truncation": Fault("truncation", ("grpo", "tinker"), _truncation),
    "no signal": Fault("no-signal", ("grpo", "tinker"), _no_signal),
    "falling": Fault("reward-falling", ALL, _falling),
    "clipping": Fault("clipping", TRL, _clipping),
    "went back": Fault("went-back", ALL, _back),
    "vanished": Fault("vanished", ALL, _vanished),
    "gap": Fault("gap", ALL, _gap),
    "no time": Fault("no-time", ALL, _no_time),
    "broken": Fault("broken-lines", ALL, _broken),
}


def as_rows(rows: list[Data]) -> list[Row]:
    """Rows as a source gives them."""
    made: list[Row] = []
    for n, data in enumerate(rows):
        if "_broken" in data:
            made.append(Row(n, {}, made[-1].step if made else 0, STARTED, fault=f"metrics.jsonl:{n + 1}: broken line"))
        else:
            made.append(Row(n, data, data["step"], STARTED))
    return made
