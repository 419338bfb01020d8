"""The LM head: log-probabilities and entropies from hidden states, in chunks.

Owns the largest product of a model, hidden · weightᵀ: [N, E] · [E, V]. Promises logits in fp32 for every compute type;
processed log-probabilities (the family's rule first, then the temperature, then log-softmax) as the servers report
them; that at most `CHUNK`
logits exist at a time; and that gradients are summed over chunks in fp32 and rounded once. No function waits for the
device. Must not know models or losses.

Notation: N tokens to predict, K targets of each, E hidden size, V vocabulary; Z = rule(logits) / temperature,
p = softmax(Z). With several chunks the forward pass keeps log Σ exp Z of each token, [N], and the backward pass
recomputes Z, as flash attention does for scores (Dao et al. 2022): memory is O(CHUNK), not O(N · V).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.train.model.logit_rule import PLAIN, LogitRule

CHUNK = 1 << 26
"""Logits of a chunk: 256 MiB in fp32."""


def head_logprobs(
    hidden_NE: Tensor,
    weight_VE: Tensor,
    targets: Tensor,
    temperature: float,
    with_entropy: bool = False,
    rule: LogitRule = PLAIN,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target, [N] or with K targets of each token [N, K], and with `with_entropy` the entropy
    [N]; nats, in fp32 (fp64 for fp64 input). A token's targets may repeat."""
    logprobs, entropy_N = _Head.apply(  # type: ignore[no-untyped-call]
        hidden_NE, weight_VE, targets, temperature, with_entropy, rule
    )
    return logprobs, entropy_N


class _Head(torch.autograd.Function):
    """logprob = Z[target] − log Σ exp Z, and entropy = −Σ p log p."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NE: Tensor,
        weight_VE: Tensor,
        targets: Tensor,
        temperature: float,
        with_entropy: bool,
        rule: LogitRule,
    ) -> tuple[Tensor, Tensor | None]:
        product = _ChunkedProduct(hidden_NE, weight_VE, rule)
        targets_NK = targets if targets.ndim > 1 else targets[:, None]
        outputs: tuple[list[Tensor], ...] = [], [], []
        for chunk in product.chunks():
            Z_NV = product.logits(chunk, temperature)
            Zt_N1 = Z_NV.gather(1, targets_NK[chunk, :1])
            logp_NV = Z_NV.log_softmax(-1)
            logprob_NK = logp_NV.gather(1, targets_NK[chunk])
            # The shape of `targets` before `cat`: FSDP warns of a model whose output is a view.
            outputs[0].append(logprob_NK.view_as(targets[chunk]))
            outputs[1].append(Zt_N1 - logprob_NK[:, :1])  # log Σ exp Z = Z[target] − logprob
            if with_entropy:
                outputs[2].append(-torch.exp(logp_NV, out=Z_NV).mul_(logp_NV).sum(-1))  # reuses Z's memory for p
        logprobs, logsums_N1, entropy_N = (torch.cat(parts) if parts else None for parts in outputs)
        ctx.save_for_backward(hidden_NE, weight_VE, targets_NK, logsums_N1, entropy_N)
        # A single chunk is within the bound anyway, so it is kept and not recomputed.
        ctx.logp_NV = logp_NV if len(outputs[0]) == 1 and any(ctx.needs_input_grad) else None
        ctx.temperature, ctx.rule = temperature, rule
        ctx.set_materialize_grads(False)
        assert logprobs is not None
        return logprobs, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logprobs: Tensor | None, of_entropy_N: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of hidden states and weight.

        With a_k and b the gradients of a token's log-probabilities and entropy, and a = Σ a_k:

            ∂loss/∂Z = Σ a_k · onehot_k − a · p − b · p · (log p + entropy)

        and ∂Z/∂rule(logits) = 1 / temperature, which a_k and b already contain below.
        """
        hidden_NE, weight_VE, targets_NK, logsums_N1, entropy_N = ctx.saved_tensors
        product, rule = _ChunkedProduct(hidden_NE, weight_VE, ctx.rule), ctx.rule
        zeros_NK = logsums_N1.new_zeros(targets_NK.shape)
        a_NK = zeros_NK if of_logprobs is None else of_logprobs.view_as(targets_NK) / ctx.temperature
        a_N1 = a_NK.sum(1, keepdim=True)
        b_N1 = None if of_entropy_N is None else of_entropy_N[:, None] / ctx.temperature
        gradients = _Gradients(product, *ctx.needs_input_grad[:2])
        for chunk in product.chunks():
            logp_NV = ctx.logp_NV
            if logp_NV is None:
                logp_NV = product.logits(chunk, ctx.temperature).sub_(logsums_N1[chunk])
            slope_NV = logp_NV.exp()  # p, then in place: p · (−a − b · (log p + entropy)), then + a_k at target k
            if b_N1 is None:
                slope_NV.mul_(-a_N1[chunk])
            else:
                slope_NV.mul_((logp_NV + entropy_N[chunk, None]).mul_(-b_N1[chunk]).sub_(a_N1[chunk]))
            slope_NV.scatter_add_(1, targets_NK[chunk], a_NK[chunk])
            if rule.cap:
                slope_NV.mul_(rule.slope((logp_NV + logsums_N1[chunk]).mul_(ctx.temperature)))
            elif rule.scale != 1:
                slope_NV.mul_(rule.scale)
            gradients.add(chunk, slope_NV)
        return *gradients.of_inputs(), None, None, None, None


class _ChunkedProduct:
    """hidden · weightᵀ in fp32, chunk by chunk.

    Products of 16-bit factors are exact in fp32. On CUDA the tensor cores sum them in fp32, many times faster than fp32
    units would (a "wide" product); other factors are converted to fp32 first.
    """

    def __init__(self, hidden_NE: Tensor, weight_VE: Tensor, rule: LogitRule) -> None:
        self.rule = rule
        self.exact = torch.promote_types(hidden_NE.dtype, torch.float32)
        self.wide = _has_wide_product(hidden_NE)
        self.factor = hidden_NE.dtype if self.wide else self.exact
        self.weight_dtype = weight_VE.dtype
        self.hidden_NE, self.weight_VE = hidden_NE, weight_VE.to(self.factor)

    def chunks(self) -> Iterator[slice]:
        """Slices of the N tokens: at least one, which may be empty."""
        rows = max(1, CHUNK // self.weight_VE.shape[0])
        return (slice(start, start + rows) for start in range(0, max(1, len(self.hidden_NE)), rows))

    def hidden(self, chunk: slice) -> Tensor:
        return self.hidden_NE[chunk].to(self.factor)

    def logits(self, chunk: slice, temperature: float) -> Tensor:
        product_NV = self.multiply(self.hidden(chunk), self.weight_VE.T)  # [n, E] · [E, V] → [n, V]
        logits_NV = self.rule.apply(product_NV)
        return logits_NV if temperature == 1 else logits_NV.div_(temperature)

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        return _wide(left, right) if self.wide else left @ right


class _Gradients:
    """∂loss/∂hidden of each chunk, and ∂loss/∂weight summed over the chunks."""

    def __init__(self, product: _ChunkedProduct, hidden: bool, weight: bool) -> None:
        self._product = product
        self._hidden_NE = torch.empty_like(product.hidden_NE) if hidden else None
        self._weight_VE = torch.zeros_like(product.weight_VE, dtype=product.exact) if weight else None

    def add(self, chunk: slice, slope_NV: Tensor) -> None:
        """Add a chunk's gradients, from ∂loss/∂logits."""
        slope_NV = slope_NV.to(self._product.factor)  # a wide product rounds its factors to 16 bits, not its sums
        if self._hidden_NE is not None:
            self._hidden_NE[chunk] = slope_NV @ self._product.weight_VE  # [n, V] · [V, E] → [n, E]
        if self._weight_VE is None:
            return
        if self._product.wide:
            self._weight_VE += _wide(slope_NV.T, self._product.hidden(chunk))  # [V, n] · [n, E] → [V, E]
        else:
            self._weight_VE.addmm_(slope_NV.T, self._product.hidden(chunk))

    def of_inputs(self) -> tuple[Tensor | None, Tensor | None]:
        weight_VE = self._weight_VE
        return self._hidden_NE, None if weight_VE is None else weight_VE.to(self._product.weight_dtype)


def _has_wide_product(hidden: Tensor) -> bool:
    return hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16)


def _wide(left: Tensor, right: Tensor) -> Tensor:
    """left · right in fp32, of 16-bit matrices; CUDA only, not differentiable."""
    return torch.ops.aten.mm.dtype(left, right, torch.float32)  # type: ignore[no-any-return]
