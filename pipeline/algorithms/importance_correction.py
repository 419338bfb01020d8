"""Importance weights that correct the mismatch between the sampling policy and the trainer's old policy.

The two differ because another program (the inference engine) computed the sampler's log-probabilities, or because
the sampler had older weights. With w = exp(old_logprobs − sampler_logprobs) of each token, the policy loss is
multiplied by a bounded weight without a gradient. KL and entropy terms are not weighted.
"""

import torch
from torch import Tensor

from pipeline.algorithms.kl_estimators import k3
from pipeline.algorithms.loss_tokens import LossTokens
from pipeline.algorithms.policy_losses import Terms, ratio
from pipeline.errors import TrainingError


def apply_correction(loss_N: Tensor, tokens: LossTokens, *, tis: str, tis_cap: float) -> Terms:
    """The loss of each token times its weight by `tis`: [N], and metrics.

    - `none`: 1.
    - `truncate`: min(w, tis_cap), truncated importance sampling (Yao et al. 2025).
    - `mask`: w, or 0 outside of 1 / tis_cap … tis_cap: masked importance sampling.

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
    weight_N = w_N.clamp(max=tis_cap) if tis == "truncate" else _masked(w_N, tis_cap)
    return loss_N * weight_N, watched | {"tis_weight": weight_N, "tis_fraction": weight_N != w_N}


def _masked(w_N: Tensor, tis_cap: float) -> Tensor:
    inside_N = (w_N >= 1 / tis_cap) & (w_N <= tis_cap)
    return torch.where(inside_N, w_N, 0)
