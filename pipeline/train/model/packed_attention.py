"""Causal attention that stays inside each row.

Owns the attention function of all models, padded or packed, and its registration with transformers under the name
`ATTENTION`. Promises that a token attends exactly to itself and the earlier tokens of its own row, also if rows share a
prefix, which the line then has only once. Packed rows in 16 bits on CUDA go through `varlen_attn`, a kernel with the
bounds of rows, long ones through a faster kernel (`long_rows`). All others go, with the same result, through rectangles
of one row per line. There is one rectangle for each size of rows, so that a long row adds no padding to short ones.
Must not know losses, ranks or micro-batches.

Notation: B lines of T tokens; P = T tokens of a packed line; S rows of at most L tokens, R tokens in all rows (a shared
token counts for each of its rows); H heads of D numbers; A places in all rectangles.

    rows abc, de, fghij in a packed line of P = 10      their rectangle, [3, 5]      rectangle_P
      a b c d e f g h i j                                 a b c c c                    0 1 2 5 6 10 11 12 13 14
                                                          d e e e e                    (the others are padding)
                                                          f g h i j
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from pipeline.errors import ConfigError
from pipeline.train.model.attention_sinks import KernelOptions, KernelRows, attend_behind_sinks, attend_kernel
from pipeline.train.model.context_parallel import ContextParallel
from pipeline.train.model.long_rows import attend_long_rows, takes_long_rows
from pipeline.train.model.to_device import to_device

ATTENTION = "rollcall"
_IGNORED = {"dropout", "position_ids", "use_cache", "cache_position", "output_router_logits", "output_attentions"}
SHORT = 32
"""Rows of up to this many tokens share one rectangle: more rectangles would cost more than their padding."""
_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Whether the kernel takes fewer key heads than query heads; before torch 2.12 it does not."""


class RaggedRows(NamedTuple):
    """The bounds of rows of several lengths, end to end.

    Attributes:
        bounds: int32[S + 1], index of each row's first token, and the number of all tokens last.
        longest: tokens of the longest row.
        lengths: tokens of each row, on the host. A graph does not read them: it would be compiled again for each batch.
    """

    bounds: Tensor
    longest: int
    lengths: list[int]

    @classmethod
    def of(cls, lengths_S: Tensor, device: torch.device) -> "RaggedRows":
        bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_S.cumsum(0)]).to(torch.int32)
        return cls(to_device(bounds, device), int(lengths_S.max()), lengths_S.tolist())


@dataclass(frozen=True)
class Segments:
    """The bounds of a packed line's rows, and index tables between the line and rectangles of one row per line.

    The order of rows is the order of their suffixes in the line. A row with a shared prefix has fewer tokens in the
    line than it reads. A row that is equal to another has none, and is omitted.

    Attributes:
        rectangles: for the rows of each size, shortest first, int64[S, L], index in the line of each token; padding has
            the index of the row's last token. The longest row has less than twice the tokens of the shortest, so less
            than half of a rectangle is padding, except for rows of up to `SHORT` tokens.
        rectangle_P: int64, for each token of the line, its index in the flattened rectangles, one after another. A
            shared token is looked up in the row whose suffix has it.
        own: the bounds of the rows' tokens in the line (queries).
        whole: the bounds of the rows as attention reads them (keys and values); equal to `own` without sharing.
        line_R: int64, index in the line of each token of the whole rows; None without sharing.
        context: the ranks over which the line is distributed; None if this rank has all of it. All tables are of the
            whole line.
    """

    rectangles: tuple[Tensor, ...]
    rectangle_P: Tensor
    own: RaggedRows
    whole: RaggedRows
    line_R: Tensor | None = None
    context: ContextParallel | None = None

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        device: torch.device,
        where: NDArray[np.int64] | None = None,
        context: ContextParallel | None = None,
    ) -> "Segments":
        """The tables of rows with these lengths, end to end.

        If rows share tokens, `where` (int64[R]) is the index in the line of each of their tokens, as
        `packing.pack_shared_prefix` assigns them: a row's suffix is contiguous, and every token of the line belongs to
        one suffix. The kernel writes no other tokens.
        """
        # The host builds the tables of length P and R. The rectangles are larger and are built on the device; the
        # kernel does not read them.
        own_S = lengths_S = torch.tensor(lengths)
        line_R = None
        if where is not None:
            rows = np.split(where, np.cumsum(lengths)[:-1])
            # A row ends with its suffix, so the sorted last indices are the ends of all suffixes. Equal rows have
            # the same last index, and `np.unique` keeps one of them: attention computes both at once.
            lasts, order = np.unique([row[-1] for row in rows], return_index=True)
            line_R = to_device(np.concatenate([rows[index] for index in order]), device)
            lengths_S, own_S = lengths_S[order], torch.from_numpy(np.diff(lasts, prepend=-1))
        whole = RaggedRows.of(lengths_S, device)
        own = whole if line_R is None else RaggedRows.of(own_S, device)
        rectangles, first_S = _rectangles(lengths_S, whole.bounds)
        # In the flattened rectangles, token i of the line, in the suffix of row s, has the index
        # first_S[s] + (lengths_S[s] − own_S[s]) + (i − start), with the suffix's start = own_S.cumsum(0)[s] − own_S[s].
        before_S = first_S + lengths_S - own_S.cumsum(0)
        rectangle_P = torch.arange(int(own_S.sum())) + before_S.repeat_interleave(own_S)
        if line_R is not None:
            rectangles = [line_R[rectangle] for rectangle in rectangles]
        return cls(tuple(rectangles), to_device(rectangle_P, device), own, whole, line_R, context)


def _rectangles(lengths_S: Tensor, bounds: Tensor) -> tuple[list[Tensor], Tensor]:
    """`Segments.rectangles` of rows without sharing, grouped by size (the next power of two), on the device of
    `bounds`; and int64[S], the index of each row's first token in the flattened rectangles."""
    sizes_S = torch.frexp((lengths_S - 1).clamp(min=SHORT - 1).double()).exponent
    order_S = sizes_S.argsort(stable=True)
    starts_S = bounds[to_device(order_S, bounds.device)]
    lasts_S = to_device(lengths_S[order_S] - 1, bounds.device)
    rectangles, widths, done = [], [], 0
    for rows in filter(None, torch.bincount(sizes_S).tolist()):
        part = slice(done, done + rows)
        longest = int(lengths_S[order_S[part]].max())
        column_L = torch.arange(longest, device=bounds.device)
        # [L] and [S, 1] → [S, L]: the clamp to the last token is the padding.
        rectangles.append(torch.minimum(column_L, lasts_S[part, None]).add_(starts_S[part, None]))
        widths += [longest] * rows
        done += rows
    first_S = torch.empty_like(lengths_S)
    first_S[order_S] = torch.tensor([0, *widths[:-1]]).cumsum(0)
    return rectangles, first_S


def attend(
    module: torch.nn.Module,
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    segments: Segments | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention with the signature of transformers' attention functions; returns [B, T, H, D].

    Grouped key and value heads are fewer than H. Without `segments` each line is one row, padded on the right;
    causality alone keeps its tokens from the padding. With context parallelism (`Segments.context`), T is this rank's
    part of the line, and H are all heads. `s_aux` [H] are sinks (see `attention_sinks`). There is no dropout and no
    cache. Raises `ConfigError` for any other argument of a model, such as `softcap` or a custom mask: ignoring it would
    train another model than the servers sample from.
    """
    arguments = others | {"attention_mask": attention_mask}
    unknown = sorted(name for name, value in arguments.items() if value is not None and name not in _IGNORED)
    if unknown:
        refused = f"{type(module).__name__} with {', '.join(unknown)}"
        raise ConfigError("model.path", refused, "a model with plain causal attention", "choose another model")
    context = None if segments is None else segments.context
    tensors, options = (query_BHTD, key_BHTD, value_BHTD), _Options(scaling, sliding_window, s_aux)
    if context is not None:
        tensors = context.scatter_heads(*tensors)  # [1, H, p, D] → [1, H / c, P, D]
        options = options.of_heads(context)
    if segments is None:
        attended = _attend(*tensors, options)
    elif _kernel_takes(query_BHTD):
        attended = _attend_lengths(*tensors, segments, options)
    else:
        attended = _attend_packed(*tensors, segments, options)
    if context is not None:
        attended = context.gather_heads(attended)  # [1, H / c, P, D] → [1, H, p, D]
    return attended.transpose(1, 2).contiguous(), None  # [B, H, T, D] → [B, T, H, D]


class _Options(NamedTuple):
    """How a layer attends: the `scaling` of scores (None: 1 / √D), the tokens of a `window`, and `sinks` [H]."""

    scaling: float | None
    window: int | None
    sinks: Tensor | None

    def of_heads(self, context: ContextParallel) -> "_Options":
        """With the sinks of the heads that this rank has while a line is exchanged."""
        if self.sinks is None:
            return self
        return self._replace(sinks=self.sinks[context.own_part(len(self.sinks))])


def _kernel_takes(query: Tensor) -> bool:
    size = query.shape[-1]
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and size <= 256 and size % 8 == 0


def _attend_lengths(query: Tensor, key: Tensor, value: Tensor, segments: Segments, options: _Options) -> Tensor:
    """[1, H, P, D] → [1, H, P, D], by the kernel for rows of various lengths."""
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [1, H, P, D] → [P, H, D]
    if segments.line_R is not None:
        # [P, H, D] → [R, H, D]: keys and values of whole rows, each with a copy of its prefix. Queries stay [P, H, D]:
        # a shared token's output is the same in all rows, so it is computed once.
        key, value = (_repeat(x, segments.line_R, 0) for x in (key, value))
    heads, grouped, width = query.shape[1], query.shape[1] != key.shape[1], value.shape[-1]
    if grouped and not _GROUPS:
        key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    if width < query.shape[-1]:
        value = pad(value, (0, query.shape[-1] - width))  # latent attention (MLA): the kernel takes one width
    own, whole = segments.own, segments.whole
    window = (-1 if options.window is None else options.window - 1, 0)
    others = {"enable_gqa": grouped} if _GROUPS else {}
    kernel_options = KernelOptions(options.scaling, window, others)
    plain = options.sinks is None and options.window is None and segments.line_R is None
    if plain and takes_long_rows(query, own.longest):
        attended = cast(Tensor, _attend_long(query, key, value, segments, kernel_options))
    else:
        # With fewer queries than keys, the kernel aligns the last query of a row with its last key: suffixes need it.
        rows = KernelRows(own.bounds, whole.bounds, own.longest, whole.longest)
        attended = attend_kernel(query, key, value, options.sinks, rows, kernel_options)
    return attended[..., :width].transpose(0, 1).unsqueeze(0)  # [P, H, D] → [1, H, P, D]


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a graph would be compiled again for each number of rows
def _attend_long(query: Tensor, key: Tensor, value: Tensor, segments: Segments, options: KernelOptions) -> Tensor:
    """[P, H, D] → [P, H, D] of a line with a long row."""
    rows = segments.own

    def attend_short(query: Tensor, key: Tensor, value: Tensor, first: int, end: int) -> Tensor:
        bounds, longest = rows.bounds[first : end + 1] - rows.bounds[first], max(rows.lengths[first:end])
        return attend_kernel(query, key, value, None, KernelRows(bounds, bounds, longest, longest), options)

    return attend_long_rows(query, key, value, rows.lengths, options.scale, attend_short)


class _Repeat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor, dim: int) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape, ctx.dim = table.shape, dim
        return table.index_select(dim, index)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None]:
        (index,), (slope,) = ctx.saved_tensors, slopes
        exact = slope.to(torch.promote_types(slope.dtype, torch.float32))
        total = exact.new_zeros(ctx.shape).index_add_(ctx.dim, index, exact)
        return total.to(slope.dtype), None, None


def _repeat(table: Tensor, index: Tensor, dim: int) -> Tensor:
    """`table.index_select(dim, index)` with gradients summed in float32: many rows may read one token."""
    return cast(Tensor, _Repeat.apply(table, index, dim))  # type: ignore[no-untyped-call]


def _attend_packed(query: Tensor, key: Tensor, value: Tensor, segments: Segments, options: _Options) -> Tensor:
    """[1, H, P, D] → [1, H, P, D], through rectangles of one row per line."""
    shapes = [rectangle.shape for rectangle in segments.rectangles]
    line_A = torch.cat([rectangle.flatten() for rectangle in segments.rectangles])
    parts = [_unpack(x, line_A, shapes) for x in (query, key, value)]
    attended = [_attend(q, k, v, options) for q, k, v in zip(*parts, strict=True)]  # each [S, H, L, D]
    heads_first = torch.cat([part.transpose(0, 1).flatten(1, 2) for part in attended], 1)  # [H, A, D]
    return heads_first[:, segments.rectangle_P].unsqueeze(0)  # drops the padding: [H, A, D] → [1, H, P, D]


def _unpack(packed: Tensor, line_A: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """[1, H, P, D] → [S, H, L, D] of each rectangle."""
    heads, _, size = packed.shape[1:]
    # [H, P, D] → [H, A, D] → [H, S · L, D] of each rectangle → [S, H, L, D]
    parts = torch.split(_repeat(packed[0], line_A, 1), [rows * longest for rows, longest in shapes], 1)
    return [part.view(heads, *shape, size).transpose(0, 1) for part, shape in zip(parts, shapes, strict=True)]


def _attend(query: Tensor, key: Tensor, value: Tensor, options: _Options) -> Tensor:
    """Causal attention along each line, at most `window` tokens back: [B, H, T, D] → [B, H, T, D]."""
    length, grouped, near = query.shape[2], query.shape[1] != key.shape[1], None
    if options.window is not None and options.window < length:
        # Bool [T, T]: key j for query i with i − window < j ≤ i.
        ones = torch.ones(length, length, dtype=torch.bool, device=query.device)
        near = ones.tril() & ones.triu(1 - options.window)
    if options.sinks is None:
        return _dot_product(query, key, value, options.scaling, near, grouped)
    scale = query.shape[-1] ** -0.5 if options.scaling is None else options.scaling
    return attend_behind_sinks(_dot_product, query, key, value, options.sinks, scale, near)


def _dot_product(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, near: Tensor | None, grouped: bool = False
) -> Tensor:
    causal = near is None
    return scaled_dot_product_attention(
        query, key, value, attn_mask=near, is_causal=causal, scale=scale, enable_gqa=grouped
    )


AttentionInterface.register(ATTENTION, attend)
