"""A tensor that is spread over ranks by its rows: filling a rank's rows, and gathering all of them.

Owns which rows of a tensor are a rank's. Promises that neither way needs memory for more than `BLOCK_BYTES` beside the
rows and the one whole tensor that is asked for. Must not know where tensors come from, nor where they go.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeline.train.model.cpu_offload import local

BLOCK_BYTES = 1 << 24


def first_row_here(tensor: Tensor) -> int:
    """The number of this rank's first row; 0 of a tensor that is whole here."""
    if not isinstance(tensor, DTensor):
        return 0
    group = _shard_group(tensor)
    start: int = _shares(len(tensor), dist.get_world_size(group))[dist.get_rank(group)].start
    return start


@torch.no_grad()
def fill_shard(target: Tensor, source: Any) -> None:
    """Fill this rank's rows of `target` from `source`: a whole tensor, or what reads the rows that it is indexed with
    (`safe_open().get_slice`)."""
    mine, first = local(target.detach()), first_row_here(target)
    if not mine.ndim:
        mine.copy_(source[...])
        return
    for rows in _blocks(mine):
        mine[rows].copy_(source[first + rows.start : first + rows.stop])


@torch.no_grad()
def holds(target: Tensor, source: Any) -> bool:
    """Whether `source` has, in this rank's rows, the numbers that are in `target`."""
    mine, first = local(target.detach()), first_row_here(target)
    pairs = ((mine[rows], source[first + rows.start : first + rows.stop]) for rows in _blocks(mine))
    return all(torch.equal(own, other.to(own)) for own, other in pairs)


def gathered(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """All rows on every rank, on the device, in another type; a tensor of its own. Collective.

    Each rank's rows go straight to their place: `full_tensor` would hold the tensor twice, and in both types.
    """
    mine = local(tensor.detach())
    if not isinstance(tensor, DTensor):
        return mine.to(dtype, copy=True)
    whole = torch.empty(tensor.shape, dtype=dtype, device=mine.device)
    group = _shard_group(tensor)
    for rank, rows in enumerate(_shares(len(whole), dist.get_world_size(group))):
        if rank == dist.get_rank(group):
            whole[rows].copy_(mine)
        if rows.start < rows.stop:
            dist.broadcast(whole[rows], group=group, group_src=rank)
    return whole


def rows_of(rows: int, ranks: int, rank: int) -> int:
    """How many rows of a tensor of `rows` a rank has."""
    share = _shares(rows, ranks)[rank]
    return int(share.stop - share.start)


def _shard_group(tensor: DTensor) -> dist.ProcessGroup:
    """The ranks that have one whole tensor among them: the last dimension of the mesh, behind that of replicas."""
    mesh = tensor.device_mesh
    return mesh.get_group(mesh.ndim - 1)


def _shares(rows: int, ranks: int) -> list[slice]:
    """The rows of each rank, as FSDP deals them out: equal shares, of which the last may be smaller or empty."""
    share = -(-rows // ranks)
    return [slice(min(rank * share, rows), min((rank + 1) * share, rows)) for rank in range(ranks)]


def _blocks(tensor: Tensor) -> list[slice]:
    """Its rows, in blocks of about `BLOCK_BYTES`."""
    if not tensor.numel():
        return []
    rows = len(tensor)
    step = max(1, BLOCK_BYTES * rows // tensor.nbytes)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
