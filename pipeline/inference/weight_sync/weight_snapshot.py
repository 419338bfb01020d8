"""A version of the weights on one rank of the trainer: where its rows lie until every server has them, and how they
leave.

Owns the memory of versions, on the device that sends or, where a GPU's own is needed for training, in pinned memory of
the host; and the chunks that are brought together for a process that needs a part of it. Must not know groups, HTTP or
the model.

    snapshots = RankSnapshots(source, adapter, device, on_host)
    snapshot = snapshots.take(version, fill, in_use)               # the rank's rows as they are now
    gatherer = ShardGatherer(device)                               # one for each server
    for chunk in parts.chunks(snapshot.at_once):
        group.send(version, gatherer.gather(snapshot, parts.shard, chunk, deadline), deadline)
"""

import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import WeightSyncError
from pipeline.inference.weight_sync.rank_rows import RowSource
from pipeline.inference.weight_sync.server_shards import Chunk, Shard, Slice
from pipeline.inference.weight_sync.transports.gloo import ALIGNMENT
from pipeline.inference.weight_sync.transports.gpu_group import SideStream
from pipeline.utils.pinned_memory import pinned_tensor
from pipeline.utils.waiting import Deadline


@dataclass(frozen=True, eq=False)
class WeightSnapshot:
    """One rank's rows of one version as bytes; never changed, so that late servers may still get them.

    Attributes:
        source: the rank.
        buffer: uint8[source.own.bytes], on `device` or in memory of its host.
        adapter: what the bytes are: an adapter with these settings, or, when empty, a whole model.
        device: from which it is sent.
        ready: on a GPU, passes once the buffer is filled.
    """

    version: int
    source: RowSource
    buffer: Tensor
    adapter: Mapping[str, Any]
    device: torch.device
    ready: torch.cuda.Event | None = None

    @property
    def on_device(self) -> bool:
        """Whether it can be sent from where it lies."""
        return self.buffer.device.type == self.device.type

    @property
    def at_once(self) -> bool:
        """Whether this is all there is, and it can be sent from where it lies."""
        return self.on_device and self.source.rows is None


class SnapshotMemory:
    """Pinned buffers, used again for later versions, since to pin one takes seconds. There are as many as versions are
    on their way at a time; none is ever waited for."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, size: int) -> Tensor:
        """uint8[size], a free one or a new one."""
        fitting = next((place for place, free in enumerate(self._free) if len(free) == size), None)
        return pinned_tensor(size) if fitting is None else self._free.pop(fitting)

    def free_after(self, snapshot: WeightSnapshot) -> None:
        """The snapshot's buffer may be used again once nobody holds the snapshot any more."""
        weakref.finalize(snapshot, self._free.append, snapshot.buffer)

    def close(self) -> None:
        """Give back the buffers that are free."""
        self._free.clear()


class RankSnapshots:
    """The versions that one rank holds for servers."""

    def __init__(self, source: RowSource, adapter: Mapping[str, Any], device: torch.device, on_host: bool) -> None:
        """`source`, `adapter` and `device` are those of the snapshots; with `on_host` they wait in the host's memory,
        where a GPU sends them."""
        self.source, self._adapter, self._device = source, adapter, device
        self._host = SnapshotMemory() if on_host and device.type == "cuda" else None
        self._held: dict[int, WeightSnapshot] = {}

    def take(self, version: int, fill: Callable[[Tensor], object], in_use: Collection[int]) -> WeightSnapshot:
        """A new version: `fill` fills its buffer, on the current stream. Versions that are not in use are forgotten
        before there is memory for it."""
        for old in self._held.keys() - set(in_use):
            del self._held[old]
        size = self.source.own.bytes
        buffer = self._host.take(size) if self._host else torch.empty(size, dtype=torch.uint8, device=self._device)
        fill(buffer)
        snapshot = WeightSnapshot(version, self.source, buffer, self._adapter, self._device, self._mark())
        if self._host is not None:
            self._host.free_after(snapshot)
        self._held[version] = snapshot
        return snapshot

    def held(self, version: int) -> WeightSnapshot:
        """A version that was taken and is not forgotten; else `WeightSyncError`."""
        snapshot = self._held.get(version)
        if snapshot is None:
            raise WeightSyncError(f"this rank does not hold version {version} any more")
        return snapshot

    def close(self) -> None:
        """Forget all versions."""
        self._held.clear()
        if self._host is not None:
            self._host.close()

    def _mark(self) -> torch.cuda.Event | None:
        """What passes once everything that was begun on the device is done."""
        if self._device.type != "cuda":
            return None
        mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
        mark.record(torch.cuda.current_stream(self._device))
        return mark


class ShardGatherer:
    """Brings chunks together on the GPU that sends, on a stream of its own: it neither waits for the training there nor
    holds it up. It takes at most two chunks' memory."""

    def __init__(self, device: torch.device) -> None:
        self._stream = SideStream(device)
        self._chunk = self._span = torch.empty(0, dtype=torch.uint8, device=device)

    def gather(self, snapshot: WeightSnapshot, shard: Shard, chunk: Chunk, deadline: Deadline) -> Tensor:
        """uint8[end - start] on the snapshot's device: the chunk of a shard of its rows. It is there when this returns,
        until the next call; `WeightSyncError` at the deadline."""
        if snapshot.on_device and shard.is_whole:
            return snapshot.buffer[chunk.start : chunk.end]
        lead = chunk.start % ALIGNMENT  # so that every type is aligned here as it is there
        size = chunk.end - chunk.start
        with self._stream.begin():
            self._chunk = _fits(self._chunk, lead + size)
            for at, each in chunk.slices:
                tensor = snapshot.source.own.view(each.tensor, snapshot.buffer)
                begin = lead + at - chunk.start
                target = self._chunk[begin : begin + each.elements * shard.width(each)].view(tensor.dtype)
                target.view(each.shape).copy_(each.of(tensor) if snapshot.on_device else self._brought(each, tensor))
        self._stream.settle(deadline)
        return self._chunk[lead : lead + size]

    def _brought(self, each: Slice, tensor: Tensor) -> Tensor:
        """A slice of a tensor of the host: all that it spans is copied to the device in one piece."""
        spanned = tensor.view(-1)[each.offset : each.offset + each.span]
        size = each.span * tensor.element_size()
        self._span = _fits(self._span, size)
        here = self._span[:size].view(tensor.dtype)
        here.copy_(spanned, non_blocking=True)
        return here.as_strided(each.shape, each.strides)


def _fits(buffer: Tensor, size: int) -> Tensor:
    """The buffer, or a larger one."""
    return buffer if len(buffer) >= size else torch.empty(size, dtype=torch.uint8, device=buffer.device)
