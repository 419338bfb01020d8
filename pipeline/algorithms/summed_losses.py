"""Losses of the Tinker API: plain sums over tokens, with per-token weights or advantages from the client.

Owns the formulas and `SUMMED_LOSSES`. Promises that the loss is a sum, never divided by a count; that weights and
advantages may have any sign; and that bounds of a ratio are absolute. Reads only the number of tokens of each row; must
not know models or ranks.

| name | loss, summed over the tokens | reads |
|---|---|---|
| `cross_entropy` | −w · lp | `weights` w |
| `importance_sampling` | −exp(lp − q) · A | `logprobs` q, `advantages` A |
| `ppo` | −min(r · A, clip(r, low, high) · A) | the same |
| `cispo` | −sg(clip(r, low, high)) · lp · A | the same |
| `dro` | −(lp · A − ½ β (lp − q)²) | the same |
| `gspo` | −min(s · A, clip(s, low, high) · A) | the same, `sequence_ratio_mask` m |

lp and q are the log-probabilities (nats) of a token under the policy and the sampling policy, r = exp(lp − q), and
sg(·) stops the gradient. s = exp(sg(mean of lp − q over the row's tokens with m ≠ 0) + lp − sg(lp)): all tokens of a
row have the ratio of the sequence, each with the gradient of its own lp alone (GSPO-token, Zheng et al. 2025).

The gateway of the API reads the list, so nothing here may import torch except inside functions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Final, TypeVar

from pipeline.algorithms.key_parameters import key_parameters
from pipeline.algorithms.kl_estimators import LARGEST

if TYPE_CHECKING:
    from torch import Tensor

F = TypeVar("F", bound="Callable[..., Tensor]")
OTHER_LOSSES: Final = "loss_fn=importance_sampling, or ppo, cispo or gspo for samples of older weights"
NOT_SERVED: Final[Mapping[str, str]] = {
    "stable_reinforce": f"its formula is not public; take {OTHER_LOSSES}",
    "custom": "forward_backward_custom computes such a loss in the client",
}
"""Losses of the SDK that are refused, with an alternative."""


@dataclass(frozen=True)
class TokenSum:
    """A chosen loss with all its settings; cheap to pickle."""

    name: str
    settings: Mapping[str, float]


@dataclass(frozen=True)
class SummedTokens:
    """The tokens of a loss.

    Attributes:
        logprobs_N: log-probability of each token under the policy; has a gradient.
        counts: number of tokens of each row, in order; their sum is N.
    """

    logprobs_N: Tensor
    counts: Sequence[int]


@dataclass(frozen=True)
class SummedLoss:
    """An entry of `SUMMED_LOSSES`.

    Attributes:
        function: the loss of each token, [N].
        columns: its inputs for each token, [N] each, in addition to the policy's log-probability.
        settings: its settings, with their defaults.
    """

    function: Callable[..., Tensor]
    columns: tuple[str, ...]
    settings: Mapping[str, float]


SUMMED_LOSSES: Final[dict[str, SummedLoss]] = {}
"""Every `loss_fn` that is served."""


def summed_loss(function: F) -> F:
    """Add the decorated function to `SUMMED_LOSSES` under its name.

    Its first parameter is `SummedTokens`, the other positional ones are columns, and the keyword-only ones settings.
    """
    parameters, keys = inspect.signature(function).parameters, key_parameters(function)
    columns = tuple(name for name in parameters if name not in keys)[1:]
    SUMMED_LOSSES[function.__name__] = SummedLoss(function, columns, {key: parameters[key].default for key in keys})
    return function


def token_losses(
    objective: TokenSum, logprobs_N: Tensor, columns: Mapping[str, Tensor], counts: Sequence[int]
) -> Tensor:
    """The loss of each token, [N], from the columns that the entry of the loss names; see `SummedTokens`."""
    entry = SUMMED_LOSSES[objective.name]
    inputs = [columns[name] for name in entry.columns]
    return entry.function(SummedTokens(logprobs_N, counts), *inputs, **objective.settings)


@summed_loss
def cross_entropy(tokens: SummedTokens, weights: Tensor) -> Tensor:
    """−w · lp of each token, [N]."""
    return -weights * tokens.logprobs_N


@summed_loss
def importance_sampling(tokens: SummedTokens, logprobs: Tensor, advantages: Tensor) -> Tensor:
    """−r · A of each token, [N]: the policy gradient under samples of `logprobs`' policy, by importance sampling."""
    return -_ratio(tokens.logprobs_N - logprobs) * advantages


@summed_loss
def ppo(
    tokens: SummedTokens,
    logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.2,
) -> Tensor:
    """PPO's clipped surrogate (Schulman et al. 2017); the thresholds bound the ratio itself, not its distance to 1."""
    ratio_N = _ratio(tokens.logprobs_N - logprobs)
    return _surrogate(ratio_N, advantages, clip_low_threshold, clip_high_threshold)


@summed_loss
def cispo(
    tokens: SummedTokens,
    logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low_threshold: float = 0.0,
    clip_high_threshold: float = 4.0,
) -> Tensor:
    """CISPO (MiniMax-M1, Chen et al. 2025): −sg(clip(r)) · lp · A. The weight is clipped, so every token has a
    gradient."""
    ratio_N = _ratio(tokens.logprobs_N - logprobs).detach()
    return -ratio_N.clamp(clip_low_threshold, clip_high_threshold) * tokens.logprobs_N * advantages


@summed_loss
def dro(tokens: SummedTokens, logprobs: Tensor, advantages: Tensor, *, beta: float = 0.05) -> Tensor:
    """DRO (Richemond et al. 2024): −(A · lp − β/2 · (lp − sampler lp)²), with advantages in place of rewards minus
    values."""
    distance_N = tokens.logprobs_N - logprobs
    return -(advantages * tokens.logprobs_N - beta / 2 * distance_N.square())


@summed_loss
def gspo(
    tokens: SummedTokens,
    logprobs: Tensor,
    advantages: Tensor,
    sequence_ratio_mask: Tensor,
    *,
    clip_low_threshold: float = 0.9997,
    clip_high_threshold: float = 1.0004,
) -> Tensor:
    """The bounds are those of the paper (Zheng et al. 2025), since Tinker's pages name none."""
    log_ratio_N = tokens.logprobs_N - logprobs
    mean_N = _row_means(log_ratio_N.detach(), sequence_ratio_mask != 0, tokens.counts)
    # Value: the row's mean log ratio. Gradient: that of the token's own log-probability, as lp − sg(lp) is 0.
    ratio_N = _ratio(mean_N + tokens.logprobs_N - tokens.logprobs_N.detach())
    return _surrogate(ratio_N, advantages, clip_low_threshold, clip_high_threshold)


def _ratio(log_ratio_N: Tensor) -> Tensor:
    return log_ratio_N.clamp(max=LARGEST).exp()


def _surrogate(ratio_N: Tensor, advantages_N: Tensor, low: float, high: float) -> Tensor:
    return -(ratio_N * advantages_N).minimum(ratio_N.clamp(low, high) * advantages_N)


def _row_means(values_N: Tensor, marked_N: Tensor, counts: Sequence[int]) -> Tensor:
    """Mean over the marked tokens of each token's row: [N] → [N]."""
    import torch

    if not counts:
        return values_N
    # [N] → [R] sums and counts of the marked tokens → [R] means → [N], each row's mean for each of its tokens.
    sums_R = _row_sums(values_N.where(marked_N, 0.0), counts)
    marked_R = _row_sums(marked_N.to(values_N.dtype), counts)
    sizes_R = torch.tensor(counts, device=values_N.device)
    return (sums_R / marked_R.clamp(min=1.0)).repeat_interleave(sizes_R, output_size=len(values_N))


def _row_sums(values_N: Tensor, counts: Sequence[int]) -> Tensor:
    from torch.nn.utils.rnn import pad_sequence

    # [N] → padded [R, T] → [R]. A sum over padded rows is bitwise reproducible; `index_add` is not on GPUs.
    starts = list(accumulate(counts))[:-1]
    return pad_sequence(list(values_N.tensor_split(starts)), batch_first=True).sum(1)
