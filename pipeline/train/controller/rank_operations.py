"""What each rank does when the controller asks.

Owns the rank's side of every operation of the dispatch: bring the parts that it needs to the device, then run it on the
models of this process. Promises that evictions come before arrivals, that models which compute at the same time do so
in threads and process groups of their own, and that a model which is removed leaves nothing behind. Must not know when
what is done, nor what moves: orders say that.
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

from pipeline.train.algorithms import Level, Objective
from pipeline.train.batching.packing import Packing
from pipeline.train.controller.batch_staging import Data, micro_batches
from pipeline.train.controller.device_placement import Move
from pipeline.train.controller.rank_process import Operation, Site
from pipeline.train.model.cpu_offload import Memory, empty_cache
from pipeline.train.model.model_worker import ModelInfo, ModelWorker
from pipeline.train.worker_spec import ModelSpec
from pipeline.utils import heartbeat

T = TypeVar("T")


def run_after_moves(site: Site, moves: Sequence[Move], operation: Operation, *args: Any) -> Any:
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


def init_model(site: Site, name: str, spec: ModelSpec) -> ModelInfo:
    remove_model(site, name)
    with heartbeat.during(f"making {name}", site.patience.commit):
        site.workers[name] = ModelWorker(
            spec,
            site.mesh_of(name, spec.dp_replicate),
            site.expert_mesh_of(name, spec.dp_replicate, spec.ep),
            site.context_of(name, spec.cp),
        )
    return site.workers[name].info


def remove_model(site: Site, name: str) -> None:
    if site.workers.pop(name, None) is not None:
        gc.collect()  # FSDP's hooks are cycles
        empty_cache(torch.device(site.device))


def forward(site: Site, name: str, data: Data, how: Packing) -> list[NDArray[np.float32]]:
    return site.worker(name).forward(micro_batches(site, data), how)


def forward_each(site: Site, data: Mapping[str, Data], how: Packing) -> dict[str, list[NDArray[np.float32]]]:
    """`forward` of several models, on the CPU at once; all of them end, then the first failure is raised.

    On CUDA in turn: collectives of several nccl groups that ranks begin in different orders can block each other, and
    one model fills the device. So are compiled layers: torch's guards, of which all models of one architecture have the
    same, are not made for several threads.
    """
    if site.device == "cuda" or any(site.worker(name).compiled for name in data):
        return {name: forward(site, name, given, how) for name, given in data.items()}
    with ThreadPoolExecutor(len(data), thread_name_prefix="forward") as threads:
        running = {name: threads.submit(forward, site, name, given, how) for name, given in data.items()}
    return {name: answers.result() for name, answers in running.items()}


def forward_backward(
    site: Site, name: str, data: Data, how: Packing, loss: Objective, loss_weight: float, level: Level
) -> dict[str, float]:
    return site.worker(name).forward_backward(micro_batches(site, data), how, loss, loss_weight, level)


def copy_parameters(site: Site, source: str, target: str) -> None:
    site.worker(target).copy_from(site.worker(source))


def on_model(site: Site, name: str, function: Callable[..., T], *args: Any) -> T:
    return function(site.worker(name), *args)


def save_hf_model(site: Site, name: str, path: Path) -> None:
    with heartbeat.during(f"exporting {name}", site.patience.commit):
        site.worker(name).save_hf_model(path)


def take_parameters(site: Site, name: str) -> None:
    """Take part in gathering for rank 0. Only the ranks of the first replica have a part in it."""
    worker = site.worker(name)
    if worker.replica == 0:
        take_rest(site, worker.full_parameters())


def take_rest(site: Site, parameters: Iterator[tuple[str, Tensor]]) -> None:
    for _ in parameters:
        pass


def raise_on_rank(site: Site, error: Exception) -> None:
    raise error


def device_memory(site: Site) -> dict[str, Memory]:
    return {name: worker.memory() for name, worker in site.workers.items()}


def give_back_cache(site: Site) -> None:
    empty_cache(torch.device(site.device))


def do_nothing(site: Site) -> None:
    pass
