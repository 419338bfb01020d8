"""Snapshots of the weights on one rank of the trainer, held until every server has them.

Owns the memory of the snapshots (on the sending device or, to save memory of a training GPU, pinned on the host), and
the staging of chunks for a process that needs only a part. Must not know groups, HTTP or the model.

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
    """One rank's rows of one version as bytes; never changed, so that late servers can still receive them.

    Attributes:
        source: the rank.
        buffer: uint8[source.own.bytes], on `device` or in memory of its host.
        adapter: the adapter's settings, if the bytes are an adapter; empty for a whole model.
        device: the sending device.
        ready: on a GPU, an event that passes once the buffer is filled.
    """

    version: int
    source: RowSource
    buffer: Tensor
    adapter: Mapping[str, Any]
    device: torch.device
    ready: torch.cuda.Event | None = None

    @property
    def on_device(self) -> bool:
        """Whether the buffer can be sent without a copy to the device."""
        return self.buffer.device.type == self.device.type

    @property
    def at_once(self) -> bool:
        """Whether the buffer holds every row, and can be sent without a copy to the device."""
        return self.on_device and self.source.rows is None


class SnapshotMemory:
    """A pool of pinned buffers, reused for later versions, since pinning one takes seconds.

    It grows to the number of versions that are being sent at once; `take` never waits.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, size: int) -> Tensor:
        """A free or new buffer, uint8[size]."""
        fitting = next((index for index, free in enumerate(self._free) if len(free) == size), None)
        return pinned_tensor(size) if fitting is None else self._free.pop(fitting)

    def free_after(self, snapshot: WeightSnapshot) -> None:
        """Return the snapshot's buffer to the pool once no server's thread refers to the snapshot any more."""
        # A server's thread holds the snapshot while it sends, so the garbage collector knows when the buffer is free.
        weakref.finalize(snapshot, self._free.append, snapshot.buffer)

    def close(self) -> None:
        """Release the free buffers."""
        self._free.clear()


class RankSnapshots:
    """The versions that one rank holds for servers."""

    def __init__(self, source: RowSource, adapter: Mapping[str, Any], device: torch.device, on_host: bool) -> None:
        """`source`, `adapter` and `device` are those of the snapshots.

        With `on_host` and a sending GPU, the snapshots are held in pinned host memory.
        """
        self.source, self._adapter, self._device = source, adapter, device
        self._host = SnapshotMemory() if on_host and device.type == "cuda" else None
        self._held: dict[int, WeightSnapshot] = {}

    def take(self, version: int, fill: Callable[[Tensor], object], in_use: Collection[int]) -> WeightSnapshot:
        """Take a new version: `fill` fills its buffer on the current stream.

        Versions that are not in use are released first, so that their memory can hold the new one.
        """
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
        """A version that was taken and not yet released; else `WeightSyncError`."""
        snapshot = self._held.get(version)
        if snapshot is None:
            raise WeightSyncError(f"this rank does not hold version {version} any more")
        return snapshot

    def close(self) -> None:
        """Release all versions."""
        self._held.clear()
        if self._host is not None:
            self._host.close()

    def _mark(self) -> torch.cuda.Event | None:
        """An event that passes once all work on the current stream is done; None on a CPU."""
        if self._device.type != "cuda":
            return None
        mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
        mark.record(torch.cuda.current_stream(self._device))
        return mark


class ShardGatherer:
    """Gathers the slices of a chunk into one contiguous buffer on the sending GPU.

    Copies on a side stream, so that it neither waits for training kernels nor delays them. Uses the memory of at most
    two chunks.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = SideStream(device)
        self._chunk = self._span = torch.empty(0, dtype=torch.uint8, device=device)

    def gather(self, snapshot: WeightSnapshot, shard: Shard, chunk: Chunk, deadline: Deadline) -> Tensor:
        """The bytes of a chunk, uint8[end - start] on the snapshot's device.

        Filled when this returns, and valid until the next call; `WeightSyncError` at the deadline.
        """
        # A whole shard has the layout of the buffer: no gathering, the chunk is sent from the snapshot.
        if snapshot.on_device and shard.is_whole:
            return snapshot.buffer[chunk.start : chunk.end]
        lead = chunk.start % ALIGNMENT  # every tensor gets the alignment that it has in the staging buffer
        size = chunk.end - chunk.start
        with self._stream.begin():
            self._chunk = _fits(self._chunk, lead + size)
            copies = shard.gathering(chunk)
            for run in copies.runs:
                source = snapshot.buffer[run.source : run.source + run.size]
                self._chunk[lead + run.target : lead + run.target + run.size].copy_(source, non_blocking=True)
            for at, slice_ in copies.strided:
                tensor = snapshot.source.own.view(slice_.tensor, snapshot.buffer)
                begin = lead + at
                target = self._chunk[begin : begin + slice_.elements * shard.width(slice_)].view(tensor.dtype)
                target.view(slice_.shape).copy_(
                    slice_.of(tensor) if snapshot.on_device else self._brought(slice_, tensor)
                )
        self._stream.wait(deadline)
        return self._chunk[lead : lead + size]

    def _brought(self, slice_: Slice, tensor: Tensor) -> Tensor:
        """Copy a slice of a host tensor to the device: its whole span in one copy, strided only on the device.

        Torch would copy a strided host tensor through a contiguous temporary on the CPU.
        """
        spanned = tensor.view(-1)[slice_.offset : slice_.offset + slice_.span]
        size = slice_.span * tensor.element_size()
        self._span = _fits(self._span, size)
        here = self._span[:size].view(tensor.dtype)
        here.copy_(spanned, non_blocking=True)
        return here.as_strided(slice_.shape, slice_.strides)


def _fits(buffer: Tensor, size: int) -> Tensor:
    """The buffer if it has `size` bytes or more, else a new one."""
    return buffer if len(buffer) >= size else torch.empty(size, dtype=torch.uint8, device=buffer.device)
