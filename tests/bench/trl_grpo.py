"""TRL's side of `tests.bench.bench_laptop` and `tests.gpu.peers`, run by a Python that has TRL: imports nothing of the
project.

python trl_grpo.py asked.json
"""

import json
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
    """When each step was done."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.monotonic())


def right(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
    """1 for exactly the answer, else 0."""
    return [float(given[-1]["content"] == wanted) for given, wanted in zip(completions, answer, strict=True)]


def even(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """The share of words with an even number."""
    texts = [given[-1]["content"].split() for given in completions]
    return [sum(word[-1] in "02468" for word in words) / max(len(words), 1) for words in texts]


REWARDS = {"right": right, "even": even}


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
        **settings,
    )
    clock = Clock()
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(asked["model"]),
        reward_funcs=REWARDS[asked["reward"]],
        args=config,
        train_dataset=Dataset.from_list(asked["rows"]),
        callbacks=[clock],
    )
    trainer.train()
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    versions = {"trl": trl.__version__, "transformers": transformers.__version__}
    found = {"ends": clock.ends, "rewards": rewards, **versions}
    Path(asked["out"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
