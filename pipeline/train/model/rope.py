"""Rotary frequencies that depend on lengths, fixed for all rows.

With `rope_type` `longrope` or `dynamic`, transformers chooses the frequencies by the longest row of each batch, so the
result of a row depends on the other rows of its batch. vLLM chooses them once, by `--max-model-len`, which is
`model.max_length`. The trainer must compute the distribution that the server samples from, so it chooses as vLLM does.

    fix_frequencies(network, config.max_length)
"""

import math
from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pipeline.errors import ConfigError

_LENGTH_DEPENDENT = ("longrope", "dynamic")


def fix_frequencies(network: nn.Module, max_length: int) -> None:
    """Give every rotary embedding of `network` the frequencies that vLLM uses for sequences of at most `max_length`
    tokens, and keep its forward pass from changing them.

    Raises `ConfigError` if vLLM computes positions up to `max_length` in another way.
    """
    modules: list[Any] = list(network.modules())
    for module in modules:
        types = getattr(module, "rope_type", None)
        if isinstance(types, str):
            module.rope_type = _fixed(module, types, max_length, None)
        elif isinstance(types, dict):
            types.update({layer: _fixed(module, rope, max_length, layer) for layer, rope in types.items()})


def _fixed(module: Any, rope_type: str, max_length: int, layer_type: str | None) -> str:
    """Fix the frequencies if they depend on lengths; the type under which transformers does not change them."""
    if rope_type not in _LENGTH_DEPENDENT:
        return rope_type
    rope = module.config.rope_parameters
    _fix(module, rope_type, rope if layer_type is None else rope[layer_type], max_length, layer_type)
    return "default"


def _fix(module: Any, rope_type: str, rope: dict[str, Any], max_length: int, layer_type: str | None) -> None:
    positions = module.config.max_position_embeddings
    if max_length > positions:
        expected = f"at most {positions}, the model's max_position_embeddings, since its rope_type is {rope_type}"
        raise ConfigError("model.max_length", max_length, expected, f"set model.max_length={positions}")
    if rope_type == "dynamic":
        # vLLM, like transformers, scales the base only beyond `max_position_embeddings`, unless this key is set.
        if rope.get("max_trained_positions", positions) != positions:
            raise _rope_mismatch(f"rope_parameters.max_trained_positions={rope['max_trained_positions']}")
        return
    prefix = f"{layer_type}_" if layer_type else ""
    original = rope["original_max_position_embeddings"]
    is_long = max_length > original
    _refuse_other_scaling(getattr(module, f"{prefix}attention_scaling"), rope, positions / original, is_long)
    if is_long:
        options = {"layer_type": layer_type} if layer_type else {}
        # Any length above `original` gives the long frequencies.
        frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](
            module.config, torch.device("cpu"), seq_len=original + 1, **options
        )
        module.register_buffer(f"{prefix}inv_freq", frequencies, persistent=False)


def _refuse_other_scaling(scaling: float, rope: dict[str, Any], factor: float, is_long: bool) -> None:
    """Raise `ConfigError` if vLLM scales attention by another factor.

    vLLM reads `short_mscale` and `long_mscale`, or computes the scaling from the lengths; transformers reads
    `attention_factor` and `factor` instead.
    """
    original = rope["original_max_position_embeddings"]
    computed = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    served = rope.get("long_mscale" if is_long else "short_mscale") or computed
    if not math.isclose(scaling, served, rel_tol=1e-5):
        raise _rope_mismatch(
            f"a longrope attention scaling of {scaling:.6g} in transformers and {served:.6g} in the servers"
        )


def _rope_mismatch(difference: str) -> ConfigError:
    expected = "rotary embeddings that transformers and the servers compute alike"
    return ConfigError("model.path", difference, expected, "choose another model")
