"""The choice of the keys that make a trainer fit into its GPUs' memory (`training.memory=auto`).

Pure, based on the arithmetic of `gpu_memory`. A key that differs from its default is never changed.

    config, reasons = choose_memory(config, sizes)      # the config with chosen keys, and a line for each of them
"""

from collections.abc import Iterator
from typing import Any

from pipeline.config import RunConfig
from pipeline.config.value_types import memory_bytes
from pipeline.errors import ConfigError
from pipeline.topology.gpu_memory import trainer_memory
from pipeline.topology.memory_budget import GIB
from pipeline.topology.memory_fit import check_memory
from pipeline.topology.sizes import Sizes

MIN_TOKENS = 8192
"""Smaller micro-batches leave a GPU partly idle, so they come last."""

_STEPS: tuple[dict[str, Any], ...] = (
    {"reshard_after_forward": True},
    {"activation_checkpointing": "selective"},
    {"activation_checkpointing": "full"},
    {"reshard_after_forward": True, "activation_checkpointing": "selective"},
    {"reshard_after_forward": True, "activation_checkpointing": "full"},
    {"reshard_after_forward": True, "activation_checkpointing": "full", "staging_device": "host"},
)
"""Changes by their cost in speed."""
_SAVES = {
    "micro_batch_tokens": "activations of fewer tokens at a time",
    "reshard_after_forward": "gathered parameters and gradients of one layer at a time",
    "activation_checkpointing": "activations are computed again in the backward pass",
    "staging_device": "weights for the servers wait in host memory",
}


def choose_memory(config: RunConfig, sizes: Sizes) -> tuple[RunConfig, tuple[str, ...]]:
    """The config with the first change that fits `resources.gpu_memory`, and a line for each key of it.

    The config itself and no line if it fits, if the memory is unknown, or if no change would do; `check_memory` then
    raises the error.
    """
    memory = memory_bytes(config.resources.gpu_memory)
    if config.training.memory != "auto" or not memory or config.resources.device != "cuda" or _fits(config, sizes):
        return config, ()
    for changes in _candidates(config):
        changed = _with(config, changes)
        if _fits(changed, sizes):
            return changed, tuple(_reasons(config, changed, changes, sizes, memory))
    return config, ()


def _candidates(config: RunConfig) -> Iterator[dict[str, Any]]:
    """Changes of keys that have their defaults, the cheapest first: somewhat smaller micro-batches, `_STEPS`, both,
    and at last micro-batches of the longest sample."""
    training = config.training
    free = {key for key in _SAVES if getattr(training, key) == type(training).model_fields[key].default}
    tokens, least = training.micro_batch_tokens, -(-config.model.max_length // training.mesh.cp)
    halves = [tokens >> power for power in range(1, 12) if tokens >> power >= least]
    large = [half for half in halves if half >= MIN_TOKENS]
    smaller: list[dict[str, Any]] = [{"micro_batch_tokens": half} for half in large]
    small: list[dict[str, Any]] = [{"micro_batch_tokens": half} for half in (*halves, least) if half < MIN_TOKENS]
    possible = [{key: value for key, value in step.items() if key in free} for step in _STEPS]
    for changes in (*smaller, *possible, *(step | fewer for step in possible for fewer in (*smaller, *small))):
        if changes and changes.keys() <= free:
            yield changes


def _fits(config: RunConfig, sizes: Sizes) -> bool:
    try:
        check_memory(config, sizes)
    except ConfigError:
        return False
    return True


def _with(config: RunConfig, changes: dict[str, Any]) -> RunConfig:
    return config.model_copy(update={"training": config.training.model_copy(update=changes)})


def _reasons(
    config: RunConfig, changed: RunConfig, changes: dict[str, Any], sizes: Sizes, memory: int
) -> Iterator[str]:
    before, after = (trainer_memory(each, sizes).total / GIB for each in (config, changed))
    needs = f"a trainer process takes {after:.1f} GiB instead of {before:.1f}, of {memory / GIB:.1f}"
    for key, value in changes.items():
        yield f"training.{key}={str(value).lower()}, chosen: {_SAVES[key]}; {needs}"
