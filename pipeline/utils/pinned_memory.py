"""Pinned host memory, which GPUs copy from and to without the CPU.

The memory has exactly the requested size, where torch's allocator rounds up to a power of two
(pytorch/pytorch#150517; `pinned_use_cuda_host_register` only makes it faster). It is released with the last tensor that
uses it.

    memory = pinned_tensor(size)             # uint8[size]; takes seconds for 10 GB: allocate early, and reuse it
    memory.copy_(on_the_gpu, non_blocking=True)
"""

import logging
import mmap
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)
PORTABLE = 1
"""Flag of `cudaHostRegister`: the memory is pinned for all devices of the process."""


class _Pages(mmap.mmap):
    """An anonymous mapping that calls `unregister` right before it is unmapped, when its last reference is gone."""

    unregister: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unregister and not sys.is_finalizing():  # the driver releases the memory of a process that exits
            self.unregister()


def pinned_tensor(size: int) -> Tensor:
    """Zeros as uint8[size], pinned. If CUDA refuses to register the memory, it is pageable, and a warning is logged.

    Forked processes do not inherit the memory.
    """
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    pages = _Pages(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # With copy-on-write after a fork, this process could get the copy of a page while the GPU uses the original.
    pages.madvise(mmap.MADV_DONTFORK)
    with suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    # Touches all pages with torch's threads; cudaHostRegister would touch them with one.
    memory = torch.frombuffer(pages, dtype=torch.uint8).zero_()
    runtime, device, address = _cuda_runtime(), current_device(), memory.data_ptr()
    if code := int(runtime.cudaHostRegister(address, size, PORTABLE)):
        _forget_error()
        slower = "copies from and to GPUs take longer; the node may be short of memory"
        log.warning("host memory could not be pinned (CUDA error %d): %s", code, slower)
    else:
        pages.unregister = partial(_unregister, runtime, device, address)
    return memory


def pinned_like(tensor: Tensor) -> Tensor:
    """A pinned, contiguous tensor of zeros with the shape and type of `tensor`."""
    return pinned_tensor(tensor.nbytes).view(tensor.dtype).view(tensor.shape)


def current_device() -> int:
    """The index of this thread's CUDA device; -1 without CUDA, which `torch.cuda.device` treats as no device.

    Pass it to a thread that you start. A new thread uses device 0 of its process, and its first CUDA call there would
    create a context of 0.5 GiB.
    """
    return torch.cuda.current_device() if torch.cuda.is_available() else -1


def _unregister(runtime: Any, device: int, address: int) -> None:
    with torch.cuda.device(device):
        runtime.cudaHostUnregister(address)


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _forget_error() -> None:
    """Clear CUDA's sticky error, so that the next kernel launch of this thread does not raise it."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")
