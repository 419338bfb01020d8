"""TRL's side of `tests.bench.bench_parity`, run by a Python that has TRL: imports nothing of the project.

python trl_parity.py asked.json
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl_settings import ON_A_CPU

Row = dict[str, Any]


def padded(rows: list[list[float]], left: bool, dtype: torch.dtype) -> Tensor:
    """The rows as one rectangle, filled with 0 on the left or on the right."""
    width = max(map(len, rows))
    filled = [[0] * (width - len(row)) + row if left else row + [0] * (width - len(row)) for row in rows]
    return torch.tensor(filled, dtype=dtype)


def inputs_of(rows: list[Row]) -> dict[str, Tensor]:
    """What GRPOTrainer makes of a batch once it is sampled and scored."""
    prompts, completions = [row["prompt"] for row in rows], [row["completion"] for row in rows]
    mask = padded([[1] * len(each) for each in completions], False, torch.long)
    return {
        "prompt_ids": padded(prompts, True, torch.long),
        "prompt_mask": padded([[1] * len(each) for each in prompts], True, torch.long),
        "completion_ids": padded(completions, False, torch.long),
        "completion_mask": mask,
        "old_per_token_logps": padded([row["sampler_logprobs"] for row in rows], False, torch.float32),
        "advantages": torch.tensor([row["advantage"] for row in rows], dtype=torch.float32),
        "num_items_in_batch": mask.sum(),
    }


class Fed(trl.GRPOTrainer):
    """Trains on given rows in place of samples, and keeps each loss and mean log-probability unrounded."""

    def __init__(self, batches: list[list[Row]], **settings: Any) -> None:
        self.batches = [inputs_of(rows) for rows in batches]
        self.losses: list[float] = []
        self.logprobs: list[float] = []
        super().__init__(**settings)

    def _prepare_inputs(self, *_: Any) -> dict[str, Tensor]:
        return self.batches[self.state.global_step]

    def _get_per_token_logps_and_entropies(self, *args: Any, **settings: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*args, **settings)
        mask = self.batches[self.state.global_step]["completion_mask"]
        self.logprobs.append(float((found[0].detach().double() * mask).sum() / mask.sum()))
        return found

    def compute_loss(self, *args: Any, **settings: Any) -> Any:
        loss = super().compute_loss(*args, **settings)
        self.losses.append(float(loss.detach()))
        return loss


def main(asked: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    batches = asked["batches"]
    config = trl.GRPOConfig(
        output_dir=f"{asked['out']}.trainer",
        per_device_train_batch_size=len(batches[0]),
        num_generations=len(batches[0]),
        max_steps=len(batches),
        learning_rate=asked["lr"],
        lr_scheduler_type="constant",
        adam_beta1=asked["betas"][0],
        adam_beta2=asked["betas"][1],
        adam_epsilon=asked["eps"],
        max_grad_norm=asked["clip_norm"],
        weight_decay=0.0,
        beta=0.0,
        epsilon=asked["clip"][0],
        epsilon_high=asked["clip"][1],
        loss_type="dapo",
        temperature=1.0,
        **ON_A_CPU,
    )
    trainer = Fed(
        batches,
        model=AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(asked["model"]),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "1+1"}] * len(batches)),
    )
    trainer.train()
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    steps = list(zip(trainer.logprobs, trainer.losses, norms, strict=True))
    versions = {"trl": trl.__version__, "transformers": transformers.__version__}
    Path(asked["out"]).write_text(json.dumps({"steps": steps, **versions}))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
