"""How a model is spread over ranks: FSDP2, with mixed precision.

Owns which modules are gathered at once, and in which types. Promises that gradients are summed over the ranks, never
averaged. Must not know what is computed, nor which rows of a tensor a rank gets (`shards`).
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
"""Parameters from which a layer is gathered by itself."""


def shard_model(
    model: DecoderModel, mesh: DeviceMesh, compute: torch.dtype, reshard: bool, expert_mesh: DeviceMesh | None = None
) -> None:
    """FSDP2 over each large layer and the root, with gradients summed, not averaged, over the ranks.

    A mesh of two dimensions is HSDP: sharded over the last, replicated over the first. Gradients are then reduced to
    shards inside each replica and summed over the replicas, which stay equal to the last bit.

    Layers of fewer than `LAYER_UNIT` parameters stay in the root's unit: gathering them one by one would save no memory
    worth having, and every collective operation waits for the slowest rank. Without `reshard`, what was gathered stays
    whole until the worker's method ends.

    With an `expert_mesh` (`efsdp` × `ep`, behind `dp_replicate` if there are replicas), the experts of each layer are
    spread over `ep`, and each rank's part is a unit that is sharded over `efsdp`. Their gradients are sums over all
    ranks, as those of the rest: what another rank of `ep` adds comes with its tokens.
    """
    large = [layer for layer in model.layers if sum(p.numel() for p in layer.parameters()) >= LAYER_UNIT]
    experts = [] if expert_mesh is None else spread_experts(model, expert_mesh["ep"])
    for module in (*experts, *large, model):
        kept = None if module is model else reshard
        # Some routers make weights in float32: an experts unit must not round what comes in.
        precision = MixedPrecisionPolicy(compute, torch.float32, cast_forward_inputs=module not in experts)
        over = _without_ep(expert_mesh) if expert_mesh is not None and module in experts else mesh
        sharded = fully_shard(module, mesh=over, mp_policy=precision, reshard_after_forward=kept)
        sharded.set_reshard_after_backward(reshard)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    _prefetch(large, experts)


def _without_ep(mesh: DeviceMesh) -> DeviceMesh:
    return mesh["efsdp"] if mesh.ndim == 2 else mesh["dp_replicate", "efsdp"]


def _prefetch(layers: Sequence[nn.Module], experts: Sequence[nn.Module]) -> None:
    """Gather the next layer with its experts while one computes: FSDP's own prefetch comes late where the host waits
    for the numbers of tokens."""
    if not experts:
        return
    units = [[layer, *(each for each in layer.modules() if each in experts)] for layer in layers]
    for (layer, *_), (later, *inner) in pairwise(units):
        cast(FSDPModule, layer).set_modules_to_forward_prefetch([cast(FSDPModule, each) for each in (later, *inner)])
    for (layer, *_), (earlier, *inner) in pairwise(reversed(units)):
        cast(FSDPModule, layer).set_modules_to_backward_prefetch([cast(FSDPModule, each) for each in (earlier, *inner)])
