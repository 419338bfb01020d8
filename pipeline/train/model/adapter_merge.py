"""Whole weights out of a base and its adapters.

Owns the sum W + alpha / rank · B A of linear layers and of experts, of this rank's rows. Promises that the base stays
as it is, and that beside one tensor's rows only A of a linear layer is gathered. Must not know where the sum goes.

    rows = AdapterMerge(network, group)(parameter)      # sharded like it; itself where there is no adapter
    rows = merger(network, lora, group)(parameter)      # the same, or the parameter itself without `lora.merge`

Rows of W and of B belong together, and are sharded alike: B A of them needs the whole of A. Of experts A and B have a
row for each expert, as W has.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeline.config import LoraConfig
from pipeline.train.model.cpu_offload import local
from pipeline.train.model.experts import ADAPTERS, ExpertAdapter, fused_experts
from pipeline.train.model.row_shards import gather


def merger(network: nn.Module, lora: LoraConfig, group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    """What makes a parameter of the network as it is published: with `lora.merge` its adapter is added."""
    return AdapterMerge(network, group) if lora.rank and lora.merge else lambda tensor: tensor


class AdapterMerge:
    """Adds to each tensor of a base what its adapters do. Collective over `group`, the ranks of one whole model."""

    def __init__(self, network: nn.Module, group: dist.ProcessGroup) -> None:
        self._group = group
        layers: list[Any] = [module for module in network.modules() if _adapts(module)]
        self._linear = {id(layer.base_layer.weight): layer for layer in layers}
        self._experts = {id(stack): parts for stack, parts in _adapted_stacks(network)}

    @torch.no_grad()
    def __call__(self, tensor: Tensor) -> Tensor:
        """The rows of `tensor` that this rank has, with the adapters' part; in the type of the base."""
        if id(tensor) in self._linear:
            return _like(tensor, local(tensor) + self._of_linear(self._linear[id(tensor)]))
        if id(tensor) in self._experts:
            return _like(tensor, local(tensor) + _of_experts(self._experts[id(tensor)]))
        return tensor

    def _of_linear(self, layer: Any) -> Tensor:
        (name,) = layer.active_adapters
        A = gather(layer.lora_A[name].weight, torch.float32, self._group)
        product: Tensor = layer.scaling[name] * local(layer.lora_B[name].weight) @ A
        return product


def _of_experts(parts: list[ExpertAdapter]) -> Tensor:
    return torch.cat([part.scale * torch.bmm(local(part.lora_B), local(part.lora_A)) for part in parts], dim=1)


def _adapts(module: nn.Module) -> bool:
    """Whether peft put an adapter on this layer. Does not import peft, which takes a second."""
    return hasattr(module, "lora_A") and hasattr(module, "base_layer")


def _adapted_stacks(network: nn.Module) -> Iterator[tuple[Tensor, list[ExpertAdapter]]]:
    """Each tensor of experts that has adapters, with those of its matrices in order."""
    for module in fused_experts(network):
        adapters: Any = getattr(module, ADAPTERS, None)
        if adapters is not None:
            yield from ((getattr(module, name), list(parts.values())) for name, parts in adapters.items())


def _like(tensor: Tensor, rows: Tensor) -> Tensor:
    """These rows as the part of a tensor that is sharded like `tensor`."""
    if not isinstance(tensor, DTensor):
        return rows
    return DTensor.from_local(
        rows, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
