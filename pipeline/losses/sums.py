"""Losses that are plain sums over tokens, with what each token brings given with it.

Owns the formulas of the losses that clients of the API name (`pipeline.config.sums`). Promises that the loss is a sum,
never divided by a count; that weights and advantages may have any sign; and that bounds of a ratio are absolute. Must
not know models, ranks or rows.

| name | loss, summed over the tokens | reads |
|---|---|---|
| `cross_entropy` | −w · lp | `weights` w |
| `importance_sampling` | −exp(lp − q) · A | `logprobs` q, `advantages` A |
| `ppo` | −min(r · A, clip(r, low, high) · A) | the same |
| `cispo` | −sg(clip(r, low, high)) · lp · A | the same |
| `dro` | −(lp · A − ½ β (lp − q)²) | the same |

lp is the log-probability of a token under the policy, q that under the policy that sampled it (nats), r = exp(lp − q),
and sg(·) stops the gradient.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from pipeline.config.sums import TokenSum
from pipeline.losses.penalties import LARGEST


def token_losses(objective: TokenSum, logprobs_N: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    """The loss of each token, [N]; `columns` has those that `pipeline.config.sums.COLUMNS` names, each [N]."""
    if objective.name == "cross_entropy":
        return -columns["weights"] * logprobs_N
    behaviour_N, advantages_N = columns["logprobs"], columns["advantages"]
    if objective.name == "dro":
        distance_N = logprobs_N - behaviour_N
        return -(advantages_N * logprobs_N - objective.settings["beta"] / 2 * distance_N.square())
    ratio_N = (logprobs_N - behaviour_N).clamp(max=LARGEST).exp()
    if objective.name == "importance_sampling":
        return -ratio_N * advantages_N
    bounds = objective.settings["clip_low_threshold"], objective.settings["clip_high_threshold"]
    if objective.name == "cispo":
        return -ratio_N.detach().clamp(*bounds) * logprobs_N * advantages_N
    return -torch.minimum(ratio_N * advantages_N, ratio_N.clamp(*bounds) * advantages_N)
