"""The size of a server's cache on GPUs that others share with it: a trainer, or a second server.

vLLM takes what is used after its first pass and was not used before for its own. What a neighbour allocates meanwhile
then counts against the cache, to less than nothing; where a neighbour frees memory, vLLM ends with an error. Here the
cache is what `gpu_memory_utilization` leaves beside the weights and `ENGINE`, whatever others do.
"""

import os
from collections.abc import Mapping
from typing import Any

from pipeline.topology.gpu_memory import ENGINE, GIB

SHARED = "ROLLCALL_SHARED_GPU"
"""The variable of the server's environment that is 1 where its GPUs are shared."""


def limit_to_share(variables: Mapping[str, str] = os.environ) -> None:
    """Have this vLLM process size its cache so, if its GPUs are shared; a second call changes nothing."""
    if variables.get(SHARED) != "1":
        return
    from vllm.v1.worker.gpu_worker import Worker

    stock = Worker.determine_available_memory
    if stock.__module__ == __name__:
        return

    def determine_available_memory(self: Any) -> int:
        """Raises `ValueError` if there is no room beside the weights."""
        if not self.cache_config.kv_cache_memory_bytes:
            weights = int(self.model_runner.model_memory_usage)
            self.cache_config.kv_cache_memory_bytes = cache_bytes_left(int(self.requested_memory), weights)
        available: int = stock(self)
        return available

    Worker.determine_available_memory = determine_available_memory


def cache_bytes_left(share: int, weights: int) -> int:
    """Bytes for the cache of a server that may have `share` bytes of a GPU; `ValueError` if that is too little."""
    left = share - weights - ENGINE
    if left <= 0:
        held = f"weights of {weights / GIB:.1f} GiB and {ENGINE / GIB:.1f} GiB for vLLM"
        raise ValueError(
            f"inference.gpu_memory: expected more than {held}, found {share / GIB:.1f} GiB of each GPU; raise it, or "
            "spread the server over more GPUs (resources.inference.gpus)"
        )
    return left
