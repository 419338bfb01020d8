"""The parts of a role's memory, and the numbers of ranks over which trainers and servers divide it. Pure."""

from collections.abc import Mapping

import msgspec

from pipeline.config import RunConfig
from pipeline.topology.sizes import Sizes

GIB = 1 << 30

CONTEXT = 3 << 29
"""Memory of CUDA, its libraries and NCCL on each GPU of a process, 1.5 GiB."""
MASTER = 4
"""Bytes of a parameter in float32."""
WEIGHT_CHUNK = 1 << 27
"""Maximum bytes of weights that are sent at a time. A trainer process needs two chunks for a server, and a server one
if several trainer processes send."""


class MemoryBudget(msgspec.Struct, frozen=True):
    """Bytes of one GPU (or of host memory), by purpose."""

    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        """The total and its parts, the largest first: `34.6 GiB (parameters and moments 22.5, …)`."""
        parts = sorted(((size, name) for name, size in self.parts.items() if size >= GIB // 20), reverse=True)
        named = ", ".join(f"{name} {size / GIB:.1f}" for size, name in parts)
        return f"{self.total / GIB:.1f} GiB ({named})" if named else f"{self.total / GIB:.1f} GiB"


def trainer_ranks(config: RunConfig) -> int:
    """Number of trainer processes on all nodes."""
    return config.resources.trainer.nodes * config.resources.trainer.processes


def dp_shard(config: RunConfig, ranks: int) -> int:
    """Number of trainer processes, out of `ranks`, that share the shards of one replica of the model (HSDP)."""
    return max(1, ranks // config.training.mesh.dp_replicate)


def publishes(config: RunConfig) -> bool:
    """Whether weights are staged on GPUs for their transfer to servers."""
    return config.has_rollouts and config.weights_backend == "nccl"


def published_bytes(config: RunConfig, sizes: Sizes) -> int:
    """Bytes of one policy version: the adapter's parameters in float32, or all weights in compute type."""
    return MASTER * sizes.trained if config.model.lora.travels_alone else sizes.weights


def server_gpus(config: RunConfig) -> int:
    """Number of processes of a server that share its weights; 1 on CPUs."""
    return max(1, config.resources.inference.gpus)


def part_of(size: int, ranks: int) -> int:
    """Bytes of the largest of `ranks` equal parts."""
    return -(-size // ranks)
