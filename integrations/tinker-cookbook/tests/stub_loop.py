"""tinker-cookbook's own ``rl.train.main`` on clients that answer at random: ``python stub_loop.py FOLDER STEPS [REPORT_TO]``.

No service and no download. With REPORT_TO the loop is attached to runmirror. What is passed to the loggers goes to
FOLDER/logged.jsonl, for comparison.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import chz
import tinker
from tinker_cookbook import tokenizer_utils
from tinker_cookbook.rl import train
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder, StepResult
from tinker_cookbook.utils import ml_log


class Words:
    """A tokenizer of numbers."""

    def encode(self, text: str, **options: Any) -> list[int]:
        return [ord(letter) % 100 for letter in text]

    def decode(self, tokens: Any, **options: Any) -> str:
        return " ".join(map(str, [tokens] if isinstance(tokens, int) else tokens))


class Done:
    """A future that has its result."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def result(self) -> Any:
        return self._result

    async def result_async(self) -> Any:
        return self._result


class Newer:
    """Since 0.6 the loop calls methods by their names without ``_async``, awaits results at once, and closes its clients."""

    def __getattr__(self, name: str) -> Any:
        if name.endswith("_async"):
            raise AttributeError(name)

        async def call(*args: Any, **more: Any) -> Any:
            made = await getattr(self, f"{name}_async")(*args, **more)
            return made.result() if isinstance(made, Done) else made

        return call

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None: ...


class Sampling(Newer):
    def result(self) -> Sampling:
        return self

    async def sample_async(self, prompt: Any, num_samples: int, sampling_params: Any, **more: Any) -> Any:
        tokens = [random.randrange(100) for _ in range(4)]
        logprobs = [-random.random() for _ in tokens]
        one = SimpleNamespace(tokens=tokens, logprobs=logprobs, stop_reason="stop", sequence_id=None)
        return SimpleNamespace(sequences=[one], prompt_cache_hit_tokens=0)


class Training(Newer):
    """A training client: every weight is saved under a name and nothing is trained."""

    async def forward_backward_async(self, data: Sequence[Any], **more: Any) -> Done:
        outputs = [{"logprobs": datum.loss_fn_inputs["logprobs"]} for datum in data]
        return Done(SimpleNamespace(loss_fn_outputs=outputs, metrics={}))

    async def optim_step_async(self, params: Any) -> Done:
        return Done(SimpleNamespace(metrics={}))

    async def save_state_async(self, name: str, **more: Any) -> Done:
        return Done(SimpleNamespace(path=f"tinker://stub/weights/{name}"))

    async def save_weights_for_sampler_async(self, name: str, **more: Any) -> Done:
        return Done(SimpleNamespace(path=f"tinker://stub/sampler_weights/{name}"))

    async def save_weights_and_get_sampling_client_async(self, *args: Any, **more: Any) -> Sampling:
        return Sampling()

    def create_sampling_client(self, *args: Any, **more: Any) -> Sampling:
        return Sampling()


class Service(Newer):
    def __init__(self, *args: Any, **more: Any) -> None: ...

    async def create_lora_training_client_async(self, *args: Any, **more: Any) -> Training:
        return Training()

    async def create_training_client_from_state_with_optimizer_async(self, *args: Any, **more: Any) -> Training:
        return Training()

    def create_rest_client(self) -> Any:
        raise ValueError("there is no service here")


class Guess(Env):
    """One turn; the reward is for even numbers."""

    async def initial_observation(self) -> Any:
        return tinker.ModelInput.from_ints([1, 2, 3]), [0]

    async def step(self, action: Any, *, extra: Any = None) -> StepResult:
        reward = sum(token % 2 == 0 for token in action) / 4
        nothing = tinker.ModelInput.from_ints([])
        return StepResult(reward, True, nothing, [0], {"even": reward})


class Group(EnvGroupBuilder):
    async def make_envs(self) -> Sequence[Env]:
        return [Guess(), Guess()]

    def logging_tags(self) -> list[str]:
        return ["guess"]


class Data(RLDataset):
    def __init__(self, batches: int) -> None:
        self.batches = batches

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        return [Group(), Group()]

    def __len__(self) -> int:
        return self.batches


@chz.chz
class Builder(RLDatasetBuilder):
    batches: int = 4

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        return Data(self.batches), Data(1)


class Keep(ml_log.Logger):
    """Notes what every logger is told."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def log_hparams(self, config: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")


def keep(path: Path) -> None:
    """Add :class:`Keep` to what ``setup_logging`` makes."""
    setup = ml_log.setup_logging

    def setup_logging(*args: Any, **options: Any) -> Any:
        made = setup(*args, **options)
        made.loggers.append(Keep(path))
        return made

    ml_log.setup_logging = setup_logging


if __name__ == "__main__":
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    keep(folder / "logged.jsonl")
    if len(sys.argv) > 3:
        from runmirror_tinker import attach

        attach(report_to=sys.argv[3])
    tinker.ServiceClient = Service
    tokenizer_utils.register_tokenizer("stub", Words)
    config = train.Config(
        learning_rate=1e-4,
        dataset_builder=Builder(batches=steps),
        model_name="stub",
        recipe_name="stub",
        max_tokens=8,
        log_path=str(folder / "tinker"),
        eval_every=2,
        save_every=2,
    )
    asyncio.run(train.main(config))
