"""One rank of a world that is not there: it holds its shards, and what others would send never comes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def rank_of(ranks: int, rank: int = 0) -> Iterator[DeviceMesh]:
    """The mesh over which this process is rank `rank` of `ranks`; collectives return at once, with anything."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)  # type: ignore[no-untyped-call]
    try:
        yield init_device_mesh("cpu", (ranks,))
    finally:
        dist.destroy_process_group()
