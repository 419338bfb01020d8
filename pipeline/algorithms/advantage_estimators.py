"""Advantage estimators: from rewards to advantages, and the list of them.

Owns the formulas and `ADVANTAGE_ESTIMATORS`. Pure: rewards in, advantages out, no rows and no models. An estimator has
up to three parts:

1. From the S rewards r₁ … r_S of one prompt, with mean m, one number for each sample (`sample_advantages`). The
   preprocessor computes it.
2. From the rewards of tokens and a critic's values, an advantage for each token.
3. Whitening over the whole batch. `pipeline.train.batching.token_advantages` applies parts 2 and 3.

| name | 1. each sample | 2. each token | 3. whitened | source |
|---|---|---|---|---|
| `group` | rᵢ − m | | | Dr. GRPO (Liu et al. 2025) |
| `group_std` | (rᵢ − m) / (s + ε), s² = Σ(rᵢ − m)² / S | | | GRPO (Shao et al. 2024) |
| `leave_one_out` | rᵢ − mean of the other rewards | | | RLOO (Kool et al. 2019; Ahmadian et al. 2024) |
| `batch` | rᵢ | | yes | REINFORCE++ (Hu et al. 2025) |
| `group_batch` | rᵢ − m | | yes | REINFORCE++-baseline (Hu et al. 2025) |
| `gae` | rᵢ | `gae` | yes | PPO with a critic (Schulman et al. 2016) |

A new estimator is one decorated function:

    @advantage_estimator("group_median", "reward minus the group median")
    def over_median(rewards: Rewards) -> list[float]:
        middle = statistics.median(rewards)
        return [reward - middle for reward in rewards]

The configuration takes its values from this list. So this module may not import torch, and numpy only inside functions:
its threads and memory would be in every agent and in every worker process of a task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import fsum, sqrt
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from pipeline.algorithms.key_parameters import key_parameters

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Numbers: TypeAlias = "NDArray[np.float64]"
Rewards: TypeAlias = Sequence[float]
TokenEstimator: TypeAlias = "Callable[..., tuple[list[Numbers], list[Numbers]]]"
"""As `gae`: rewards, values, γ, and further keys of `loss.*` by keyword → advantages and returns of each row."""
F = TypeVar("F", bound=Callable[[Rewards], list[float]])

EPSILON = 1e-6


def discounted_sums(rows: Sequence[Numbers], decay: float) -> list[Numbers]:
    """y_k = x_k + decay · y_{k+1} of each row, y_{n+1} = 0: float64[n] for each."""
    import numpy as np

    if decay == 1:
        return [row[::-1].cumsum()[::-1] for row in rows]
    # Right-aligned table [longest, rows]: every row ends in the last line, so one backward scan over lines computes the
    # recurrence of all rows at once, and the zeros above a short row are never read.
    longest = max((len(row) for row in rows), default=0)
    table_NR = np.zeros((longest, len(rows)))
    for index, row in enumerate(rows):
        table_NR[longest - len(row) :, index] = row
    for k in range(longest - 2, -1, -1):
        table_NR[k] += decay * table_NR[k + 1]
    return [table_NR[longest - len(row) :, index] for index, row in enumerate(rows)]


def whiten(rows: Sequence[Numbers]) -> list[Numbers]:
    """(x − mean) / (deviation + ε), with the mean and the population deviation over all rows."""
    import numpy as np

    every = np.concatenate([*rows, np.zeros(0)])
    if not every.size:
        return list(rows)
    mean, deviation = every.mean(), every.std()
    return [(row - mean) / (deviation + EPSILON) for row in rows]


def gae(
    rewards: Sequence[Numbers], values: Sequence[Numbers], gamma: float, *, gae_lambda: float
) -> tuple[list[Numbers], list[Numbers]]:
    """Generalized advantage estimation (Schulman et al. 2016), float64[n] of each row.

    From the rewards r and the critic's values V of a row's n tokens, with V_{n+1} = 0:

        δ_k = r_k + γ · V_{k+1} − V_k          the TD error
        A_k = δ_k + γλ · A_{k+1}               the advantages
        R_k = A_k + V_k                        the returns: targets of the critic
    """
    td_errors = [reward - value for reward, value in zip(rewards, values, strict=True)]
    for td_error, value in zip(td_errors, values, strict=True):
        td_error[:-1] += gamma * value[1:]
    advantages = discounted_sums(td_errors, gamma * gae_lambda)
    return advantages, [advantage + value for advantage, value in zip(advantages, values, strict=True)]


@dataclass(frozen=True)
class AdvantageEstimator:
    """An entry of `ADVANTAGE_ESTIMATORS`.

    Attributes:
        description: the advantage in a few words, for the reference of keys.
        of_samples: one number for each of the S ≥ 1 rewards of a prompt's samples, in order.
        within_group: whether the samples of a prompt are compared. If all of them have one reward, there is no signal.
        whitened: whether the advantages are whitened over the batch.
        of_tokens: the advantages of tokens by a critic's values. None: every token has its discounted return.
    """

    description: str
    of_samples: Callable[[Rewards], list[float]]
    within_group: bool
    whitened: bool
    of_tokens: TokenEstimator | None

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained."""
        return self.of_tokens is not None

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of `loss.*` that `of_tokens` reads: its keyword-only parameters."""
        return key_parameters(self.of_tokens) if self.of_tokens else ()


ADVANTAGE_ESTIMATORS: Final[dict[str, AdvantageEstimator]] = {}
"""Every value of `loss.advantage_estimator`."""


def advantage_estimator(
    name: str,
    description: str,
    *,
    within_group: bool = True,
    whitened: bool = False,
    of_tokens: TokenEstimator | None = None,
) -> Callable[[F], F]:
    """Add an estimator whose `of_samples` is the decorated function; see `AdvantageEstimator`."""

    def register(function: F) -> F:
        ADVANTAGE_ESTIMATORS[name] = AdvantageEstimator(description, function, within_group, whitened, of_tokens)
        return function

    return register


@advantage_estimator("group_batch", "reward minus the group mean, whitened over the batch", whitened=True)
@advantage_estimator("group", "reward minus the group mean")
def over_mean(rewards: Rewards) -> list[float]:
    """rᵢ − m"""
    mean = fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


@advantage_estimator("group_std", "reward minus the group mean, divided by the group's standard deviation")
def over_deviation(rewards: Rewards) -> list[float]:
    """(rᵢ − m) / (s + ε)"""
    centered = over_mean(rewards)
    deviation = sqrt(fsum(value * value for value in centered) / len(centered))
    return [value / (deviation + EPSILON) for value in centered]


@advantage_estimator("leave_one_out", "reward minus the mean of the other samples")
def over_others(rewards: Rewards) -> list[float]:
    """rᵢ − (S·m − rᵢ) / (S − 1), written as a multiple of the centered reward"""
    return [value * len(rewards) / (len(rewards) - 1) for value in over_mean(rewards)]


@advantage_estimator("gae", "with a critic's values", within_group=False, whitened=True, of_tokens=gae)
@advantage_estimator("batch", "reward whitened over the batch", within_group=False, whitened=True)
def plain_rewards(rewards: Rewards) -> list[float]:
    """rᵢ"""
    return list(rewards)


def sample_advantages(rewards: Rewards, name: str) -> list[float]:
    """The numbers of the S ≥ 1 finite rewards of a group, in order, by the estimator `name`.

    An estimator within the group gives numbers that sum to 0, and are exactly 0 if all rewards are equal.
    """
    estimator = ADVANTAGE_ESTIMATORS[name]
    if estimator.within_group and has_zero_variance(rewards):
        return [0.0] * len(rewards)
    return estimator.of_samples(rewards)


def has_zero_variance(rewards: Rewards) -> bool:
    """True when a group has no signal: all its samples have the same reward."""
    return len(set(rewards)) <= 1
