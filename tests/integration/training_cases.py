"""What the oracle and the ranks compute both: the model, the rows, the losses, and how rows are cut."""

from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Qwen3Config, Qwen3ForCausalLM

from pipeline.config import LossConfig, ModelConfig, OptimConfig
from pipeline.losses import SFT, Objective
from pipeline.packing import Budget
from pipeline.training.rows import Batch, Normalise, Row
from pipeline.training.spec import ModelSpec

VOCABULARY, STEPS = 17, 3
OPTIM = OptimConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, clip_norm=0.5)
MAX_LENGTH = 12

LOSSES: dict[str, tuple[Objective, Normalise, float]] = {
    "grpo": (LossConfig(name="grpo", clip_low=0.2, clip_high=0.3), "token", 0.8),
    "gspo": (LossConfig(name="gspo", clip_low=0.1, clip_high=0.2), "sequence", 1.0),
    "reinforce": (LossConfig(name="reinforce", ratio_cap=1.2), "fixed", 1.3),
    "ppo": (LossConfig(name="ppo", kl=0.2, entropy=0.1), "prompt", 0.8),
    "sft": (SFT, "token", 1.0),
}


@dataclass(frozen=True)
class Case:
    """One way to compute a loss: at most `rows` rows in a micro-batch; layers as FSDP units of their own or not."""

    loss: str
    rows: int
    packed: bool
    layer_units: bool = False

    @property
    def budget(self) -> Budget:
        return Budget(tokens=96, rows=self.rows, packed=self.packed)

    def __str__(self) -> str:
        layout = "packed" if self.packed else "padded"
        return f"{self.loss}-{layout}-{self.rows}" + ("-layers" if self.layer_units else "")


CASES = [Case(*values) for values in product(LOSSES, (1, 2, 8), (True, False))]
CASES += [Case(loss, 2, True, layer_units=True) for loss in ("grpo", "sft")]

Arrays = dict[str, NDArray[np.float32]]


@dataclass
class Result:
    """What the ranks computed in one case."""

    logprobs: list[NDArray[np.float32]] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    gradients: list[Arrays] = field(default_factory=list)
    parameters: Arrays = field(default_factory=dict)


Mutation = Literal[
    "local_normalisation",
    "dropped_micro_batch",
    "duplicated_shard",
    "averaged_gradients",
    "leaking_attention",
    "wrong_positions",
    "shifted_targets",
]
PACKED, PADDED = Case("grpo", 2, True), Case("grpo", 2, False)
MUTATIONS: dict[Mutation, Case] = {
    "local_normalisation": PADDED,
    "dropped_micro_batch": PACKED,
    "duplicated_shard": PACKED,
    "averaged_gradients": PADDED,
    "leaking_attention": PACKED,
    "wrong_positions": PACKED,
    "shifted_targets": PADDED,
}


def write_model(path: Path, tied: bool) -> None:
    """A tiny Qwen3 whose weights are large enough that attention and positions matter."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(5)
        Qwen3ForCausalLM(config).save_pretrained(path)


def model_config(path: Path) -> ModelConfig:
    return ModelConfig(path=str(path), init="pretrained")


def policy_spec(path: Path, **changed: Any) -> ModelSpec:
    return ModelSpec("policy", model_config(path), **{"optim": OPTIM, "steps": STEPS, **changed})


def make_rows() -> list[Row]:
    """Nine ragged rows of three prompts: one counts nothing, one has several turns, one an advantage for each token."""
    draw = np.random.default_rng(3)
    rows = []
    for index, length in enumerate((3, 11, 2, 7, 5, 9, 4, 6, 8)):
        mask = np.ones(length, np.uint8)
        mask[: 1 + index % 2] = 0
        if index == 4:
            mask[:] = 0
        if index == 5:
            mask[3:6] = 0
        row = Row(
            tokens=draw.integers(0, VOCABULARY, length).astype(np.int32),
            mask=mask,
            advantages=draw.normal(size=length).astype(np.float32) if index == 8 else float(draw.normal()),
            behaviour=(draw.normal(size=length) * 0.7 - 3).astype(np.float32),
            reference=(draw.normal(size=length) * 0.7 - 3).astype(np.float32),
            prompt=index // 3,
        )
        rows.append(row)
    return rows


def make_batch(loss: str) -> Batch:
    _, normalise, temperature = LOSSES[loss]
    return Batch.of(make_rows(), normalise, temperature=temperature, max_length=MAX_LENGTH)
