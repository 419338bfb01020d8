"""Policy-gradient losses, token by token.

Owns the formulas. Each function maps `LossTokens` and the `LossConfig` to an unweighted loss for each token and the
quantities worth watching, both `[N]`; `pipeline.losses.total` multiplies by the weights and sums. Nothing here divides
by a count. Below, r = exp(logprob − behaviour) is the importance ratio, A the advantage, and sg(·) stops the gradient.
"""

import torch
from torch import Tensor

from pipeline.config import LossConfig
from pipeline.losses.tokens import LossTokens

Terms = tuple[Tensor, dict[str, Tensor]]


def reinforce(tokens: LossTokens, config: LossConfig) -> Terms:
    """−sg(min(r, ratio_cap)) · A · logprob, of each token: [N].

    REINFORCE (Williams 1992) on samples of an older policy, with the importance weight truncated from above (Ionides
    2008) so that its variance stays bounded.
    """
    ratio_N = tokens.log_ratio_N.detach().exp()
    weight_N = ratio_N.clamp(max=config.ratio_cap)
    loss_N = -weight_N * tokens.advantages_N * tokens.logprobs_N
    return loss_N, {"ratio": ratio_N, "clip_fraction": ratio_N > config.ratio_cap}


def clipped(tokens: LossTokens, config: LossConfig) -> Terms:
    """−min(r · A, clip(r, 1 − clip_low, 1 + clip_high) · A), of each token: [N].

    PPO's clipped surrogate (Schulman et al. 2017), which GRPO takes over with group-relative advantages (Shao et al.
    2024); separate bounds as in DAPO's clip-higher (Yu et al. 2025).
    """
    return _surrogate(tokens.log_ratio_N, tokens.advantages_N, config)


def sequence_clipped(tokens: LossTokens, config: LossConfig) -> Terms:
    """The clipped surrogate with one ratio for the whole row, the geometric mean of its tokens' ratios: [N].

    s = exp(mean over the row of (logprob − behaviour)); every counted token of a row carries the same s, and its
    gradient reaches all tokens of the row. With sequence normalisation this is GSPO (Zheng et al. 2025).
    """
    return _surrogate(tokens.row_mean(tokens.log_ratio_N), tokens.advantages_N, config)


def supervised(tokens: LossTokens) -> Terms:
    """Cross-entropy −logprob of each token (nats): [N]. Advantages and behaviour are not read."""
    return -tokens.logprobs_N, {}


def _surrogate(log_ratio_N: Tensor, advantages_N: Tensor, config: LossConfig) -> Terms:
    ratio_N = log_ratio_N.exp()
    bounded_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high)
    free_N, held_N = ratio_N * advantages_N, bounded_N * advantages_N
    loss_N = -torch.minimum(free_N, held_N)
    return loss_N, {"ratio": ratio_N.detach(), "clip_fraction": held_N < free_N}
