"""Attention with sinks: one logit per head that takes part of a softmax and has no value (gpt-oss).

    p_j = exp(s_j) / (exp(sink) + Σ_i exp(s_i)),    output = Σ_j p_j v_j

Owns two ways to compute it, and its gradients, from attention functions without sinks. Both are exact, with causal
masks, windows and grouped heads. Must not know rows, lines or ranks.

- A kernel that returns the logsumexp `lse` of its scores: with sinks it is lse' = log(exp(lse) + exp(sink)), and the
  output is scaled by exp(lse − lse'). The kernel's backward pass computes probabilities as exp(s − lse'), so with lse'
  and the scaled output in place of its own it returns the gradients with sinks. ∂sink is the sum over tokens of
  −exp(sink − lse') · (slope · output).
- Other functions: a token before the first one has the sink as its score, by an additional feature, and zeros as value.

Notation: B lines of T tokens; P tokens of a packed line; H heads of D numbers.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from torch.nn.functional import pad

_ALIGNMENT = 8
"""Features that are added to a head for its sink: kernels take multiples of this."""


class KernelRows(NamedTuple):
    """The bounds of rows in a packed line, as `varlen_attn` takes them: of queries and of keys (int32[rows + 1]), and
    the tokens of the longest row of each."""

    own_bounds: Tensor
    whole_bounds: Tensor
    own_longest: int
    whole_longest: int


class KernelOptions(NamedTuple):
    """`scale` of the scores (None: 1 / √D); `window`: keys to the left and to the right, −1 for all; `others`: further
    options of `varlen_attn`."""

    scale: float | None
    window: tuple[int, int]
    others: dict[str, Any]


def attend_kernel(
    query: Tensor, key: Tensor, value: Tensor, sinks_H: Tensor | None, rows: KernelRows, options: KernelOptions
) -> Tensor:
    """`varlen_attn` of [P, H, D], with a sink for each query head if there are `sinks_H`; returns [P, H, D]."""
    if sinks_H is not None:
        return cast(Tensor, _SinkKernel.apply(query, key, value, sinks_H, rows, options))  # type: ignore[no-untyped-call]
    scale, window, others = options
    return cast(Tensor, varlen_attn(query, key, value, *rows, scale=scale, window_size=window, **others))


class _SinkKernel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks_H: Tensor, rows: KernelRows, options: KernelOptions
    ) -> Tensor:
        scale, window, others = options
        whole = {"scale": scale, "window_size": window, "return_aux": AuxRequest(lse=True), **others}
        output, lse_HP = varlen_attn(query, key, value, *rows, **whole)
        sunk_HP = torch.logaddexp(lse_HP, sinks_H.to(lse_HP.dtype)[:, None])
        output = (output * (lse_HP - sunk_HP).exp().T.unsqueeze(-1)).to(output.dtype)
        ctx.save_for_backward(query, key, value, sinks_H, output, sunk_HP, rows.own_bounds, rows.whole_bounds)
        ctx.longest, ctx.options = (rows.own_longest, rows.whole_longest), options
        return output

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks_H, output, sunk_HP, *bounds = ctx.saved_tensors
        slope = slopes[0].contiguous()
        rows = KernelRows(*bounds, *ctx.longest)
        of_inputs = _kernel_backward(slope, query, key, value, output, sunk_HP, rows, ctx.options)
        taken_HP = (sinks_H.to(sunk_HP.dtype)[:, None] - sunk_HP).exp()  # the sink's probability
        inner_PH = (slope.to(sunk_HP.dtype) * output.to(sunk_HP.dtype)).sum(-1)
        return *of_inputs, -(taken_HP * inner_PH.T).sum(1).to(sinks_H.dtype), None, None


def _kernel_backward(
    slope: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse_HP: Tensor,
    rows: KernelRows,
    options: KernelOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, by the backward pass of `varlen_attn`, which torch has under no public
    name for other outputs and logsumexps than its own."""
    left, right = options.window
    random, unused = torch.zeros(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device)
    tensors = (slope, query, key, value, output, lse_HP, *rows, 0.0, options.window == (-1, 0), random, unused)
    window = {"window_size_left": left, "window_size_right": right}
    gradients = torch.ops.aten._flash_attention_backward(*tensors, scale=options.scale, **window)
    return cast(tuple[Tensor, Tensor, Tensor], gradients)


Attend = Callable[[Tensor, Tensor, Tensor, float, Tensor | None], Tensor]
"""Attention of [B, H, T, D] without groups, scaled by a number; causal, or by a boolean mask [T, T]."""


def attend_behind_sinks(
    attend: Attend, query: Tensor, key: Tensor, value: Tensor, sinks_H: Tensor, scale: float, near_TT: Tensor | None
) -> Tensor:
    """[B, H, T, D] → [B, H, T, D]: causal attention with a sink for each query head, by a function without sinks.

    `near_TT`: bool, the keys of each query; None: all up to it. Key heads may be fewer than H.
    """
    heads, width = query.shape[1], value.shape[-1]
    key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    # One more feature is 1 in queries and 0 in keys, but sink / scale in the key of the token before: its score is the
    # sink. Keys and values are filled up to one width, which kernels want.
    query = pad(query, (0, _ALIGNMENT, 1, 0))
    query[..., -_ALIGNMENT] = 1.0
    key = pad(key, (0, _ALIGNMENT, 1, 0))
    sink_key_HD = pad((sinks_H / scale).to(key.dtype)[:, None], (key.shape[-1] - _ALIGNMENT, _ALIGNMENT - 1))
    key = torch.cat([sink_key_HD.expand(len(key), 1, -1, -1).transpose(1, 2), key[:, :, 1:]], 2)
    value = pad(value, (0, key.shape[-1] - width, 1, 0))
    if near_TT is not None:
        near_TT = pad(near_TT, (1, 0, 1, 0), value=True)
    return attend(query, key, value, scale, near_TT)[:, :, 1:, :width]
