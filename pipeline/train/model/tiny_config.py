"""A small copy of a model's architecture, from its config alone.

Owns the choice of config values that may shrink. Promises that the copy has every kind of layer of the model, in the
order and the classes of its first layers; that attention windows are a few tokens; that length-dependent behavior
changes at rows of more than `BOUND` tokens; and that the full model is never allocated. Must not know weights, or the
use of the copy.

Values of a config constrain each other, differently in each family. So there are three attempts, `TINY_SIZES`, from a
copy of a few hundred thousand parameters to one that is only truncated after its kinds of layers; the caller tries them
in turn.
"""

import copy
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from pipeline.errors import ConfigError

TINY_SIZES = ("narrow", "wide", "cut")
"""`narrow`: few heads, small feed-forward layers, few experts; `wide`: all heads; `cut`: layers of the full size."""

VOCABULARY = 64
BOUND = 8
"""Rows of the copy with more tokens count as long: for rotary frequencies, and for layers that select tokens."""
_HEADS = 4
_FEW = 4
_PARTS = {
    **dict.fromkeys(("intermediate_size", "intermediate_size_mlp", "moe_intermediate_size"), 64),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size", "expert_intermediate_size"), 64),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner"), 64),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "attention_window_size", "window_size"), 4),
    **dict.fromkeys(("keep_window_size", "index_topk", "floor_scale"), 4),
    "index_block_size": 2,
    "index_topk_blocks": 2,
}


def shrink_config(config: Any, size: str) -> Any:
    """A copy of a transformers config for a small model; `size` is one of `TINY_SIZES`. `ConfigError` if its decoder
    has no list of layers."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    exceptions = _take_exceptions(text)
    _cut(text, _layers_per_kind(config))
    text.vocab_size = VOCABULARY
    _shrink(text, "vocab_size_per_layer_input", VOCABULARY)
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        _shrink(text, key, 0)
    _bound(text)
    for part in (text, *exceptions.values()):
        if size != "cut":
            for key, number in _PARTS.items():
                _shrink(part, key, number)
    if size == "narrow":
        _narrow(text, list(exceptions.values()))
    if exceptions:
        layers = {layer: vars(values) for layer, values in exceptions.items() if layer < text.num_hidden_layers}
        text.per_layer_config = layers
    for name in small.sub_configs:
        if getattr(small, name, None) not in (None, text):
            _shrink(getattr(small, name), "num_hidden_layers", 1)
    return small


def _layers_per_kind(config: Any) -> int:
    """The number of first layers that include every kind of layer, in units of `num_hidden_layers`, in which some
    families count the halves of a layer."""
    with torch.device("meta"):
        decoder = AutoModelForCausalLM.from_config(copy.deepcopy(config)).get_decoder()
    if not hasattr(decoder, "layers"):
        raise ConfigError(
            "model.path", type(decoder).__name__, "a decoder with a list of layers", "choose another model"
        )
    types = getattr(config.get_text_config(), "layer_types", None) or [None] * len(decoder.layers)
    kinds = [(_kind(layer), type_) for layer, type_ in zip(decoder.layers, types, strict=False)]
    counted: int = max(1, config.get_text_config().num_hidden_layers // len(decoder.layers))
    return (max(kinds.index(kind) for kind in kinds) + 1) * counted


def _kind(layer: nn.Module) -> tuple[object, ...]:
    """The structure of a layer: the classes of its modules and their switches, without sizes and numbers."""
    return tuple((name, type(module).__name__, _switches(module)) for name, module in layer.named_modules())


def _switches(module: nn.Module) -> tuple[object, ...]:
    plain = {key: value for key, value in vars(module).items() if isinstance(value, bool | str | int | float | None)}
    return tuple(sorted((key, str(v) if isinstance(v, bool | str) else type(v).__name__) for key, v in plain.items()))


def _cut(text: Any, layers: int) -> None:
    """Truncate the config to the first layers, including lists with an entry per layer."""
    # With few layers, an unrelated list may have the same length, so nothing is truncated.
    before = text.num_hidden_layers
    if before <= _FEW:
        return
    for key, value in text.to_dict().items():
        per_layer = isinstance(value, list | tuple) or (isinstance(value, str) and "pattern" in key)
        if per_layer and len(value) == before:
            setattr(text, key, value[:layers])
    text.num_hidden_layers = layers


def _bound(text: Any) -> None:
    """Shrink the lengths at which rotary embeddings change. A table of learned embeddings keeps its size, since it
    needs an entry for each position."""
    parameters = getattr(text, "rope_parameters", None)
    if not parameters:
        return
    positions = BOUND
    for rope in (parameters, *(nested for nested in parameters.values() if isinstance(nested, dict))):
        original = rope.get("original_max_position_embeddings")
        if isinstance(original, int) and original > BOUND:
            rope["original_max_position_embeddings"] = BOUND
            if rope.get("rope_type") == "longrope":  # its scaling is computed from both lengths, so keep their ratio
                positions = max(positions, text.max_position_embeddings * BOUND // original)
    _shrink(text, "max_position_embeddings", positions)
    _shrink(text, "original_max_position_embeddings", BOUND)


def _take_exceptions(text: Any) -> dict[int, SimpleNamespace]:
    """Remove and return the values of single layers that differ from the rest, by layer index. While they are in the
    config, its common values cannot be read."""
    if not getattr(text, "is_heterogeneous", False):
        return {}
    exceptions = {int(layer): SimpleNamespace(**keys) for layer, keys in text.to_dict()["per_layer_config"].items()}
    text.per_layer_config = None
    return exceptions


def _narrow(text: Any, exceptions: list[Any]) -> None:
    """Shrink the number of heads, not their size; grouped heads stay grouped, also in layers with other numbers."""
    heads = getattr(text, "num_attention_heads", None)
    if not heads:
        return
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    for part in (*exceptions, text):
        grouped = getattr(part, "num_key_value_heads", None) not in (None, getattr(part, "num_attention_heads", heads))
        _shrink(part, "num_attention_heads", _HEADS)
        _shrink(part, "num_key_value_heads", _HEADS // 2 if grouped else _HEADS)
    text.hidden_size = _HEADS * size


def _shrink(config: Any, key: str, number: int) -> None:
    """Lower an integer value of a config to `number`, if it is larger."""
    value = getattr(config, key, None)
    if isinstance(value, int) and not isinstance(value, bool) and value > number:
        setattr(config, key, number)
