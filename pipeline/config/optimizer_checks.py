"""Rules between the keys of the optimizer and the rest."""

from pipeline.config import OptimConfig, RunConfig
from pipeline.errors import ConfigError

_LEAST_CHANGE = 2**-8
"""bfloat16 has 8 significant bits, so a value stays as it is when it should change by less than this share of it."""


def optimizer_is_possible(config: RunConfig) -> None:
    """A service has its clients' optimizers."""
    moments_can_shrink(config.optim)
    if config.serve.enabled and config.optim.router_aux_loss_coef:
        expected = "0 with serve.enabled: the losses of clients' models are their clients'"
        raise ConfigError("optim.router_aux_loss_coef", config.optim.router_aux_loss_coef, expected, "remove it")
    if config.serve.enabled and config.optim.state_dtype != "float32":
        expected = "float32 with serve.enabled, where clients set the decays"
        raise ConfigError("optim.state_dtype", config.optim.state_dtype, expected, "remove it")


def moments_can_shrink(optim: OptimConfig) -> None:
    """`ConfigError` if rounding would undo the decay: with a small gradient a moment shrinks by 1 − beta of itself."""
    if optim.state_dtype == "bfloat16" and max(optim.beta1, optim.beta2) > 1 - _LEAST_CHANGE:
        name = "beta1" if optim.beta1 > optim.beta2 else "beta2"
        expected = f"at most {1 - _LEAST_CHANGE:.3f} with optim.state_dtype=bfloat16, which would round the decay away"
        raise ConfigError(f"optim.{name}", max(optim.beta1, optim.beta2), expected, "or use optim.state_dtype=float32")
