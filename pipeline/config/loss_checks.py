"""Rules between the keys of the loss, and of the groups that it trains."""

from pipeline.config import RunConfig
from pipeline.errors import ConfigError


def correction_has_old_logprobs(config: RunConfig) -> None:
    loss = config.loss
    if loss.old_logprobs == "sampler" and loss.tis != "none":
        expected = "none with loss.old_logprobs=sampler, whose ratio includes the mismatch with the sampling policy"
        raise ConfigError("loss.tis", loss.tis, expected, "set loss.tis=none, or loss.old_logprobs=recompute")


def kl_has_a_gradient(config: RunConfig) -> None:
    loss = config.loss
    # With a teacher's likeliest tokens the estimator is only a metric: the loss has the KL over them.
    if loss.kl and loss.kl_in == "loss" and loss.kl_estimator == "k1" and not config.teacher.top_k:
        expected = "k2 or k3 with loss.kl_in=loss: as a term of the loss, the gradient of k1 has mean zero"
        hint = "set loss.kl_estimator=k2, whose gradient is that of the KL, or loss.kl_in=reward"
        raise ConfigError("loss.kl_estimator", "k1", expected, hint)


def only_groups_are_filtered(config: RunConfig) -> None:
    if config.training.zero_variance_groups == "drop" and not config.loss.estimator.within_group:
        estimator = config.loss.advantage_estimator
        expected = f"keep with loss.advantage_estimator={estimator}: samples with equal rewards still have a gradient"
        raise ConfigError(
            "training.zero_variance_groups", "drop", expected, "leave it out, or choose a group's baseline"
        )
