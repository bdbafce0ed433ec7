"""A small, real reinforcement-learning run to look at: a policy learns to add two digits, in seconds, on any machine.

Guarantees:

- The numbers are real: a policy of two hidden layers answers questions such as ``7+5`` with tokens (``<12>``), is rewarded
  for each character in its place, and learns by group-relative advantages with a clipped ratio (GRPO). Nothing is made up.
- The same seed gives the same numbers, times apart.
- The run is logged with the public API, as any training would be: see :func:`train`.
- numpy is imported when training starts, nothing is printed, and nothing is written outside the folder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import runmirror
from runmirror.exceptions import MissingPackageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Ints = NDArray[np.int64]
    Bools = NDArray[np.bool_]

VOCABULARY = "0123456789<>. "
LENGTH = 6
"""Tokens an answer may have; one that has not ended by then is cut."""
_END = VOCABULARY.index(">")
OnIteration = Callable[[str], object]


@dataclass(frozen=True)
class DemoConfig:
    """What the demo trains, and how."""

    task: str = "add two digits; the answer to 7+5 is <12>"
    seed: int = 0
    iterations: int = 40
    questions: int = 256
    answers_per_question: int = 16
    hidden: int = 256
    learning_rate: float = 1.5e-3
    minibatches: int = 4
    clip_range: float = 0.2
    kl_coef: float = 0.2
    eval_every: int = 10
    save_every: int = 20


@dataclass
class Rollout:
    """Answers to questions: tokens, which of them count, what the sampler thought of them, and how good they are."""

    question: Ints
    tokens: Ints
    mask: Bools
    logprobs: Floats
    reward: Floats = field(init=False)
    correct: Bools = field(init=False)
    formatted: Bools = field(init=False)

    def metrics(self) -> dict[str, float]:
        return {
            "env/all/reward/total": float(self.reward.mean()),
            "env/all/correct": float(self.correct.mean()),
            "env/all/format_parse": float(self.formatted.mean()),
        }


class Learner:
    """The policy and its optimizer (Adam)."""

    def __init__(self, config: DemoConfig) -> None:
        try:
            import numpy as np
        except ImportError as error:
            raise MissingPackageError("the demo needs numpy: pip install 'runmirror[tensorboard]'") from error
        self.np = np
        self.config = config
        self.random = np.random.default_rng(config.seed)
        first, second = np.divmod(np.arange(100), 10)
        answers = [f"<{total:02d}>" for total in first + second]
        self.target = np.array([[VOCABULARY.index(char) for char in answer] for answer in answers])
        width, tokens = config.hidden, len(VOCABULARY)
        shapes = {"question": (100, width), "position": (LENGTH, width), "hidden": (width, width)}
        scales = {"question": 0.5, "position": 0.5, "hidden": width**-0.5}
        self.weights: dict[str, Floats] = {
            name: self.random.normal(0, scales[name], shape).astype(np.float32) for name, shape in shapes.items()
        }
        self.weights["out"] = self.random.normal(0, 0.01, (width, tokens)).astype(np.float32)
        self.weights["bias"] = np.zeros((LENGTH, tokens), np.float32)
        self.reference = dict(self.weights)
        self.moments = {name: (np.zeros_like(weight), np.zeros_like(weight)) for name, weight in self.weights.items()}
        self.updates = 0

    def forward(self, weights: dict[str, Floats], question: Ints, position: Ints) -> tuple[Floats, Floats, Floats]:
        """Both hidden layers, and the log-probability of each token of the vocabulary."""
        np = self.np
        first = np.tanh(weights["question"][question] + weights["position"][position])
        second = np.tanh(first @ weights["hidden"])
        logits = second @ weights["out"] + weights["bias"][position]
        logits -= logits.max(axis=1, keepdims=True)
        return first, second, logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    def sample(self, question: Ints, *, greedy: bool = False) -> Rollout:
        """Answer questions, token by token, with weights in half precision, as engines for inference hold them."""
        np = self.np
        weights = {name: weight.astype(np.float16).astype(np.float32) for name, weight in self.weights.items()}
        count = len(question)
        tokens = np.zeros((count, LENGTH), np.int64)
        mask = np.zeros((count, LENGTH), bool)
        logprobs = np.zeros((count, LENGTH), np.float32)
        alive = np.ones(count, bool)
        for place in range(LENGTH):
            _, _, scores = self.forward(weights, question, np.full(count, place))
            noise = 0.0 if greedy else self.random.gumbel(size=scores.shape)
            chosen = np.argmax(scores + noise, axis=1)
            tokens[:, place], mask[:, place] = chosen, alive
            logprobs[:, place] = scores[np.arange(count), chosen]
            alive = alive & (chosen != _END)
        return self.grade(Rollout(question, tokens, mask, logprobs))

    def grade(self, rollout: Rollout) -> Rollout:
        """Reward: the share of the answer's four characters that are in their place."""
        np = self.np
        size = self.target.shape[1]
        hits = (rollout.tokens[:, :size] == self.target[rollout.question]) & rollout.mask[:, :size]
        rollout.reward = hits.mean(axis=1).astype(np.float32)
        rollout.correct = hits.all(axis=1)
        digits = (rollout.tokens[:, 1:3] < 10).all(axis=1)
        rollout.formatted = hits[:, 0] & digits & hits[:, 3]
        return rollout

    def train(self, rollout: Rollout) -> dict[str, float]:
        """One pass over the answers in minibatches."""
        np, config = self.np, self.config
        grouped = rollout.reward.reshape(-1, config.answers_per_question)
        spread = grouped.std(axis=1, keepdims=True)
        advantage = ((grouped - grouped.mean(axis=1, keepdims=True)) / (spread + 1e-4)).ravel()
        row, place = np.nonzero(rollout.mask)
        _, _, before = self.forward(self.weights, rollout.question[row], place)
        gap = rollout.logprobs[row, place] - before[np.arange(len(row)), rollout.tokens[row, place]]
        steps = []
        for part in np.array_split(self.random.permutation(len(rollout.question)), config.minibatches):
            row, place = np.nonzero(rollout.mask[part])
            row = part[row]
            token, old = rollout.tokens[row, place], rollout.logprobs[row, place]
            steps.append(self.step(rollout.question[row], place, token, old, advantage[row]))
        return {
            "entropy": float(-rollout.logprobs[rollout.mask].mean()),
            "kl_sample_train_v1": float(gap.mean()),
            "kl_sample_train_v2": float(0.5 * (gap**2).mean()),
            **{key: float(np.mean([step[key] for step in steps])) for key in steps[0]},
            "advantage/std": float(advantage.std()),
            "env/all/by_group/frac_mixed": float((spread > 0).mean()),
        }

    def step(self, question: Ints, place: Ints, token: Ints, old: Floats, advantage: Floats) -> dict[str, float]:
        """One update: the clipped policy loss, and the divergence from the policy that training began with."""
        np, config, count = self.np, self.config, len(question)
        first, second, logprobs = self.forward(self.weights, question, place)
        _, _, reference = self.forward(self.reference, question, place)
        probability, every = np.exp(logprobs), np.arange(count)
        ratio = np.exp(logprobs[every, token] - old)
        low, high = 1 - config.clip_range, 1 + config.clip_range
        clipped = ((ratio > high) & (advantage > 0)) | ((ratio < low) & (advantage < 0))
        loss = -np.minimum(ratio * advantage, np.clip(ratio, low, high) * advantage)
        divergence = (probability * (logprobs - reference)).sum(axis=1, keepdims=True)

        pull = np.where(clipped, 0, ratio * advantage)[:, None]
        towards = pull * probability
        towards[every, token] -= pull[:, 0]
        logits = (towards + config.kl_coef * probability * (logprobs - reference - divergence)) / count
        inner = (logits @ self.weights["out"].T) * (1 - second**2)
        outer = (inner @ self.weights["hidden"].T) * (1 - first**2)
        gradients = {name: np.zeros_like(weight) for name, weight in self.weights.items()}
        gradients["out"] += second.T @ logits
        gradients["hidden"] += first.T @ inner
        np.add.at(gradients["bias"], place, logits)
        np.add.at(gradients["position"], place, outer)
        np.add.at(gradients["question"], question, outer)
        self.adam(gradients)
        return {
            "policy/loss": float(loss.mean()),
            "policy/clipfrac_avg": float(clipped.mean()),
            "kl_policy_base": float(divergence.mean()),
            "optim/grad_norm": float(np.sqrt(sum(float((part**2).sum()) for part in gradients.values()))),
        }

    def rate(self) -> float:
        """The learning rate now; it falls by half over the run."""
        done = self.updates / max(1, self.config.iterations * self.config.minibatches)
        return self.config.learning_rate * (1 - 0.5 * done)

    def adam(self, gradients: dict[str, Floats]) -> None:
        np, rate = self.np, self.rate()
        self.updates += 1
        for name, gradient in gradients.items():
            mean, square = self.moments[name]
            mean = 0.9 * mean + 0.1 * gradient
            square = 0.99 * square + 0.01 * gradient**2
            self.moments[name] = mean, square
            scaled = (mean / (1 - 0.9**self.updates)) / (np.sqrt(square / (1 - 0.99**self.updates)) + 1e-8)
            self.weights[name] = (self.weights[name] - rate * scaled).astype(np.float32)

    def evaluate(self) -> dict[str, float]:
        """Every question once, with the most likely answer."""
        return {f"test/{key}": value for key, value in self.sample(self.np.arange(100), greedy=True).metrics().items()}


def next_log_path(folder: Path) -> Path:
    """The first of ``folder/1``, ``folder/2``, ... behind all that are there."""
    taken = [int(entry.name) for entry in folder.glob("*") if entry.name.isdecimal()]
    return folder / str(max(taken, default=0) + 1)


def train(log_path: Path, config: DemoConfig | None = None, on_iteration: OnIteration | None = None) -> Path:
    """Train once and log it to ``log_path``, which is returned.

    Args:
        log_path: a new folder.
        config: sizes, rates, the seed.
        on_iteration: called after each iteration with a line of text about it.

    Raises:
        MissingPackageError: numpy is not installed.
    """
    config = config or DemoConfig()
    learner = Learner(config)
    evaluation: dict[str, float] = {}
    with runmirror.start(log_path, config=config, total_iterations=config.iterations, code=False) as run:
        for i in range(config.iterations):
            with run.iteration(i) as it:
                if i % config.eval_every == 0:
                    with it.span("eval"):
                        evaluation = learner.evaluate()
                    it.log(evaluation)
                with it.span("sample"):
                    asked = learner.random.integers(0, 100, config.questions)
                    rollout = learner.sample(learner.np.repeat(asked, config.answers_per_question))
                metrics = rollout.metrics()
                metrics["ac_tokens_per_turn"] = float(rollout.mask.sum(axis=1).mean())
                metrics["optim/lr"] = learner.rate()
                with it.span("train"):
                    metrics |= learner.train(rollout)
                it.log(metrics)
            if (i + 1) % config.save_every == 0 or i + 1 == config.iterations:
                save(run, learner, i + 1, final=i + 1 == config.iterations)
            if on_iteration:
                on_iteration(_line(i, config.iterations, metrics))
        run.log_summary(learner.evaluate())
    return log_path


def _line(i: int, iterations: int, metrics: dict[str, float]) -> str:
    shown = {"reward": "env/all/reward/total", "correct": "env/all/correct", "entropy": "entropy"}
    return f"iteration {i + 1:>{len(str(iterations))}}/{iterations}  " + "  ".join(
        f"{name} {metrics[key]:.3f}" for name, key in shown.items()
    )


def save(run: runmirror.Run, learner: Learner, batch: int, *, final: bool) -> None:
    """Weights and optimizer to a file in the log_path, and its line in checkpoints.jsonl."""
    name = "final" if final else f"{batch:06d}"
    state: dict[str, Any] = dict(learner.weights)
    for part, (mean, square) in learner.moments.items():
        state |= {f"{part}.mean": mean, f"{part}.square": square}
    path = Path(run.log_path) / "checkpoints" / f"{name}.npz"
    path.parent.mkdir(exist_ok=True)
    learner.np.savez(path, **state)
    run.log_checkpoint(
        name,
        batch=batch,
        state_path=f"checkpoints/{name}.npz",
        loop_state={"updates": learner.updates},
        final=final or None,
    )


def run_demo(
    folder: Path = Path("runmirror-demo"),
    *,
    iterations: int = 40,
    seed: int = 0,
    on_iteration: OnIteration | None = None,
) -> Path:
    """Train the demo into the next free numbered folder below ``folder``, and return that log_path.

    Args:
        folder: holds the runs ``1``, ``2``, ...; made when missing.
        iterations: how many; 40 take some 15 seconds on two cores.
        seed: of everything random.
        on_iteration: called after each iteration with a line of text about it.
    """
    config = replace(DemoConfig(), iterations=iterations, seed=seed)
    return train(next_log_path(Path(folder)), config, on_iteration)
