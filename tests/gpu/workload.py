"""What the measurements on GPUs train: models in the shapes of Qwen3 and Qwen3-MoE, random weights, and their rows."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import Qwen3Config, Qwen3MoeConfig

from pipeline.config import ModelConfig
from pipeline.train.batching.sequences import Batch, TrainSequence
from pipeline.train.model.model_flops import ModelFlops
from pipeline.train.model.models import build_on_meta


@dataclass(frozen=True)
class Workload:
    """A model and the batch of one optimizer step.

    Attributes:
        model: arguments of `Qwen3Config`, or with `num_experts` of `Qwen3MoeConfig`.
        rows: samples of a step.
        shortest, longest: tokens of a sample, drawn evenly between.
        prompt: tokens of a sample that are not counted.
        budget: tokens of a micro-batch.
        group: samples of a prompt, which begin alike.
    """

    model: dict[str, Any]
    rows: int
    shortest: int
    longest: int
    prompt: int
    budget: int
    group: int = 1

    def write_model(self, path: Path) -> None:
        """A directory with a config and no weights."""
        mixture = "num_experts" in self.model
        config, name = (Qwen3MoeConfig, "Qwen3Moe") if mixture else (Qwen3Config, "Qwen3")
        config(**TIED | self.model, architectures=[f"{name}ForCausalLM"]).save_pretrained(path)

    def of_length(self, rows: int, length: int, prompt: int, group: int = 1) -> "Workload":
        """The same model with rows of one length."""
        return replace(self, rows=rows, shortest=length, longest=length, prompt=prompt, group=group)

    def of_small_rows(self) -> "Workload":
        """The same model with 256 ragged rows of 20 to 108 tokens: 16k tokens, one micro-batch."""
        return replace(self, rows=256, shortest=20, longest=108, prompt=16, group=1)

    def make_batch(self) -> Batch:
        """Rows of one reward each, sampled by a policy that is not quite this one."""
        draw = np.random.default_rng(0)
        vocabulary = self.model["vocab_size"]
        rows = []
        for length in draw.integers(self.shortest, self.longest + 1, self.rows).tolist():
            mask = np.ones(length, np.uint8)
            mask[: self.prompt] = 0
            sampler_logprobs = np.full(length, -np.log(vocabulary), np.float32)
            tokens = draw.integers(0, vocabulary, length).astype(np.int32)
            if len(rows) % self.group:
                tokens[: self.prompt] = rows[-1].tokens[: self.prompt]
            rows.append(TrainSequence(tokens, mask, float(draw.normal()), sampler_logprobs))
        return Batch.of(rows)


def flops_of(model: Path) -> ModelFlops:
    """The trainer's own formula for the model of a directory, which needs no weights."""
    return build_on_meta(ModelConfig(path=str(model), init="random")).flops


def step_flops(flops: ModelFlops, batch: Batch) -> float:
    """Operations of one step on the rows, of which none shares tokens with another."""
    return flops.of_rows([(length, 0) for length in batch.lengths], batch.counted)


TIED = {"tie_word_embeddings": True}
_QWEN3 = {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096}
_TINY = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "max_position_embeddings": 256,
}


def _experts(experts: int, of_a_token: int, size: int) -> dict[str, Any]:
    """Every layer with experts of the intermediate size `size`, `of_a_token` of them for each token."""
    chosen = {"num_experts": experts, "num_experts_per_tok": of_a_token, "moe_intermediate_size": size}
    return chosen | {"norm_topk_prob": True, "decoder_sparse_step": 1}


def _qwen3(vocabulary: int = 151_936, **model: Any) -> Workload:
    settings = _QWEN3 | {"vocab_size": vocabulary} | model
    return Workload(model=settings, rows=128, shortest=200, longest=1000, prompt=64, budget=16_384)


WORKLOADS = {
    "135m": _qwen3(  # the sizes of SmolLM2-135M
        49_152,
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        intermediate_size=1536,
    ),
    "0.6b": _qwen3(32_000, hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, intermediate_size=3072),
    "1.7b": _qwen3(hidden_size=2048, num_hidden_layers=28, num_attention_heads=16, intermediate_size=6144),
    "4b": _qwen3(hidden_size=2560, num_hidden_layers=36, num_attention_heads=32, intermediate_size=9728),
    "8b": _qwen3(
        hidden_size=4096,
        num_hidden_layers=36,
        num_attention_heads=32,
        intermediate_size=12_288,
        tie_word_embeddings=False,
    ),
    "moe": _qwen3(  # 1.7B parameters, 0.3B active per token
        32_000,
        hidden_size=1024,
        num_hidden_layers=16,
        num_attention_heads=16,
        intermediate_size=3072,
        **_experts(64, 8, 512),
    ),
    "tiny": Workload(model=_TINY, rows=32, shortest=20, longest=100, prompt=8, budget=512),
    "tiny-moe": Workload(
        model=_TINY | _experts(8, 2, 64),
        rows=32,
        shortest=20,
        longest=100,
        prompt=8,
        budget=512,
    ),
}
