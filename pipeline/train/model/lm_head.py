"""From hidden states to log-probabilities.

Owns the largest product of a model, that with the vocabulary. Promises logits in fp32 whatever the compute type,
processed log-probabilities (temperature first, then log-softmax) as the servers report them, that at most `CHUNK`
logits exist at a time, and that gradients are added up over chunks in fp32 and rounded once. Nothing here waits for
the device. Must not know models or losses.

Notation: N tokens to predict, E hidden size, V vocabulary; Z = logits / temperature, p = softmax(Z).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 1 << 26


def head_logprobs(
    hidden_NE: Tensor, weight_VE: Tensor, targets_N: Tensor, temperature: float, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probability [N] of each target and, if asked for, the entropy [N], in fp32 (or fp64 for fp64 input).

    Rows of hidden states are taken in chunks of at most `CHUNK` logits. If there are several, only log Σ exp Z (and the
    entropy) of each token is kept, and the backward pass computes the logits again.
    """
    logprobs_N, entropy_N = _Head.apply(  # type: ignore[no-untyped-call]
        hidden_NE, weight_VE, targets_N, temperature, with_entropy
    )
    return logprobs_N, entropy_N


class _Head(torch.autograd.Function):
    """logprob = Z[target] − log Σ exp Z, and entropy = −Σ p log p."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NE: Tensor, weight_VE: Tensor, targets_N: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        product = _ChunkedProduct(hidden_NE, weight_VE)
        found: tuple[list[Tensor], ...] = [], [], []
        for chunk in product.chunks():
            Z_NV = product.logits(chunk, temperature)
            target_N1 = targets_N[chunk, None]
            Zt_N1 = Z_NV.gather(1, target_N1)
            logp_NV = Z_NV.log_softmax(-1)
            logprob_N1 = logp_NV.gather(1, target_N1)
            found[0].append(logprob_N1[:, 0])
            found[1].append(Zt_N1 - logprob_N1)
            if with_entropy:
                found[2].append(-torch.exp(logp_NV, out=Z_NV).mul_(logp_NV).sum(-1))
        logprobs_N, logsums_N1, entropy_N = (torch.cat(parts) if parts else None for parts in found)
        ctx.save_for_backward(hidden_NE, weight_VE, targets_N, logsums_N1, entropy_N)
        ctx.logp_NV = logp_NV if len(found[0]) == 1 and any(ctx.needs_input_grad) else None
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        assert logprobs_N is not None
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logprob_N: Tensor | None, of_entropy_N: Tensor | None) -> tuple[Tensor | None, ...]:
        """With a and b the gradients of a token's log-probability and entropy:

        ∂loss/∂Z = a · (onehot − p) − b · p · (log p + entropy)
        """
        hidden_NE, weight_VE, targets_N, logsums_N1, entropy_N = ctx.saved_tensors
        product = _ChunkedProduct(hidden_NE, weight_VE)
        a_N1 = torch.zeros_like(logsums_N1) if of_logprob_N is None else of_logprob_N[:, None] / ctx.temperature
        b_N1 = None if of_entropy_N is None else of_entropy_N[:, None] / ctx.temperature
        gradients = _Gradients(product, *ctx.needs_input_grad[:2])
        for chunk in product.chunks():
            logp_NV = ctx.logp_NV
            if logp_NV is None:
                logp_NV = product.logits(chunk, ctx.temperature).sub_(logsums_N1[chunk])
            slope_NV = logp_NV.exp()
            if b_N1 is None:
                slope_NV.mul_(-a_N1[chunk])
            else:
                slope_NV.mul_((logp_NV + entropy_N[chunk, None]).mul_(-b_N1[chunk]).sub_(a_N1[chunk]))
            slope_NV.scatter_add_(1, targets_N[chunk, None], a_N1[chunk])
            gradients.add(chunk, slope_NV)
        return *gradients.of_inputs(), None, None, None


class _ChunkedProduct:
    """Chunks of hidden · weightᵀ in fp32. Sixteen-bit factors have exact products in fp32: on CUDA their own units add
    those up in fp32, many times faster than fp32 units would."""

    def __init__(self, hidden_NE: Tensor, weight_VE: Tensor) -> None:
        self.exact = torch.promote_types(hidden_NE.dtype, torch.float32)
        self.wide = _has_wide_product(hidden_NE)
        self.factor = hidden_NE.dtype if self.wide else self.exact
        self.given = weight_VE.dtype
        self.hidden_NE, self.weight_VE = hidden_NE, weight_VE.to(self.factor)

    def chunks(self) -> Iterator[slice]:
        """One at least, which may be empty."""
        rows = max(1, CHUNK // self.weight_VE.shape[0])
        return (slice(start, start + rows) for start in range(0, max(1, len(self.hidden_NE)), rows))

    def hidden(self, chunk: slice) -> Tensor:
        return self.hidden_NE[chunk].to(self.factor)

    def logits(self, chunk: slice, temperature: float) -> Tensor:
        logits_NV = self.multiply(self.hidden(chunk), self.weight_VE.T)
        return logits_NV if temperature == 1 else logits_NV.div_(temperature)

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        return _wide(left, right) if self.wide else left @ right


class _Gradients:
    """∂loss/∂hidden, chunk by chunk, and the sum over the chunks of ∂loss/∂weight."""

    def __init__(self, product: _ChunkedProduct, hidden: bool, weight: bool) -> None:
        self._product = product
        self._hidden_NE = torch.empty_like(product.hidden_NE) if hidden else None
        self._weight_VE = torch.zeros_like(product.weight_VE, dtype=product.exact) if weight else None

    def add(self, chunk: slice, slope_NV: Tensor) -> None:
        """The factors of a wide product are rounded to sixteen bits; its sums are not."""
        slope_NV = slope_NV.to(self._product.factor)
        if self._hidden_NE is not None:
            self._hidden_NE[chunk] = slope_NV @ self._product.weight_VE
        if self._weight_VE is None:
            return
        if self._product.wide:
            self._weight_VE += _wide(slope_NV.T, self._product.hidden(chunk))
        else:
            self._weight_VE.addmm_(slope_NV.T, self._product.hidden(chunk))

    def of_inputs(self) -> tuple[Tensor | None, Tensor | None]:
        weight_VE = self._weight_VE
        return self._hidden_NE, None if weight_VE is None else weight_VE.to(self._product.given)


def _has_wide_product(hidden: Tensor) -> bool:
    return hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16)


def _wide(left: Tensor, right: Tensor) -> Tensor:
    """left · right in fp32, of sixteen-bit matrices; for CUDA only, and without a gradient of its own."""
    return torch.ops.aten.mm.dtype(left, right, torch.float32)  # type: ignore[no-any-return]
