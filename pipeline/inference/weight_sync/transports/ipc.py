"""How weights travel on one GPU that trainer and server share: the server copies them out of the trainer's memory.

nccl refuses two members on one GPU. CUDA lets another process map a piece of memory; what it needs for that is said in
the store, which is signed. The trainer's buffer is held until the server said that it has everything, or why it has
not.

Must not know vLLM's engine, HTTP, or what the tensors mean.
"""

from contextlib import suppress
from typing import Any

import msgspec
import torch
from torch import Tensor

from pipeline.errors import WeightSyncError, one_line
from pipeline.inference.weight_sync.transports.gpu_group import GpuGroup, await_event
from pipeline.utils.waiting import Deadline


class CudaIpcHandle(msgspec.Struct, frozen=True, kw_only=True):
    """A buffer of another process, in the words of torch's storages (`UntypedStorage._share_cuda_`).

    Attributes:
        handle, size, offset: the allocation that holds it, and where it lies there.
        counter, slot: where users of the memory are counted.
        event, sync: what passes when the sender's stream is done with it, and whether to wait for that.
        start, length: of the buffer in its storage.
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
    """Two processes on one GPU."""

    _left = False

    def send(self, version: int, buffer: Tensor, deadline: Deadline) -> None:
        key = self._next()
        try:
            mapping = _export_handle(version, buffer)
        except RuntimeError as error:
            raise WeightSyncError(
                f"this memory cannot be shared between processes ({error}); "
                "PYTORCH_CUDA_ALLOC_CONF must not ask for expandable_segments"
            ) from error
        self._tell(key, msgspec.json.encode(mapping).decode())
        refusal = self._receive(f"{key}/taken", bytes.decode, deadline)
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        if refusal:
            self.leave()
            raise WeightSyncError(f"the other process could not take them: {refusal}")

    def receive(self, buffer: Tensor, deadline: Deadline, after: torch.cuda.Event | None = None) -> int:
        key = self._next()
        try:
            mapping = self._receive(key, lambda data: msgspec.json.decode(data, type=CudaIpcHandle), deadline)
            self._copy(buffer, mapping, deadline, after)
        except Exception as error:
            self.leave()
            with suppress(WeightSyncError):  # the first of two reasons is reported
                self._tell(f"{key}/taken", one_line(error))
            raise
        self._tell(f"{key}/taken", "")
        return mapping.version

    def leave(self) -> None:
        self._left = True

    def _next(self) -> str:
        if self._left:
            raise WeightSyncError(f"group {self._name} was left")
        key = self._key()
        self._buffers += 1
        return key

    def _copy(self, buffer: Tensor, mapping: CudaIpcHandle, deadline: Deadline, after: torch.cuda.Event | None) -> None:
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        try:
            theirs = _open_handle(mapping, self._device)
            with torch.cuda.stream(self._stream):
                if after is not None:
                    self._stream.wait_event(after)
                buffer.copy_(theirs, non_blocking=True)
                done.record(self._stream)
        except RuntimeError as error:
            raise WeightSyncError(f"{deadline.awaited}: {error}") from error
        await_event(done, deadline)


def _export_handle(version: int, buffer: Tensor) -> CudaIpcHandle:
    """uint8[n] of this process, as another one may map it."""
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


def _open_handle(mapping: CudaIpcHandle, device: torch.device) -> Tensor:
    """uint8[length]: the other process's buffer, in this one."""
    storages: Any = torch.UntypedStorage
    storage = storages._new_shared_cuda(
        device.index if device.index is not None else torch.cuda.current_device(),
        mapping.handle,
        mapping.size,
        mapping.offset,
        mapping.counter,
        mapping.slot,
        mapping.event,
        mapping.sync,
    )
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, mapping.start, (mapping.length,), (1,))
