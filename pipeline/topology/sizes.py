"""The sizes of a model, as the arithmetic of memory needs them. Pure.

sizes_of_run(config, sizes_of)      # those of the policy, with those of the model that drafts its tokens
"""

from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from pipeline.config import ModelConfig, RunConfig
from pipeline.config.model_directory import DRAFTING_MODEL, drafting_model
from pipeline.errors import ConfigError


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a model that determine its memory.

    Attributes:
        parameters, trained: number of all parameters, and of those with gradients.
        outside_layers: parameters of embedding, head and last norm.
        layer, layers: parameters of the largest layer, and the number of layers.
        hidden, vocabulary: the hidden size, and the number of rows of the head.
        head_trained: whether the head has a gradient.
        logits: maximum number of logits in memory at a time.
        activations: bytes per token that eager layers keep for the backward pass; 0 if unknown.
        selected: bytes per token of the outputs that `training.activation_checkpointing=selective` keeps.
        experts: parameters of all experts that `training.mesh.ep` can shard.
        experts_layer: parameters of the experts of the largest layer.
        experts_of_layer, experts_per_token: number of experts in a layer, and of those that a token is routed to.
        kv: numbers per token in a server's cache, over `kv_heads` heads, of layers that cache all tokens; 0 if unknown.
        kv_window: the same for layers that cache only the last `window` tokens.
        width: bytes of a number in compute type.
        draft: the sizes of the model that drafts tokens on the policy's servers; None without one.
    """

    parameters: int
    trained: int
    outside_layers: int
    layer: int
    layers: int
    hidden: int
    vocabulary: int
    head_trained: bool
    logits: int
    activations: float
    selected: float
    kv: int
    kv_heads: int
    width: int
    kv_window: int = 0
    window: int = 0
    experts: int = 0
    experts_layer: int = 0
    experts_of_layer: int = 0
    experts_per_token: int = 0
    draft: "Sizes | None" = None

    @property
    def weights(self) -> int:
        """Bytes of all parameters in compute type, in which they are sent and served."""
        return self.parameters * self.width

    @property
    def head(self) -> int:
        """Number of parameters of the head."""
        return self.hidden * self.vocabulary


def sizes_of_run(config: RunConfig, sizes_of: Callable[[ModelConfig], Sizes]) -> Sizes:
    """The sizes of a run's policy, and in `draft` those of `inference.speculation.model`, both by `sizes_of`.

    Its `ConfigError` for the drafting model names that key.
    """
    sizes = sizes_of(config.model)
    if config.inference.speculation.method != "draft" or not config.has_servers:
        return sizes
    draft = drafting_model(config)
    try:
        return replace(sizes, draft=sizes_of(draft))
    except ConfigError as error:
        raise ConfigError(DRAFTING_MODEL, draft.path, error.expected, error.hint) from None
