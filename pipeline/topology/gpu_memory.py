"""The GPU memory of a trainer process, part by part, and what the plan prints of the memory of all roles.

Computed from a model's sizes (`pipeline.train.model.model_size`) and a config; `server_memory` does so for servers, and
`memory_fit` refuses a config that does not fit. The results are upper bounds close to measured values (docs/gpus.md
compares them). Pure.

    trainer_memory(config, sizes).total       # bytes of the GPU of a trainer process
"""

import math
from collections.abc import Iterator

from pipeline.config import RunConfig
from pipeline.config.value_types import memory_bytes
from pipeline.topology.memory_budget import (
    CONTEXT,
    GIB,
    MASTER,
    WEIGHT_CHUNK,
    MemoryBudget,
    dp_shard,
    part_of,
    published_bytes,
    publishes,
    server_gpus,
    trainer_ranks,
)
from pipeline.topology.server_memory import (
    arrives_on_host,
    arriving_bytes,
    bytes_outside_engine,
    kv_bytes,
    min_engine_bytes,
    sequences,
    server_memory,
)
from pipeline.topology.sizes import Sizes

COMPILED = 0.75
"""Activation memory of compiled layers relative to eager ones. Compiled layers recompute cheap activations."""

_MOMENTS, _GRADIENT = 8, 4
_MOMENT_BYTES = {"float32": _MOMENTS, "bfloat16": 4, "float8": 2 * (1 + 4 / 128)}
"""Bytes of both moments of a parameter by `optim.state_dtype`; in float8 with scales of blocks of 128 columns."""
_PUBLISHED = 2
"""Versions in memory while one is taken: the new one, and the previous one, which a server may still receive. Each
process of a replica has its part of both."""
_ARRIVING = 2
"""Tokens that arrive at a process for its experts, relative to the number under uniform routing."""
_LOGIT = 12
"""Bytes per logit in the backward pass: the logit, its gradient, and a temporary copy of one of the two."""


def trainer_memory(config: RunConfig, sizes: Sizes, ranks: int = 0) -> MemoryBudget:
    """The peak GPU memory of the trainer's rank 0, with `ranks` trainer processes (0: the number in the config)."""
    ranks = ranks or trainer_ranks(config)
    tokens, shards = micro_batch_tokens(config, ranks), dp_shard(config, ranks)
    always = {
        "parameters and moments": part_of(_stored(sizes) + _moment_bytes(config, sizes.trained), shards),
        "other models": _other_models_bytes(config, sizes, shards),
        "weights for the servers": _staging_bytes(config, sizes, shards) if publishes(config) else 0,
        "copies in compute type": _gathered_bytes(config, sizes, shards),
        "gradients": _gradients(config, sizes, shards),
        "tokens on their way to experts": _traveling(config, sizes, tokens),
        "logits of routers": _router_logit_bytes(config, sizes, tokens),
        "tables of shared rows": _tables(config, tokens),
        "CUDA": CONTEXT,
    }
    # Three moments compete for the peak of a backward pass: at the head, within a layer, and at the embedding, where
    # the gradients outside of the layers are reduced.
    peaks: list[dict[str, int]] = [
        {"activations": _activation_bytes(config, sizes, tokens), "head": _lm_head_bytes(sizes, tokens)},
        {"activations": _activation_bytes(config, sizes, tokens) + _recomputed_activation_bytes(config, sizes, tokens)}
        | {"gradients of a layer": _grad_comm_bytes(_layer(config, sizes), sizes)},
        {"gradients of embedding and head": _grad_comm_bytes(sizes.outside_layers, sizes)},
    ]
    return MemoryBudget(always | max(peaks, key=lambda parts: sum(parts.values())))


def least_trainer_memory(sizes: Sizes, ranks: int) -> int:
    """A lower bound of the bytes of a trained model on each of `ranks` ranks: parameters, moments, gradients."""
    return part_of(_stored(sizes) + (_MOMENTS + _GRADIENT) * sizes.trained, ranks)


def adapter_state_memory(sizes: Sizes, ranks: int) -> int:
    """Bytes on each of `ranks` ranks of one more adapter on a loaded model, including its copy during a checkpoint."""
    return part_of((2 * MASTER + _MOMENTS) * sizes.trained, ranks)


def host_memory(config: RunConfig, sizes: Sizes) -> MemoryBudget:
    """Host memory of the trainer's rank 0, in addition to a few GiB of torch and CUDA."""
    shards = dp_shard(config, trainer_ranks(config))
    state = part_of(MASTER * sizes.trained + _moment_bytes(config, sizes.trained), shards)
    policy = part_of(_stored(sizes) + _moment_bytes(config, sizes.trained), shards)
    others = part_of(sum(_other_models(config, sizes)), shards)
    moved = policy + others if config.training.offload_idle_models else 0
    published = (
        _PUBLISHED * part_of(published_bytes(config, sizes), shards)
        if publishes(config) and config.training.staging_device == "host"
        else 0
    )
    return MemoryBudget(
        {"a checkpoint that is being written": state, "models that wait": moved, "weights for the servers": published}
    )


def describe_memory(config: RunConfig, sizes: Sizes) -> tuple[str, ...]:
    """One line per kind of process on GPUs, and one for the host memory of a trainer process."""
    lines = [f"GPU of a trainer process: {trainer_memory(config, sizes)}"]
    if not sizes.activations:
        lines.append("  without activations, whose size is unknown for this model")
    if config.has_rollouts:
        lines += _describe_servers(config, sizes)
    if publishes(config) and arrives_on_host(config):
        text = f"{arriving_bytes(config, sizes) / GIB:.1f} GiB (weights that arrive), and the engine's own"
        lines.append(f"host memory of a server process: {text}")
    lines.append(f"host memory of a trainer process: {host_memory(config, sizes)}, and what its libraries take")
    return tuple(lines)


def _describe_servers(config: RunConfig, sizes: Sizes) -> Iterator[str]:
    yield f"GPU of a server, at least: {server_memory(config, sizes)}"
    if config.resources.colocate:
        shared = min_engine_bytes(config, sizes) + colocated_bytes(config, sizes)
        yield f"GPU that they share, at least: {shared / GIB:.1f} GiB"
    if per_token := kv_bytes(config, sizes):
        memory = memory_bytes(config.resources.gpu_memory)
        room = f"; {sequences(config, sizes, memory)} sequences of {config.model.max_length} fit" if memory else ""
        yield f"  a token takes {per_token / 1024:.1f} KiB of its cache{room}"


def describe_mesh(config: RunConfig) -> str:
    """The dimensions of the trainer's mesh, such as `dp_replicate 2 × dp_shard 4`; the last is over neighboring ranks.

    With expert parallelism, the mesh of the experts over the same ranks follows.
    """
    shards = dp_shard(config, trainer_ranks(config))
    experts = f"; experts: efsdp {shards // ep} × ep {ep}" if (ep := config.training.mesh.ep) > 1 else ""
    context = f" × cp {cp}" if (cp := config.training.mesh.cp) > 1 else ""
    return f"dp_replicate {config.training.mesh.dp_replicate} × dp_shard {shards // cp}{context}{experts}"


def micro_batch_tokens(config: RunConfig, ranks: int) -> int:
    """Maximum tokens of a micro-batch on one rank: its budget, or a rank's part of the largest batch if that is less.

    With context parallelism (`training.mesh.cp`), the tokens of one rank. The sizes of batches of offline jobs and of
    clients are unknown here; the budget applies to them.
    """
    training, cp = config.training, config.training.mesh.cp
    if training.jobs or config.serve.enabled:
        return training.micro_batch_tokens
    rl = training.prompts_per_step * config.rollout.group_size if config.has_rl else 0
    sft = training.sft.batch if config.has_sft else 0
    pairs = config.preference.batch if config.has_preference else 0
    rows = math.ceil(max(rl, sft, 2 * pairs) * cp / ranks)
    return min(training.micro_batch_tokens, math.ceil(rows * config.model.max_length / cp))


def colocated_bytes(config: RunConfig, sizes: Sizes) -> int:
    """Bytes of a server's GPU for other users than its engine: `bytes_outside_engine`, and a colocated trainer."""
    trainer = trainer_memory(config, sizes).total if config.resources.colocate else 0
    return trainer + bytes_outside_engine(config, sizes)


def _stored(sizes: Sizes) -> int:
    """Bytes of all ranks' parameters: trained ones in float32, frozen ones in compute type."""
    return MASTER * sizes.trained + sizes.width * (sizes.parameters - sizes.trained)


def _moment_bytes(config: RunConfig, parameters: int) -> int:
    """Bytes of AdamW's moments of this number of parameters, all of them in matrices."""
    return math.ceil(_MOMENT_BYTES[config.optim.state_dtype] * parameters)


def _staging_bytes(config: RunConfig, sizes: Sizes, shards: int) -> int:
    """Bytes of weight-sync staging on a trainer's GPU: its part of pending policy versions, and gather buffers.

    Servers need a gather buffer if their shards differ from the staged layout, or the versions are in host memory.
    """
    on_host = config.training.staging_device == "host"
    servers = config.resources.inference.nodes * config.resources.inference.servers
    gathering = servers * 2 * WEIGHT_CHUNK if on_host or server_gpus(config) > 1 else 0
    return gathering + (0 if on_host else _PUBLISHED * part_of(published_bytes(config, sizes), shards))


def _other_models_bytes(config: RunConfig, sizes: Sizes, shards: int) -> int:
    """Bytes of other models than the policy on the device: `_other_models`.

    With `training.offload_idle_models` only the computing model is on the device: by how much the largest of them
    exceeds the policy, such as the critic of a policy with adapters.
    """
    others = _other_models(config, sizes)
    if not config.training.offload_idle_models:
        return part_of(sum(others), shards)
    policy = _stored(sizes) + _moment_bytes(config, sizes.trained) + _GRADIENT * sizes.trained
    return part_of(max(0, max(others) - policy), shards)


def _other_models(config: RunConfig, sizes: Sizes) -> tuple[int, int]:
    """Bytes of all ranks of a reference without gradients, and of a critic, which is trained whole."""
    compared = config.has_preference and config.preference.formula.has_reference
    reference = sizes.weights if config.has_reference or compared else 0
    whole = (MASTER + _GRADIENT) * sizes.parameters + _moment_bytes(config, sizes.parameters)
    trained = whole if config.loss.estimator.has_critic else 0
    return reference, trained


def _gathered_bytes(config: RunConfig, sizes: Sizes, shards: int) -> int:
    """Bytes of gathered parameters in compute type: all of them, or embedding, head and two layers at a time. Frozen
    ones are not copied where there is one shard; a critic has none."""
    copied = sizes.trained if shards == 1 and not config.loss.estimator.has_critic else sizes.parameters
    if not config.training.reshard_after_forward:
        return _without_spread(config, copied, sizes.experts) * sizes.width
    return min(copied, sizes.outside_layers + 2 * _layer(config, sizes)) * sizes.width


def _layer(config: RunConfig, sizes: Sizes) -> int:
    """Number of parameters that a process gathers for the largest layer."""
    return _without_spread(config, sizes.layer, sizes.experts_layer)


def _without_spread(config: RunConfig, parameters: int, experts: int) -> int:
    """The number of `parameters` with which a process computes, if `experts` of them are sharded over `ep` ranks."""
    return parameters - experts + part_of(experts, config.training.mesh.ep)


def _tables(config: RunConfig, tokens: int) -> int:
    """Bytes of the index tables of a packed row under context parallelism: each rank has the int64 tables of the whole
    row, at most two of rectangles, one of positions, one of prefixes."""
    cp = config.training.mesh.cp
    return 4 * 8 * tokens * cp if cp > 1 else 0


def _gradients(config: RunConfig, sizes: Sizes, shards: int) -> int:
    if config.training.reshard_after_forward:
        return part_of(_GRADIENT * sizes.trained, shards)
    # ZeRO-2: a rank holds whole gradients until the last micro-batch, except those of experts sharded over `ep` ranks.
    experts = sizes.experts if sizes.trained == sizes.parameters else 0
    return _GRADIENT * _without_spread(config, sizes.trained, experts)


def _router_logit_bytes(config: RunConfig, sizes: Sizes, tokens: int) -> int:
    """Bytes of all layers' logits in float32 that the auxiliary loss keeps, and of their softmax."""
    return 8 * tokens * sizes.experts_of_layer * sizes.layers if config.optim.router_aux_loss_coef else 0


def _traveling(config: RunConfig, sizes: Sizes, tokens: int) -> int:
    """Bytes of the tokens that a process sends to experts and receives: twice the average, since routing varies."""
    if config.training.mesh.ep == 1:
        return 0
    return 2 * _ARRIVING * tokens * sizes.experts_per_token * sizes.hidden * sizes.width


def _activation_bytes(config: RunConfig, sizes: Sizes, tokens: int) -> int:
    """Bytes of the activations that are kept for the backward pass."""
    if config.training.activation_checkpointing == "none":
        return int(tokens * sizes.activations * _compiled(config))
    return int(tokens * (sizes.layers * sizes.hidden * sizes.width + _selected(config, sizes)))


def _recomputed_activation_bytes(config: RunConfig, sizes: Sizes, tokens: int) -> int:
    """Bytes of the activations of the layer that is recomputed, without those that are kept."""
    if config.training.activation_checkpointing == "none":
        return 0
    return int(tokens * max(0.0, sizes.activations * _compiled(config) - _selected(config, sizes)) / sizes.layers)


def _selected(config: RunConfig, sizes: Sizes) -> float:
    return sizes.selected if config.training.activation_checkpointing == "selective" else 0.0


def _compiled(config: RunConfig) -> float:
    return COMPILED if config.training.compile else 1.0


def _lm_head_bytes(sizes: Sizes, tokens: int) -> int:
    """Bytes of a chunk's logits, and of the head's gradient in float32: the sum over chunks and the current addend."""
    logits = min(max(sizes.logits, sizes.vocabulary), tokens * sizes.vocabulary)
    return _LOGIT * logits + (2 * _GRADIENT * sizes.head if sizes.head_trained else 0)


def _grad_comm_bytes(parameters: int, sizes: Sizes) -> int:
    """Bytes of gradients during their reduce-scatter: in compute type, and in float32 between the ranks."""
    return parameters * (sizes.width + _GRADIENT) if sizes.trained == sizes.parameters else 0
