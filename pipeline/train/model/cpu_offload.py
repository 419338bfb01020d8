"""Offloading of tensors' storages, in place.

Owns the move of a model's or an optimizer's bytes off the device. The tensors stay: every storage is emptied in place
and later filled again, so the objects that reference the tensors (FSDP, AdamW) are unaffected. Promises that the memory
is released, that the bytes return unchanged, and that no storage is emptied before the copy of all of them is complete.
Bytes move from CUDA to pinned host memory, and from the CPU to a file in a temporary folder (`TMPDIR`; this saves no
memory if the folder is in memory). Must not know the tensors' content, nor the schedule of moves, which belongs to the
dispatch.
"""

import ctypes
import tempfile
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import psutil
import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

from pipeline.errors import TrainingError
from pipeline.utils.pinned_memory import pinned_tensor

Part = Literal["model", "optimizer"]


@dataclass(frozen=True)
class Memory:
    """Bytes of one model in this process.

    Attributes:
        allocated: of the whole process: allocated on its CUDA device, or resident (RSS) on the CPU.
        model: of the model's parameters and gradients on the device; 0 when offloaded.
        optimizer: of the optimizer's moments on the device; 0 when offloaded, or without an optimizer.
    """

    allocated: int
    model: int
    optimizer: int


class Offloadable:
    """The storages of some tensors, on the device or offloaded. `tensors` returns the current ones at each use."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        self._tensors = tensors
        self._away: list[tuple[UntypedStorage, int]] = []
        self._copy: _HostCopy | None = None
        self._host = _HostMemory()

    @property
    def resident(self) -> int:
        """Bytes on the device; a storage that several tensors share counts once."""
        return sum(storage.nbytes() for storage in self._storages())

    def offload(self) -> None:
        """Move all bytes off the device; does nothing if they are offloaded."""
        if self._copy is not None:
            return
        storages = self._storages()
        if not all(storage.resizable() for storage in storages):
            raise TrainingError("a tensor that numpy has a view of cannot be offloaded: copy it before `.numpy()`")
        self._copy, self._away = self._copy_out(storages), [(storage, storage.nbytes()) for storage in storages]
        for storage in storages:
            storage.resize_(0)
        if all(storage.device.type == "cpu" for storage in storages):
            give_back_heap()

    def load(self) -> None:
        """Move all bytes back to the device; does nothing if they are there."""
        if self._copy is None:
            return
        self._copy.rewind()
        for storage, size in self._away:
            storage.resize_(size)
            self._copy.take(_bytes(storage))
        self._copy.wait()
        self._copy.close()
        self._copy, self._away = None, []

    def discard(self) -> None:
        """Release all bytes, on the device or offloaded: the tensors stay empty."""
        if self._copy is not None:
            self._copy.close()
        self._copy, self._away, self._host = None, [], _HostMemory()
        for storage in self._storages():
            storage.resize_(0)

    def _copy_out(self, storages: Sequence[UntypedStorage]) -> "_HostCopy":
        """A complete copy of all bytes off the device."""
        copy: _HostCopy = self._host if any(storage.device.type == "cuda" for storage in storages) else _File()
        try:
            for storage in storages:
                copy.put(_bytes(storage))
            copy.wait()
        except BaseException:
            copy.close()
            raise
        return copy

    def _storages(self) -> list[UntypedStorage]:
        storages = [local(tensor).untyped_storage() for tensor in self._tensors()]
        return list({storage.data_ptr(): storage for storage in storages if storage.nbytes()}.values())


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a distributed tensor; any other tensor unchanged."""
    return cast(Tensor, cast(Any, tensor).to_local()) if isinstance(tensor, DTensor) else tensor


def allocated(device: torch.device) -> int:
    """Bytes that this process holds: allocated on its CUDA device, or resident (RSS) on the CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(psutil.Process().memory_info().rss)


def empty_cache(device: torch.device) -> None:
    """Release an allocator's free memory to the device, or to the operating system."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        give_back_heap()


def give_back_heap() -> None:
    """Make glibc return its free pages; does nothing with other C libraries."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


class _HostCopy(Protocol):
    """A sequence of bytes: `put` appends, and after `rewind`, `take` reads in the same order."""

    def put(self, data: Tensor) -> None: ...
    def take(self, target: Tensor) -> None: ...
    def rewind(self) -> None: ...
    def wait(self) -> None: ...
    def close(self) -> None: ...


class _HostMemory:
    """Pinned host memory. It is reused for later copies, since pinning takes seconds."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []
        self._next = 0

    def put(self, data: Tensor) -> None:
        if self._next == len(self._parts) or len(self._parts[self._next]) != len(data):
            self._parts[self._next : self._next + 1] = [pinned_tensor(len(data))]
        self._parts[self._next].copy_(data, non_blocking=True)
        self._next += 1

    def take(self, target: Tensor) -> None:
        target.copy_(self._parts[self._next], non_blocking=True)
        self._next += 1

    def rewind(self) -> None:
        self._next = 0

    def wait(self) -> None:
        torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        self.rewind()


class _File:
    """An unnamed temporary file, which the operating system removes at the end of the process."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="rollcall-offload-", buffering=0)  # noqa: SIM115
        weakref.finalize(self, self._file.close)  # an offloaded model may be deleted without `load`

    def put(self, data: Tensor) -> None:
        view, written = _view(data), 0
        while written < len(view):
            written += self._file.write(view[written:])

    def take(self, target: Tensor) -> None:
        view, read = _view(target), 0
        while read < len(view):
            count = self._file.readinto(view[read:])
            if not count:
                raise OSError(f"offloaded bytes are gone: {len(view) - read} are missing")
            read += count

    def rewind(self) -> None:
        self._file.seek(0)

    def wait(self) -> None:
        """Do nothing: writes and reads of the file are synchronous."""

    def close(self) -> None:
        self._file.close()


def _view(data: Tensor) -> memoryview:
    """A view of a CPU tensor's bytes. A numpy view would make the storage non-resizable forever."""
    return memoryview((ctypes.c_char * data.numel()).from_address(data.data_ptr())).cast("B")


def _bytes(storage: UntypedStorage) -> Tensor:
    """The storage as uint8[nbytes], without a copy."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
