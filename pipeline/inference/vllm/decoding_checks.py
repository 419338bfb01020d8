"""Rules of the keys `inference.quantization` and `inference.speculation`. Imports no vLLM."""

from pipeline.config import RunConfig
from pipeline.config.model_directory import draft_directory
from pipeline.errors import ConfigError


def check_quantization(config: RunConfig) -> None:
    """`ConfigError` for FP8 where vLLM has no kernels for it, or where an update would not be quantized."""
    key, value = "inference.quantization", config.inference.quantization
    if value == "none" or not config.has_servers:
        return
    if config.resources.device == "cpu":
        raise ConfigError(key, value, "none on CPUs, where vLLM has no kernels for it", "leave it out")
    if config.model.dtype == "float32":
        raise ConfigError(key, value, "none with model.dtype=float32", "set model.dtype=bfloat16")
    if config.serve.enabled or config.model.lora.travels_alone:
        expected = "none with adapters, whose base on the servers then differs from the trainer's"
        hint = "leave it out" if config.serve.enabled else "leave it out, or set model.lora.merge=true"
        raise ConfigError(key, value, expected, hint)


def check_quantized_experts(config: RunConfig, experts: int) -> None:
    """`ConfigError` for FP8 with a mixture of experts."""
    if experts and config.has_servers and config.inference.quantization != "none":
        expected = f"none for a model with experts (it has {experts}), which was not tried"
        raise ConfigError("inference.quantization", config.inference.quantization, expected, "leave it out")


def check_speculation(config: RunConfig) -> None:
    """`ConfigError` for drafts that cannot be made or checked."""
    speculation = config.inference.speculation
    method, section = speculation.method, "inference.speculation"
    if method == "none" or not config.has_servers:
        return
    if config.training.routing_replay != "none":
        expected = "none with training.routing_replay, for which servers return the experts of one token a step"
        raise ConfigError(f"{section}.method", method, expected, "leave one of them out")
    if method == "ngram" and speculation.lookup_min > speculation.lookup_max:
        expected = f"at most lookup_max, which is {speculation.lookup_max}"
        raise ConfigError(f"{section}.lookup_min", speculation.lookup_min, expected, "lower it, or raise lookup_max")
    if method == "draft":
        _check_draft_model(config)


def _check_draft_model(config: RunConfig) -> None:
    key, model = "inference.speculation.model", config.inference.speculation.model
    if config.serve.enabled or config.model.lora.travels_alone:
        expected = "nothing with adapters, which vLLM would apply to the drafts' model too"
        hint = "set method=ngram" if config.serve.enabled else "set method=ngram, or model.lora.merge=true"
        raise ConfigError(key, model, expected, hint)
    draft_directory(config)
