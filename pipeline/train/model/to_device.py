"""The way of numbers from the host to the device.

Promises that training is not held up by it: to CUDA they go through pinned memory, without waiting for what the device
is still busy with. Must not know what the numbers are.
"""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(values: NDArray[Any] | Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The values on `device`, as `dtype` if that is given. On the CPU the tensor may share their memory."""
    given = values if isinstance(values, Tensor) else torch.from_numpy(values)
    wanted = given.to(dtype or given.dtype)
    return wanted.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else wanted.to(device)
