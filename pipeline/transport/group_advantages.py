"""Advantages of samples within their group.

Owns the advantage estimators of one group, and the list of estimators that need more than one group. Pure: rewards in,
advantages out, no batch and no model. Notation: S samples of one prompt with rewards r₁ … r_S, mean m.

    group           rᵢ − m                                   Dr. GRPO (Liu et al. 2025)
    group_std       (rᵢ − m) / (s + ε), s² = Σ(rᵢ − m)² / S  GRPO (Shao et al. 2024)
    leave_one_out   rᵢ − mean of the other rewards           RLOO (Kool et al. 2019; Ahmadian et al. 2024)
    group_batch     rᵢ − m                                   REINFORCE++-baseline (Hu et al. 2025)
    batch, gae      rᵢ                                       REINFORCE++; PPO with a critic

The trainer divides the advantages of `group_batch` by the batch's deviation, and computes those of `batch` and `gae`
from the plain rewards (`pipeline.train.algorithms.token_advantages`). In all other estimators the advantages of a group
sum to 0, and are exactly 0 if all rewards of the group are equal.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Baseline = Literal["group", "group_std", "leave_one_out", "batch", "group_batch", "gae"]
REWARDS_ONLY: tuple[Baseline, ...] = ("batch", "gae")
"""Estimators that no single group can compute: the samples carry their rewards."""
Rewards = NDArray[np.float64]

EPSILON = 1e-6


def advantages(rewards: Sequence[float], baseline: Baseline) -> Rewards:
    """float64[S]: the advantages of the S ≥ 1 finite rewards of a group, in order; for `REWARDS_ONLY` the rewards."""
    values = np.asarray(rewards, dtype=np.float64)
    if has_zero_variance(rewards) and baseline not in REWARDS_ONLY:
        return np.zeros_like(values)
    return _ESTIMATORS[baseline](values)


FILTERED = "filtered: zero advantage"
"""Outcome of a group without a signal, with `training.zero_variance_groups=drop`."""


def has_zero_variance(rewards: Sequence[float]) -> bool:
    """True when a group has no signal: all its samples have the same reward."""
    return len(set(rewards)) <= 1


def _over_mean(rewards: Rewards) -> Rewards:
    centered: Rewards = rewards - rewards.mean()
    return centered


def _over_deviation(rewards: Rewards) -> Rewards:
    scaled: Rewards = _over_mean(rewards) / (rewards.std() + EPSILON)
    return scaled


def _over_others(rewards: Rewards) -> Rewards:
    """rᵢ − (S·m − rᵢ) / (S − 1), written as a multiple of the centered reward."""
    scaled: Rewards = _over_mean(rewards) * len(rewards) / (len(rewards) - 1)
    return scaled


_ESTIMATORS: dict[Baseline, Callable[[Rewards], Rewards]] = {
    "group": _over_mean,
    "group_std": _over_deviation,
    "leave_one_out": _over_others,
    "batch": np.array,
    "group_batch": _over_mean,
    "gae": np.array,
}
