"""Losses: pure functions of flat token tensors.

Owns the registry of losses by the names of `LossConfig.name` (and `sft`) and the one place where terms become a number.
Promises that `total` returns a plain weighted SUM over the counted tokens of a micro-batch: the normalisation lies in
the weights, which the controller decided over the global batch, so the sum over micro-batches and ranks is the loss
itself, however the batch was cut. Must not know models, ranks, or how rows were packed.

    loss, sums = total(tokens, config)      # backward() on `loss`; add up `sums` over micro-batches and ranks
    metrics = measures.means(sums, counted)
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from pipeline.config import LossConfig
from pipeline.errors import TrainingError
from pipeline.losses import policy
from pipeline.losses.penalties import ESTIMATORS, k3
from pipeline.losses.tokens import LossTokens


class Supervised:
    """Asks for the cross-entropy of the counted tokens (SFT); it has no settings."""

    name: Final = "sft"
    kl: Final = 0.0
    entropy: Final = 0.0


Objective = LossConfig | Supervised
SFT = Supervised()

POLICY_LOSSES: dict[str, Callable[[LossTokens, LossConfig], policy.Terms]] = {
    "reinforce": policy.reinforce,
    "ppo": policy.clipped,
    "grpo": policy.clipped,
    "gspo": policy.sequence_clipped,
}


def total(tokens: LossTokens, objective: Objective) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one micro-batch and what to watch.

    loss = Σ_N weight · (policy loss + kl · KL(policy ‖ reference) − entropy · H)

    Returns the scalar loss, to be differentiated, and detached scalars. A name that ends in `_max` is a maximum over
    the tokens; `loss` is the weighted sum; every other one is a plain sum over the counted tokens.
    """
    if isinstance(objective, Supervised):
        loss_N, watched = policy.supervised(tokens)
        return _sum(tokens, loss_N), _sums(tokens, loss_N, watched)
    loss_N, watched = _policy_loss(objective.name)(tokens, objective)
    watched |= _mismatch(tokens)
    if objective.kl:
        kl_N = _reference_kl(tokens, objective)
        loss_N, watched = loss_N + objective.kl * kl_N, watched | {"reference_kl": kl_N}
    if objective.entropy:
        loss_N = loss_N - objective.entropy * _entropy(tokens)
    if tokens.entropy_N is not None:
        watched |= {"entropy": tokens.entropy_N}
    return _sum(tokens, loss_N), _sums(tokens, loss_N, watched)


def _policy_loss(name: str) -> Callable[[LossTokens, LossConfig], policy.Terms]:
    if name not in POLICY_LOSSES:
        raise TrainingError(f"unknown loss {name!r}; there are {', '.join(POLICY_LOSSES)}")
    return POLICY_LOSSES[name]


def _reference_kl(tokens: LossTokens, config: LossConfig) -> Tensor:
    if tokens.reference_N is None:
        raise TrainingError(f"loss.kl={config.kl} needs reference log-probabilities, and the rows have none")
    return ESTIMATORS[config.kl_estimator](tokens.logprobs_N - tokens.reference_N)


def _entropy(tokens: LossTokens) -> Tensor:
    if tokens.entropy_N is None:
        raise TrainingError("an entropy bonus needs the entropy of the tokens; forward with entropy=True")
    return tokens.entropy_N


def _mismatch(tokens: LossTokens) -> dict[str, Tensor]:
    """How far the policy is from the one that sampled: |log ratio|, its maximum, and KL(behaviour ‖ policy) by k3."""
    log_ratio_N = tokens.log_ratio_N.detach()
    return {
        "log_ratio": log_ratio_N.abs(),
        "log_ratio_max": log_ratio_N.abs(),
        "behaviour_kl": k3(-log_ratio_N),
        "advantage": tokens.advantages_N,
    }


def _sum(tokens: LossTokens, loss_N: Tensor) -> Tensor:
    return (tokens.weights_N * loss_N).sum()


def _sums(tokens: LossTokens, loss_N: Tensor, watched: dict[str, Tensor]) -> dict[str, Tensor]:
    with torch.no_grad():
        sums = {"loss": _sum(tokens, loss_N), "logprob": tokens.logprobs_N.sum()}
        if "ratio" in watched:
            sums["ratio_squared"] = watched["ratio"].square().sum()
        for name, values_N in watched.items():
            sums[name] = _maximum(values_N) if name.endswith("_max") else values_N.sum()
        return sums


def _maximum(values_N: Tensor) -> Tensor:
    return values_N.max() if values_N.numel() else values_N.new_zeros(())
