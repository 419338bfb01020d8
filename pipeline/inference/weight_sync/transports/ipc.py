"""The transport on one GPU that trainer and server share: the server copies the bytes out of the trainer's memory.

nccl refuses two members on one GPU. CUDA IPC lets another process map an allocation; the handle travels through the
signed store. The trainer holds its buffer until the server reports that it has copied everything, or why it failed.

Must not know vLLM's engine, HTTP, or the meaning of the tensors.
"""

from typing import Any

import msgspec
import torch
from torch import Tensor

from pipeline.errors import WeightSyncError
from pipeline.inference.weight_sync.transports.gpu_group import GpuGroup, await_event
from pipeline.utils.waiting import Deadline


class CudaIpcHandle(msgspec.Struct, frozen=True, kw_only=True):
    """A buffer of another process, by the fields of torch's shared storages (`UntypedStorage._share_cuda_`).

    Attributes:
        handle, size, offset: CUDA's handle of the allocation; the storage's size and offset in it.
        counter, slot: file and index of the reference counter of the memory.
        event, sync: an event that passes when the sender's stream is done with it, and whether to wait for the event.
        start, length: offset and size of the buffer in its storage.
    """

    version: int
    handle: bytes
    size: int
    offset: int
    counter: bytes
    slot: int
    event: bytes
    sync: bool
    start: int
    length: int


class IpcGroup(GpuGroup):
    """A group of two processes on one GPU."""

    _left = False

    def send(self, version: int, buffer: Tensor, deadline: Deadline) -> None:
        key = self._next()
        try:
            with torch.cuda.stream(self._stream):  # torch's event is on the current one, with the training's kernels
                handle = _export_handle(version, buffer)
        except RuntimeError as error:
            raise WeightSyncError(
                f"this memory cannot be shared between processes ({error}); "
                "PYTORCH_CUDA_ALLOC_CONF must not ask for expandable_segments"
            ) from error
        self._publish(key, msgspec.json.encode(handle).decode())
        try:
            self._await_answer(deadline)
        finally:
            # Torch holds shared memory until it has seen that the other process released it.
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        self._forget(self._buffers)
        self._buffers += 1

    def receive(self, buffer: Tensor, deadline: Deadline, after: torch.cuda.Event | None = None) -> int:
        key = self._next()
        with self._refusal_on_failure():
            handle = self._receive(key, lambda data: msgspec.json.decode(data, type=CudaIpcHandle), deadline)
            self._copy(buffer, handle, deadline, after)
        self._publish(f"{key}/answer", "")
        self._buffers += 1
        return handle.version

    def leave(self) -> None:
        self._left = True

    def _next(self) -> str:
        if self._left:
            raise WeightSyncError(f"group {self._name} was left")
        return self._key()

    def _copy(self, buffer: Tensor, handle: CudaIpcHandle, deadline: Deadline, after: torch.cuda.Event | None) -> None:
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        try:
            with torch.cuda.stream(self._stream):
                exported = _open_handle(handle, self._device)
                if after is not None:
                    self._stream.wait_event(after)
                buffer.copy_(exported, non_blocking=True)
                done.record(self._stream)
        except RuntimeError as error:
            raise WeightSyncError(f"{deadline.awaited}: {error}") from error
        await_event(done, deadline)


def _export_handle(version: int, buffer: Tensor) -> CudaIpcHandle:
    """Export a buffer of this process, uint8[n], for another process on the GPU."""
    storage: Any = buffer.untyped_storage()
    _, handle, size, offset, counter, slot, event, sync = storage._share_cuda_()
    return CudaIpcHandle(
        version=version,
        handle=handle,
        size=size,
        offset=offset,
        counter=counter,
        slot=slot,
        event=event,
        sync=sync,
        start=int(buffer.storage_offset()),
        length=buffer.numel(),
    )


def _open_handle(handle: CudaIpcHandle, device: torch.device) -> Tensor:
    """Map the buffer of another process, uint8[length], without a copy; the current stream waits for its event."""
    storages: Any = torch.UntypedStorage
    storage = storages._new_shared_cuda(
        device.index if device.index is not None else torch.cuda.current_device(),
        handle.handle,
        handle.size,
        handle.offset,
        handle.counter,
        handle.slot,
        handle.event,
        handle.sync,
    )
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, handle.start, (handle.length,), (1,))
