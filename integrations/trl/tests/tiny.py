"""A real, tiny training on the CPU: ``python tiny.py grpo|ppo FOLDER [--steps N] [--resume] [--by-name] [--report-to A,B]``.

A Llama of two layers with random weights and a byte-level tokenizer made here, so nothing is downloaded. GRPO takes the
newest TRL, PPO the last that has it (1.12.0). What the Trainer logged goes to FOLDER/logged.jsonl, for comparison.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from runmirror_trl import RunMirrorCallback, enable
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
)

WORDS = ["add one and two", "what is three", "count to ten", "say a digit"]


class Keep(TrainerCallback):
    """Notes what every callback is told."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            with self.path.open("a") as file:
                file.write(json.dumps({"_global_step": state.global_step, **logs}) + "\n")


def tokenizer() -> PreTrainedTokenizerFast:
    bytes_only = Tokenizer(models.BPE())
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<pad>", "<eos>"], initial_alphabet=alphabet)
    bytes_only.train_from_iterator(WORDS * 20, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=bytes_only, pad_token="<pad>", eos_token="<eos>")
    made.padding_side = "left"
    return made


def config() -> LlamaConfig:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaConfig(vocab_size=400, num_key_value_heads=2, pad_token_id=0, eos_token_id=1, num_labels=1, **sizes)


def length_reward(completions: list[str], **kwargs: Any) -> list[float]:
    return [-abs(len(text) - 30) / 100 for text in completions]


def digit_reward(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(any(letter.isdigit() for letter in text)) for text in completions]


def grpo(folder: Path, given: argparse.Namespace) -> None:
    from trl import GRPOConfig, GRPOTrainer

    model = folder / "model"  # beta above 0 reads the reference model from here
    if not model.exists() and given.main:
        torch.manual_seed(0)
        LlamaForCausalLM(config()).save_pretrained(model)
        tokenizer().save_pretrained(model)
    if given.by_name:
        enable()
    arguments = GRPOConfig(
        output_dir=str(folder / "grpo"),
        report_to=["runmirror"] if given.by_name else [],
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        num_generations=4,
        max_completion_length=16,
        max_steps=given.steps,
        logging_steps=1,
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        beta=0.04,
        log_completions=True,
        num_iterations=2,
        disable_tqdm=True,
    )
    data = Dataset.from_dict({"prompt": WORDS * 8})
    trainer = GRPOTrainer(
        model=str(model),
        args=arguments,
        reward_funcs=[length_reward, digit_reward],
        train_dataset=data,
        eval_dataset=data.select(range(2)),
        processing_class=PreTrainedTokenizerFast.from_pretrained(model),
        callbacks=[Keep(folder / "logged.jsonl"), *callbacks(given)],
    )
    trainer.train(resume_from_checkpoint=given.resume or None)


def ppo(folder: Path, given: argparse.Namespace) -> None:
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    words = tokenizer()
    arguments = PPOConfig(
        output_dir=str(folder / "ppo"),
        report_to=[],
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_mini_batches=1,
        num_ppo_epochs=2,
        response_length=8,
        total_episodes=4 * given.steps,
        logging_steps=1,
        num_sample_generations=0,
        local_rollout_forward_batch_size=4,
        save_strategy="no",
        disable_tqdm=True,
    )
    data = Dataset.from_dict({"input_ids": [words(text)["input_ids"] for text in WORDS * 8]})
    torch.manual_seed(0)
    trainer = PPOTrainer(
        args=arguments,
        processing_class=words,
        model=LlamaForCausalLM(config()),
        ref_model=LlamaForCausalLM(config()),
        reward_model=LlamaForSequenceClassification(config()),
        value_model=LlamaForSequenceClassification(config()),
        train_dataset=data,
        eval_dataset=data.select(range(4)),
        callbacks=[Keep(folder / "logged.jsonl"), *callbacks(given)],
    )
    trainer.train()


def callbacks(given: argparse.Namespace) -> list[RunMirrorCallback]:
    return [] if given.by_name else [RunMirrorCallback(report_to=given.report_to)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["grpo", "ppo"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--by-name", action="store_true")
    parser.add_argument("--report-to", default="none")
    parsed = parser.parse_args()
    parsed.main = os.environ.get("RANK", "0") == "0"
    parsed.folder.mkdir(parents=True, exist_ok=True)
    {"grpo": grpo, "ppo": ppo}[parsed.kind](parsed.folder, parsed)
