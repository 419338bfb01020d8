"""The check that the roles of a run fit into a GPU's memory, and the changes that would make them fit.

Pure, based on the arithmetic of `gpu_memory`.

    check_memory(config, sizes)     # `ConfigError` if resources.gpu_memory is known and too small
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from pipeline.config import RunConfig
from pipeline.config.value_types import memory_bytes
from pipeline.errors import ConfigError
from pipeline.topology.gpu_memory import colocated_bytes, trainer_memory
from pipeline.topology.memory_budget import CONTEXT, GIB, MemoryBudget, dp_shard, trainer_ranks
from pipeline.topology.server_memory import bytes_outside_engine, min_engine_bytes, server_memory
from pipeline.topology.sizes import Sizes

_MIB = 1 << 20


def check_memory(config: RunConfig, sizes: Sizes) -> None:
    """Raise `ConfigError` for a role that does not fit into `resources.gpu_memory`, with a change that makes it fit."""
    memory = memory_bytes(config.resources.gpu_memory)
    if not memory or config.resources.device != "cuda":
        return
    trainer = trainer_memory(config, sizes)
    if trainer.total > memory:
        raise _out_of_memory_error(config, "a trainer process", trainer, _hint_trainer(config, sizes, memory))
    if config.has_rollouts:
        _check_servers(config, sizes, memory)


def trainer_allowance(config: RunConfig, sizes: Sizes, memory: int) -> int:
    """Bytes that a trainer process may allocate on a GPU of `memory` bytes that it shares with servers.

    These are the bytes that the servers leave, minus CUDA's context. `ConfigError` if the trainer does not fit. The
    sizes of clients' adapters are unknown, so with `serve.enabled` the error is raised only if no bytes are left.
    """
    placed = with_gpu_memory(config, memory)
    if not config.serve.enabled:
        check_memory(placed, sizes)
    left = int((1 - config.inference.gpu_memory) * memory) - bytes_outside_engine(config, sizes) - CONTEXT
    if left <= 0:
        raise _out_of_memory_error(
            placed, "a trainer on the GPU of its servers", trainer_memory(config, sizes), "lower inference.gpu_memory"
        )
    return left


def with_gpu_memory(config: RunConfig, memory: int) -> RunConfig:
    """The config with `resources.gpu_memory` set to `memory` bytes."""
    resources = config.resources.model_copy(update={"gpu_memory": f"{memory // _MIB}M"})
    return config.model_copy(update={"resources": resources})


def max_gpu_memory_utilization(config: RunConfig, sizes: Sizes, memory: int) -> float:
    """The largest `inference.gpu_memory` (a fraction, in steps of 0.01) that leaves room for other users of the GPU."""
    return max(0, math.floor(100 * (1 - colocated_bytes(config, sizes) / memory))) / 100


def _check_servers(config: RunConfig, sizes: Sizes, memory: int) -> None:
    inside, outside = min_engine_bytes(config, sizes), colocated_bytes(config, sizes)
    if inside + outside > memory and config.resources.colocate:
        trainer = trainer_memory(config, sizes)
        servers = inside + outside - trainer.total
        hint = _hint_trainer(config, sizes, memory - servers)
        raise _out_of_memory_error(
            config, f"its servers, {servers / GIB:.1f} GiB, and a trainer process", trainer, hint
        )
    if inside + outside > memory:
        need = server_memory(config, sizes)
        raise _out_of_memory_error(config, "each GPU of a server", need, _hint_server(config, sizes, memory))
    share, most = config.inference.gpu_memory, max_gpu_memory_utilization(config, sizes, memory)
    if share > most:
        expected = f"at most {most}: {_users_outside_engine(config)} take {outside / GIB:.1f} GiB outside of it"
        raise ConfigError("inference.gpu_memory", share, expected, "lower it")
    if share * memory < inside:
        draft = "a drafting model, " if sizes.draft else ""
        expected = f"at least {math.ceil(100 * inside / memory) / 100}, for weights, {draft}engine and one sequence"
        raise ConfigError("inference.gpu_memory", share, expected, "raise it, or lower model.max_length")


def _users_outside_engine(config: RunConfig) -> str:
    """The users of a server's GPU other than the engine."""
    trainer = "the trainer, " if config.resources.colocate else ""
    drafted = "" if config.inference.speculation.method == "none" else ", logits of drafted tokens"
    return f"{trainer}weights that arrive{drafted} and CUDA"


def _out_of_memory_error(config: RunConfig, process: str, need: MemoryBudget, hint: str) -> ConfigError:
    return ConfigError("resources.gpu_memory", config.resources.gpu_memory, f"enough for {process}, {need}", hint)


def _hint_trainer(config: RunConfig, sizes: Sizes, memory: int) -> str:
    """The first change that makes a trainer process fit, the cheapest first."""
    one = _on_mesh(config, dp_replicate=1)
    if config.training.mesh.dp_replicate > 1 and trainer_memory(one, sizes).total <= memory:
        return "set training.mesh.dp_replicate=1"
    # Ordered by their cost in speed. Each is tried alone; the last one combines all.
    for changes in _SAVINGS:
        saved = _with_changes(config, changes)
        if trainer_memory(saved, sizes).total <= memory:
            return f"set {' '.join(f'training.{key}={_text(value)}' for key, value in changes.items())}"
    saved, ranks = _with_changes(config, _SAVINGS[-1]), trainer_ranks(config)
    keys = " ".join(f"training.{key}={_text(value)}" for key, value in _SAVINGS[-1].items())
    for ep in _spreads(config, sizes):
        if trainer_memory(_on_mesh(saved, ep=ep), sizes).total <= memory:
            return f"set {keys} training.mesh.ep={ep}"
    more = next((n for n in _powers(ranks) if trainer_memory(saved, sizes, n).total <= memory), 0)
    if not more:
        return "no number of trainer processes would do: choose GPUs of more memory, or adapters (model.lora.rank)"
    return f"set {keys} and spread the trainer over {more} processes"


def _hint_server(config: RunConfig, sizes: Sizes, memory: int) -> str:
    resources = config.resources
    for gpus in (2, 4, 8):
        wider = resources.model_copy(update={"inference": resources.inference.model_copy(update={"gpus": gpus})})
        wide = config.model_copy(update={"resources": wider})
        if gpus > resources.inference.gpus and min_engine_bytes(wide, sizes) + colocated_bytes(wide, sizes) <= memory:
            return f"set resources.inference.gpus={gpus}"
    staged = config.model_copy(update={"inference": config.inference.model_copy(update={"staging_device": "host"})})
    if min_engine_bytes(staged, sizes) + colocated_bytes(staged, sizes) <= memory:
        return "set inference.staging_device=host"
    alone = replace(sizes, draft=None)
    if sizes.draft and min_engine_bytes(config, alone) + colocated_bytes(config, alone) <= memory:
        return "choose a smaller drafting model"
    return "choose GPUs of more memory"


_SAVINGS: Sequence[dict[str, Any]] = (
    {"staging_device": "host"},
    {"reshard_after_forward": True},
    {"activation_checkpointing": "selective"},
    {"activation_checkpointing": "full"},
    {"reshard_after_forward": True, "activation_checkpointing": "selective"},
    {"reshard_after_forward": True, "activation_checkpointing": "full"},
    {"staging_device": "host", "reshard_after_forward": True, "activation_checkpointing": "full"},
)


def _with_changes(config: RunConfig, changes: dict[str, Any]) -> RunConfig:
    return config.model_copy(update={"training": config.training.model_copy(update=changes)})


def _on_mesh(config: RunConfig, **dimensions: int) -> RunConfig:
    return _with_changes(config, {"mesh": config.training.mesh.model_copy(update=dimensions)})


def _spreads(config: RunConfig, sizes: Sizes) -> list[int]:
    """Larger values of `training.mesh.ep` that the model and the processes of a replica allow."""
    shards, first = dp_shard(config, trainer_ranks(config)), config.training.mesh.ep + 1
    return [ep for ep in range(first, sizes.experts_of_layer + 1) if shards % ep == sizes.experts_of_layer % ep == 0]


def _powers(first: int) -> Iterable[int]:
    return (first << power for power in range(1, 11))


def _text(value: Any) -> str:
    return str(value).lower()
