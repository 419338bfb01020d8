"""The operations of the controller, as each rank executes them.

Owns the rank's side of every operation: move the planned parts, then run the operation on the models of this process.
Promises that parts leave the device before others arrive, that models which compute concurrently use separate threads
and process groups, and that a removed model leaves no memory behind. Must not know the order of operations, nor the
plan of moves.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.train.batching.packing import Packing
from pipeline.train.controller.batch_staging import Data, micro_batches
from pipeline.train.controller.device_placement import Move
from pipeline.train.controller.rank_process import Operation, RankState
from pipeline.train.loss_specs import LossSpec, MetricsLevel
from pipeline.train.model.cpu_offload import Memory, empty_cache
from pipeline.train.model.model_worker import ModelInfo, ModelWorker
from pipeline.train.worker_spec import ModelSpec
from pipeline.utils import heartbeat

T = TypeVar("T")


def run_after_moves(site: RankState, moves: Sequence[Move], operation: Operation, *args: Any) -> Any:
    """Move parts of models, then run the operation."""
    for move in moves:
        worker = site.worker(move.name)
        if move.to == "device":
            worker.load(move.part)
        else:
            worker.offload(move.part)
    if any(move.to == "offloaded" for move in moves):
        empty_cache(torch.device(site.device))
    return operation(site, *args)


def init_model(site: RankState, name: str, spec: ModelSpec) -> ModelInfo:
    remove_model(site, name)
    with heartbeat.busy_with(f"making {name}", site.patience.checkpoint):
        site.workers[name] = ModelWorker(
            spec,
            site.mesh_of(name, spec.dp_replicate),
            site.expert_mesh_of(name, spec.dp_replicate, spec.ep),
            site.context_of(name, spec.cp),
        )
    return site.workers[name].info


def remove_model(site: RankState, name: str) -> None:
    if site.workers.pop(name, None) is not None:
        gc.collect()  # FSDP's hooks form reference cycles, which hold the parameters
        empty_cache(torch.device(site.device))


def forward(site: RankState, name: str, data: Data, how: Packing) -> list[NDArray[np.float32]]:
    return site.worker(name).forward(micro_batches(site, data), how)


def forward_models(site: RankState, data: Mapping[str, Data], how: Packing) -> dict[str, list[NDArray[np.float32]]]:
    """Run `forward` of several models, concurrently on the CPU; after the end of all, the first failure is raised."""
    # In turn on CUDA: collectives of several nccl groups can deadlock if ranks begin them in different orders, and one
    # model occupies the device anyway. In turn with compiled layers: models of one architecture share torch's guards,
    # which are not thread-safe.
    if site.device == "cuda" or any(site.worker(name).compiled for name in data):
        return {name: forward(site, name, rows, how) for name, rows in data.items()}
    with ThreadPoolExecutor(len(data), thread_name_prefix="forward") as threads:
        running = {name: threads.submit(forward, site, name, rows, how) for name, rows in data.items()}
    return {name: future.result() for name, future in running.items()}


def forward_backward(
    site: RankState, name: str, data: Data, how: Packing, loss: LossSpec, loss_weight: float, level: MetricsLevel
) -> dict[str, float]:
    return site.worker(name).forward_backward(micro_batches(site, data), how, loss, loss_weight, level)


def copy_parameters(site: RankState, source: str, target: str) -> None:
    site.worker(target).copy_from(site.worker(source))


def on_model(site: RankState, name: str, function: Callable[..., T], *args: Any) -> T:
    return function(site.worker(name), *args)


def save_hf_model(site: RankState, name: str, path: Path) -> None:
    with heartbeat.busy_with(f"exporting {name}", site.patience.checkpoint):
        site.worker(name).save_hf_model(path)


def gather_parameters(site: RankState, name: str) -> None:
    """Take part in the gathering of full parameters for rank 0. Only ranks of the first replica hold shards for it."""
    worker = site.worker(name)
    if worker.replica == 0:
        join_gathers(site, worker.full_parameters())


def join_gathers(site: RankState, parameters: Iterator[tuple[str, Tensor]]) -> None:
    for _ in parameters:
        pass


def raise_on_rank(site: RankState, error: Exception) -> None:
    raise error


def device_memory(site: RankState) -> dict[str, Memory]:
    return {name: worker.memory() for name, worker in site.workers.items()}


def empty_device_cache(site: RankState) -> None:
    empty_cache(torch.device(site.device))


def do_nothing(site: RankState) -> None:
    pass
