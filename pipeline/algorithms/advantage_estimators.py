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
    def over_median(rewards: Rewards) -> Rewards:
        return rewards - np.median(rewards)

The configuration takes its values from this list, so nothing here may import torch.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Numbers: TypeAlias = NDArray[np.float64]
Rewards: TypeAlias = NDArray[np.float64]
TokenEstimator: TypeAlias = Callable[..., tuple[list[Numbers], list[Numbers]]]
"""As `gae`: rewards, values, γ, and further keys of `loss.*` by keyword → advantages and returns of each row."""
F = TypeVar("F", bound=Callable[[Rewards], Rewards])

EPSILON = 1e-6


def discounted_sums(rows: Sequence[Numbers], decay: float) -> list[Numbers]:
    """y_k = x_k + decay · y_{k+1} of each row, y_{n+1} = 0: float64[n] for each."""
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
    td_errors = [
        reward + gamma * np.append(value[1:], 0.0) - value if len(value) else value
        for reward, value in zip(rewards, values, strict=True)
    ]
    advantages = discounted_sums(td_errors, gamma * gae_lambda)
    return advantages, [advantage + value for advantage, value in zip(advantages, values, strict=True)]


@dataclass(frozen=True)
class AdvantageEstimator:
    """An entry of `ADVANTAGE_ESTIMATORS`.

    Attributes:
        description: the advantage in a few words, for the reference of keys.
        of_samples: float64[S] → float64[S], from the rewards of one prompt's samples.
        within_group: whether the samples of a prompt are compared. If all of them have one reward, there is no signal.
        whitened: whether the advantages are whitened over the batch.
        of_tokens: the advantages of tokens by a critic's values. None: every token has its discounted return.
    """

    description: str
    of_samples: Callable[[Rewards], Rewards]
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
        parameters = inspect.signature(self.of_tokens).parameters.values() if self.of_tokens else ()
        return tuple(parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)

    def settings_of(self, loss: object) -> dict[str, Any]:
        """The values of `keys`; `loss` has them as attributes, as `LossConfig` does."""
        return {key: getattr(loss, key) for key in self.keys}


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
def over_mean(rewards: Rewards) -> Rewards:
    """rᵢ − m"""
    centered: Rewards = rewards - rewards.mean()
    return centered


@advantage_estimator("group_std", "reward minus the group mean, divided by the group's standard deviation")
def over_deviation(rewards: Rewards) -> Rewards:
    """(rᵢ − m) / (s + ε)"""
    scaled: Rewards = over_mean(rewards) / (rewards.std() + EPSILON)
    return scaled


@advantage_estimator("leave_one_out", "reward minus the mean of the other samples")
def over_others(rewards: Rewards) -> Rewards:
    """rᵢ − (S·m − rᵢ) / (S − 1), written as a multiple of the centered reward"""
    scaled: Rewards = over_mean(rewards) * len(rewards) / (len(rewards) - 1)
    return scaled


@advantage_estimator("gae", "with a critic's values", within_group=False, whitened=True, of_tokens=gae)
@advantage_estimator("batch", "reward whitened over the batch", within_group=False, whitened=True)
def plain_rewards(rewards: Rewards) -> Rewards:
    """rᵢ"""
    return rewards.copy()


def sample_advantages(rewards: Sequence[float], name: str) -> Rewards:
    """float64[S]: the numbers of the S ≥ 1 finite rewards of a group, in order, by the estimator `name`.

    An estimator within the group gives numbers that sum to 0, and are exactly 0 if all rewards are equal.
    """
    values, estimator = np.asarray(rewards, dtype=np.float64), ADVANTAGE_ESTIMATORS[name]
    if estimator.within_group and has_zero_variance(rewards):
        return np.zeros_like(values)
    return estimator.of_samples(values)


def has_zero_variance(rewards: Sequence[float]) -> bool:
    """True when a group has no signal: all its samples have the same reward."""
    return len(set(rewards)) <= 1
