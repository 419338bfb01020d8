"""The attention layers of a model, as its text config describes them: their kinds, windows, heads and widths. Pure."""

from typing import Any

WINDOWED = ("sliding_attention", "chunked_attention")
"""Kinds of layers whose attention reaches at most `window` tokens back."""


def layer_kinds(settings: Any, layers: int) -> list[str]:
    """The kind of each of `layers` layers, such as `full_attention`."""
    return list(getattr(settings, "layer_types", None) or [_usual_kind(settings)] * layers)


def attends(kind: str) -> bool:
    """Whether a layer of this kind has attention between tokens, and so a cache of keys and values."""
    return kind == "hybrid" or ("attention" in kind and "linear" not in kind)


def window(settings: Any) -> int:
    """Tokens that a query of a `WINDOWED` layer attends to at most; 0 if the config has no window."""
    names = ("sliding_window", "attention_chunk_size")
    return next((size for name in names if isinstance(size := getattr(settings, name, None), int)), 0)


def heads(settings: Any) -> int:
    """Number of query heads; 0 if the config does not have one number for all layers."""
    count = getattr(settings, "num_attention_heads", 0)
    return count if isinstance(count, int) else 0


def kv_heads(settings: Any) -> int:
    """Number of key and value heads, over which the servers' tensor parallelism shards the cache."""
    if getattr(settings, "kv_lora_rank", None):
        return 1
    return int(getattr(settings, "num_key_value_heads", None) or heads(settings))


def head_dim(settings: Any) -> int:
    """Numbers of a head, of models whose keys and values have one width."""
    own = getattr(settings, "attention_head_dim", None) or getattr(settings, "head_dim", None)
    return int(own or settings.hidden_size // max(1, heads(settings)))


def query_and_value_dims(settings: Any) -> tuple[int, int]:
    """Numbers of a head's query (and key), and of its value; they differ in latent attention (MLA)."""
    if getattr(settings, "kv_lora_rank", None):
        return settings.qk_nope_head_dim + settings.qk_rope_head_dim, settings.v_head_dim
    return head_dim(settings), head_dim(settings)


def _usual_kind(settings: Any) -> str:
    """The kind of all layers, for a config without `layer_types`."""
    everywhere = getattr(settings, "sliding_window", None) and getattr(settings, "use_sliding_window", True)
    return "sliding_attention" if everywhere else "full_attention"
