"""The release of device memory before a job is reported as finished.

A reader of the `finished` event may use the devices at once, so the event comes only when no rank holds device memory.
The models are discarded, not offloaded: they are saved and exported by now, and the host may lack memory for them.
"""

import torch

from pipeline.errors import TrainingError
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.controller.rank_process import RankState
from pipeline.train.model.cpu_offload import allocated

LIBRARIES_BYTES = 128 << 20
"""CUDA memory that libraries may hold until their process ends: cuBLAS has workspaces of 64 MiB on an H200."""


def release_device(dispatch: RankGroup) -> None:
    """Release the device memory of all models and optimizers on every rank, remove the models, and verify it.

    On return every rank has answered, so the call is a barrier. `TrainingError` names memory that is still held. The
    check has two parts: the storages of models and optimizers must be empty; and on CUDA, whose allocator counts all
    tensors of the process, at most `LIBRARIES_BYTES` may remain.
    """
    dispatch.run_on_all_models(discard_models)
    for rank, models in enumerate(dispatch.memory()):
        for name, memory in models.items():
            if held := memory.model + memory.optimizer:
                raise TrainingError(f"rank {rank} still holds {held} bytes of {name} after the end of the job")
    for name in list(dispatch.models):
        dispatch.remove_model(name)
    for rank, held in enumerate(dispatch.run_on_all_models(held_on_cuda)):
        if held > LIBRARIES_BYTES:
            expected = f"at most {LIBRARIES_BYTES} by libraries"
            raise TrainingError(
                f"rank {rank} has no model any more, but {held} bytes of its device; expected {expected}"
            )


def discard_models(site: RankState) -> None:
    """Empty all models of a rank, and free the host copies of checkpoints; runs on every rank."""
    site.saver.forget()
    for worker in site.workers.values():
        worker.discard()


def held_on_cuda(site: RankState) -> int:
    """Bytes of tensors on a rank's CUDA device; 0 on the CPU; runs on every rank."""
    return allocated(torch.device("cuda")) if site.device == "cuda" else 0
