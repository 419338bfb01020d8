"""TRL's side of `tests.bench.bench_sft`, run by a Python that has TRL: imports nothing of the project.

python trl_sft.py asked.json
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
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl_settings import ON_A_CPU


class InOrder(trl.SFTTrainer):
    """Takes the rows in the order in which they are given, and keeps each loss unrounded with its tokens."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        self.losses: list[float] = []
        self.tokens: list[float] = []
        super().__init__(*args, **settings)

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **settings: Any) -> Any:
        self.tokens.append(float(inputs["attention_mask"].sum()))
        result = super().compute_loss(model, inputs, *args, **settings)
        self.losses.append(float((result[0] if isinstance(result, tuple) else result).detach()))
        return result


class Clock(TrainerCallback):
    """The CPU seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began = time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.process_time() - self.began)


def main(asked: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in Path(asked["data"]).read_text().splitlines()]
    config = trl.SFTConfig(
        output_dir=f"{asked['out']}.trainer",
        per_device_train_batch_size=asked["batch"],
        num_train_epochs=1,
        learning_rate=asked["lr"],
        lr_scheduler_type="cosine",
        warmup_steps=0,
        adam_beta1=asked["betas"][0],
        adam_beta2=asked["betas"][1],
        max_grad_norm=asked["clip_norm"],
        weight_decay=0.0,
        max_length=1024,
        packing=False,
        assistant_only_loss=True,
        **ON_A_CPU,
    )
    adapters = None
    if asked["lora"]:
        from peft import LoraConfig

        adapters = LoraConfig(task_type="CAUSAL_LM", **asked["lora"])
    clock = Clock()
    trainer = InOrder(
        model=AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(asked["model"]),
        args=config,
        train_dataset=Dataset.from_list([rows[index] for index in asked["order"]]),
        peft_config=adapters,
        callbacks=[clock],
    )
    trainer.train()
    steps = list(zip(trainer.losses, clock.seconds, trainer.tokens, strict=True))
    versions = {"trl": trl.__version__, "transformers": transformers.__version__}
    Path(asked["out"]).write_text(json.dumps({"steps": steps, **versions}))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
