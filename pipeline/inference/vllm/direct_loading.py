"""A fix for models whose loaders in vLLM write into parameters themselves (gpt-oss): load these tensors after a reload.

vLLM's reload of a running model works with what loaders hand to a parameter's `weight_loader`; meanwhile the parameters
have no memory. The loader of gpt-oss copies experts and sinks into the parameters directly, so a reload loses them, and
the old values stay. After the reload, the parameters are again those that the model computes with: the loader writes
into them, and the experts are packed again.

vLLM logs `Failed to load weights` for these layers, before they are loaded here.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

_WRITTEN = {"gpt_oss": (".experts.", ".sinks")}
"""Parts of the names of such tensors, by model type."""


class DirectTensors:
    """The tensors of one reload that the model's loader writes directly."""

    def __init__(self, model_type: str) -> None:
        self._parts = _WRITTEN.get(model_type, ())
        self._tensors: list[tuple[str, Tensor]] = []

    def without(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The other tensors; those of this class are kept for `load`."""
        for name, tensor in weights:
            if any(part in name for part in self._parts):
                self._tensors.append((name, tensor))
            else:
                yield name, tensor

    @torch.no_grad()
    def load(self, model: Any) -> None:
        """Load the kept tensors into a model whose reload is over.

        An error for experts whose size the kernel has padded: the parameters have another shape than the tensors.
        """
        if not self._tensors:
            return
        model.load_weights(iter(self._tensors))
        for layer in model.modules():
            pack_experts(layer)


def pack_experts(layer: nn.Module) -> None:
    """Have the kernel of a layer of experts pack its weights, as it does after the first load."""
    kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
    experts: Any = getattr(kernel, "fused_experts", None)
    if hasattr(experts, "process_weights_after_loading"):
        experts.process_weights_after_loading(layer)
