"""The architectures that the trainer supports: those whose logits are hidden states times a head, scaled or capped.

Owns the refusal of all others, by known keys of a config, and by a comparison of the model's own logits for a few
tokens. Needs no weights: constants replace them.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from pipeline.errors import ConfigError
from pipeline.train.model.checkpoint_layout import Tensors
from pipeline.train.model.logit_rule import logit_rule

_WORDS = 8


def refuse_unloadable(config: Any) -> None:
    """Raise `ConfigError` for quantized weights, attention over compressed tokens, and a family whose causal language
    model transformers cannot load from its own directory: there is none, or it has another config class, with other
    names of tensors than the family's files."""
    network = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if network is None or network.config_class not in MODEL_FOR_CAUSAL_LM_MAPPING:
        expected = "a family that transformers' AutoModelForCausalLM saves and loads"
        raise ConfigError("model.path", config.model_type, expected, "choose one that it does, such as Qwen or Llama")
    if getattr(config, "compress_rates", None):
        feature = f"{config.model_type} with compress_rates, whose attention reads compressed tokens"
        raise ConfigError("model.path", feature, "a model with plain causal attention", "choose another model")
    quantized = getattr(config, "quantization_config", None)
    if quantized:
        method = quantized.get("quant_method", "") if isinstance(quantized, dict) else type(quantized).__name__
        expected = f"weights in bfloat16 or float32, not quantized ({method or 'quantization_config'})"
        raise ConfigError("model.path", config.model_type, expected, "choose a directory with dequantized weights")


def refuse_unsupported(network: Any) -> None:
    """Raise `ConfigError` unless the model's logits follow its `LogitRule`, with plain attention.

    To detect other heads, the model computes the logits of a few tokens
    by its own code. Weights are not needed: a constant replaces each tensor, random hidden states replace the decoder's
    output, and a head of `_WORDS` random rows replaces its head.
    """
    config = network.config.get_text_config()
    if (cap := getattr(config, "attn_logit_softcapping", None)) is not None:
        raise _unsupported(f"attn_logit_softcapping={cap}")
    head = network.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise _unsupported("a head with a bias (lm_head.bias)")
    network.eval()
    tokens_BT = torch.arange(min(4, config.vocab_size))[None]
    draw = torch.Generator().manual_seed(0)
    hidden_BTE = torch.randn(*tokens_BT.shape, head.weight.shape[1], generator=draw)
    words_VE = torch.randn(_WORDS, head.weight.shape[1], generator=draw)
    own = _logits(network, tokens_BT, hidden_BTE, words_VE)
    expected = logit_rule(config).apply(hidden_BTE @ words_VE.T)  # [B, T, E] · [E, V] → [B, T, V]
    if own.shape != expected.shape or not torch.allclose(own, expected, rtol=1e-3, atol=1e-4):
        raise _unsupported(f"a custom head ({type(network).__name__})")


@torch.no_grad()
def _logits(network: Any, tokens_BT: Tensor, hidden_BTE: Tensor, words_VE: Tensor) -> Tensor:
    """The network's logits for these last hidden states and a head with these rows. The decoder runs too, since its
    output object is needed; a hook replaces the hidden states in it."""
    head = network.get_output_embeddings()
    name = next(name for name, module in network.named_modules() if module is head)
    stand_ins = _stand_ins(network, head) | {f"{name}.weight": words_VE}

    def replace(module: nn.Module, inputs: Any, output: Any) -> Any:
        output.last_hidden_state = hidden_BTE
        return output

    hook = network.get_decoder().register_forward_hook(replace)
    try:
        inputs = {"input_ids": tokens_BT, "position_ids": tokens_BT, "use_cache": False}
        output = torch.func.functional_call(network, stand_ins, kwargs=inputs, tie_weights=False)
        logits: Tensor = output.logits
        return logits
    finally:
        hook.remove()


def _stand_ins(network: nn.Module, head: nn.Module) -> Tensors:
    """Constant tensors in place of all parameters except the head's. They are views of one tensor of the largest size;
    an embedding, which is only looked up, is an expanded scalar."""
    multiplied: dict[str, torch.Size] = {}
    looked_up: dict[str, torch.Size] = {}
    for prefix, module in network.named_modules():
        if module is not head:
            shapes = looked_up if isinstance(module, nn.Embedding) else multiplied
            shapes |= {f"{prefix}.{leaf}": p.shape for leaf, p in module.named_parameters(recurse=False)}
    numbers = torch.full((max(shape.numel() for shape in multiplied.values()),), 0.01)
    stand_ins = {name: numbers[: shape.numel()].view(shape) for name, shape in multiplied.items()}
    return stand_ins | {name: numbers[0].expand(shape) for name, shape in looked_up.items()}


def _unsupported(feature: str) -> ConfigError:
    expected = "a model whose logits are its hidden states times its head"
    return ConfigError("model.path", feature, expected, "choose one without it, such as Qwen or Llama")
