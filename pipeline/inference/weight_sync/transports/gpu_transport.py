"""The transport between two members on GPUs: IPC where both use one GPU, NCCL where each has its own."""

import torch
from torch._C._distributed_c10d import Store

from pipeline.inference.weight_sync.transports.gpu_group import GpuGroup, gpu_of
from pipeline.inference.weight_sync.transports.ipc import IpcGroup
from pipeline.inference.weight_sync.transports.nccl import NcclGroup
from pipeline.utils.waiting import Deadline


def join_gpu_group(store: Store, name: str, rank: int, device: torch.device, peer: str, deadline: Deadline) -> GpuGroup:
    """Join the group `name` as the member `rank` on `device`. `peer` is the other member's GPU, as `gpu_of` returns it.

    NCCL refuses two ranks on one GPU, so two members of one GPU read each other's memory. Raises `WeightSyncError` if
    the other member does not join before the deadline.
    """
    if gpu_of(device) == peer:
        return IpcGroup(store, name, device)
    return NcclGroup(store, name, rank, device, deadline)
