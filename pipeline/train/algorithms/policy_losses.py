"""Policy-gradient losses, token by token.

Owns the formulas, and the formula of each `LossConfig.name`. Each function maps `LossTokens` and the `LossConfig` to an
unweighted loss of each token and metrics of each token, all `[N]`. `pipeline.train.algorithms.total` multiplies by the
weights and sums, so nothing here divides by a count. Several names share one formula; their other settings (advantages,
normalization, bounds) are in `conf/loss/`. docs/losses.md has the table.

Below, r = exp(logprob − old_logprob) is the importance ratio, A the advantage, and sg(·) stops the gradient.
"""

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from pipeline.config import LossConfig
from pipeline.train.algorithms.kl_penalties import LARGEST
from pipeline.train.algorithms.loss_tokens import LossTokens

Terms = tuple[Tensor, dict[str, Tensor]]
PolicyLoss = Callable[[LossTokens, LossConfig], Terms]


def reinforce(tokens: LossTokens, config: LossConfig) -> Terms:
    """Truncated importance-weighted REINFORCE: −sg(min(r, ratio_cap)) · A · logprob of each token, [N].

    REINFORCE (Williams 1992) on samples of an older policy. The importance weight is truncated from above (Ionides
    2008), which bounds its variance.
    """
    ratio_N = ratio(tokens.log_ratio_N.detach())
    return _weighted(tokens, ratio_N, ratio_N.clamp(max=config.ratio_cap))


def sequence_mean(tokens: LossTokens, config: LossConfig) -> Terms:
    """REINFORCE with the row as one action: −sg(min(∏ r over the row, ratio_cap)) · A · logprob of each token, [N].

    The log-probability of the action is the sum over the row's tokens, so every token of a row has the same weight.
    With leave-one-out advantages this is RLOO (Kool et al. 2019; Ahmadian et al. 2024).
    """
    # A product of ratios is the exp of the summed log ratios; `ratio` bounds the sum, so a long row stays finite.
    ratio_N = ratio(tokens.row_sum(tokens.log_ratio_N.detach()))
    return _weighted(tokens, ratio_N, ratio_N.clamp(max=config.ratio_cap))


def clipped_weight(tokens: LossTokens, config: LossConfig) -> Terms:
    """CISPO: −sg(clip(r, 1 − clip_low, 1 + clip_high)) · A · logprob of each token, [N].

    The weight is clipped, not the surrogate, so every token keeps a gradient (MiniMax-M1, Chen et al. 2025).
    """
    ratio_N = ratio(tokens.log_ratio_N.detach())
    return _weighted(tokens, ratio_N, _clip(ratio_N, config))


def clipped(tokens: LossTokens, config: LossConfig) -> Terms:
    """PPO's clipped surrogate: −min(r · A, clip(r, 1 − clip_low, 1 + clip_high) · A) of each token, [N].

    From PPO (Schulman et al. 2017); GRPO uses it with group-relative advantages (Shao et al. 2024). The separate bounds
    are DAPO's clip-higher (Yu et al. 2025).
    """
    return _surrogate(tokens.log_ratio_N, tokens.advantages_N, config)


def sequence_clipped(tokens: LossTokens, config: LossConfig) -> Terms:
    """The clipped surrogate with one ratio for the whole row, the geometric mean of its tokens' ratios: [N].

    s = exp(mean over the row of (logprob − old_logprob)). Every counted token of a row has the same s, and the gradient
    of s reaches all tokens of the row. With sequence normalization this is GSPO (Zheng et al. 2025).
    """
    return _surrogate(tokens.row_mean(tokens.log_ratio_N), tokens.advantages_N, config)


def direct(tokens: LossTokens, config: LossConfig) -> Terms:
    """DRO: −(A · logprob − β/2 · (logprob − sampler_logprob)²) of each token, [N]; β is `beta`.

    A quadratic penalty, instead of a ratio, keeps the policy near the sampling policy: the policy loss of DRO
    (Richemond et al. 2024), with advantages in place of rewards minus values.
    """
    distance_N = tokens.logprobs_N - tokens.sampler_logprobs_N
    loss_N = -(tokens.advantages_N * tokens.logprobs_N - config.beta / 2 * distance_N.square())
    return loss_N, {"ratio": ratio(tokens.log_ratio_N.detach())}


POLICY_LOSSES: Final[Mapping[str, PolicyLoss]] = {
    "reinforce": reinforce,
    "ppo": clipped,
    "grpo": clipped,
    "gspo": sequence_clipped,
    "dr_grpo": clipped,
    "dapo": clipped,
    "cispo": clipped_weight,
    "rloo": sequence_mean,
    "reinforce_pp": clipped,
    "dro": direct,
}


def ratio(log_ratio_N: Tensor) -> Tensor:
    """exp of a log ratio, at most e^`LARGEST`: [N]."""
    return log_ratio_N.clamp(max=LARGEST).exp()


def _weighted(tokens: LossTokens, ratio_N: Tensor, weight_N: Tensor) -> Terms:
    """−weight · A · logprob of each token, [N]; the weight, the ratio clipped to its bounds, has no gradient."""
    loss_N = -weight_N * tokens.advantages_N * tokens.logprobs_N
    return loss_N, _clip_statistics(ratio_N, low_N=ratio_N < weight_N, high_N=ratio_N > weight_N)


def _surrogate(log_ratio_N: Tensor, advantages_N: Tensor, config: LossConfig) -> Terms:
    ratio_N = ratio(log_ratio_N)
    unclipped_N, bounded_N = ratio_N * advantages_N, _clip(ratio_N, config) * advantages_N
    # The bound is active only where it lowers the surrogate (the pessimistic side); there the gradient is 0.
    clipped_N = bounded_N < unclipped_N
    loss_N = -torch.minimum(unclipped_N, bounded_N)
    return loss_N, _clip_statistics(ratio_N.detach(), low_N=clipped_N & (ratio_N < 1), high_N=clipped_N & (ratio_N > 1))


def _clip(ratio_N: Tensor, config: LossConfig) -> Tensor:
    return ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high)


def _clip_statistics(ratio_N: Tensor, low_N: Tensor, high_N: Tensor) -> dict[str, Tensor]:
    return {
        "ratio": ratio_N,
        "clip_fraction": low_N | high_N,
        "clip_fraction_low": low_N,
        "clip_fraction_high": high_N,
    }
