"""From hidden states to log-probabilities.

Owns the largest product of a model, that with the vocabulary. Promises logits in fp32 whatever the compute type,
processed log-probabilities (temperature first, then log-softmax) as the servers report them, and that at most `CHUNK`
logits exist at a time. Must not know models or losses.

Notation: N tokens to predict, E hidden size, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import nll_loss
from torch.utils.checkpoint import checkpoint

CHUNK = 1 << 26


def head_logprobs(
    hidden_NE: Tensor, weight_VE: Tensor, targets_N: Tensor, temperature: float, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probability [N] of each target and, if asked for, the entropy [N], in fp32 (or fp64 for fp64 input).

    Rows of hidden states are taken in chunks of at most `CHUNK` logits; with several chunks, each is computed again in
    the backward pass instead of being kept.
    """
    rows = max(1, CHUNK // weight_VE.shape[0])
    chunks = list(zip(torch.split(hidden_NE, rows), torch.split(targets_N, rows), strict=True))
    if len(chunks) == 1:
        return _chunk_logprobs(hidden_NE, weight_VE, targets_N, temperature, with_entropy)
    parts = [
        checkpoint(
            _chunk_logprobs,
            hidden,
            weight_VE,
            targets,
            temperature,
            with_entropy,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for hidden, targets in chunks
    ]
    entropies = torch.cat([entropy for _, entropy in parts]) if with_entropy else None
    return torch.cat([logprobs for logprobs, _ in parts]), entropies


def _chunk_logprobs(
    hidden_NE: Tensor, weight_VE: Tensor, targets_N: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    logits_NV = _logits(hidden_NE, weight_VE)
    logprobs_NV = (logits_NV if temperature == 1 else logits_NV / temperature).log_softmax(-1)
    logprobs_N = -nll_loss(logprobs_NV, targets_N, reduction="none")
    entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1) if with_entropy else None
    return logprobs_N, entropy_N


def _logits(hidden_NE: Tensor, weight_VE: Tensor) -> Tensor:
    """hidden · weightᵀ in fp32. Sixteen-bit factors have exact products in fp32: on CUDA their own units add those up
    in fp32, many times faster than fp32 units would."""
    if _has_wide_product(hidden_NE):
        return _WideProduct.apply(hidden_NE, weight_VE)  # type: ignore[no-any-return, no-untyped-call]
    exact = torch.promote_types(hidden_NE.dtype, torch.float32)
    return hidden_NE.to(exact) @ weight_VE.to(exact).T


def _has_wide_product(hidden: Tensor) -> bool:
    return hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16)


def _wide(left: Tensor, right: Tensor) -> Tensor:
    """left · right in fp32, of sixteen-bit matrices; for CUDA only, and without a gradient of its own."""
    return torch.ops.aten.mm.dtype(left, right, torch.float32)  # type: ignore[no-any-return]


class _WideProduct(torch.autograd.Function):
    """hidden · weightᵀ in fp32 of sixteen-bit factors; their gradients, sixteen bits too, come from rounded ones."""

    @staticmethod
    def forward(ctx: Any, hidden_NE: Tensor, weight_VE: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_NE, weight_VE)
        return _wide(hidden_NE, weight_VE.T)

    @staticmethod
    def backward(ctx: Any, gradient_NV: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden_NE, weight_VE = ctx.saved_tensors
        rounded_NV = gradient_NV.to(hidden_NE.dtype)
        of_hidden, of_weight = ctx.needs_input_grad
        return rounded_NV @ weight_VE if of_hidden else None, rounded_NV.T @ hidden_NE if of_weight else None
