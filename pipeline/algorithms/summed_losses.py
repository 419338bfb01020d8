"""Losses of the Tinker API: plain sums over tokens, with per-token weights or advantages from the client.

Owns the formulas of the losses in `pipeline.algorithms.tinker_losses`. Promises that the loss is a sum, never divided
by a count; that weights and advantages may have any sign; and that bounds of a ratio are absolute. Reads only the
number of tokens of each row; must not know models or ranks.

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
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pipeline.algorithms.kl_estimators import LARGEST
from pipeline.algorithms.tinker_losses import TokenSum


def token_losses(
    objective: TokenSum, logprobs_N: Tensor, columns: Mapping[str, Tensor], counts: Sequence[int]
) -> Tensor:
    """The loss of each token, [N].

    Args:
        objective: one of the table above, with its settings.
        logprobs_N: log-probability of each token under the policy; has a gradient.
        columns: the columns in `pipeline.algorithms.tinker_losses.COLUMNS` for the loss, each [N].
        counts: number of tokens of each row, in order; their sum is N.
    """
    if objective.name == "cross_entropy":
        return -columns["weights"] * logprobs_N
    sampler_logprobs_N, advantages_N = columns["logprobs"], columns["advantages"]
    if objective.name == "dro":
        distance_N = logprobs_N - sampler_logprobs_N
        return -(advantages_N * logprobs_N - objective.settings["beta"] / 2 * distance_N.square())
    log_ratio_N = logprobs_N - sampler_logprobs_N
    if objective.name == "gspo":
        # Value: the row's mean log ratio. Gradient: that of the token's own log-probability, as lp − sg(lp) is 0.
        mean_N = _row_means(log_ratio_N.detach(), columns["sequence_ratio_mask"] != 0, counts)
        log_ratio_N = mean_N + logprobs_N - logprobs_N.detach()
    ratio_N = log_ratio_N.clamp(max=LARGEST).exp()
    if objective.name == "importance_sampling":
        return -ratio_N * advantages_N
    bounds = objective.settings["clip_low_threshold"], objective.settings["clip_high_threshold"]
    if objective.name == "cispo":
        return -ratio_N.detach().clamp(*bounds) * logprobs_N * advantages_N
    return -torch.minimum(ratio_N * advantages_N, ratio_N.clamp(*bounds) * advantages_N)


def _row_means(values_N: Tensor, marked_N: Tensor, counts: Sequence[int]) -> Tensor:
    """Mean over the marked tokens of each token's row: [N] → [N]."""
    if not counts:
        return values_N
    sizes = torch.tensor(counts, device=values_N.device)
    sums_R = _row_sums(torch.where(marked_N, values_N, 0.0), counts)
    marked_R = _row_sums(marked_N.to(values_N.dtype), counts)
    return (sums_R / marked_R.clamp(min=1.0)).repeat_interleave(sizes, output_size=len(values_N))


def _row_sums(values_N: Tensor, counts: Sequence[int]) -> Tensor:
    # [N] → padded [R, T] → [R]. A sum over padded rows is bitwise reproducible; `index_add` is not on GPUs.
    starts = list(accumulate(counts))[:-1]
    return pad_sequence(list(values_N.tensor_split(starts)), batch_first=True).sum(1)
