"""Activation checkpointing (Chen et al. 2016): the backward pass recomputes activations instead of keeping them.

Owns which operations are recomputed, and which part of a layer. Promises the same bits as without it in eager layers.
Must not know ranks or losses.

- `full` keeps the input of each layer.
- `selective` also keeps the outputs of attention, and of matrix products that are expensive for their size. Norms,
  activations, rotations, permutations to experts and narrow products are recomputed (torchtitan's `selective op`).
"""

import logging
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from pipeline.config.training_keys import Recomputation
from pipeline.errors import ConfigError
from pipeline.train.model.models import DecoderModel

_ATTENTION = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "torch_attn::_varlen_attn",
)
_FACTOR = {"aten::mm": 0, "aten::addmm": 1, "aten::_grouped_mm": 0}
"""The argument of each matrix product that has the tokens."""


def recompute_activations(model: DecoderModel, mode: Recomputation) -> None:
    """Recompute the activations of each layer, before layers are compiled; `ConfigError` for a family that cannot."""
    if mode == "none":
        return
    if not model.decoder.supports_gradient_checkpointing:
        family = type(model.decoder).__name__
        raise ConfigError("training.activation_checkpointing", family, "a model whose layers can be computed again")
    if mode == "full":
        model.decoder.gradient_checkpointing_enable({"use_reentrant": False})
        return
    policy = partial(_policy, model.network.config.get_text_config().hidden_size)
    contexts = partial(create_selective_checkpoint_contexts, policy)
    # It warns of any operation in place; the one in a layer adds to the counts of experts, which have no gradient.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    for layer in model.layers:
        # Inside of the module's call, which is what `torch.compile` takes: the graph then contains the checkpoint, and
        # the compiler keeps what the policy marks. Outside, a compiled layer would be one operation.
        layer.forward = partial(_checkpointed, layer.forward, contexts)


def is_saved(hidden: int, operation: Any, inputs: Any) -> bool:
    """Whether `selective` keeps the output of an operation in a model of this hidden size.

    A product is kept if each number of its output takes at least `hidden` multiplications. So the projections of
    attention and the first product of a feed-forward layer are kept, and adapters and the second product of small
    experts are not: its output is wide and cheap.
    """
    name = operation.name().partition(".")[0]
    return name in _ATTENTION or (name in _FACTOR and inputs[_FACTOR[name]].shape[-1] >= hidden)


def _policy(hidden: int, context: Any, operation: Any, *inputs: Any, **options: Any) -> CheckpointPolicy:
    saved = isinstance(operation, torch._ops.OpOverload) and is_saved(hidden, operation, inputs)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def _checkpointed(forward: Any, contexts: Any, *inputs: Any, **options: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs, **options)
    # Layers have no dropout (`build_on_meta`), so there is no random state to restore.
    fixed = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": contexts}
    return checkpoint(forward, *inputs, **fixed, **options)
