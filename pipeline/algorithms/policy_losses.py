"""Policy-gradient losses, token by token, and the list of them.

Owns the formulas and `POLICY_LOSSES`. Each function maps `LossTokens` to an unweighted loss of each token and metrics
of each token, all `[N]`. Its keyword-only parameters are the keys of `loss.*` that it reads.
`pipeline.train.total_loss` multiplies by the weights and sums, so nothing here divides by a count. Several names share
one formula; their other settings (advantages, normalization, bounds) are in `conf/loss/`. docs/losses.md has the table.

A new loss is a decorated function and a file in `conf/loss/`:

    @policy_loss("linear")
    def linear(tokens: LossTokens, *, beta: float) -> Terms:
        return -beta * tokens.advantages_N * tokens.logprobs_N, {}

Below, r = exp(logprob − old_logprob) is the importance ratio, A the advantage, and sg(·) stops the gradient.

The configuration takes its values from this list, so nothing here may import torch: use the methods of tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from pipeline.algorithms.key_parameters import key_parameters, key_values
from pipeline.algorithms.kl_estimators import LARGEST

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.algorithms.loss_tokens import LossTokens

Terms: TypeAlias = "tuple[Tensor, dict[str, Tensor]]"
"""The loss of each token, and metrics of each token: all [N]."""
F = TypeVar("F", bound="Callable[..., Terms]")


@dataclass(frozen=True)
class PolicyLoss:
    """An entry of `POLICY_LOSSES`.

    Attributes:
        function: the formula; its positional parameter is `LossTokens`.
        keys: the keys of `loss.*` that it reads.
        clips_tokens: whether single tokens lose their gradient where they are clipped.
    """

    function: Callable[..., Terms]
    keys: tuple[str, ...]
    clips_tokens: bool

    def terms(self, tokens: LossTokens, loss: object) -> Terms:
        """The loss and the metrics of each token, [N]; `loss` is the `LossConfig`."""
        return self.function(tokens, **key_values(self.keys, loss))


POLICY_LOSSES: Final[dict[str, PolicyLoss]] = {}
"""Every value of `loss.name`, with its formula."""


def policy_loss(*names: str, clips_tokens: bool = False) -> Callable[[F], F]:
    """Add the decorated function to `POLICY_LOSSES` under these names."""

    def register(function: F) -> F:
        POLICY_LOSSES.update(dict.fromkeys(names, PolicyLoss(function, key_parameters(function), clips_tokens)))
        return function

    return register


@policy_loss("reinforce")
def reinforce(tokens: LossTokens, *, ratio_cap: float) -> Terms:
    """Truncated importance-weighted REINFORCE: −sg(min(r, ratio_cap)) · A · logprob of each token, [N].

    REINFORCE (Williams 1992) on samples of an older policy. The importance weight is truncated from above (Ionides
    2008), which bounds its variance.
    """
    ratio_N = ratio(tokens.log_ratio_N.detach())
    return _weighted(tokens, ratio_N, ratio_N.clamp(max=ratio_cap))


@policy_loss("rloo")
def sequence_mean(tokens: LossTokens, *, ratio_cap: float) -> Terms:
    """REINFORCE with the row as one action: −sg(min(∏ r over the row, ratio_cap)) · A · logprob of each token, [N].

    The log-probability of the action is the sum over the row's tokens, so every token of a row has the same weight.
    With leave-one-out advantages this is RLOO (Kool et al. 2019; Ahmadian et al. 2024).
    """
    # A product of ratios is the exp of the summed log ratios; `ratio` bounds the sum, so a long row stays finite.
    ratio_N = ratio(tokens.row_sum(tokens.log_ratio_N.detach()))
    return _weighted(tokens, ratio_N, ratio_N.clamp(max=ratio_cap))


@policy_loss("cispo")
def clipped_weight(tokens: LossTokens, *, clip_low: float, clip_high: float) -> Terms:
    """CISPO: −sg(clip(r, 1 − clip_low, 1 + clip_high)) · A · logprob of each token, [N].

    The weight is clipped, not the surrogate, so every token keeps a gradient (MiniMax-M1, Chen et al. 2025).
    """
    ratio_N = ratio(tokens.log_ratio_N.detach())
    return _weighted(tokens, ratio_N, ratio_N.clamp(1 - clip_low, 1 + clip_high))


@policy_loss("ppo", "grpo", "dr_grpo", "dapo", "reinforce_pp", clips_tokens=True)
def clipped(tokens: LossTokens, *, clip_low: float, clip_high: float) -> Terms:
    """PPO's clipped surrogate: −min(r · A, clip(r, 1 − clip_low, 1 + clip_high) · A) of each token, [N].

    From PPO (Schulman et al. 2017); GRPO uses it with group-relative advantages (Shao et al. 2024). The separate bounds
    are DAPO's clip-higher (Yu et al. 2025).
    """
    return _surrogate(tokens.log_ratio_N, tokens.advantages_N, clip_low, clip_high)


@policy_loss("gspo")
def sequence_clipped(tokens: LossTokens, *, clip_low: float, clip_high: float) -> Terms:
    """The clipped surrogate with one ratio for the whole row, the geometric mean of its tokens' ratios: [N].

    s = exp(mean over the row of (logprob − old_logprob)). Every counted token of a row has the same s, and the gradient
    of s reaches all tokens of the row. With sequence normalization this is GSPO (Zheng et al. 2025). It clips whole
    samples, many by design.
    """
    return _surrogate(tokens.row_mean(tokens.log_ratio_N), tokens.advantages_N, clip_low, clip_high)


@policy_loss("dro")
def direct(tokens: LossTokens, *, beta: float) -> Terms:
    """DRO: −(A · logprob − β/2 · (logprob − sampler_logprob)²) of each token, [N]; β is `beta`.

    A quadratic penalty, instead of a ratio, keeps the policy near the sampling policy: the policy loss of DRO
    (Richemond et al. 2024), with advantages in place of rewards minus values.
    """
    distance_N = tokens.logprobs_N - tokens.sampler_logprobs_N
    loss_N = -(tokens.advantages_N * tokens.logprobs_N - beta / 2 * distance_N.square())
    return loss_N, {"ratio": ratio(tokens.log_ratio_N.detach())}


def ratio(log_ratio_N: Tensor) -> Tensor:
    """exp of a log ratio, at most e^`LARGEST`: [N]."""
    return log_ratio_N.clamp(max=LARGEST).exp()


def _weighted(tokens: LossTokens, ratio_N: Tensor, weight_N: Tensor) -> Terms:
    """−weight · A · logprob of each token, [N]; the weight, the ratio clipped to its bounds, has no gradient."""
    loss_N = -weight_N * tokens.advantages_N * tokens.logprobs_N
    return loss_N, _clip_statistics(ratio_N, low_N=ratio_N < weight_N, high_N=ratio_N > weight_N)


def _surrogate(log_ratio_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float) -> Terms:
    ratio_N = ratio(log_ratio_N)
    unclipped_N, bounded_N = ratio_N * advantages_N, ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N
    # The bound is active only where it lowers the surrogate (the pessimistic side); there the gradient is 0.
    clipped_N = bounded_N < unclipped_N
    loss_N = -unclipped_N.minimum(bounded_N)
    return loss_N, _clip_statistics(ratio_N.detach(), low_N=clipped_N & (ratio_N < 1), high_N=clipped_N & (ratio_N > 1))


def _clip_statistics(ratio_N: Tensor, low_N: Tensor, high_N: Tensor) -> dict[str, Tensor]:
    return {
        "ratio": ratio_N,
        "clip_fraction": low_N | high_N,
        "clip_fraction_low": low_N,
        "clip_fraction_high": high_N,
    }
