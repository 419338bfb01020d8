"""Rules between the compute type and the family of a model."""

import re

from pipeline.config import ModelConfig
from pipeline.config.model_directory import model_family
from pipeline.errors import ConfigError

_OVERFLOWING = re.compile(r"gemma[234].*|glm4|gpt_oss")
"""Families whose activations exceed 65,504, the largest number of float16. vLLM refuses Gemma 2, Gemma 3 and GLM-4 in
float16 (`_FLOAT16_NOT_SUPPORTED_MODELS`, 0.32); of Gemma 3n, Gemma 4 and gpt-oss Unsloth reports infinities in the
forward pass (`FORCE_FLOAT32`; unsloth-zoo pull request 600)."""
_UNSTABLE = re.compile(r"qwen3_5.*|qwen3_next")
"""Families for whose linear attention Unsloth reports gradients that are not finite in float16."""


def check_dtype(model: ModelConfig, key: str = "model.dtype") -> None:
    """Raise `ConfigError` for float16 with a family whose activations overflow; `key` has the dtype or the path."""
    if model.dtype == "float16" and _OVERFLOWING.fullmatch(family := model_family(model)):
        value = model.dtype if key == "model.dtype" else model.path
        expected = f"bfloat16 or float32 for {family}, whose activations exceed the range of float16"
        raise ConfigError(key, value, expected, "set model.dtype=bfloat16")


def has_unstable_gradients(model: ModelConfig) -> bool:
    """Whether gradients of the model's family are known to be not finite in its compute type."""
    return model.dtype == "float16" and _UNSTABLE.fullmatch(model_family(model)) is not None
