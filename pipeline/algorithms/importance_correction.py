"""Importance weights that correct the mismatch between the sampling policy and the trainer's old policy.

The two differ because another program (the inference engine) computed the sampler's log-probabilities, or because
the sampler had older weights. With w = exp(old_logprobs − sampler_logprobs) of each token, the policy loss is
multiplied by a bounded weight without a gradient. KL and entropy terms are not weighted.
"""

import math

import torch
from torch import Tensor

from pipeline.algorithms.kl_estimators import k3
from pipeline.algorithms.loss_tokens import LossTokens
from pipeline.algorithms.policy_losses import Terms, ratio
from pipeline.errors import TrainingError


def apply_correction(
    loss_N: Tensor, tokens: LossTokens, *, tis: str, tis_cap: float, tis_low: float = 0.0, sequence_mask: float = 0.0
) -> Terms:
    """The loss of each token times its weight by `tis`: [N], and metrics.

    - `none`: 1.
    - `truncate`: min(w, tis_cap), truncated importance sampling (Yao et al. 2025).
    - `mask`: w, or 0 outside of tis_low … tis_cap: masked importance sampling (IcePop, Ling team 2025).

    With `sequence_mask` above 0 it is 0 too for all tokens of a row whose geometric mean of w is outside of
    1 / (1 + sequence_mask) … 1 + sequence_mask. Tokens of other rows keep their weight.

    Raises `TrainingError` if `tis` is not `none` and the rows have no old log-probabilities.
    """
    if tokens.old_logprobs_N is None:
        if tis != "none":
            raise TrainingError(f"loss.tis={tis} needs old log-probabilities, and the rows have none")
        return loss_N, {}
    log_w_N = tokens.old_logprobs_N - tokens.sampler_logprobs_N
    watched = {"mismatch": log_w_N.abs(), "mismatch_kl": k3(-log_w_N)}
    if tis == "none":
        return loss_N, watched
    w_N = ratio(log_w_N)
    inside_N = (w_N >= tis_low) & (w_N <= tis_cap)
    weight_N = w_N.clamp(max=tis_cap) if tis == "truncate" else torch.where(inside_N, w_N, 0)
    if sequence_mask:
        # [N] → mean of each row → [N]: the log of the geometric mean of the row's ratios
        trusted_N = tokens.row_mean(log_w_N).abs() <= math.log1p(sequence_mask)
        weight_N = torch.where(trusted_N, weight_N, 0)
    return loss_N * weight_N, watched | {"tis_weight": weight_N, "tis_fraction": weight_N != w_N}
