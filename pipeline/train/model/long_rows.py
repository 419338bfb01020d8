"""Attention of long rows by cuDNN's kernel.

Owns how a packed line with a long row is attended on GPUs of the Hopper generation and later. cuDNN's kernel is up to
twice as fast there as the one for rows of various lengths (FlashAttention 2): on an H200 both passes of a row of 65,536
tokens take 111 ms against 188 ms, those of four rows of 16,384 take 30 ms against 49 ms (16 heads of 128, 8 key heads).
It takes one row at a time and builds a plan for each length. Below `LONG` tokens both cost more than the kernel saves.
Lengths are rounded up to sixteen in an octave; the padding is behind a row, where causality hides it.

Notation: P tokens of a line, L of a row with its padding, H heads of D numbers; key heads may be fewer than H.
"""

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

LONG = 8192
"""Tokens of a row from which on cuDNN's kernel is used."""
_HOPPER = 9
"""Compute capability. FlashAttention 2 is the faster kernel on older GPUs."""
_LENGTHS_PER_OCTAVE = 16
_KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""In order of preference: cuDNN takes no heads of more than 128 numbers."""

Attend = Callable[[Tensor, Tensor, Tensor, int, int], Tensor]
"""Attention of query, key and value of some neighboring rows, from the first to before the last."""


def takes_long_rows(query: Tensor, longest: int) -> bool:
    """Whether a line on this device goes through `attend_long_rows`, by the tokens of its longest row."""
    return longest >= LONG and query.is_cuda and torch.cuda.get_device_capability(query.device)[0] >= _HOPPER


def attend_long_rows(
    query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], scale: float | None, attend_short: Attend
) -> Tensor:
    """Causal attention inside each row of a line, [P, H, D] → [P, H, D].

    Args:
        query, key, value: of all rows, end to end.
        lengths: tokens of each row.
        scale: of the scores; None: 1 / √D.
        attend_short: the same for neighboring rows of less than `LONG` tokens.
    """
    attended, start, row = list[Tensor](), 0, 0
    for is_long, run in groupby(lengths, lambda length: length >= LONG):
        sizes = list(run)
        for rows in [[size] for size in sizes] if is_long else [sizes]:
            part = slice(start, start + sum(rows))
            tensors = (query[part], key[part], value[part])
            attended.append(_attend_row(*tensors, scale) if is_long else attend_short(*tensors, row, row + len(rows)))
            start, row = part.stop, row + len(rows)
    return torch.cat(attended)


def _attend_row(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Causal attention of one row, [l, H, D] → [l, H, D]."""
    length, grouped = len(query), query.shape[1] != key.shape[1]
    padding = padded_length(length) - length
    q, k, v = (pad(x, (0, 0, 0, 0, 0, padding)).transpose(0, 1)[None] for x in (query, key, value))  # [1, H, L, D]
    with sdpa_kernel(_KERNELS, set_priority=True):
        output = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    return output[0, :, :length].transpose(0, 1)


def padded_length(length: int) -> int:
    """The next length for which a plan is built: a sixteenth of the power of two below is the step."""
    step = max(1, (1 << (length.bit_length() - 1)) // _LENGTHS_PER_OCTAVE)
    return -(-length // step) * step
