"""The routers of a mixture: float32 arithmetic from the logits to the choice of experts.

Families differ in how a router computes. Many multiply in the compute type, and bfloat16 keeps 8 bits of a logit: of
experts with almost equal logits, rounding decides. Here the router's own forward pass runs on inputs, parameters and
buffers that were cast to float32 first, so products, softmax or sigmoid, top-k and the weights of experts are exact to
float32 for every family. The parameters are those of the compute type, as servers have them.

Owns which module is a router, the type in which it computes, and the record of what it computed, for a loss. Must not
know experts' products, ranks or losses.

Notation: T tokens, X experts, K of them for each token.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pipeline.train.model.experts import fused_experts

RECORDED_EXPERTS = "recorded_experts"
"""The attribute with the number of a router's experts, if it is to keep a `Routing` of each pass with gradients."""
ROUTING = "routing"
"""The attribute with the `Routing` of the last such pass."""
_NAMES = ("gate", "router")
"""What families call the router in the module that also has the experts."""


class Routing(NamedTuple):
    """What a router computed: `logits_TX` with their gradient, and the experts of each token, `chosen_TK`."""

    logits_TX: Tensor
    chosen_TK: Tensor


def routers(network: nn.Module) -> list[nn.Module | None]:
    """The router of each layer of fused experts, in the order of `fused_experts`; None for one of another name."""
    names = {id(module): name for name, module in network.named_modules()}
    blocks = (network.get_submodule(names[id(module)].rpartition(".")[0]) for module in fused_experts(network))
    return [next((child for name, child in block.named_children() if name in _NAMES), None) for block in blocks]


def use_exact_routers(network: nn.Module) -> int:
    """Have every router of the network compute in float32 (in float64 for float64 input); returns their number."""
    modules = [module for module in routers(network) if module is not None]
    for module in modules:
        module.forward = partial(_forward, module, module.forward)
    return len(modules)


def _forward(module: nn.Module, forward: Any, *inputs: Any, **options: Any) -> Any:
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    exact = {name: _exact(tensor) for name, tensor in own.items()}
    inputs, options = tuple(map(_exact, inputs)), {name: _exact(value) for name, value in options.items()}
    if all(exact[name] is tensor for name, tensor in own.items()):
        outputs = forward(*inputs, **options)
        experts = getattr(module, RECORDED_EXPERTS, 0)
        if experts and torch.is_grad_enabled():
            setattr(module, ROUTING, _routing(outputs, experts))
        return outputs
    return functional_call(module, exact, inputs, options)  # comes back here, with nothing left to cast


def _routing(outputs: tuple[Tensor, ...], experts: int) -> Routing:
    """Families return logits, weights of experts and chosen experts, in one order or another."""
    logits = next(output for output in outputs if output.is_floating_point() and output.shape[-1] == experts)
    chosen = next(output for output in outputs if not output.is_floating_point())
    return Routing(logits.flatten(0, -2), chosen.flatten(0, -2))


def _exact(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.to(torch.promote_types(value.dtype, torch.float32))
