"""Terms that are added to a policy loss: divergence from a reference model.

Owns the estimators of KL(policy ‖ reference) from single samples. With d = logprob − reference, all are `[N]`, in nats,
and differentiable in the policy (Schulman, "Approximating KL divergence", 2020). As a loss term, the gradient of k2 is
that of the true KL in expectation for on-policy samples; k1's gradient has expectation zero, k3's is biased but bounded
below. Promises finite numbers, also where the policies are far apart.
"""

from collections.abc import Callable

import torch
from torch import Tensor

LARGEST = 20.0
"""A log ratio above it counts as this one, so that no ratio, and no product over a long row, becomes infinite."""


def k1(difference_N: Tensor) -> Tensor:
    """d: unbiased, of high variance, may be negative."""
    return difference_N


def k2(difference_N: Tensor) -> Tensor:
    """d² / 2: biased, of low variance, never negative."""
    return difference_N.square() / 2


def k3(difference_N: Tensor) -> Tensor:
    """exp(−d) − 1 + d with d at least −`LARGEST`: never negative, and unbiased but for that bound.

    Beyond it the value stays, without a gradient. verl (`core_algos.kl_penalty`) bounds d by the same 20; on its other
    side too, where nothing grows but linearly, and d keeps its gradient here.
    """
    bounded_N = difference_N.clamp(min=-LARGEST)
    return torch.expm1(-bounded_N) + bounded_N


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
