"""Terms that are added to a policy loss: divergence from a reference model.

Owns the estimators of KL(policy ‖ reference) from single samples. With d = logprob − reference, all are `[N]`, in nats,
and differentiable in the policy (Schulman, "Approximating KL divergence", 2020). As a loss term, the gradient of k2 is
that of the true KL in expectation for on-policy samples; k1's gradient has expectation zero, k3's is biased but bounded
below.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def k1(difference_N: Tensor) -> Tensor:
    """d: unbiased, of high variance, may be negative."""
    return difference_N


def k2(difference_N: Tensor) -> Tensor:
    """d² / 2: biased, of low variance, never negative."""
    return difference_N.square() / 2


def k3(difference_N: Tensor) -> Tensor:
    """exp(−d) − 1 + d: unbiased and never negative."""
    return torch.expm1(-difference_N) + difference_N


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
