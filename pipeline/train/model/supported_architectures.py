"""Which architectures the trainer computes right: those whose logits are hidden states times a head.

Owns the refusal of all others, by known keys of a config and by a few tokens that the model computes in its own way.
Must not know weights: numbers stand in for them.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from pipeline.errors import ConfigError
from pipeline.train.model.checkpoint_layout import Tensors

_NEUTRAL: dict[str, tuple[float | None, ...]] = {
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "output_logit_soft_cap": (None,),
    "logits_scaling": (None, 1),
    "logit_scale": (None, 1),
    "lm_head_multiplier": (None, 1),
}

_WORDS = 8


def refuse_unloadable(config: Any) -> None:
    """`ConfigError` for a family whose causal language model transformers would not load from its own directory: it
    has no such model, or one with another config, whose names of tensors are not those of the family's files."""
    network = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if network is None or network.config_class not in MODEL_FOR_CAUSAL_LM_MAPPING:
        expected = "a family that transformers' AutoModelForCausalLM saves and loads"
        raise ConfigError("model.path", config.model_type, expected, "choose one that it does, such as Qwen or Llama")


def refuse_unsupported(network: Any) -> None:
    """`ConfigError` unless the model's logits are its last hidden states times its head, with plain attention.

    Known keys are named. As others may come, the model also computes a few tokens in its own way. It needs no weights
    for that: a number stands in for those of each tensor, random hidden states for what it would make of them, and a
    head of a few words for its own.
    """
    config = network.config.get_text_config()
    for key, neutral in _NEUTRAL.items():
        if getattr(config, key, None) not in neutral:
            raise _unsupported(f"{key}={getattr(config, key)}")
    head = network.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise _unsupported("a head with a bias (lm_head.bias)")
    network.eval()
    tokens_BT = torch.arange(min(4, config.vocab_size))[None]
    draw = torch.Generator().manual_seed(0)
    hidden_BTE = torch.randn(*tokens_BT.shape, head.weight.shape[1], generator=draw)
    words_VE = torch.randn(_WORDS, head.weight.shape[1], generator=draw)
    own = _logits(network, tokens_BT, hidden_BTE, words_VE)
    wanted = hidden_BTE @ words_VE.T
    if own.shape != wanted.shape or not torch.allclose(own, wanted, rtol=1e-3, atol=1e-4):
        raise _unsupported(f"a custom head ({type(network).__name__})")


@torch.no_grad()
def _logits(network: Any, tokens_BT: Tensor, hidden_BTE: Tensor, words_VE: Tensor) -> Tensor:
    """What the network makes of these last hidden states with a head of these words; its decoder runs all the same."""
    head = network.get_output_embeddings()
    name = next(name for name, module in network.named_modules() if module is head)
    stand_ins = _stand_ins(network, head) | {f"{name}.weight": words_VE}

    def replace(module: nn.Module, given: Any, output: Any) -> Any:
        output.last_hidden_state = hidden_BTE
        return output

    hook = network.get_decoder().register_forward_hook(replace)
    try:
        given = {"input_ids": tokens_BT, "position_ids": tokens_BT, "use_cache": False}
        answer = torch.func.functional_call(network, stand_ins, kwargs=given, tie_weights=False)
        logits: Tensor = answer.logits
        return logits
    finally:
        hook.remove()


def _stand_ins(network: nn.Module, head: nn.Module) -> Tensors:
    """A number in place of those of each parameter but the head's: they share memory for the largest of them, and an
    embedding, of which rows are only looked up, is one number."""
    multiplied: dict[str, torch.Size] = {}
    looked_up: dict[str, torch.Size] = {}
    for prefix, module in network.named_modules():
        if module is not head:
            shapes = looked_up if isinstance(module, nn.Embedding) else multiplied
            shapes |= {f"{prefix}.{leaf}": p.shape for leaf, p in module.named_parameters(recurse=False)}
    numbers = torch.full((max(shape.numel() for shape in multiplied.values()),), 0.01)
    stand_ins = {name: numbers[: shape.numel()].view(shape) for name, shape in multiplied.items()}
    return stand_ins | {name: numbers[0].expand(shape) for name, shape in looked_up.items()}


def _unsupported(found: str) -> ConfigError:
    expected = "a model whose logits are its hidden states times its head"
    return ConfigError("model.path", found, expected, "choose one without it, such as Qwen or Llama")
