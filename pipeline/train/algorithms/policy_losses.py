"""Policy-gradient losses, token by token.

Owns the formulas, and which name of `LossConfig.name` means which. Each function maps `LossTokens` and the `LossConfig`
to an unweighted loss for each token and the quantities worth watching, all `[N]`; `pipeline.train.algorithms.total`
multiplies by the weights and sums, so nothing here divides by a count. What names that share a formula differ in
(advantages, normalisation, bounds) is in `conf/loss/`; docs/losses.md has the table.

Below, r = exp(logprob − proximal) is the importance ratio, A the advantage, and sg(·) stops the gradient.
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
    """−sg(min(r, ratio_cap)) · A · logprob, of each token: [N].

    REINFORCE (Williams 1992) on samples of an older policy, with the importance weight truncated from above (Ionides
    2008) so that its variance stays bounded.
    """
    ratio_N = ratio(tokens.log_ratio_N.detach())
    return _weighted(tokens, ratio_N, ratio_N.clamp(max=config.ratio_cap))


def sequence_mean(tokens: LossTokens, config: LossConfig) -> Terms:
    """−sg(min(∏ r over the row, ratio_cap)) · A · logprob, of each token: [N].

    REINFORCE with the whole row as one action, whose log-probability is the sum of its tokens'; with leave-one-out
    advantages it is RLOO (Kool et al. 2019; Ahmadian et al. 2024). Every token of a row carries the same weight.
    """
    ratio_N = ratio(tokens.row_sum(tokens.log_ratio_N.detach()))
    return _weighted(tokens, ratio_N, ratio_N.clamp(max=config.ratio_cap))


def clipped_weight(tokens: LossTokens, config: LossConfig) -> Terms:
    """−sg(clip(r, 1 − clip_low, 1 + clip_high)) · A · logprob, of each token: [N].

    CISPO (MiniMax-M1, Chen et al. 2025): the weight is clipped, not the surrogate, so every token keeps a gradient.
    """
    ratio_N = ratio(tokens.log_ratio_N.detach())
    return _weighted(tokens, ratio_N, _clip(ratio_N, config))


def clipped(tokens: LossTokens, config: LossConfig) -> Terms:
    """−min(r · A, clip(r, 1 − clip_low, 1 + clip_high) · A), of each token: [N].

    PPO's clipped surrogate (Schulman et al. 2017), which GRPO takes over with group-relative advantages (Shao et al.
    2024); separate bounds as in DAPO's clip-higher (Yu et al. 2025).
    """
    return _surrogate(tokens.log_ratio_N, tokens.advantages_N, config)


def sequence_clipped(tokens: LossTokens, config: LossConfig) -> Terms:
    """The clipped surrogate with one ratio for the whole row, the geometric mean of its tokens' ratios: [N].

    s = exp(mean over the row of (logprob − proximal)); every counted token of a row carries the same s, and its
    gradient reaches all tokens of the row. With sequence normalisation this is GSPO (Zheng et al. 2025).
    """
    return _surrogate(tokens.row_mean(tokens.log_ratio_N), tokens.advantages_N, config)


def direct(tokens: LossTokens, config: LossConfig) -> Terms:
    """−(A · logprob − β/2 · (logprob − sampler_logprob)²), of each token: [N]; β is `beta`.

    The policy gradient held near the policy that sampled by a quadratic penalty instead of a ratio: the policy's side
    of DRO (Richemond et al. 2024), with advantages in the place of rewards less values.
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
    """−weight · A · logprob of a constant weight, which is the ratio within its bounds."""
    loss_N = -weight_N * tokens.advantages_N * tokens.logprobs_N
    return loss_N, _clip_statistics(ratio_N, low_N=ratio_N < weight_N, high_N=ratio_N > weight_N)


def _surrogate(log_ratio_N: Tensor, advantages_N: Tensor, config: LossConfig) -> Terms:
    ratio_N = ratio(log_ratio_N)
    free_N, held_N = ratio_N * advantages_N, _clip(ratio_N, config) * advantages_N
    clipped_N = held_N < free_N
    loss_N = -torch.minimum(free_N, held_N)
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
