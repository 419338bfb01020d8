"""Causal attention that stays inside each row.

Owns the one attention function that the policy uses, padded or packed, and its registration with transformers under the
name `ATTENTION`. Promises that a token attends to itself and to the earlier tokens of its own row, to nothing else,
exactly, also where rows share their first tokens, which then lie in the line only once. Packed rows go through a kernel
that knows where each begins (`varlen_attn`) on CUDA in 16 bits, and else, with the same result, through a rectangle of
one row a line. Must not know losses, ranks or micro-batches.

Notation: B lines of T tokens, P = T tokens of a packed line, S rows of at most L tokens and R in all, H heads of D
numbers.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from pipeline.errors import ConfigError
from pipeline.training.workers.transfer import to_device

ATTENTION = "rollcall"
_NO_MATTER = {"dropout", "position_ids", "use_cache", "cache_position", "output_router_logits"}
_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Whether the kernel takes fewer key heads than query heads; before torch 2.12 it does not."""


@dataclass(frozen=True)
class Segments:
    """Where the rows of a packed line lie, and index tables between the line and a rectangle of one row a line.

    Attributes:
        line_SL: int64, index in the line of each token of the rectangle; padding points at the row's last token.
        rectangle_P: int64, index in the flattened rectangle of each token of the line; of one that rows share, in one
            of them.
        bounds: int32[S + 1], index of each row's first token in the rows laid end to end, and at last R.
        longest: L.
        line_R: int64, index in the line of each token of the rows laid end to end; None if the line is just that.
        rows_P: int64, index in the rows laid end to end of each token of the line; None with `line_R`.
    """

    line_SL: Tensor
    rectangle_P: Tensor
    bounds: Tensor
    longest: int
    line_R: Tensor | None = None
    rows_P: Tensor | None = None

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device, where: NDArray[np.int64] | None = None) -> "Segments":
        """The tables of rows with these lengths, laid end to end; or, if they share tokens, `where` (int64[R]) says
        which place of the line each of their tokens has.

        The host makes what is as long as the line, or as the rows; the rectangle, which one long row among many short
        ones makes far larger, is filled in on the device, where 16 bits never read it.
        """
        lengths_S = torch.tensor(lengths)
        ends_S = lengths_S.cumsum(0)
        starts_S = ends_S - lengths_S
        longest = max(lengths)
        before_S = torch.arange(len(lengths)) * longest - starts_S
        rectangle_P = torch.arange(int(ends_S[-1])) + before_S.repeat_interleave(lengths_S)
        bounds = torch.cat([torch.zeros(1, dtype=torch.int64), ends_S]).to(torch.int32)
        line_R = rows_P = None
        if where is not None:
            found = np.unique(where, return_index=True)[1]
            rectangle_P = rectangle_P[torch.from_numpy(found)]
            line_R, rows_P = to_device(where, device), to_device(found, device)
        lengths_S, starts_S, rectangle_P, bounds = (
            to_device(table, device) for table in (lengths_S, starts_S, rectangle_P, bounds)
        )
        column_L = torch.arange(longest, device=device)
        line_SL = torch.minimum(column_L, lengths_S[:, None] - 1).add_(starts_S[:, None])
        return cls(line_SL if line_R is None else line_R[line_SL], rectangle_P, bounds, longest, line_R, rows_P)


def attend(
    module: torch.nn.Module,
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    segments: Segments | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: returns [B, T, H, D]. Grouped key and value heads are fewer than H.

    Without `segments` each line is one row, padded on the right; causality alone keeps its tokens from the padding.
    Never drops out, and keeps no cache. Raises `ConfigError` for any other argument that a model passes, such as
    `softcap` or `s_aux`: to ignore it would be to train another model than the one that samples.
    """
    unknown = sorted(name for name, value in others.items() if value is not None and name not in _NO_MATTER)
    if unknown:
        found = f"{type(module).__name__} with {', '.join(unknown)}"
        raise ConfigError("model.path", found, "a model with plain causal attention", "choose another model")
    tensors = query_BHTD, key_BHTD, value_BHTD
    if segments is None:
        attended = _attend(*tensors, scaling, sliding_window)
    elif _kernel_takes(query_BHTD):
        attended = _attend_lengths(*tensors, segments, scaling, sliding_window)
    else:
        attended = _attend_packed(*tensors, segments, scaling, sliding_window)
    return attended.transpose(1, 2).contiguous(), None


def _kernel_takes(query: Tensor) -> bool:
    size = query.shape[-1]
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and size <= 256 and size % 8 == 0


def _attend_lengths(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None, window: int | None
) -> Tensor:
    """[1, H, P, D] → [1, H, P, D], by the kernel for rows of various lengths."""
    if segments.line_R is not None:
        query, key, value = (x.index_select(2, segments.line_R) for x in (query, key, value))
    heads, grouped = query.shape[1], query.shape[1] != key.shape[1]
    if grouped and not _GROUPS:
        key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    options: dict[str, Any] = {"enable_gqa": grouped} if _GROUPS else {}
    attended = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        segments.bounds,
        segments.bounds,
        segments.longest,
        segments.longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        **options,
    )
    heads_first = cast(Tensor, attended).transpose(0, 1).unsqueeze(0)
    return heads_first if segments.rows_P is None else heads_first.index_select(2, segments.rows_P)


def _attend_packed(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None, window: int | None
) -> Tensor:
    """[1, H, P, D] → [1, H, P, D], through a rectangle of one row a line."""
    query, key, value = (_unpack(x, segments.line_SL) for x in (query, key, value))
    rectangle = _attend(query, key, value, scaling, window)
    heads_first = rectangle.transpose(0, 1).flatten(1, 2)
    return heads_first[:, segments.rectangle_P].unsqueeze(0)


def _unpack(packed: Tensor, line_SL: Tensor) -> Tensor:
    """[1, H, P, D] → [S, H, L, D]."""
    rows, longest = line_SL.shape
    heads, _, size = packed.shape[1:]
    return packed[0].index_select(1, line_SL.flatten()).view(heads, rows, longest, size).transpose(0, 1)


def _attend(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """Causal attention along each line, at most `window` tokens back: [B, H, T, D] → [B, H, T, D]."""
    length, grouped = query.shape[2], query.shape[1] != key.shape[1]
    if window is None or window >= length:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
    ones = torch.ones(length, length, dtype=torch.bool, device=query.device)
    near = ones.tril() & ones.triu(1 - window)
    return scaled_dot_product_attention(query, key, value, attn_mask=near, scale=scaling, enable_gqa=grouped)


AttentionInterface.register(ATTENTION, attend)
