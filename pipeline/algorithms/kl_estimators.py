"""Estimators of KL(policy ‖ reference) from single samples.

With d = logprob − reference, all estimates are `[N]`, in nats, and differentiable in the policy (Schulman,
"Approximating KL divergence", 2020). As a loss term, the gradient of k2 is that of the true KL in expectation for
on-policy samples. The gradient of k1 has expectation zero. The gradient of k3 is biased but bounded below. The results
are finite even if the policies are far apart.

The configuration takes its values from `KL_ESTIMATORS`, so nothing here may import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = 20.0
"""Upper bound of a log ratio: no ratio, and no product of ratios over a long row, becomes infinite."""


def k1(difference_N: Tensor) -> Tensor:
    """d: unbiased, of high variance, may be negative."""
    return difference_N


def k2(difference_N: Tensor) -> Tensor:
    """d² / 2: biased, of low variance, never negative."""
    return difference_N.square() / 2


def k3(difference_N: Tensor) -> Tensor:
    """exp(−d) − 1 + d, with d bounded below by −`LARGEST`: never negative, and unbiased except for the bound.

    Below the bound the value is constant and has no gradient. verl (`core_algos.kl_penalty`) bounds d by 20 on both
    sides; here large d stays unbounded, because the estimate grows only linearly there, and so keeps its gradient.
    """
    bounded_N = difference_N.clamp(min=-LARGEST)
    # expm1 keeps precision for small d, where exp(−d) − 1 cancels.
    return (-bounded_N).expm1() + bounded_N


KL_ESTIMATORS: Final[dict[str, Callable[[Tensor], Tensor]]] = {"k1": k1, "k2": k2, "k3": k3}
"""Every value of `loss.kl_estimator`."""
