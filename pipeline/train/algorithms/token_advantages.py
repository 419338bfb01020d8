"""Which token of a sample deserves how much: the advantage of each token.

Owns what is done with the number that a sample comes with: the advantage that its group gave it, or its bare reward
(`pipeline.transport.group_advantages.REWARDS_ONLY`). Promises that only counted tokens are actions: those of prompts
and tools neither earn nor discount anything; and that all statistics are of the whole batch. Pure; must not know models
or ranks.

Notation: T tokens of a row, n of them counted, numbered k = 1 … n; γ is `loss.discount`, λ is `loss.trace`. With a the
row's number, KL_k the estimate of KL(policy ‖ reference) from token k by `loss.kl_estimator`, and β = `loss.kl` if
`loss.kl_in` is `reward`, else 0:

    r_k = −β · KL_k, and a on top of it for k = n         the reward of each token
    G_k = r_k + γ · G_{k+1}                               what follows from it
    δ_k = r_k + γ · V_{k+1} − V_k, with V_{n+1} = 0       V: the critic's values
    A_k = δ_k + γλ · A_{k+1}                              GAE (Schulman et al. 2016)
    R_k = A_k + V_k                                       what the critic should say

`gae` whitens A_k; all others take G_k for the advantage, whitened for `batch` (REINFORCE++, Hu et al. 2025) and
`group_batch`. Whitened is (x − mean) / (deviation + ε) over the whole batch: over the counted tokens, or over the
samples when all tokens of a sample are alike, that is for β = 0 and γ = 1. A sample of several rows is then counted
once; else each of its rows is a trajectory of its own, which ends with the sample's number.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.config import LossConfig
from pipeline.errors import TrainingError
from pipeline.train.algorithms.kl_penalties import ESTIMATORS
from pipeline.train.batching.sequences import TrainSequence, episodes_of
from pipeline.transport.group_advantages import EPSILON

Numbers = NDArray[np.float64]
Tokens = Sequence[NDArray[np.float32]]
"""float32[T] for each row; only the entries of counted tokens are read."""


@dataclass(frozen=True)
class TokenAdvantages:
    """float32[T] for each row, 0 where no token is counted; `returns` are there for `gae` only."""

    advantages: list[NDArray[np.float32]]
    returns: list[NDArray[np.float32]] | None = None


def has_kl_in_reward(loss: LossConfig) -> bool:
    """Whether the KL is taken off the rewards of tokens."""
    return loss.kl > 0 and loss.kl_in == "reward"


def needs_token_advantages(loss: LossConfig) -> bool:
    """Whether the number that a sample comes with is not yet the advantage of each of its tokens."""
    return loss.advantage in ("batch", "group_batch", "gae") or has_kl_in_reward(loss) or loss.discount < 1


def assign_advantages(
    rows: Sequence[TrainSequence],
    loss: LossConfig,
    logprobs: Tokens | None = None,
    references: Tokens | None = None,
    values: Tokens | None = None,
) -> TokenAdvantages:
    """The advantages of a batch's rows, whose `advantages` are one number each.

    `logprobs` and `references` are needed where `has_kl_in_reward`, `values` for `gae`. Rows without counted tokens get
    zeros; when whole samples are whitened theirs count like all others.
    """
    numbers = _numbers(rows)
    batchwide = loss.advantage in ("batch", "group_batch")
    if not has_kl_in_reward(loss) and loss.discount == 1 and loss.advantage != "gae":
        whole = _whitened_samples(rows, numbers) if batchwide else numbers
        return TokenAdvantages(
            _scatter_to_tokens(rows, [np.full(row.counted, one) for row, one in zip(rows, whole, strict=True)])
        )
    taxes = (
        _kl_penalties(rows, loss, logprobs, references)
        if has_kl_in_reward(loss)
        else [np.zeros(row.counted) for row in rows]
    )
    rewards = [_token_rewards(tax, number) for tax, number in zip(taxes, numbers, strict=True)]
    if loss.advantage == "gae":
        advantages, returns = gae(rewards, _counted(rows, values, "values"), loss.discount, loss.trace)
        return TokenAdvantages(_scatter_to_tokens(rows, whiten(advantages)), _scatter_to_tokens(rows, returns))
    follows = discounted_sums(rewards, loss.discount)
    return TokenAdvantages(_scatter_to_tokens(rows, whiten(follows) if batchwide else follows))


def gae(
    rewards: Sequence[Numbers], values: Sequence[Numbers], discount: float, trace: float
) -> tuple[list[Numbers], list[Numbers]]:
    """Advantages A and returns R of each row, float64[n], from its rewards r and values V: see above."""
    surprises = [
        reward + discount * np.append(value[1:], 0.0) - value if len(value) else value
        for reward, value in zip(rewards, values, strict=True)
    ]
    advantages = discounted_sums(surprises, discount * trace)
    return advantages, [advantage + value for advantage, value in zip(advantages, values, strict=True)]


def discounted_sums(rows: Sequence[Numbers], decay: float) -> list[Numbers]:
    """y_k = x_k + decay · y_{k+1} of each row, y_{n+1} = 0: float64[n] for each."""
    if decay == 1:
        return [row[::-1].cumsum()[::-1] for row in rows]
    longest = max((len(row) for row in rows), default=0)
    table_NR = np.zeros((longest, len(rows)))
    for number, row in enumerate(rows):
        table_NR[longest - len(row) :, number] = row
    for place in range(longest - 2, -1, -1):
        table_NR[place] += decay * table_NR[place + 1]
    return [table_NR[longest - len(row) :, number] for number, row in enumerate(rows)]


def whiten(rows: Sequence[Numbers]) -> list[Numbers]:
    """(x − mean) / (deviation + ε) with the mean and the population deviation of all rows together."""
    every = np.concatenate([*rows, np.zeros(0)])
    if not every.size:
        return list(rows)
    mean, deviation = every.mean(), every.std()
    return [(row - mean) / (deviation + EPSILON) for row in rows]


def _whitened_samples(rows: Sequence[TrainSequence], numbers: Numbers) -> Numbers:
    """The number of each row, whitened over the samples."""
    samples = np.array(episodes_of(rows), np.intp)
    firsts, own = np.unique(samples, return_inverse=True)
    whole: Numbers = whiten([numbers[firsts]])[0][own]
    return whole


def _numbers(rows: Sequence[TrainSequence]) -> Numbers:
    for index, row in enumerate(rows):
        if np.ndim(row.advantages):
            raise TrainingError(
                f"row {index} has an advantage for each token; expected one number for the whole sample"
            )
    return np.array([row.advantages for row in rows], np.float64)


def _kl_penalties(
    rows: Sequence[TrainSequence], loss: LossConfig, logprobs: Tokens | None, references: Tokens | None
) -> list[Numbers]:
    """−β · KL_k of each row's counted tokens."""
    pairs = zip(_counted(rows, logprobs, "logprobs"), _counted(rows, references, "references"), strict=True)
    estimate = ESTIMATORS[loss.kl_estimator]
    return [-loss.kl * estimate(torch.from_numpy(policy - reference)).numpy() for policy, reference in pairs]


def _token_rewards(tax: Numbers, number: float) -> Numbers:
    """The rewards of a row's counted tokens: its taxes, and the sample's number with the last of them."""
    rewards = tax.copy()
    rewards[-1:] += number
    return rewards


def _counted(rows: Sequence[TrainSequence], tokens: Tokens | None, name: str) -> list[Numbers]:
    if tokens is None:
        raise TrainingError(f"these advantages cannot be made without {name}")
    return [each[np.asarray(row.mask, bool)].astype(np.float64) for row, each in zip(rows, tokens, strict=True)]


def _scatter_to_tokens(rows: Sequence[TrainSequence], numbers: Sequence[Numbers]) -> list[NDArray[np.float32]]:
    """From the counted tokens of each row to all of its tokens."""
    spread: list[NDArray[np.float32]] = []
    for row, each in zip(rows, numbers, strict=True):
        whole = np.zeros(len(row), np.float32)
        whole[np.asarray(row.mask, bool)] = each
        spread.append(whole)
    return spread
