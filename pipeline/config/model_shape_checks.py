"""The rules of the sizes in a model's config.json that hold in every family, checked without torch and transformers.

A config passes whose sizes are absent, or lists with a number for each layer. The rules of a family, such as which head
counts it reads, are those of transformers (`pipeline.train.model.model_size`).
"""

from collections.abc import Mapping
from typing import Any

_SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "vocab_size", "max_position_embeddings"),
)
_MAY_BE_ZERO = ("head_dim", "intermediate_size")
"""Sizes that are 0 where a family does not use them, such as a mixture of experts without dense layers."""


def find_shape_mistake(settings: Mapping[str, Any]) -> tuple[str, str] | None:
    """The expectation that config.json misses first, and the value there; None without a mistake."""
    for key in _SIZES:
        size, least = settings.get(key), 0 if key in _MAY_BE_ZERO else 1
        if not (size is None or isinstance(size, list) or (type(size) is int and size >= least)):
            expected = "a positive integer" if least else "0 or a positive integer"
            return f"a config.json whose {key} is {expected}", f"it is {size!r}"
    layers, kinds = settings.get("num_hidden_layers"), settings.get("layer_types")
    if kinds is not None and not isinstance(kinds, list):
        return "a config.json whose layer_types is a list", f"it is {kinds!r}"
    if isinstance(layers, int) and kinds is not None and len(kinds) < layers:  # more of them are for layers of MTP
        return f"a config.json with layer_types for num_hidden_layers={layers}", f"it has {len(kinds)} of them"
    return None
