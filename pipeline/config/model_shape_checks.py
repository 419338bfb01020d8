"""The rules between the sizes in a model's config.json, checked without torch and transformers.

A config of any family passes whose sizes are absent, or lists with a number for each layer.
"""

from collections.abc import Mapping
from typing import Any

_SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "vocab_size", "max_position_embeddings"),
)


def find_shape_mistake(settings: Mapping[str, Any]) -> tuple[str, str] | None:
    """The expectation that config.json misses first, and the value there; None without a mistake."""
    for key in _SIZES:
        size = settings.get(key)
        if not (size is None or isinstance(size, list) or (type(size) is int and size > 0)):
            return f"a config.json whose {key} is a positive integer", f"it is {size!r}"
    layers, kinds = settings.get("num_hidden_layers"), settings.get("layer_types")
    if kinds is not None and not isinstance(kinds, list):
        return "a config.json whose layer_types is a list", f"it is {kinds!r}"
    if isinstance(layers, int) and kinds is not None and len(kinds) != layers:
        return f"a config.json with layer_types for num_hidden_layers={layers}", f"it has {len(kinds)} of them"
    heads, keys = settings.get("num_attention_heads"), settings.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(keys, int) and heads % keys and not settings.get("kv_lora_rank"):
        expected = f"a config.json whose num_key_value_heads divides num_attention_heads={heads}"
        return expected, f"it is {keys}"
    return None
