"""Tensors that are sharded by rows over ranks: filling a rank's rows, and gathering all rows.

Owns the assignment of rows to ranks. Promises that filling and gathering need at most `BLOCK_BYTES` of memory in
addition to the rows and the one gathered tensor. Must not know where tensors come from, nor where they go.
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
    """Some rows of a tensor, from index `first`, of `count` rows in all; indexed like the whole tensor."""

    rows: Tensor
    first: int
    count: int

    def __getitem__(self, rows: slice) -> Tensor:
        return self.rows[rows.start - self.first : rows.stop - self.first]

    def get_shape(self) -> list[int]:
        """Shape of the whole tensor."""
        return [self.count, *self.rows.shape[1:]]


def rows_here(tensor: Tensor) -> slice:
    """The rows of a tensor in this rank's memory."""
    if not isinstance(tensor, DTensor) or not tensor.ndim:
        return slice(0, len(tensor) if tensor.ndim else 0)
    return _rows_of_rank(tensor, dist.get_rank())


def owned_rows(tensor: Tensor, group: dist.ProcessGroup) -> slice:
    """The rows that this rank contributes when the ranks of `group` contribute each row exactly once.

    Of a sharded tensor, the rank's own rows. Of a tensor that every rank has whole, all rows on the first rank and none
    on the others. A scalar counts as one row. The ranks of `group` together have one whole tensor.
    """
    if isinstance(tensor, DTensor) and tensor.ndim:
        return rows_here(tensor)
    return slice(0, (len(tensor) if tensor.ndim else 1) if dist.get_rank(group) == 0 else 0)


@torch.no_grad()
def fill_shard(target: Tensor, source: Any) -> None:
    """Fill this rank's rows of `target` from `source`.

    `source` is a whole tensor or a lazy one that reads the rows it is indexed with (`safe_open().get_slice`).
    """
    mine, first = local(target.detach()), rows_here(target).start
    if not mine.ndim:
        mine.copy_(source[...])
        return
    for rows in row_blocks(mine):
        mine[rows].copy_(source[first + rows.start : first + rows.stop])


@torch.no_grad()
def is_source_of(target: Tensor, source: Any) -> bool:
    """Whether `source` and `target` are equal in this rank's rows."""
    mine, first = local(target.detach()), rows_here(target).start
    pairs = ((mine[rows], source[first + rows.start : first + rows.stop]) for rows in row_blocks(mine))
    return all(torch.equal(own, other.to(own)) for own, other in pairs)


def gather(tensor: Tensor, dtype: torch.dtype, group: dist.ProcessGroup, rows: slice | None = None) -> Tensor:
    """Some rows, by default all, on every rank, on the device, as a new tensor of type `dtype`. Collective over
    `group`, the ranks that together have one whole tensor.

    Each rank's rows are received directly into the result: `full_tensor` would hold the tensor twice, in both types.
    """
    mine = local(tensor.detach())
    if not isinstance(tensor, DTensor):
        return (mine if rows is None else mine[rows]).to(dtype, copy=True)
    rows = slice(0, len(tensor)) if rows is None else rows
    gathered = torch.empty(rows.stop - rows.start, *tensor.shape[1:], dtype=dtype, device=mine.device)
    # One broadcast per rank, since the ranks have different numbers of rows; a slice of rows is contiguous.
    for rank, global_rank in enumerate(dist.get_process_group_ranks(group)):
        owned = _rows_of_rank(tensor, global_rank)
        first, last = max(owned.start, rows.start), min(owned.stop, rows.stop)
        if first >= last:
            continue
        part = gathered[first - rows.start : last - rows.start]
        if rank == dist.get_rank(group):
            part.copy_(mine[first - owned.start : last - owned.start])  # converts to `dtype` before the rows are sent
        dist.broadcast(part, group=group, group_src=rank)
    return gathered


def share_of(rows: int, ranks: int, rank: int) -> slice:
    """The rows of `rank` if `ranks` ranks shard `rows` rows, as DTensor's `Shard(0)` does."""
    shape, first = _compute_local_shape_and_global_offset((rows,), (ranks,), [rank], [Shard(0)])
    return slice(first[0], first[0] + shape[0])


def rows_of(rows: int, ranks: int, rank: int) -> int:
    """The number of rows of `rank` if `ranks` ranks shard `rows` rows."""
    share = share_of(rows, ranks, rank)
    return int(share.stop - share.start)


def _rows_of_rank(tensor: DTensor, rank: int) -> slice:
    """The rows of a global rank, one block: experts are sharded over `ep` first and within that over `efsdp`."""
    mesh = tensor.device_mesh
    coordinate = (mesh.mesh == rank).nonzero()[0].tolist()
    shape, first = _compute_local_shape_and_global_offset(tensor.shape, mesh.shape, coordinate, tensor.placements)
    return slice(first[0], first[0] + shape[0])


def row_blocks(tensor: Tensor) -> list[slice]:
    """The rows of a whole tensor, in blocks of at most `BLOCK_BYTES`, or of one row."""
    if not tensor.numel():
        return []
    rows = len(tensor)
    step = max(1, BLOCK_BYTES * rows // tensor.nbytes)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
