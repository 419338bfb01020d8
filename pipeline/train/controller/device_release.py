"""Giving the devices back before anybody is told that the trainer is done.

Owns the rule that a completion is announced only when no rank holds anything any more: who hears of it may take the
devices at once. The models are not kept in host memory, as an offload would: they are committed and exported by now,
and a node need not have room for them.
"""

import torch

from pipeline.errors import TrainingError
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.controller.rank_process import RankState
from pipeline.train.model.cpu_offload import allocated

LIBRARIES_BYTES = 128 << 20
"""What libraries may keep of a CUDA device until their process ends: cuBLAS has workspaces of 64 MiB on an H200."""


def release_device(dispatch: RankGroup) -> None:
    """Give the device memory of every model and optimizer back on every rank, drop the models, and see that it is so.

    Every rank has answered when this returns: that is the barrier. `TrainingError` names what is still held. Counted
    are the storages of models and optimizers, which must be empty; and on CUDA, where that can be told, what all
    tensors of the process have, also those that nobody here knows of: at most `LIBRARIES_BYTES`.
    """
    dispatch.run_on_all_models(discard_models)
    for rank, models in enumerate(dispatch.memory()):
        for name, memory in models.items():
            if held := memory.model + memory.optimizer:
                raise TrainingError(f"rank {rank} still holds {held} bytes of {name}, which nobody needs any more")
    for name in list(dispatch.models):
        dispatch.remove_model(name)
    for rank, held in enumerate(dispatch.run_on_all_models(held_on_cuda)):
        if held > LIBRARIES_BYTES:
            expected = f"at most {LIBRARIES_BYTES}, which libraries keep"
            raise TrainingError(
                f"rank {rank} has no model any more, but {held} bytes of its device; expected {expected}"
            )


def discard_models(site: RankState) -> None:
    """On every rank: empty all models, and forget the copies that saves were written from."""
    site.saver.forget()
    for worker in site.workers.values():
        worker.discard()


def held_on_cuda(site: RankState) -> int:
    """On every rank: bytes that tensors have of its CUDA device; 0 on the CPU."""
    return allocated(torch.device("cuda")) if site.device == "cuda" else 0
