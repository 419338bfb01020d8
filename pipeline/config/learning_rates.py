"""Learning rates of runs that set none: `optim.lr` and `critic.lr` of 0.

A pretrained model needs far smaller steps than random weights, and adapters about ten times those of all weights
(Schulman et al. 2025, "LoRA Without Regret"). docs/algorithms.md has the sources.
"""

from pipeline.config import ModelConfig, OptimConfig, RunConfig
from pipeline.config.model_directory import initial_weights

RANDOM, PRETRAINED, ADAPTERS, CRITIC = 1e-4, 1e-6, 1e-5, 1e-5
"""Peak learning rates of random weights, of all weights of a pretrained model, of its adapters, and of its critic."""


def with_learning_rate(optim: OptimConfig, model: ModelConfig) -> OptimConfig:
    """`optim` with the learning rate that fits the policy `model`, unless it has one."""
    if optim.lr:
        return optim
    random = initial_weights(model) == "random"
    return optim.model_copy(update={"lr": RANDOM if random else ADAPTERS if model.lora.rank else PRETRAINED})


def describe_learning_rate(config: RunConfig) -> str:
    """The chosen learning rate of RL in words; empty if the run sets one, or has no RL."""
    if config.optim.lr or not config.has_rl:
        return ""
    rate = with_learning_rate(config.optim, config.model).lr
    return f"learning rate: {rate:g}, the default for these weights (optim.lr sets another)"


def critic_learning_rate(config: RunConfig) -> float:
    """`critic.lr`, or the one that fits its first weights, which are the policy's or its base's."""
    return config.critic.lr or (RANDOM if initial_weights(config.model) == "random" else CRITIC)
