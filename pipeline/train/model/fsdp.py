"""How a model is spread over ranks: FSDP2, with mixed precision.

Owns which modules are gathered at once, and in which types. Promises that gradients are summed over the ranks, never
averaged. Must not know what is computed, nor which rows of a tensor a rank gets (`shards`).
"""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from pipeline.train.model.models import DecoderModel

LAYER_UNIT = 1 << 20
"""Parameters from which a layer is gathered by itself."""


def shard_model(model: DecoderModel, mesh: DeviceMesh, compute: torch.dtype, reshard: bool) -> None:
    """FSDP2 over each large layer and the root, with gradients summed, not averaged, over the ranks.

    A mesh of two dimensions is HSDP: sharded over the last, replicated over the first. Gradients are then reduced to
    shards inside each replica and summed over the replicas, which stay equal to the last bit.

    Layers of fewer than `LAYER_UNIT` parameters stay in the root's unit: gathering them one by one would save no memory
    worth having, and every collective operation waits for the slowest rank. Without `reshard`, what was gathered stays
    whole until the worker's method ends.
    """
    precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    large = [layer for layer in model.layers if sum(p.numel() for p in layer.parameters()) >= LAYER_UNIT]
    for module in (*large, model):
        kept = None if module is model else reshard
        sharded = fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=kept)
        sharded.set_reshard_after_backward(reshard)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
