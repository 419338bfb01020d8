"""The loss of a critic. `pipeline.algorithms.advantage_estimators` computes the returns."""

import torch
from torch import Tensor

from pipeline.algorithms.loss_tokens import ValueTokens
from pipeline.algorithms.policy_losses import Terms


def clipped_value(tokens: ValueTokens, *, clip: float) -> Terms:
    """½ · max((V − R)², (clip(V, V_old − clip, V_old + clip) − R)²) of each token, [N]; with clip 0, ½ · (V − R)².

    V is the critic's value, V_old its value when the step began, R the return. The larger error counts, so a value that
    moved further than `clip` towards its return has no gradient (PPO's value loss: Schulman et al. 2017, as in OpenAI
    baselines).
    """
    error_N = tokens.returns_N - tokens.values_N
    squares_N = error_N.square()
    watched = {"value": tokens.values_N, "return": tokens.returns_N, "error": error_N}
    if clip:
        bounded_N = _near(tokens.values_N, tokens.old_values_N, clip)
        bounded_squares_N = (tokens.returns_N - bounded_N).square()
        watched["clip_fraction"] = bounded_squares_N > squares_N
        squares_N = torch.maximum(squares_N, bounded_squares_N)
    return squares_N / 2, watched


def _near(values_N: Tensor, old_N: Tensor, clip: float) -> Tensor:
    """The values clamped to `old_N` ± `clip`, [N]."""
    # A value within the bounds stays the same bits: rounding must not count as clipping.
    return values_N.clamp(old_N - clip, old_N + clip)
