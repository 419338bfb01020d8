"""Several adapters on one model, which take turns.

Owns the exchange of one adapter with another: parameters, gradients that wait for a step, moments and progress of the
optimizer. Promises that an adapter comes back as it left, to the last bit, and that a base which many adapters share is
in memory once. An adapter that is not on the model is parked on the same device, sharded alike. Every rank does the
same; nothing here is collective. Must not know who owns an adapter, nor when they change.

    admit(worker, "a", seed=7)       # what was on the model is forgotten, unless it was parked
    …passes, steps…
    park(worker, "a")
    recall(worker, "b")
"""

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from pipeline.errors import TrainingError
from pipeline.training.workers import lora
from pipeline.training.workers.offload import local
from pipeline.training.workers.shards import fill_shard
from pipeline.training.workers.worker import ModelWorker


@dataclass
class Guest:
    """What an adapter is while another one is on the model, by the names of the parameters."""

    parameters: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    moments: dict[str, dict[str, Any]]
    progress: dict[str, int]


_parked: "WeakKeyDictionary[ModelWorker, dict[str, Guest]]" = WeakKeyDictionary()


@torch.no_grad()
def park(worker: ModelWorker, key: str) -> None:
    """Keep the adapter that is on the model under this key; another may take its place now."""
    optimizer = _optimizer(worker)
    named = _trained(worker)
    guest = Guest(
        {name: local(parameter.detach()).clone() for name, parameter in named.items()},
        {name: parameter.grad for name, parameter in named.items()},
        {name: dict(optimizer.adamw.state[parameter]) for name, parameter in named.items()},
        optimizer.progress(),
    )
    for parameter in named.values():
        parameter.grad = None
    _guests(worker)[key] = guest


@torch.no_grad()
def recall(worker: ModelWorker, key: str) -> None:
    """Put the adapter of this key on the model; it is parked no longer. `TrainingError` if there is none."""
    guest = _guests(worker).pop(key, None)
    if guest is None:
        raise TrainingError(f"no adapter {key!r} waits here")
    optimizer = _optimizer(worker)
    for name, parameter in _trained(worker).items():
        local(parameter.detach()).copy_(guest.parameters[name])
        parameter.grad = guest.gradients[name]
        optimizer.adamw.state[parameter] = guest.moments[name]
    optimizer.load_progress(guest.progress)


@torch.no_grad()
def admit(worker: ModelWorker, seed: int) -> None:
    """Put a fresh adapter on the model, drawn from the seed: no moments, no gradients, no steps."""
    named = dict(worker.model.network.named_parameters())
    for name, tensor in lora.first_tensors(worker.model.network, worker.adapters, seed):
        fill_shard(named[name], tensor)
    worker.restart_optimizer()


def dismiss(worker: ModelWorker, key: str) -> None:
    """Forget the adapter of this key."""
    _guests(worker).pop(key, None)


def _guests(worker: ModelWorker) -> dict[str, Guest]:
    return _parked.setdefault(worker, {})


def _trained(worker: ModelWorker) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in worker.model.named_parameters() if parameter.requires_grad}


def _optimizer(worker: ModelWorker) -> Any:
    if worker.optimizer is None:
        raise TrainingError("this model is never trained: it takes no guests")
    return worker.optimizer
