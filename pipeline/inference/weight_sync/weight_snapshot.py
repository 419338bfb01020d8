"""A version of the weights on the trainer's side: where it lies until every server has it, and how it leaves.

Owns the memory of versions, on the device that sends or, where a GPU's own is needed for training, in pinned memory of
the host; and the chunks that are brought together for a process that needs a shard of it. Must not know groups, HTTP or
the model.

    payload = Payload(version, layout, layout.pack(parameters, buffer), adapter, device, ready)
    gatherer = ShardGatherer(device)                                    # one for each server
    for chunk in shard.chunks(payload.at_once):
        group.send(version, gatherer.gather(payload, shard, chunk, deadline), deadline)
"""

import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.inference.weight_sync.server_shards import Chunk, Shard, Slice
from pipeline.inference.weight_sync.transports.gloo import ALIGNMENT, WeightLayout
from pipeline.inference.weight_sync.transports.gpu_group import await_event
from pipeline.utils.pinned_memory import pinned_tensor
from pipeline.utils.waiting import Deadline


@dataclass(frozen=True, eq=False)
class WeightSnapshot:
    """One version of the weights as bytes; never changed, so that late servers may still get it.

    Attributes:
        buffer: uint8[layout.bytes], on `device` or in memory of its host.
        adapter: what the bytes are: an adapter with these settings, or, when empty, a whole model.
        device: from which it is sent.
        ready: on a GPU, passes once the buffer is filled.
    """

    version: int
    layout: WeightLayout
    buffer: Tensor
    adapter: Mapping[str, Any]
    device: torch.device
    ready: torch.cuda.Event | None = None

    @property
    def at_once(self) -> bool:
        """Whether all of it can be sent from where it lies."""
        return self.buffer.device.type == self.device.type


class SnapshotMemory:
    """Pinned buffers, used again for later versions, since to pin one takes seconds. There are as many as versions are
    on their way at a time; none is ever waited for."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, size: int) -> Tensor:
        """uint8[size], a free one or a new one."""
        fitting = next((place for place, free in enumerate(self._free) if len(free) == size), None)
        return pinned_tensor(size) if fitting is None else self._free.pop(fitting)

    def free_after(self, payload: WeightSnapshot) -> None:
        """The payload's buffer may be used again once nobody holds the payload any more."""
        weakref.finalize(payload, self._free.append, payload.buffer)

    def close(self) -> None:
        """Give back the buffers that are free."""
        self._free.clear()


class ShardGatherer:
    """Brings chunks together on the GPU that sends, on a stream of its own: it neither waits for the training there nor
    holds it up. It takes at most two chunks' memory."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._chunk = self._span = torch.empty(0, dtype=torch.uint8, device=device)

    def gather(self, payload: WeightSnapshot, shard: Shard, chunk: Chunk, deadline: Deadline) -> Tensor:
        """uint8[end - start] on the payload's device, as the chunk lies in the staging buffer of whoever holds the
        shard. It is there when this returns, until the next call; `WeightSyncError` at the deadline."""
        if payload.at_once and shard.is_whole:
            return payload.buffer
        lead = chunk.start % ALIGNMENT  # so that every type is aligned here as it is there
        size = chunk.end - chunk.start
        with self._on_stream():
            self._chunk = _fits(self._chunk, lead + size)
            for at, each in chunk.slices:
                tensor = payload.layout.view(each.tensor, payload.buffer)
                begin = lead + at - chunk.start
                target = self._chunk[begin : begin + each.elements * shard.width(each)].view(tensor.dtype)
                target.view(each.shape).copy_(each.of(tensor) if payload.at_once else self._brought(each, tensor))
        self._settle(deadline)
        return self._chunk[lead : lead + size]

    def _brought(self, each: Slice, tensor: Tensor) -> Tensor:
        """A slice of a tensor of the host: all that it spans is copied to the device in one piece."""
        spanned = tensor.view(-1)[each.offset : each.offset + each.span]
        size = each.span * tensor.element_size()
        self._span = _fits(self._span, size)
        here = self._span[:size].view(tensor.dtype)
        here.copy_(spanned, non_blocking=True)
        return here.as_strided(each.shape, each.strides)

    def _on_stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream) if self._stream else nullcontext()

    def _settle(self, deadline: Deadline) -> None:
        if self._stream:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
            await_event(done, deadline)


def _fits(buffer: Tensor, size: int) -> Tensor:
    """The buffer, or a larger one."""
    return buffer if len(buffer) >= size else torch.empty(size, dtype=torch.uint8, device=buffer.device)
