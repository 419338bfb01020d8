"""Several adapters that take turns on one model.

Owns the exchange of one adapter for another: parameters, accumulated gradients, moments and progress of the optimizer.
Promises that an adapter returns with the bits it left with, and that the shared base is in memory once. A swapped-out
adapter stays on the device, with the same sharding. Every rank does the same; no function is collective. Must not know
the owners of adapters, nor the schedule of swaps.

    init_adapter(worker, seed=7)     # overwrites the active adapter, unless it was swapped out
    …passes, steps…
    swap_out(worker, "a")
    swap_in(worker, "b")

For a checkpoint, the hundreds of small tensors of an adapter are packed into a few large ones (`packed`), whether the
adapter is active or not; `unpack` loads them into the model, on any number of ranks:

    packed(worker, "a", "exp_avg")   # of a swapped-out adapter; None: of the active one
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
from pipeline.train.model.moment_storage import MOMENTS
from pipeline.train.model.row_shards import fill_shard, rows_of

VECTORS = ("parameters", *MOMENTS, "step", "progress")
"""The tensors of a packed adapter."""


@dataclass
class AdapterState:
    """An adapter on this rank: its shards and AdamW's moments, by the names of its parameters."""

    parameters: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    moments: dict[str, dict[str, Any]]
    progress: dict[str, int]


_swapped_out: "WeakKeyDictionary[ModelWorker, dict[str, AdapterState]]" = WeakKeyDictionary()


@torch.no_grad()
def swap_out(worker: ModelWorker, key: str) -> None:
    """Store the active adapter under this key; another may replace it now."""
    adapter = _active(worker)
    # Parameters are copied, since FSDP owns their storage. Gradients and moments are handed over without a copy.
    copies = [torch.empty_like(shard) for shard in adapter.parameters.values()]
    torch._foreach_copy_(copies, list(adapter.parameters.values()))
    adapter.parameters = dict(zip(adapter.parameters, copies, strict=True))
    for parameter in _trained(worker).values():
        parameter.grad = None
    _states(worker)[key] = adapter


@torch.no_grad()
def swap_in(worker: ModelWorker, key: str) -> None:
    """Make the stored adapter of this key the active one. `TrainingError` if there is none."""
    adapter = _states(worker).pop(key, None)
    if adapter is None:
        raise TrainingError(f"no adapter {key!r} is swapped out on this model")
    optimizer = _optimizer(worker)
    named = _trained(worker)
    shards = [local(parameter.detach()) for parameter in named.values()]
    torch._foreach_copy_(shards, [adapter.parameters[name] for name in named])
    for name, parameter in named.items():
        parameter.grad = adapter.gradients[name]
        optimizer.adamw.state[parameter] = adapter.moments[name]
    optimizer.load_progress(adapter.progress)


@torch.no_grad()
def init_adapter(worker: ModelWorker, seed: int) -> None:
    """Make a new adapter, drawn from the seed, the active one: no moments, no gradients, no steps."""
    named = dict(worker.model.network.named_parameters())
    for name, tensor in lora.first_tensors(worker.model.network, worker.adapters, seed):
        fill_shard(named[name], tensor)
    worker.restart_optimizer()


def drop_adapter(worker: ModelWorker, key: str) -> None:
    """Delete the stored adapter of this key."""
    _states(worker).pop(key, None)


@torch.no_grad()
def packed(worker: ModelWorker, key: str | None, vector: str) -> Tensor:
    """One of the `VECTORS` of this rank's shards of the adapter stored under this key, or of the active one (None). No
    vector contains gradients.

    `parameters` and AdamW's `exp_avg` and `exp_avg_sq` are on the device, flat, in the order and type of the
    parameters. `step` is AdamW's step of each parameter, float32; `progress` is int64, one number for each counter of
    `Optimizer.progress`. A large vector temporarily needs a third of the adapter's memory on the device.
    """
    adapter = _active(worker) if key is None else _states(worker)[key]
    if vector == "progress":
        return torch.tensor(list(adapter.progress.values()))
    if vector == "parameters":
        return torch.cat([shard.reshape(-1) for shard in adapter.parameters.values()])
    return torch.cat([local(moments[vector]).reshape(-1) for moments in adapter.moments.values()])


def empty_packs(worker: ModelWorker, ranks: int) -> list[dict[str, Tensor]]:
    """Uninitialized `VECTORS` on the CPU, one set for each of `ranks`, with the shapes of `packed` there."""
    named = _trained(worker)
    counters = len(_optimizer(worker).progress())
    shapes, (dtype,) = [tensor.shape for tensor in named.values()], {tensor.dtype for tensor in named.values()}

    def of_rank(rank: int) -> dict[str, Tensor]:
        # FSDP shards the first dimension: a rank has `rows_of(shape[0], ranks, rank)` rows of each tensor.
        size = sum(shape[1:].numel() * rows_of(shape[0], ranks, rank) for shape in shapes)
        large = {part: torch.empty(size, dtype=dtype) for part in ("parameters", *MOMENTS)}
        return {**large, "step": torch.empty(len(shapes)), "progress": torch.empty(counters, dtype=torch.int64)}

    return [of_rank(rank) for rank in range(ranks)]


@torch.no_grad()
def unpack(worker: ModelWorker, parts: Sequence[Mapping[str, Tensor]]) -> None:
    """Make a packed adapter the active one, with moments and progress. `parts` are the packs of all ranks that saved
    it, in rank order; their number may differ from today's. Each rank takes its rows."""
    optimizer, named = _optimizer(worker), _trained(worker)
    moments = [optimizer.adamw.state[parameter] for parameter in named.values()]
    targets = {part: [state[part] for state in moments] for part in MOMENTS} | {"parameters": list(named.values())}
    for part, tensors in targets.items():
        offsets = [0] * len(parts)
        for tensor in tensors:
            fill_shard(tensor, _unpacked(tensor, [pack[part] for pack in parts], offsets))
    for state, step in zip(moments, parts[0]["step"], strict=True):
        state["step"].copy_(step)
    optimizer.load_progress(dict(zip(optimizer.progress(), parts[0]["progress"].tolist(), strict=True)))


def _unpacked(like: Tensor, flats: Sequence[Tensor], offsets: list[int]) -> Tensor:
    """The whole tensor of the shape of `like`, from its rows at `offsets` of each rank's vector; advances `offsets`."""
    rows = []
    for rank, flat in enumerate(flats):
        shape = (rows_of(like.shape[0], len(flats), rank), *like.shape[1:])
        size = math.prod(shape)
        rows.append(flat[offsets[rank] : offsets[rank] + size].view(shape))
        offsets[rank] += size
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _active(worker: ModelWorker) -> AdapterState:
    """The active adapter; its tensors are the model's own, not copies."""
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
        raise TrainingError("this model is never trained, so it cannot swap adapters")
    return worker.optimizer
