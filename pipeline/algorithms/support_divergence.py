"""The divergence of the policy from a teacher over a few tokens of the vocabulary.

The support of a position is the sampled token and the teacher's k likeliest tokens. All other tokens of the vocabulary
are one further outcome, the tail. With the policy's probabilities q, the teacher's p, and the masses outside of the
support q_R = 1 − Σ_S q_i and p_R = 1 − Σ_S p_i:

    KL_S = Σ_{i ∈ S} q_i · log(q_i / p_i)  +  q_R · log(q_R / p_R)

This is the reverse KL(policy ‖ teacher) of on-policy distillation (Agarwal et al. 2024, "On-policy distillation of
language models"; Lu et al. 2025, "On-policy distillation") after both distributions are mapped to |S| + 1 outcomes. So
it is never negative, at most the KL over the whole vocabulary, and equal to it if S is the vocabulary.

Without the tail the sum is no divergence: the policy can lower it by moving its mass out of the support, which verl
observed (pull request 5041: its truncated reverse KL was unstable). If both sides are normalized over the support
instead, their masses outside of it have no effect. verl's `forward_kl_topk_tail` (pull request 7855) has the same tail
in the forward KL.

Notation: N counted tokens; K = 1 + k tokens of the support, the sampled one first.
"""

import torch
from torch import Tensor

TAIL = 1e-6
"""Lower bound of a tail's probability. Below it the rounding of a teacher's float32 log-probabilities exceeds it."""
LOWEST = -100.0
"""Tokens that are less likely to the teacher (nats) belong to the tail; servers write −9999 for the probability 0."""


def support_kl(policy_NK: Tensor, teacher_NK: Tensor) -> Tensor:
    """KL_S of each token, [N] in nats, from log-probabilities; has a gradient in `policy_NK` only.

    An entry that the teacher does not have is −∞ in `teacher_NK`; the policy's entry is then ignored. The tails come
    from log Σ p by expm1, without the cancellation in 1 − Σ p. The rounding of float32 log-probabilities remains: the
    error is about 1e-6 · (1 + q_R / p_R).
    """
    present_NK = teacher_NK > LOWEST
    # The difference of an absent entry is 0, not ∞, so that its product with q = 0 has a gradient.
    difference_NK = policy_NK - torch.where(present_NK, teacher_NK, policy_NK.detach())
    inside_N = (policy_NK.exp() * present_NK * difference_NK).sum(-1)
    policy_tail_N, teacher_tail_N = (_tail(logprobs, present_NK) for logprobs in (policy_NK, teacher_NK))
    return inside_N + policy_tail_N * (policy_tail_N.log() - teacher_tail_N.log())


def support_mass(logprobs_NK: Tensor, teacher_NK: Tensor) -> Tensor:
    """The probability of the support, [N], without a gradient."""
    return (logprobs_NK.detach().exp() * (teacher_NK > LOWEST)).sum(-1)


def _tail(logprobs_NK: Tensor, present_NK: Tensor) -> Tensor:
    """1 − Σ p over the present entries, [N], at least `TAIL`."""
    # A finite number in place of −∞, whose gradient in a row without any present entry would be NaN.
    log_mass_N = logprobs_NK.masked_fill(~present_NK, 2 * LOWEST).logsumexp(-1)
    return (-log_mass_N.expm1()).clamp(min=TAIL)
