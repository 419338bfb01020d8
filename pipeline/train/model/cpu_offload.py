"""Tensors that can leave the device and come back.

Owns how the bytes of a model or of an optimizer are moved away while the tensors themselves stay: every storage is
emptied in place and later filled again, so whoever holds the tensors (FSDP, AdamW) need not know. Promises that the
memory is really given back, that the bytes that return are those that left, and that nothing is emptied before all of
it is kept. From CUDA bytes go to pinned host memory, from the CPU to a file in a temporary folder (`TMPDIR`; of no use
where that is memory itself). Must not know what the tensors are, nor when to move them: that is the dispatch's.
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
    """The storages behind some tensors, on the device or away; `tensors` names them anew at each call."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        self._tensors = tensors
        self._away: list[tuple[UntypedStorage, int]] = []
        self._kept: _HostCopy | None = None
        self._host = _HostMemory()

    @property
    def resident(self) -> int:
        """Bytes on the device; a storage that several tensors share counts once."""
        return sum(storage.nbytes() for storage in self._storages())

    def offload(self) -> None:
        """Move all bytes away; does nothing when they are."""
        if self._kept is not None:
            return
        storages = self._storages()
        if not all(storage.resizable() for storage in storages):
            raise TrainingError("a tensor that numpy has a view of cannot be offloaded: copy it before `.numpy()`")
        self._kept, self._away = self._keep(storages), [(storage, storage.nbytes()) for storage in storages]
        for storage in storages:
            storage.resize_(0)
        if all(storage.device.type == "cpu" for storage in storages):
            give_back_heap()

    def load(self) -> None:
        """Bring all bytes back; does nothing when they are there."""
        if self._kept is None:
            return
        self._kept.rewind()
        for storage, size in self._away:
            storage.resize_(size)
            self._kept.take(_bytes(storage))
        self._kept.wait()
        self._kept.close()
        self._kept, self._away = None, []

    def discard(self) -> None:
        """Give all bytes back for good, wherever they are: the tensors hold nothing any more."""
        if self._kept is not None:
            self._kept.close()
        self._kept, self._away, self._host = None, [], _HostMemory()
        for storage in self._storages():
            storage.resize_(0)

    def _keep(self, storages: Sequence[UntypedStorage]) -> "_HostCopy":
        """A copy of all bytes elsewhere."""
        kept: _HostCopy = self._host if any(storage.device.type == "cuda" for storage in storages) else _File()
        try:
            for storage in storages:
                kept.put(_bytes(storage))
            kept.wait()
        except BaseException:
            kept.close()
            raise
        return kept

    def _storages(self) -> list[UntypedStorage]:
        found = [local(tensor).untyped_storage() for tensor in self._tensors()]
        return list({storage.data_ptr(): storage for storage in found if storage.nbytes()}.values())


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a distributed tensor; another tensor as it is."""
    return cast(Tensor, cast(Any, tensor).to_local()) if isinstance(tensor, DTensor) else tensor


def allocated(device: torch.device) -> int:
    """Bytes that this process holds: allocated on its CUDA device, or resident (RSS) on the CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(psutil.Process().memory_info().rss)


def empty_cache(device: torch.device) -> None:
    """Give free memory that an allocator holds back to the device, or to the operating system."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        give_back_heap()


def give_back_heap() -> None:
    """Have the C library return its free pages; elsewhere than with glibc there is no such call."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


class _HostCopy(Protocol):
    """Bytes put in one after the other, and taken out in the same order, from the start again after `rewind`."""

    def put(self, data: Tensor) -> None: ...
    def take(self, target: Tensor) -> None: ...
    def rewind(self) -> None: ...
    def wait(self) -> None: ...
    def close(self) -> None: ...


class _HostMemory:
    """Pinned host memory. It is kept for the next time, since to pin it takes seconds."""

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
    """An unnamed temporary file: it goes with the process, whatever ends it."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="rollcall-offload-", buffering=0)  # noqa: SIM115
        weakref.finalize(self, self._file.close)  # a model that is away may be dropped

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
        """Files are written and read at once."""

    def close(self) -> None:
        self._file.close()


def _view(data: Tensor) -> memoryview:
    """Of a tensor's bytes on the CPU. Numpy's own would keep the storage from ever being emptied."""
    return memoryview((ctypes.c_char * data.numel()).from_address(data.data_ptr())).cast("B")


def _bytes(storage: UntypedStorage) -> Tensor:
    """The storage as uint8[nbytes], without a copy."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
