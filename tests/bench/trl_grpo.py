"""TRL's side of `tests.bench.bench_laptop`, `tests.gpu.peers` and `tests.gpu.real`, run by a Python that has TRL:
imports nothing of the project. What it has done so far is written after each step.

python trl_grpo.py asked.json
"""

import json
import os
import runpy
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl_settings import ON_A_CPU, ON_A_GPU


class Clock(TrainerCallback):
    """When each step was done, and its reward; ends the training once the mean of some steps reaches a reward."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.ends: list[float] = []
        self._asked = asked

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.monotonic())

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        rewards = rewards_of(state)
        write(self._asked, self.ends, rewards)
        last = rewards[-self._asked.get("window", 1) :]
        if len(rewards) >= self._asked.get("window", 1) and statistics.mean(last) >= self._asked.get("until", 2.0):
            control.should_training_stop = True


def rewards_of(state: Any) -> list[float]:
    return [row["reward"] for row in state.log_history if "reward" in row]


def write(asked: dict[str, Any], ends: list[float], rewards: list[float]) -> None:
    versions = {"trl": trl.__version__, "transformers": transformers.__version__}
    beside = Path(f"{asked['out']}.part")
    beside.write_text(json.dumps({"ends": ends, "rewards": rewards, **versions}))
    os.replace(beside, asked["out"])


def right(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
    """1 for exactly the answer, else 0."""
    return [float(given[-1]["content"] == wanted) for given, wanted in zip(completions, answer, strict=True)]


def even(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """The share of words with an even number."""
    texts = [given[-1]["content"].split() for given in completions]
    return [sum(word[-1] in "02468" for word in words) / max(len(words), 1) for words in texts]


REWARDS = {"right": right, "even": even}


def last_number(file: str) -> Any:
    """1 if the last number is the answer, by the rule in `file`."""
    is_last_number = runpy.run_path(file)["is_last_number"]

    def scores(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
        texts = [given[-1]["content"] for given in completions]
        return [float(is_last_number(text, wanted)) for text, wanted in zip(texts, answer, strict=True)]

    return scores


def main(asked: dict[str, Any]) -> None:
    if asked["threads"]:
        torch.set_num_threads(asked["threads"])
    settings: dict[str, Any] = dict(ON_A_CPU)
    if asked["device"] == "cuda":
        settings = ON_A_GPU | {"vllm_max_model_length": asked["longest"]}
    config = trl.GRPOConfig(
        output_dir=f"{asked['out']}.trainer",
        per_device_train_batch_size=asked["prompts_per_step"] * asked["samples"] // asked["passes"],
        gradient_accumulation_steps=asked["passes"],
        num_generations=asked["samples"],
        max_completion_length=asked["max_tokens"],
        max_steps=asked["steps"],
        learning_rate=asked["lr"],
        lr_scheduler_type="constant",
        adam_beta1=asked["betas"][0],
        adam_beta2=asked["betas"][1],
        max_grad_norm=asked["clip_norm"],
        weight_decay=0.0,
        beta=0.0,
        epsilon=asked["clip"],
        loss_type="bnpo",
        temperature=1.0,
        shuffle_dataset=False,
        seed=asked.get("seed", 42),
        **settings,
    )
    clock = Clock(asked)
    reward = asked["reward"]
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(asked["model"]),
        reward_funcs=REWARDS[reward] if reward in REWARDS else last_number(reward),
        args=config,
        train_dataset=Dataset.from_list(asked["rows"]),
        callbacks=[clock],
    )
    trainer.train()
    write(asked, clock.ends, rewards_of(trainer.state))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
