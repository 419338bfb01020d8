"""The advantage of each token, from the scalar of its sample.

The scalar of a sample is computed from its group (`pipeline.algorithms.advantage_estimators`, which also has the
formulas of whitening and of a critic). Promises that only counted tokens are actions: tokens of prompts and tools have
no reward and no discount. All statistics are over the whole batch. Pure; must not know models, ranks, or the names of
estimators.

Notation: a row has T tokens; n of them are counted, with k = 1 … n. γ is `loss.gamma`. a is the scalar of the row's
sample, KL_k the estimate of KL(policy ‖ reference) from token k by `loss.kl_estimator`, and β = `loss.kl` if
`loss.kl_in` is `reward`, else 0:

    r_k = −β · KL_k, plus a for k = n                     the reward of each token
    G_k = r_k + γ · G_{k+1}                               the discounted return

The advantage of a token is G_k, or what an estimator with a critic computes from r and the critic's values. An
estimator that whitens does so over the counted tokens of the whole batch. If all tokens of a sample have one advantage
(no critic, β = 0 and γ = 1), whitening is over the samples, and a sample of several rows counts once. Otherwise each
row is a separate trajectory that ends with the scalar of its sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.algorithms.advantage_estimators import Numbers, discounted_sums, whiten
from pipeline.algorithms.key_parameters import key_values
from pipeline.algorithms.kl_estimators import KL_ESTIMATORS
from pipeline.config import LossConfig
from pipeline.errors import TrainingError
from pipeline.train.batching.sequences import TrainSequence, episodes_of

Tokens = Sequence[NDArray[np.float32]]
"""float32[T] of each row; only the entries of counted tokens are read."""


@dataclass(frozen=True)
class TokenAdvantages:
    """Advantages, and with a critic returns: float32[T] of each row, 0 at tokens that are not counted."""

    advantages: list[NDArray[np.float32]]
    returns: list[NDArray[np.float32]] | None = None


def has_kl_in_reward(loss: LossConfig) -> bool:
    """Whether the KL penalty is subtracted from the rewards of tokens."""
    return loss.kl > 0 and loss.kl_in == "reward"


def needs_token_advantages(loss: LossConfig) -> bool:
    """Whether the advantage of a token differs from the scalar of its sample."""
    estimator = loss.estimator
    return estimator.whitened or estimator.has_critic or has_kl_in_reward(loss) or loss.gamma < 1


def assign_advantages(
    rows: Sequence[TrainSequence],
    loss: LossConfig,
    logprobs: Tokens | None = None,
    references: Tokens | None = None,
    values: Tokens | None = None,
) -> TokenAdvantages:
    """The token advantages of a batch's rows; `advantages` of each row is one scalar.

    `logprobs` and `references` are required if `has_kl_in_reward`, `values` for an estimator with a critic. Rows
    without counted tokens get zeros. Whitening over samples includes the scalars of rows without counted tokens.
    """
    scalars, estimator = _row_scalars(rows), loss.estimator
    finish = whiten if estimator.whitened else list
    if not has_kl_in_reward(loss) and loss.gamma == 1 and not estimator.has_critic:
        # β = 0 and γ = 1: the return is the same at every token of a row, so one number per row suffices.
        per_row = _whitened_samples(rows, scalars) if estimator.whitened else scalars
        return TokenAdvantages(
            _scatter_to_tokens(rows, [np.full(row.counted, scalar) for row, scalar in zip(rows, per_row, strict=True)])
        )
    penalties = (
        _kl_penalties(rows, loss, logprobs, references)
        if has_kl_in_reward(loss)
        else [np.zeros(row.counted) for row in rows]
    )
    rewards = [_token_rewards(penalty, scalar) for penalty, scalar in zip(penalties, scalars, strict=True)]
    if estimator.of_tokens is not None:
        values_read = _counted(rows, values, "values")
        settings = key_values(estimator.keys, loss)
        advantages, returns = estimator.of_tokens(rewards, values_read, loss.gamma, **settings)
        return TokenAdvantages(_scatter_to_tokens(rows, finish(advantages)), _scatter_to_tokens(rows, returns))
    return TokenAdvantages(_scatter_to_tokens(rows, finish(discounted_sums(rewards, loss.gamma))))


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
    estimate = KL_ESTIMATORS[loss.kl_estimator]
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
