"""The advantage of each token, from the scalar of its sample.

The scalar of a sample is its group-relative advantage, or its plain reward for the estimators in
`pipeline.transport.group_advantages.REWARDS_ONLY`. Promises that only counted tokens are actions: tokens of prompts and
tools have no reward and no discount. All statistics are over the whole batch. Pure; must not know models or ranks.

Notation: a row has T tokens; n of them are counted, with k = 1 … n. γ is `loss.gamma`, λ is `loss.gae_lambda`. a is the
scalar of the row's sample, KL_k the estimate of KL(policy ‖ reference) from token k by `loss.kl_estimator`, and
β = `loss.kl` if `loss.kl_in` is `reward`, else 0:

    r_k = −β · KL_k, plus a for k = n                     the reward of each token
    G_k = r_k + γ · G_{k+1}                               the discounted return
    δ_k = r_k + γ · V_{k+1} − V_k, with V_{n+1} = 0       the TD error; V: the critic's values
    A_k = δ_k + γλ · A_{k+1}                              GAE (Schulman et al. 2016)
    R_k = A_k + V_k                                       the target of the critic

`gae` whitens A_k. All other estimators use G_k as the advantage, whitened for `batch` (REINFORCE++, Hu et al. 2025) and
`group_batch`. Whitening is (x − mean) / (deviation + ε) over the counted tokens of the whole batch. If all tokens of a
sample have one advantage (β = 0 and γ = 1), whitening is over the samples, and a sample of several rows counts once.
Otherwise each row is a separate trajectory that ends with the scalar of its sample.
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
"""float32[T] of each row; only the entries of counted tokens are read."""


@dataclass(frozen=True)
class TokenAdvantages:
    """Advantages and returns, float32[T] of each row, 0 at tokens that are not counted; `returns` for `gae` only."""

    advantages: list[NDArray[np.float32]]
    returns: list[NDArray[np.float32]] | None = None


def has_kl_in_reward(loss: LossConfig) -> bool:
    """Whether the KL penalty is subtracted from the rewards of tokens."""
    return loss.kl > 0 and loss.kl_in == "reward"


def needs_token_advantages(loss: LossConfig) -> bool:
    """Whether the advantage of a token differs from the scalar of its sample."""
    return loss.advantage_estimator in ("batch", "group_batch", "gae") or has_kl_in_reward(loss) or loss.gamma < 1


def assign_advantages(
    rows: Sequence[TrainSequence],
    loss: LossConfig,
    logprobs: Tokens | None = None,
    references: Tokens | None = None,
    values: Tokens | None = None,
) -> TokenAdvantages:
    """The token advantages of a batch's rows; `advantages` of each row is one scalar.

    `logprobs` and `references` are required if `has_kl_in_reward`, `values` for `gae`. Rows without counted tokens get
    zeros. Whitening over samples includes the scalars of rows without counted tokens.
    """
    scalars = _row_scalars(rows)
    batchwide = loss.advantage_estimator in ("batch", "group_batch")
    if not has_kl_in_reward(loss) and loss.gamma == 1 and loss.advantage_estimator != "gae":
        # β = 0 and γ = 1: the return is the same at every token of a row, so one number per row suffices.
        per_row = _whitened_samples(rows, scalars) if batchwide else scalars
        return TokenAdvantages(
            _scatter_to_tokens(rows, [np.full(row.counted, scalar) for row, scalar in zip(rows, per_row, strict=True)])
        )
    penalties = (
        _kl_penalties(rows, loss, logprobs, references)
        if has_kl_in_reward(loss)
        else [np.zeros(row.counted) for row in rows]
    )
    rewards = [_token_rewards(penalty, scalar) for penalty, scalar in zip(penalties, scalars, strict=True)]
    if loss.advantage_estimator == "gae":
        advantages, returns = gae(rewards, _counted(rows, values, "values"), loss.gamma, loss.gae_lambda)
        return TokenAdvantages(_scatter_to_tokens(rows, whiten(advantages)), _scatter_to_tokens(rows, returns))
    returns = discounted_sums(rewards, loss.gamma)
    return TokenAdvantages(_scatter_to_tokens(rows, whiten(returns) if batchwide else returns))


def gae(
    rewards: Sequence[Numbers], values: Sequence[Numbers], discount: float, trace: float
) -> tuple[list[Numbers], list[Numbers]]:
    """Advantages A and returns R of each row, float64[n], from its rewards r and values V; formulas above."""
    td_errors = [
        reward + discount * np.append(value[1:], 0.0) - value if len(value) else value
        for reward, value in zip(rewards, values, strict=True)
    ]
    advantages = discounted_sums(td_errors, discount * trace)
    return advantages, [advantage + value for advantage, value in zip(advantages, values, strict=True)]


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


def _whitened_samples(rows: Sequence[TrainSequence], scalars: Numbers) -> Numbers:
    """The scalar of each row, whitened over the samples: [R] → [R]."""
    # A sample of several rows must enter mean and deviation once: take its first row, then copy the result to all rows.
    samples = np.array(episodes_of(rows), np.intp)
    first_rows, sample_of_row = np.unique(samples, return_inverse=True)
    whitened: Numbers = whiten([scalars[first_rows]])[0][sample_of_row]
    return whitened


def _row_scalars(rows: Sequence[TrainSequence]) -> Numbers:
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


def _token_rewards(penalties: Numbers, scalar: float) -> Numbers:
    """The rewards of a row's counted tokens: KL penalties, and the scalar of the sample at the last token."""
    rewards = penalties.copy()
    rewards[-1:] += scalar  # a slice, since a row without counted tokens has no last entry
    return rewards


def _counted(rows: Sequence[TrainSequence], tokens: Tokens | None, name: str) -> list[Numbers]:
    if tokens is None:
        raise TrainingError(f"these advantages cannot be computed without {name}")
    return [values[np.asarray(row.mask, bool)].astype(np.float64) for row, values in zip(rows, tokens, strict=True)]


def _scatter_to_tokens(rows: Sequence[TrainSequence], numbers: Sequence[Numbers]) -> list[NDArray[np.float32]]:
    """Scatter the values of counted tokens over all tokens of each row: float64[n] → float32[T]."""
    scattered: list[NDArray[np.float32]] = []
    for row, values in zip(rows, numbers, strict=True):
        row_values = np.zeros(len(row), np.float32)
        row_values[np.asarray(row.mask, bool)] = values
        scattered.append(row_values)
    return scattered
