"""Causal attention that stays inside each row.

Owns the one attention function that the policy uses, padded or packed, and its registration with transformers under the
name `ATTENTION`. Promises that a token attends to itself and to the earlier tokens of its own row, to nothing else,
exactly. A kernel for another device replaces `_attend_packed` only. Must not know losses, ranks or micro-batches.

Notation: B lines of T tokens, P = T tokens of a packed line, S rows of at most L tokens, H heads of D numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from pipeline.errors import ConfigError

ATTENTION = "rollcall"
_NO_MATTER = {"dropout", "position_ids", "use_cache", "cache_position", "output_router_logits"}


@dataclass(frozen=True)
class Segments:
    """Where the rows of a packed line lie: index tables between the line and a rectangle of one row a line.

    Attributes:
        line_SL: int64, index in the line of each token of the rectangle; padding points at the row's last token.
        rectangle_P: int64, index in the flattened rectangle of each token of the line.
    """

    line_SL: Tensor
    rectangle_P: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> "Segments":
        """The tables of rows with these lengths, laid end to end."""
        lengths_S = torch.tensor(lengths)
        starts_S = lengths_S.cumsum(0) - lengths_S
        column_L = torch.arange(int(lengths_S.max()))
        line_SL = starts_S[:, None] + torch.minimum(column_L, lengths_S[:, None] - 1)
        inside_SL = column_L < lengths_S[:, None]
        return cls(line_SL.to(device), inside_SL.flatten().nonzero()[:, 0].to(device))


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
    else:
        attended = _attend_packed(*tensors, segments, scaling, sliding_window)
    return attended.transpose(1, 2).contiguous(), None


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
