"""Host memory that stays in place, so that a GPU reads and writes it by itself.

Owns how such memory is made and given back. Promises that it has the size that was asked for, where torch's own
allocator rounds up to a power of two (pytorch/pytorch#150517), and that it is given back with the last tensor that lies
in it. Must not know what is kept there.

    memory = pinned(size)                    # uint8[size]; seconds for ten GB: ask early, and use it again
    memory.copy_(on_the_gpu, non_blocking=True)

torch's settings for its allocator (`pinned_use_cuda_host_register`) make that faster too, but leave it its sizes.
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
"""Of `cudaHostRegister`: memory for all devices of the process."""


class _Pages(mmap.mmap):
    """Memory of its own, which `unregister` is called for when nobody holds it any more, while it is still there."""

    unregister: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unregister and not sys.is_finalizing():  # the driver gives back what a process has when it ends
            self.unregister()


def pinned_tensor(size: int) -> Tensor:
    """uint8[size] of zeros. Where CUDA refuses to register it, a warning says so, and it is ordinary memory.

    Its pages are touched before they are registered, by all of torch's threads: by itself the driver has one thread
    touch them. Processes that are forked do not get it: a page that both had would be copied when it is written, and
    the GPU would go on with the other one.
    """
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    pages = _Pages(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_DONTFORK)
    with suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
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
    """As many numbers of its type, contiguous."""
    return pinned_tensor(tensor.nbytes).view(tensor.dtype).view(tensor.shape)


def current_device() -> int:
    """The number of this thread's CUDA device; -1 without CUDA, which `torch.cuda.device` takes for none.

    A thread begins with the first device of its process, and has a context made there, of half a GiB, by whatever it
    asks CUDA for. So a thread is given the device of whoever starts it.
    """
    return torch.cuda.current_device() if torch.cuda.is_available() else -1


def _unregister(runtime: Any, device: int, address: int) -> None:
    with torch.cuda.device(device):
        runtime.cudaHostUnregister(address)


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _forget_error() -> None:
    """CUDA keeps an error until somebody asks, and the next kernel of this thread would be blamed for it."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")
