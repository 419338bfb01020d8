"""The size of a server's KV cache on GPUs that it shares with a trainer or a second server.

vLLM counts all memory that is allocated during its profiling pass as its own. A neighbor's allocation then reduces the
cache, even below zero, and a neighbor's release ends vLLM with an error. Here the size of the cache is the part of
`gpu_memory_utilization` that weights and `ENGINE` leave, independent of neighbors.
"""

import os
from collections.abc import Mapping
from typing import Any

from pipeline.inference.vllm.stock_functions import stock_function
from pipeline.topology.memory_budget import GIB
from pipeline.topology.server_memory import ENGINE

SHARED = "ROLLCALL_SHARED_GPU"
"""The environment variable of a server that is 1 if its GPUs are shared."""


def limit_to_share(variables: Mapping[str, str] = os.environ) -> None:
    """Patch this vLLM process to size its cache this way, if its GPUs are shared. A second call changes nothing."""
    if variables.get(SHARED) != "1":
        return
    from vllm.v1.worker.gpu_worker import Worker

    key = "resources.colocate and resources.inference.servers_per_gpu"
    stock = stock_function(Worker, "determine_available_memory", "self", by=__name__, key=key)
    if stock is None:
        return

    def determine_available_memory(self: Any) -> int:
        """The bytes of the cache. `ValueError` if the weights leave no room."""
        if not self.cache_config.kv_cache_memory_bytes:
            weights = int(self.model_runner.model_memory_usage)
            self.cache_config.kv_cache_memory_bytes = cache_bytes_left(int(self.requested_memory), weights)
        available: int = stock(self)
        return available

    Worker.determine_available_memory = determine_available_memory


def cache_bytes_left(share: int, weights: int) -> int:
    """Bytes for the cache of a server that may use `share` bytes of a GPU. `ValueError` if none are left."""
    left = share - weights - ENGINE
    if left <= 0:
        required = f"weights of {weights / GIB:.1f} GiB and {ENGINE / GIB:.1f} GiB for vLLM"
        raise ValueError(
            f"inference.gpu_memory: expected more than {required}, found {share / GIB:.1f} GiB of each GPU; raise it, "
            "or spread the server over more GPUs (resources.inference.gpus)"
        )
    return left
