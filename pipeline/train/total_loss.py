"""The loss of one micro-batch: all terms of an objective, weighted and summed.

Promises that `total` and `total_value` return a plain weighted SUM over the counted tokens of a micro-batch. The
normalization lies in the weights, which the controller computes once over the global batch. The sum over micro-batches
and ranks is therefore the loss itself, regardless of how the batch was split. The formulas are in
`pipeline.algorithms`. Must not know models, ranks, or packing.

    loss, sums = total(tokens, config)      # backward() on `loss`; add up `sums` over micro-batches and ranks
    metrics = loss_metrics.means(sums, counted)
"""

from dataclasses import replace

from torch import Tensor

from pipeline.algorithms.importance_correction import apply_correction
from pipeline.algorithms.kl_estimators import KL_ESTIMATORS, k3
from pipeline.algorithms.loss_tokens import LossTokens, ValueTokens
from pipeline.algorithms.policy_losses import POLICY_LOSSES, PolicyLoss, Terms
from pipeline.algorithms.support_divergence import support_kl, support_mass
from pipeline.algorithms.token_statistics import statistic_sums
from pipeline.algorithms.value_losses import clipped_value
from pipeline.config import LossConfig
from pipeline.errors import TrainingError
from pipeline.train.loss_specs import MetricsLevel, PolicyLossSpec, SupervisedLoss, ValueLoss


def total(
    tokens: LossTokens, objective: PolicyLossSpec, level: MetricsLevel = "basic"
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one micro-batch, and sums for its metrics.

    loss = Σ_N weight · (correction · policy loss + kl · KL(policy ‖ reference) − entropy · H)

    The KL term applies only for `kl_in="loss"`. It is estimated from the sampled token, or with a teacher's likeliest
    tokens computed over them (`support_kl`). A supervised loss is Σ_N weight · −logprob. Returns the scalar loss,
    which has a gradient, and detached scalars for `loss_metrics`: `loss` is the weighted sum, names in `_max` and
    `_min` are extremes over the tokens, all others are plain sums over the counted tokens. Level `none` returns only
    `loss`. Level `with_entropy` requires `entropy_N`; the entropy is summed whenever `entropy_N` is present.
    """
    loss_N, watched = _supervised(tokens) if isinstance(objective, SupervisedLoss) else _reinforced(tokens, objective)
    if level == "with_entropy":
        _entropy(tokens)
    if tokens.entropy_N is not None:
        watched["entropy"] = tokens.entropy_N
    # [N] → scalar. No division: `weights_N` already holds 1 / (count over the global batch).
    loss = (tokens.weights_N * loss_N).sum()
    return loss, statistic_sums(loss, {} if level == "none" else watched)


def total_value(
    tokens: ValueTokens, objective: ValueLoss, level: MetricsLevel = "basic"
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a critic on one micro-batch, Σ_N weight · `clipped_value`, and sums with the names `total` uses."""
    loss_N, watched = clipped_value(tokens, clip=objective.clip)
    loss = (tokens.weights_N * loss_N).sum()
    return loss, statistic_sums(loss, {} if level == "none" else watched)


def total_score(scores_N: Tensor, weights_N: Tensor, level: MetricsLevel = "basic") -> tuple[Tensor, dict[str, Tensor]]:
    """Σ_N weight · score of a reward model on one micro-batch, and sums with the names `total` uses."""
    loss = (weights_N * scores_N).sum()
    return loss, statistic_sums(loss, {} if level == "none" else {"value": scores_N})


def _supervised(tokens: LossTokens) -> Terms:
    """Cross-entropy −logprob of each token (nats): [N]. Advantages and sampler_logprobs are not read."""
    return -tokens.logprobs_N, {"logprob": tokens.logprobs_N}


def _reinforced(tokens: LossTokens, config: LossConfig) -> Terms:
    """All terms of an RL loss for each token: [N]."""
    # `policy_update` recomputes old log-probabilities for batches of several optimizer steps. Here the batch has
    # one: the policy has not moved since the step began, so its own log-probabilities, detached, are the old_logprobs
    # ones. The ratio is then 1 in value and still has the policy's gradient.
    if config.old_logprobs == "recompute" and tokens.old_logprobs_N is None:
        tokens = replace(tokens, old_logprobs_N=tokens.logprobs_N.detach())
    loss_N, watched = _policy_loss(config.name).terms(tokens, config)
    loss_N, mismatch = apply_correction(
        loss_N,
        tokens,
        tis=config.tis,
        tis_cap=config.tis_cap,
        tis_low=config.tis_low,
        sequence_mask=config.sequence_mask,
    )
    watched |= mismatch | _basics(tokens)
    in_loss = config.kl > 0 and config.kl_in == "loss"
    # With `kl_in="reward"` the advantages already contain the penalty; here the KL is only a metric.
    if in_loss or tokens.reference_N is not None:
        watched["reference_kl"] = kl_N = _reference_kl(tokens, config)
        if tokens.support_NK is not None:
            watched |= (support := _support(tokens))
            kl_N = support["support_kl"]
        loss_N = loss_N + config.kl * kl_N if in_loss else loss_N
    if config.entropy:
        loss_N = loss_N - config.entropy * _entropy(tokens)
    return loss_N, watched


def _policy_loss(name: str) -> PolicyLoss:
    if name not in POLICY_LOSSES:
        raise TrainingError(f"unknown loss {name!r}; there are {', '.join(POLICY_LOSSES)}")
    return POLICY_LOSSES[name]


def _reference_kl(tokens: LossTokens, config: LossConfig) -> Tensor:
    if tokens.reference_N is None:
        raise TrainingError(f"loss.kl={config.kl} needs reference log-probabilities, and the rows have none")
    return KL_ESTIMATORS[config.kl_estimator](tokens.logprobs_N - tokens.reference_N)


def _support(tokens: LossTokens) -> dict[str, Tensor]:
    """The divergence over the support, [N], and its mass by either model."""
    policy_NK, teacher_NK = tokens.support_NK, tokens.teacher_support_NK
    if policy_NK is None or teacher_NK is None:
        raise TrainingError("the rows have a teacher's likeliest tokens without their log-probabilities")
    return {
        "support_kl": support_kl(policy_NK, teacher_NK),
        "support_mass": support_mass(policy_NK, teacher_NK),
        "support_teacher_mass": support_mass(teacher_NK, teacher_NK),
    }


def _entropy(tokens: LossTokens) -> Tensor:
    if tokens.entropy_N is None:
        raise TrainingError("the loss needs the entropy of the tokens, and the forward pass did not compute it")
    return tokens.entropy_N


def _basics(tokens: LossTokens) -> dict[str, Tensor]:
    """Metrics of every policy loss, [N] each; `ratio_kl` is KL(old ‖ policy), estimated by k3."""
    log_ratio_N = tokens.log_ratio_N.detach()
    return {
        "logprob": tokens.logprobs_N,
        "log_ratio": log_ratio_N.abs(),
        "ratio_kl": k3(-log_ratio_N),
        "advantage": tokens.advantages_N,
    }
