"""The sharding of a model over ranks: FSDP2, with mixed precision.

Owns the units of modules that are gathered together, and their types. Promises that gradients are summed over the
ranks, never averaged: the loss weights already contain the normalization. Must not know the algorithm, nor the
assignment of a tensor's rows to ranks (`row_shards`).
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from pipeline.train.model.experts import spread_experts
from pipeline.train.model.models import DecoderModel

LAYER_UNIT = 1 << 20
"""Number of parameters from which a layer is a separate unit."""
WHOLE_UNIT = 1 << 28
"""Number of parameters up to which a model on one rank is one unit. Its gradients then exist in both types at the end
of the backward pass, when all activations are freed."""


def shard_model(
    model: DecoderModel, mesh: DeviceMesh, compute: torch.dtype, reshard: bool, expert_mesh: DeviceMesh | None = None
) -> None:
    """Apply FSDP2 to each large layer and the root, with gradients summed, not averaged, over the ranks.

    A mesh of two dimensions is HSDP: sharded over the last, replicated over the first. Gradients are then reduced to
    shards inside each replica and summed over the replicas, which stay equal to the last bit.

    Layers of fewer than `LAYER_UNIT` parameters stay in the root's unit: separate units would save little memory, and
    every collective operation waits for the slowest rank. Without `reshard`, gathered parameters stay unsharded until
    the worker's method ends. A model of at most `WHOLE_UNIT` parameters that one rank then has gathered is one unit,
    since the host takes longer for the hooks of its layers than the GPU for their products.

    On a mesh of one shard, frozen parameters of the compute type stay as they are: FSDP would keep a second, equal copy
    of them during passes. They have no gradients, and each replica loads the same ones.

    With an `expert_mesh` (`efsdp` × `ep`, behind `dp_replicate` if there are replicas), the experts of each layer are
    distributed over `ep`, and each rank's part is a unit that is sharded over `efsdp`. Their gradients are sums over
    all ranks, like the others: contributions of other ranks of `ep` arrive with their tokens.
    """
    whole = mesh.size() == 1 and not reshard and _parameters(model) <= WHOLE_UNIT
    large = [] if whole else [layer for layer in model.layers if _parameters(layer) >= LAYER_UNIT]
    experts = [] if expert_mesh is None else spread_experts(model, expert_mesh["ep"])
    unsharded = _frozen(model, compute) if mesh.size(mesh.ndim - 1) == 1 else set()
    for module in (*experts, *large, model):
        # None lets FSDP choose for the root, which it leaves gathered, since the backward pass needs it first.
        reshard_after_forward = None if module is model else reshard
        # Some routers compute weights in float32: an experts unit must not round its inputs.
        precision = MixedPrecisionPolicy(compute, torch.float32, cast_forward_inputs=module not in experts)
        unit_mesh = _without_ep(expert_mesh) if expert_mesh is not None and module in experts else mesh
        sharded = fully_shard(
            module,
            mesh=unit_mesh,
            mp_policy=precision,
            reshard_after_forward=reshard_after_forward,
            ignored_params=unsharded,
        )
        sharded.set_reshard_after_backward(reshard)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    _prefetch(large, experts)


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _frozen(model: nn.Module, compute: torch.dtype) -> set[nn.Parameter]:
    """The parameters that need neither a gradient nor another type."""
    return {p for p in model.parameters() if not p.requires_grad and p.dtype == compute}


def _without_ep(mesh: DeviceMesh) -> DeviceMesh:
    return mesh["efsdp"] if mesh.ndim == 2 else mesh["dp_replicate", "efsdp"]


def _prefetch(layers: Sequence[nn.Module], experts: Sequence[nn.Module]) -> None:
    """Prefetch the next layer with its experts while one computes.

    FSDP's implicit prefetch would start too late, since the host waits for the number of tokens of each expert.
    """
    if not experts:
        return
    units = [
        [cast(FSDPModule, layer), *(cast(FSDPModule, unit) for unit in layer.modules() if unit in experts)]
        for layer in layers
    ]
    for (layer, *_), following in pairwise(units):
        layer.set_modules_to_forward_prefetch(following)
    for (layer, *_), preceding in pairwise(reversed(units)):
        layer.set_modules_to_backward_prefetch(preceding)
