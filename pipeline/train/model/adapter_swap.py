"""Several adapters on one model, which take turns.

Owns the exchange of one adapter with another: parameters, gradients that wait for a step, moments and progress of the
optimizer. Promises that an adapter comes back as it left, to the last bit, and that a base which many adapters share is
in memory once. An adapter that is not on the model is parked on the same device, sharded alike. Every rank does the
same; nothing here is collective. Must not know who owns an adapter, nor when they change.

    admit(worker, "a", seed=7)       # what was on the model is forgotten, unless it was parked
    …passes, steps…
    park(worker, "a")
    recall(worker, "b")

For a commit, the hundreds of small tensors of an adapter are a few large ones (`packed`), which a commit takes as they
are wherever the adapter is; `unpack` puts them on the model again, on any number of ranks:

    packed(worker, "a", "exp_avg")   # parked; None: the one that is on the model
    unpack(worker, [all `VECTORS` of each rank that packed it])
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from pipeline.errors import TrainingError
from pipeline.train.model import lora
from pipeline.train.model.cpu_offload import local
from pipeline.train.model.model_worker import ModelWorker
from pipeline.train.model.row_shards import fill_shard, rows_of

MOMENTS, PROGRESS = ("exp_avg", "exp_avg_sq"), ("taken", "skipped")
VECTORS = ("parameters", *MOMENTS, "step", "progress")
"""What an adapter is packed as."""


@dataclass
class AdapterState:
    """What an adapter is, by the names of its parameters: this rank's shards, and what AdamW has of them."""

    parameters: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    moments: dict[str, dict[str, Any]]
    progress: dict[str, int]


_swapped_out: "WeakKeyDictionary[ModelWorker, dict[str, AdapterState]]" = WeakKeyDictionary()


@torch.no_grad()
def swap_out(worker: ModelWorker, key: str) -> None:
    """Keep the adapter that is on the model under this key; another may take its place now."""
    guest = _present(worker)
    copies = [torch.empty_like(shard) for shard in guest.parameters.values()]
    torch._foreach_copy_(copies, list(guest.parameters.values()))
    guest.parameters = dict(zip(guest.parameters, copies, strict=True))
    for parameter in _trained(worker).values():
        parameter.grad = None
    _states(worker)[key] = guest


@torch.no_grad()
def swap_in(worker: ModelWorker, key: str) -> None:
    """Put the adapter of this key on the model; it is parked no longer. `TrainingError` if there is none."""
    guest = _states(worker).pop(key, None)
    if guest is None:
        raise TrainingError(f"no adapter {key!r} waits here")
    optimizer = _optimizer(worker)
    named = _trained(worker)
    shards = [local(parameter.detach()) for parameter in named.values()]
    torch._foreach_copy_(shards, [guest.parameters[name] for name in named])
    for name, parameter in named.items():
        parameter.grad = guest.gradients[name]
        optimizer.adamw.state[parameter] = guest.moments[name]
    optimizer.load_progress(guest.progress)


@torch.no_grad()
def init_adapter(worker: ModelWorker, seed: int) -> None:
    """Put a fresh adapter on the model, drawn from the seed: no moments, no gradients, no steps."""
    named = dict(worker.model.network.named_parameters())
    for name, tensor in lora.first_tensors(worker.model.network, worker.adapters, seed):
        fill_shard(named[name], tensor)
    worker.restart_optimizer()


def drop_adapter(worker: ModelWorker, key: str) -> None:
    """Forget the adapter of this key."""
    _states(worker).pop(key, None)


@torch.no_grad()
def packed(worker: ModelWorker, key: str | None, vector: str) -> Tensor:
    """One of the `VECTORS` of this rank's shards of the adapter that is parked under this key, or that is on the model
    (None); gradients are in none of them.

    `parameters` and AdamW's `exp_avg` and `exp_avg_sq`: on the device, in the order and type of the parameters.
    `step`: AdamW's, of each parameter, float32; `progress`: int64[2]. One at a time, for as long as it is in use a
    large one takes of the device what a third of the adapter does.
    """
    guest = _present(worker) if key is None else _states(worker)[key]
    if vector == "progress":
        return torch.tensor([guest.progress[name] for name in PROGRESS])
    if vector == "parameters":
        return torch.cat([shard.reshape(-1) for shard in guest.parameters.values()])
    return torch.cat([local(moments[vector]).reshape(-1) for moments in guest.moments.values()])


def empty_packs(worker: ModelWorker, ranks: int) -> list[dict[str, Tensor]]:
    """Vectors on the CPU, one set for each of `ranks`, of the form of what `packed` gives there of any adapter."""
    named = _trained(worker)
    shapes, (dtype,) = [each.shape for each in named.values()], {each.dtype for each in named.values()}

    def of_rank(rank: int) -> dict[str, Tensor]:
        size = sum(shape[1:].numel() * rows_of(shape[0], ranks, rank) for shape in shapes)
        long = {part: torch.empty(size, dtype=dtype) for part in ("parameters", *MOMENTS)}
        return {**long, "step": torch.empty(len(shapes)), "progress": torch.empty(len(PROGRESS), dtype=torch.int64)}

    return [of_rank(rank) for rank in range(ranks)]


@torch.no_grad()
def unpack(worker: ModelWorker, parts: Sequence[Mapping[str, Tensor]]) -> None:
    """Put an adapter on the model, with moments and progress, that other ranks than these may have packed: `parts` has
    what each of them did, in their order, and each rank here takes its own rows of it."""
    optimizer, named = _optimizer(worker), _trained(worker)
    moments = [optimizer.adamw.state[parameter] for parameter in named.values()]
    targets = {part: [state[part] for state in moments] for part in MOMENTS} | {"parameters": list(named.values())}
    for part, tensors in targets.items():
        places = [0] * len(parts)
        for tensor in tensors:
            fill_shard(tensor, _unpacked(tensor, [each[part] for each in parts], places))
    for state, step in zip(moments, parts[0]["step"], strict=True):
        state["step"].copy_(step)
    optimizer.load_progress(dict(zip(PROGRESS, parts[0]["progress"].tolist(), strict=True)))


def _unpacked(like: Tensor, flats: Sequence[Tensor], places: list[int]) -> Tensor:
    """The tensor whose rows lie next in each of the vectors; `places` says where, and moves on."""
    rows = []
    for rank, flat in enumerate(flats):
        shape = (rows_of(like.shape[0], len(flats), rank), *like.shape[1:])
        size = math.prod(shape)
        rows.append(flat[places[rank] : places[rank] + size].view(shape))
        places[rank] += size
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _present(worker: ModelWorker) -> AdapterState:
    """The adapter that is on the model; the tensors are the live ones."""
    optimizer, named = _optimizer(worker), _trained(worker)
    return AdapterState(
        {name: local(parameter.detach()) for name, parameter in named.items()},
        {name: parameter.grad for name, parameter in named.items()},
        {name: dict(optimizer.adamw.state[parameter]) for name, parameter in named.items()},
        optimizer.progress(),
    )


def _states(worker: ModelWorker) -> dict[str, AdapterState]:
    return _swapped_out.setdefault(worker, {})


def _trained(worker: ModelWorker) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in worker.model.named_parameters() if parameter.requires_grad}


def _optimizer(worker: ModelWorker) -> Any:
    if worker.optimizer is None:
        raise TrainingError("this model is never trained: it takes no guests")
    return worker.optimizer
