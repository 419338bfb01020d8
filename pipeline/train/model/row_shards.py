"""A tensor that is spread over ranks by its rows: filling a rank's rows, and gathering all of them.

Owns which rows of a tensor are a rank's. Promises that neither way needs memory for more than `BLOCK_BYTES` beside the
rows and the one whole tensor that is asked for. Must not know where tensors come from, nor where they go.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from pipeline.train.model.cpu_offload import local

BLOCK_BYTES = 1 << 24


@dataclass(frozen=True)
class SomeRows:
    """Rows of a tensor from number `first` on, of `count` rows in all; read like the whole tensor."""

    rows: Tensor
    first: int
    count: int

    def __getitem__(self, wanted: slice) -> Tensor:
        return self.rows[wanted.start - self.first : wanted.stop - self.first]

    def get_shape(self) -> list[int]:
        """Shape of the whole tensor."""
        return [self.count, *self.rows.shape[1:]]


def rows_here(tensor: Tensor) -> slice:
    """The rows of a tensor that this rank has."""
    if not isinstance(tensor, DTensor) or not tensor.ndim:
        return slice(0, len(tensor) if tensor.ndim else 0)
    return _rows_of_rank(tensor, dist.get_rank())


def owned_rows(tensor: Tensor, group: dist.ProcessGroup) -> slice:
    """The rows that this rank gives where every row is given once by the ranks of `group`, which have one whole tensor
    among them: its own, and of a tensor that is whole on every rank all or, on all but the first, none. A number is a
    row."""
    if isinstance(tensor, DTensor) and tensor.ndim:
        return rows_here(tensor)
    return slice(0, (len(tensor) if tensor.ndim else 1) if dist.get_rank(group) == 0 else 0)


@torch.no_grad()
def fill_shard(target: Tensor, source: Any) -> None:
    """Fill this rank's rows of `target` from `source`: a whole tensor, or what reads the rows that it is indexed with
    (`safe_open().get_slice`)."""
    mine, first = local(target.detach()), rows_here(target).start
    if not mine.ndim:
        mine.copy_(source[...])
        return
    for rows in _blocks(mine):
        mine[rows].copy_(source[first + rows.start : first + rows.stop])


@torch.no_grad()
def is_source_of(target: Tensor, source: Any) -> bool:
    """Whether `source` has, in this rank's rows, the numbers that are in `target`."""
    mine, first = local(target.detach()), rows_here(target).start
    pairs = ((mine[rows], source[first + rows.start : first + rows.stop]) for rows in _blocks(mine))
    return all(torch.equal(own, other.to(own)) for own, other in pairs)


def gather(tensor: Tensor, dtype: torch.dtype, group: dist.ProcessGroup) -> Tensor:
    """All rows on every rank, on the device, in another type; a tensor of its own. Collective over `group`, the ranks
    that have one whole tensor among them.

    Each rank's rows go straight to their place: `full_tensor` would hold the tensor twice, and in both types.
    """
    mine = local(tensor.detach())
    if not isinstance(tensor, DTensor):
        return mine.to(dtype, copy=True)
    whole = torch.empty(tensor.shape, dtype=dtype, device=mine.device)
    for rank, of_world in enumerate(dist.get_process_group_ranks(group)):
        rows = _rows_of_rank(tensor, of_world)
        if rank == dist.get_rank(group):
            whole[rows].copy_(mine)
        if rows.start < rows.stop:
            dist.broadcast(whole[rows], group=group, group_src=rank)
    return whole


def share_of(rows: int, ranks: int, rank: int) -> slice:
    """Which rows of a tensor of `rows` a rank has, of ranks that share it by rows."""
    shape, first = _compute_local_shape_and_global_offset((rows,), (ranks,), [rank], [Shard(0)])
    return slice(first[0], first[0] + shape[0])


def rows_of(rows: int, ranks: int, rank: int) -> int:
    """How many these are."""
    share = share_of(rows, ranks, rank)
    return int(share.stop - share.start)


def _rows_of_rank(tensor: DTensor, rank: int) -> slice:
    """The rows of this rank of the world. Experts are spread over `ep` first and then over `efsdp`, so they too are one
    block."""
    mesh = tensor.device_mesh
    place = (mesh.mesh == rank).nonzero()[0].tolist()
    shape, first = _compute_local_shape_and_global_offset(tensor.shape, mesh.shape, place, tensor.placements)
    return slice(first[0], first[0] + shape[0])


def _blocks(tensor: Tensor) -> list[slice]:
    """Its rows, in blocks of about `BLOCK_BYTES`."""
    if not tensor.numel():
        return []
    rows = len(tensor)
    step = max(1, BLOCK_BYTES * rows // tensor.nbytes)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
