"""Merging of adapters into their base weights.

Owns the sum W + alpha / rank · B A (LoRA, Hu et al. 2021) for linear layers and experts, for this rank's rows. Promises
that the base is unchanged, and that only A of a linear layer is gathered. Must not know the receiver of the sum.

    rows = AdapterMerge(network, group)(parameter)      # sharded like the parameter; itself where there is no adapter
    rows = merger(network, lora, group)(parameter)      # the same, or the parameter itself without `lora.merge`

W [out, in] and B [out, rank] are sharded by the same rows, so a rank's rows of B A need the whole of A [rank, in]. Of
experts W [X, out, in], A and B have one row per expert, so no gathering is needed.
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
    """A function that makes the published value of a parameter: with `lora.merge`, the sum with its adapter."""
    return AdapterMerge(network, group) if lora.rank and lora.merge else lambda tensor: tensor


class AdapterMerge:
    """Adds adapters to the tensors of their base. Collective over `group`, the ranks of one whole model."""

    def __init__(self, network: nn.Module, group: dist.ProcessGroup) -> None:
        self._group = group
        layers: list[Any] = [module for module in network.modules() if _adapts(module)]
        self._linear = {id(layer.base_layer.weight): layer for layer in layers}
        self._experts = {id(stack): adapters for stack, adapters in _adapted_stacks(network)}

    @torch.no_grad()
    def __call__(self, tensor: Tensor) -> Tensor:
        """This rank's rows of `tensor` plus the adapter's product: in float32, if a base in 16 bits has one."""
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


def _of_experts(adapters: list[ExpertAdapter]) -> Tensor:
    # [x, out, rank] @ [x, rank, in] for this rank's x experts; a fused tensor has its matrices one below the other, or
    # is one stack of matrices [x, in, out].
    products = [adapter.scale * torch.bmm(local(adapter.lora_B), local(adapter.lora_A)) for adapter in adapters]
    return products[0].transpose(1, 2) if adapters[0].is_stack else torch.cat(products, dim=1)


def _adapts(module: nn.Module) -> bool:
    """Whether peft put an adapter on this layer, by its attributes: importing peft takes a second."""
    return hasattr(module, "lora_A") and hasattr(module, "base_layer")


def _adapted_stacks(network: nn.Module) -> Iterator[tuple[Tensor, list[ExpertAdapter]]]:
    """Each tensor of experts with adapters, and the adapters of its matrices in the order of their rows."""
    for module in fused_experts(network):
        adapters: Any = getattr(module, ADAPTERS, None)
        if adapters is not None:
            yield from ((getattr(module, name), list(of_tensor.values())) for name, of_tensor in adapters.items())


def _like(tensor: Tensor, rows: Tensor) -> Tensor:
    """This rank's `rows` as a tensor sharded like `tensor`."""
    if not isinstance(tensor, DTensor):
        return rows
    return DTensor.from_local(
        rows, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
