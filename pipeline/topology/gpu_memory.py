"""What the roles of a run need of a GPU's memory.

Owns the arithmetic, from a model's sizes and a config, part by part; `memory_fit` refuses what cannot fit. Promises
upper bounds that lie near what was measured (docs/gpus.md says how near). Pure: a model's sizes come from
`pipeline.train.model.model_size`.

    trainer_memory(config, sizes).total       # bytes of the GPU of a trainer process
"""

import math
from collections.abc import Iterator, Mapping

import msgspec

from pipeline.config import RunConfig
from pipeline.config.value_types import memory_bytes

GIB = 1 << 30

CONTEXT = 3 << 29
"""What CUDA, its libraries and nccl take of each GPU for a process, 1.5 GiB."""
COMPILED = 0.75
"""Of the activations that eager layers keep, what compiled ones do: they compute again what is cheap."""
ENGINE = 3 << 30
"""What vLLM takes beside weights and cache: the pass that it sizes them by, and its graphs."""

_MASTER, _MOMENTS, _GRADIENT = 4, 8, 4
_PUBLISHED = 2
"""Versions that lie on rank 0 while one is packed: it, and the one before, which servers may still ask for."""
WEIGHT_CHUNK = 1 << 27
"""Most bytes of the weights that are brought together at a time for a process of a server; twice that for each server.
"""
_ARRIVING = 2
"""Tokens that arrive at a process for its experts, for each token that would if all experts were chosen alike."""
_LOGIT = 12
"""Bytes a logit in the backward pass: itself, its slope, one of the two once more while it is made."""


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """What the arithmetic needs to know of a model.

    Attributes:
        parameters, trained: all, and those that have gradients.
        outside_layers: parameters of embedding, head and last norm; `layer` those of the largest layer, of `layers`.
        hidden, vocabulary: sizes of a hidden state and of the head's rows.
        head_trained: whether the head has a gradient.
        logits: most logits that exist at a time.
        activations: bytes a token that eager layers keep for the backward pass; 0 where that is not known.
        experts: parameters of all experts of a mixture that `training.mesh.ep` can spread; `experts_layer` those of
            the largest layer. `experts_of_layer` counts these, `experts_per_token` those that a token is sent to.
        kv: numbers a token in a server's cache, over `kv_heads` heads, of layers that keep all tokens; `kv_window` of
            those that keep the last `window` tokens alone. Both 0 where that is not known.
        width: bytes of a number in compute type.
    """

    parameters: int
    trained: int
    outside_layers: int
    layer: int
    layers: int
    hidden: int
    vocabulary: int
    head_trained: bool
    logits: int
    activations: float
    kv: int
    kv_heads: int
    width: int
    kv_window: int = 0
    window: int = 0
    experts: int = 0
    experts_layer: int = 0
    experts_of_layer: int = 0
    experts_per_token: int = 0

    @property
    def weights(self) -> int:
        """Bytes of all parameters in compute type: what is sent and served."""
        return self.parameters * self.width

    @property
    def head(self) -> int:
        """Parameters of the head."""
        return self.hidden * self.vocabulary


class MemoryBudget(msgspec.Struct, frozen=True):
    """Bytes of one GPU, by what they are for."""

    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        """As `34.6 GiB (parameters and moments 22.5, …)`, the largest first."""
        parts = sorted(((size, name) for name, size in self.parts.items() if size >= GIB // 20), reverse=True)
        named = ", ".join(f"{name} {size / GIB:.1f}" for size, name in parts)
        return f"{self.total / GIB:.1f} GiB ({named})" if named else f"{self.total / GIB:.1f} GiB"


def trainer_memory(config: RunConfig, sizes: Sizes, ranks: int = 0) -> MemoryBudget:
    """The most that rank 0 of the trainer holds at a time, of `ranks` (0: as many as the config has)."""
    ranks = ranks or trainer_ranks(config)
    tokens, shards = micro_batch_tokens(config, ranks), dp_shard(config, ranks)
    always = {
        "parameters and moments": _shard(_MASTER * sizes.parameters + _MOMENTS * sizes.trained, shards),
        "other models": _other_models_bytes(config, sizes, shards),
        "weights for the servers": _staging_bytes(config, sizes) if _publishes(config) else 0,
        "copies in compute type": _gathered_bytes(config, sizes),
        "gradients": _gradients(config, sizes, shards),
        "tokens on their way to experts": _traveling(config, sizes, tokens),
        "tables of shared lines": _tables(config, tokens),
        "CUDA": CONTEXT,
    }
    peaks: list[dict[str, int]] = [
        {"activations": _activation_bytes(config, sizes, tokens), "head": _lm_head_bytes(sizes, tokens)},
        {"activations": _activation_bytes(config, sizes, tokens) + _recomputed_activation_bytes(config, sizes, tokens)}
        | {"gradients of a layer": _grad_comm_bytes(_layer(config, sizes), sizes)},
        {"gradients of embedding and head": _grad_comm_bytes(sizes.outside_layers, sizes)},
    ]
    return MemoryBudget(always | max(peaks, key=lambda parts: sum(parts.values())))


def least_trainer_memory(sizes: Sizes, ranks: int) -> int:
    """Bytes on each of so many ranks that a trained model takes at the very least: parameters, moments, gradients."""
    return _shard(_MASTER * sizes.parameters + (_MOMENTS + _GRADIENT) * sizes.trained, ranks)


def adapter_state_memory(sizes: Sizes, ranks: int) -> int:
    """As `least_trainer_memory`, for a further adapter on a model that is there, and for what a commit makes of one at
    a time."""
    return _shard((2 * _MASTER + _MOMENTS) * sizes.trained, ranks)


def server_memory(config: RunConfig, sizes: Sizes) -> MemoryBudget:
    """The least that a server must have of each of its GPUs: room for one sequence of `model.max_length`."""
    return MemoryBudget(
        {
            "weights": _shard(sizes.weights, _server_gpus(config)),
            "weights that arrive": _receive_bytes(config, sizes) if _publishes(config) else 0,
            "one sequence": sequence_bytes(config, sizes),
            "vLLM": ENGINE,
            "CUDA": CONTEXT,
        }
    )


def kv_bytes(config: RunConfig, sizes: Sizes) -> int:
    """Bytes that a token takes in the cache of each GPU of a server, as long as it is in every layer's window; 0 where
    that is not known."""
    return _shard((sizes.kv + sizes.kv_window) * sizes.width, min(_server_gpus(config), sizes.kv_heads))


def sequence_bytes(config: RunConfig, sizes: Sizes) -> int:
    """Bytes that a sequence of `model.max_length` takes in the cache of each GPU of a server; 0 where that is unknown.

    vLLM keeps some more of layers with windows while a long prompt is computed.
    """
    length = config.model.max_length
    numbers = length * sizes.kv + min(length, sizes.window) * sizes.kv_window
    return _shard(numbers * sizes.width, min(_server_gpus(config), sizes.kv_heads))


def sequences(config: RunConfig, sizes: Sizes, memory: int) -> int:
    """Sequences of `model.max_length` that fit in a server's cache on GPUs of so many bytes; 0 or less for too few, or
    unknown."""
    each = sequence_bytes(config, sizes)
    mine = config.inference.gpu_memory * memory / config.resources.inference.servers_per_gpu
    room = mine - _shard(sizes.weights, _server_gpus(config)) - ENGINE
    return int(room // each) if each else 0


def host_memory(config: RunConfig, sizes: Sizes) -> MemoryBudget:
    """What rank 0 of the trainer takes of its node's memory beside the few GiB that torch and CUDA take."""
    shards = dp_shard(config, trainer_ranks(config))
    state = _shard(_MASTER * sizes.parameters + _MOMENTS * sizes.trained, shards)
    moved = state + _other_models_bytes(config, sizes, shards) if config.training.offload_idle_models else 0
    published = (
        _PUBLISHED * _published_bytes(config, sizes)
        if _publishes(config) and config.training.staging_device == "host"
        else 0
    )
    return MemoryBudget(
        {"a commit that is being written": state, "models that wait": moved, "weights for the servers": published}
    )


def describe_memory(config: RunConfig, sizes: Sizes) -> tuple[str, ...]:
    """A line for each kind of process that computes on GPUs, and one for what trainers take of their node."""
    lines = [f"GPU of a trainer process: {trainer_memory(config, sizes)}"]
    if not sizes.activations:
        lines.append("  without activations, which cannot be told of this model")
    if config.has_rollouts:
        lines += _describe_servers(config, sizes)
    lines.append(f"host memory of a trainer process: {host_memory(config, sizes)}, and what its libraries take")
    return tuple(lines)


def _describe_servers(config: RunConfig, sizes: Sizes) -> Iterator[str]:
    yield f"GPU of a server, at least: {server_memory(config, sizes)}"
    if config.resources.colocate:
        shared = min_vllm_bytes(config, sizes) + colocated_bytes(config, sizes)
        yield f"GPU that they share, at least: {shared / GIB:.1f} GiB"
    if each := kv_bytes(config, sizes):
        memory = memory_bytes(config.resources.gpu_memory)
        room = f"; {sequences(config, sizes, memory)} sequences of {config.model.max_length} fit" if memory else ""
        yield f"  a token takes {each / 1024:.1f} KiB of its cache{room}"


def trainer_ranks(config: RunConfig) -> int:
    """Trainer processes over all nodes."""
    return config.resources.trainer.nodes * config.resources.trainer.processes


def dp_shard(config: RunConfig, ranks: int) -> int:
    """How many of `ranks` trainer processes hold one whole model among them: those of a replica (HSDP)."""
    return max(1, ranks // config.training.mesh.dp_replicate)


def describe_mesh(config: RunConfig) -> str:
    """The dimensions of the trainer's mesh, as `dp_replicate 2 × dp_shard 4`; the last is over neighboring ranks.
    With expert parallelism, those of the same ranks as experts see them, too."""
    shards = dp_shard(config, trainer_ranks(config))
    experts = f"; experts: efsdp {shards // ep} × ep {ep}" if (ep := config.training.mesh.ep) > 1 else ""
    context = f" × cp {cp}" if (cp := config.training.mesh.cp) > 1 else ""
    return f"dp_replicate {config.training.mesh.dp_replicate} × dp_shard {shards // cp}{context}{experts}"


def micro_batch_tokens(config: RunConfig, ranks: int) -> int:
    """Most tokens of a micro-batch on a rank: its budget, or all that a rank gets of the largest batch if that is less;
    of a micro-batch that `training.mesh.cp` ranks share, the part of one.

    Of the batches of jobs that stand alone, which are in their files, and of clients, nothing is known here.
    """
    training, cp = config.training, config.training.mesh.cp
    if training.jobs or config.serve.enabled:
        return training.micro_batch_tokens
    rl = training.prompts_per_step * config.rollout.group_size if config.has_rollouts else 0
    rows = math.ceil(max(rl, training.sft.batch if config.has_sft else 0) * cp / ranks)
    return min(training.micro_batch_tokens, math.ceil(rows * config.model.max_length / cp))


def min_vllm_bytes(config: RunConfig, sizes: Sizes) -> int:
    """Bytes of a GPU that vLLM needs inside of `inference.gpu_memory`, for all servers there."""
    parts = server_memory(config, sizes).parts
    return config.resources.inference.servers_per_gpu * (parts["weights"] + parts["one sequence"] + parts["vLLM"])


def colocated_bytes(config: RunConfig, sizes: Sizes) -> int:
    """Bytes of a server's GPU that others need: weights that arrive, CUDA, and a trainer that shares it."""
    trainer = trainer_memory(config, sizes).total if config.resources.colocate else 0
    return trainer + non_vllm_bytes(config, sizes)


def non_vllm_bytes(config: RunConfig, sizes: Sizes) -> int:
    """Bytes of a GPU that its servers need outside of `inference.gpu_memory`: weights that arrive, and CUDA."""
    parts = server_memory(config, sizes).parts
    return config.resources.inference.servers_per_gpu * (parts["weights that arrive"] + parts["CUDA"])


def _publishes(config: RunConfig) -> bool:
    """Whether weights lie on GPUs while they travel."""
    return config.has_rollouts and config.weights_backend == "nccl"


def _published_bytes(config: RunConfig, sizes: Sizes) -> int:
    """Bytes of a version of the weights: of adapters these alone, in float32."""
    return _MASTER * sizes.trained if config.model.lora.travels_alone else sizes.weights


def _receive_bytes(config: RunConfig, sizes: Sizes) -> int:
    """Bytes of it that each GPU of a server takes: its part of a whole model, or all of an adapter."""
    return _shard(_published_bytes(config, sizes), 1 if config.model.lora.travels_alone else _server_gpus(config))


def _server_gpus(config: RunConfig) -> int:
    return max(1, config.resources.inference.gpus)


def _shard(size: int, ranks: int) -> int:
    return -(-size // ranks)


def _staging_bytes(config: RunConfig, sizes: Sizes) -> int:
    """What lies on rank 0's GPU for the servers: versions that wait there, and chunks that are brought together for
    servers which do not take a version as it lies."""
    on_host = config.training.staging_device == "host"
    servers = config.resources.inference.nodes * config.resources.inference.servers
    gathering = servers * 2 * WEIGHT_CHUNK if on_host or _server_gpus(config) > 1 else 0
    return gathering + (0 if on_host else _PUBLISHED * _published_bytes(config, sizes))


def _other_models_bytes(config: RunConfig, sizes: Sizes, shards: int) -> int:
    """Models beside the policy: a reference without gradients, a critic with all that a trained one has.

    With `training.offload_idle_models` only the one that computes is on the device, and none of them is larger than the
    policy.
    """
    if config.training.offload_idle_models:
        return 0
    reference = _MASTER * sizes.parameters if config.has_reference else 0
    trained = (_MASTER + _MOMENTS + _GRADIENT) * sizes.parameters if config.loss.advantage_estimator == "gae" else 0
    return _shard(reference + trained, shards)


def _gathered_bytes(config: RunConfig, sizes: Sizes) -> int:
    """Whole parameters in compute type: all, or embedding, head and two layers at a time."""
    if not config.training.reshard_after_forward:
        return _without_spread(config, sizes.parameters, sizes.experts) * sizes.width
    return (sizes.outside_layers + 2 * _layer(config, sizes)) * sizes.width


def _layer(config: RunConfig, sizes: Sizes) -> int:
    """Parameters of the largest layer that a process gathers."""
    return _without_spread(config, sizes.layer, sizes.experts_layer)


def _without_spread(config: RunConfig, parameters: int, experts: int) -> int:
    """The parameters that a process computes with, out of `parameters` that include those of `experts`."""
    return parameters - experts + _shard(experts, config.training.mesh.ep)


def _tables(config: RunConfig, tokens: int) -> int:
    """Index tables of a packed line that several ranks share: each has those of the whole line, int64, up to two of
    rectangles, one of places and one of what rows share."""
    cp = config.training.mesh.cp
    return 4 * 8 * tokens * cp if cp > 1 else 0


def _gradients(config: RunConfig, sizes: Sizes, shards: int) -> int:
    if config.training.reshard_after_forward:
        return _shard(_GRADIENT * sizes.trained, shards)
    experts = sizes.experts if sizes.trained == sizes.parameters else 0
    return _GRADIENT * _without_spread(config, sizes.trained, experts)


def _traveling(config: RunConfig, sizes: Sizes, tokens: int) -> int:
    """What a process sends to the experts of a layer and what arrives. The data decides which experts are chosen, so
    each counts with twice its average."""
    if config.training.mesh.ep == 1:
        return 0
    return 2 * _ARRIVING * tokens * sizes.experts_per_token * sizes.hidden * sizes.width


def _activation_bytes(config: RunConfig, sizes: Sizes, tokens: int) -> int:
    """Activations that wait for the backward pass."""
    if config.training.activation_checkpointing:
        return tokens * sizes.layers * sizes.hidden * sizes.width
    return int(tokens * sizes.activations * (COMPILED if config.training.compile else 1))


def _recomputed_activation_bytes(config: RunConfig, sizes: Sizes, tokens: int) -> int:
    """Activations of the one layer that is computed again."""
    if not config.training.activation_checkpointing:
        return 0
    return int(tokens * sizes.activations / sizes.layers * (COMPILED if config.training.compile else 1))


def _lm_head_bytes(sizes: Sizes, tokens: int) -> int:
    """Logits of a chunk, and the gradient of the head: its sum over chunks and what is added to that, in float32."""
    logits = min(max(sizes.logits, sizes.vocabulary), tokens * sizes.vocabulary)
    return _LOGIT * logits + (2 * _GRADIENT * sizes.head if sizes.head_trained else 0)


def _grad_comm_bytes(parameters: int, sizes: Sizes) -> int:
    """Gradients on their way to their shards: in compute type, and in float32 as they cross the ranks."""
    return parameters * (sizes.width + _GRADIENT) if sizes.trained == sizes.parameters else 0
