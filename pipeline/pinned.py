"""Host memory that stays in place, so that a GPU reads and writes it by itself.

Owns how such memory is made and given back. Promises that it has the size that was asked for, where torch's own
allocator rounds up to a power of two (pytorch/pytorch#150517), and that it is given back with the last tensor that lies
in it. Must not know what is kept there.

    memory = pinned(size)                    # uint8[size]; seconds for ten GB: ask early, and use it again
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


class _Pages(mmap.mmap):
    """Memory of its own, which `unregister` is called for when nobody holds it any more, while it is still there."""

    unregister: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unregister and not sys.is_finalizing():  # the driver gives back what a process has when it ends
            self.unregister()


def pinned(size: int) -> Tensor:
    """uint8[size] of zeros. Where CUDA refuses to register it, a warning says so, and it is ordinary memory.

    Its pages are touched before they are registered, by all of torch's threads: by itself the driver has one thread
    touch them.
    """
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    pages, runtime = _Pages(-1, size), _cuda_runtime()
    with suppress(AttributeError, OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8).zero_()
    code = int(runtime.cudaHostRegister(memory.data_ptr(), size, 0))
    if code:
        log.warning("host memory could not be pinned (CUDA error %d); copies from and to GPUs take longer", code)
    else:
        pages.unregister = partial(runtime.cudaHostUnregister, memory.data_ptr())
    return memory


def pinned_like(tensor: Tensor) -> Tensor:
    """As many numbers of its type, contiguous."""
    return pinned(tensor.nbytes).view(tensor.dtype).view(tensor.shape)


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
