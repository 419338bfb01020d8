"""The GPU memory of a server, part by part. Pure; see `gpu_memory`.

server_memory(config, sizes).total        # minimum bytes of each of its GPUs
"""

from pipeline.config import RunConfig
from pipeline.topology.memory_budget import (
    CONTEXT,
    WEIGHT_CHUNK,
    MemoryBudget,
    dp_shard,
    part_of,
    published_bytes,
    publishes,
    server_gpus,
    trainer_ranks,
)
from pipeline.topology.sizes import Sizes

ENGINE = 3 << 30
"""An engine's memory in addition to weights and cache, as measured with vLLM: a profiling pass and CUDA graphs."""

_CHECKED_LOGIT = 20
"""Bytes per logit of a drafted token that vLLM checks: five copies in float32 exist at a time (0.32, its
`RejectionSampler` with log-probabilities). vLLM's profiling pass has one drafted token per sequence, so all others
take memory outside of `inference.gpu_memory`."""
_CHECKED_TOKENS = 8192
"""Maximum tokens of a step of vLLM, drafted ones included: its servers' default on GPUs of 70 to 160 GB (0.32)."""


def server_memory(config: RunConfig, sizes: Sizes) -> MemoryBudget:
    """The minimum memory of a server on each of its GPUs, with room for one sequence of `model.max_length`."""
    return MemoryBudget(
        {
            "weights": _served_bytes(config, sizes),
            "weights that arrive": _receive_bytes(config, sizes) if publishes(config) else 0,
            "one sequence": sequence_bytes(config, sizes),
            "drafting model": _drafting_bytes(config, sizes),
            "logits of drafted tokens": _checked_bytes(config, sizes),
            "engine": ENGINE,
            "CUDA": CONTEXT,
        }
    )


def kv_bytes(config: RunConfig, sizes: Sizes) -> int:
    """Cache bytes of a token on each GPU of a server while every layer's window includes it; 0 if unknown."""
    own = part_of((sizes.kv + sizes.kv_window) * sizes.width, min(server_gpus(config), sizes.kv_heads))
    return own + (kv_bytes(config, sizes.draft) if sizes.draft else 0)


def sequence_bytes(config: RunConfig, sizes: Sizes) -> int:
    """Cache bytes of a sequence of `model.max_length` on each GPU of a server, of the policy and of a drafting model; 0
    if unknown.

    For layers with windows, an engine uses somewhat more while it computes a long prompt.
    """
    length = config.model.max_length
    # Layers with a window cache at most `window` tokens of a sequence.
    numbers = length * sizes.kv + min(length, sizes.window) * sizes.kv_window
    own = part_of(numbers * sizes.width, min(server_gpus(config), sizes.kv_heads))
    return own + (sequence_bytes(config, sizes.draft) if sizes.draft else 0)


def sequences(config: RunConfig, sizes: Sizes, memory: int) -> int:
    """Number of sequences of `model.max_length` that fit into a server's cache on GPUs of `memory` bytes.

    0 or negative if the memory is too small; 0 if the size of a sequence is unknown.
    """
    per_sequence = sequence_bytes(config, sizes)
    own = config.inference.gpu_memory * memory / config.resources.inference.servers_per_gpu
    room = own - _served_bytes(config, sizes) - _drafting_bytes(config, sizes) - ENGINE
    return int(room // per_sequence) if per_sequence else 0


def min_engine_bytes(config: RunConfig, sizes: Sizes) -> int:
    """Minimum bytes of a GPU for the engine, within `inference.gpu_memory`, over all servers on the GPU."""
    parts = server_memory(config, sizes).parts
    inside = parts["weights"] + parts["drafting model"] + parts["one sequence"] + parts["engine"]
    return config.resources.inference.servers_per_gpu * inside


def bytes_outside_engine(config: RunConfig, sizes: Sizes) -> int:
    """Bytes of a GPU that its servers need outside of `inference.gpu_memory`: arriving weights, drafted tokens'
    logits, and CUDA."""
    parts = server_memory(config, sizes).parts
    outside = parts["weights that arrive"] + parts["logits of drafted tokens"] + parts["CUDA"]
    return config.resources.inference.servers_per_gpu * outside


def _receive_bytes(config: RunConfig, sizes: Sizes) -> int:
    """Memory of each GPU of a server for a policy version: its shard of a whole model, or a whole adapter; and a chunk
    if several trainer processes send. With `inference.staging_device=host`, a chunk alone instead of the shard."""
    on_host = arrives_on_host(config)
    chunk = WEIGHT_CHUNK if on_host or dp_shard(config, trainer_ranks(config)) > 1 else 0
    return chunk + (0 if on_host else arriving_bytes(config, sizes))


def arriving_bytes(config: RunConfig, sizes: Sizes) -> int:
    """Bytes of a policy version for one process of a server: its shard of a whole model, or a whole adapter."""
    whole = config.model.lora.travels_alone or config.inference.quantization != "none"
    return part_of(published_bytes(config, sizes), 1 if whole else server_gpus(config))


def _served_bytes(config: RunConfig, sizes: Sizes) -> int:
    """Bytes of the weights with which one process of a server computes. Quantized ones have one byte, but for the
    embedding and the head; their scales are below a thousandth."""
    fewer = 0 if config.inference.quantization == "none" else sizes.width - 1
    return part_of(sizes.weights - fewer * (sizes.parameters - sizes.outside_layers), server_gpus(config))


def _drafting_bytes(config: RunConfig, sizes: Sizes) -> int:
    """Bytes of a drafting model's weights for one process of a server. It has as many processes as the policy, and
    FP8 does not apply to it."""
    return part_of(sizes.draft.weights, server_gpus(config)) if sizes.draft else 0


def _checked_bytes(config: RunConfig, sizes: Sizes) -> int:
    """Bytes of the logits of all tokens that a server's sequences have drafted; each of its processes has them all."""
    speculation = config.inference.speculation
    if speculation.method == "none":
        return 0
    tokens = min(config.inference.max_sequences * speculation.tokens, _CHECKED_TOKENS)
    return _CHECKED_LOGIT * tokens * sizes.vocabulary


def arrives_on_host(config: RunConfig) -> bool:
    """Whether weights for a server arrive in its host's memory."""
    return config.inference.staging_device == "host" and not config.model.lora.travels_alone
