"""Copies from the host to the device that do not block: through pinned memory to CUDA, without waiting for earlier work
of the device."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(values: NDArray[Any] | Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The values on `device`, converted to `dtype` if it is set. On the CPU the tensor may share their memory."""
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(values)
    converted = tensor.to(dtype or tensor.dtype)
    return converted.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else converted.to(device)
