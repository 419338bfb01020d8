"""Routing replay: the trainer sends each token to the experts that the server chose for it (R3, Ma et al. 2025).

Owns the shape of a token's record, which follows from the model's config alone, and the refusal of runs in which no
record can exist. Imports neither torch nor transformers.
"""

from dataclasses import dataclass

import numpy as np

from pipeline.config import ModelConfig, RunConfig
from pipeline.config.cross_checks import check_stream_budget
from pipeline.config.model_directory import expert_count, experts_per_token, layer_count
from pipeline.errors import ConfigError

KEY = "training.routing_replay"
MAX_EXPERTS = 1 << 15
"""Upper bound of experts in a layer: ids are int16 on the device."""


@dataclass(frozen=True)
class RoutingShape:
    """The record of one token: an expert id for each layer and choice, layer after layer, little-endian.

    Layers without experts are included, as vLLM has them; their ids mean nothing.
    """

    layers: int
    per_token: int
    experts: int

    @property
    def dtype(self) -> np.dtype[np.uint8] | np.dtype[np.uint16]:
        """uint8 if the ids fit, else uint16."""
        return np.dtype("<u1") if self.experts <= 1 << 8 else np.dtype("<u2")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's record."""
        return self.layers * self.per_token * self.dtype.itemsize


def routing_shape(config: RunConfig) -> RoutingShape | None:
    """The shape of the records of a run; None without routing replay."""
    return shape_of_model(config.model) if config.training.routing_replay == "rollout" else None


def shape_of_model(model: ModelConfig) -> RoutingShape:
    """The shape of a model's records; `ConfigError` for a model without experts."""
    experts, per_token, layers = expert_count(model), experts_per_token(model), layer_count(model)
    if not (0 < per_token <= experts <= MAX_EXPERTS and layers):
        expected = f"none for {model.path}, whose config has no mixture of experts"
        raise ConfigError(KEY, "rollout", expected, "remove it, or choose another model")
    return RoutingShape(layers, per_token, experts)


def check_routing_replay(config: RunConfig) -> None:
    """Raise `ConfigError` for routing replay in a run without RL, of a model without experts, or with streams that are
    too small for the records."""
    if config.training.routing_replay == "none":
        return
    if not config.has_rollouts:
        expected = "none in a run without rollouts, whose rows come from no server"
        raise ConfigError(KEY, "rollout", expected, "remove it")
    check_stream_budget(config, shape_of_model(config.model).token_bytes)
