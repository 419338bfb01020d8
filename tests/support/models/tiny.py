"""The one tiny Qwen3 of the tests, in any size: its config, and directories with it."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

VOCABULARY = 17
SIZE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "tie_word_embeddings": True,
}


def tiny_config(**changed: Any) -> PretrainedConfig:
    """`SIZE`, or what is said otherwise; with `model_type`, of another family."""
    return AutoConfig.for_model(**{"model_type": "qwen3", **SIZE, **changed})


def tiny_network(seed: int, **changed: Any) -> Any:
    """The model in float32, its weights drawn from `seed`; the caller's random numbers go on as if it were not."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(tiny_config(**changed), dtype=torch.float32)


def write_tiny(path: Path, seed: int | None = None, **changed: Any) -> Path:
    """A model directory, with something in place of a tokenizer; with weights where there is a `seed` for them."""
    made = tiny_config(**changed) if seed is None else tiny_network(seed, **changed)
    made.save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return path
