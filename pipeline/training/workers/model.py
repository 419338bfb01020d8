"""The models: a causal language model that answers with log-probabilities, and a critic that answers with values.

Owns how a model directory becomes a network, and what is computed of a micro-batch. Promises that a model whose
log-probabilities would be wrong is refused. Knows transformers; must not know ranks, losses or optimizers.

Notation: B lines of T tokens, N tokens to predict, E hidden size.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.config import ModelConfig
from pipeline.errors import ConfigError, TrainingError
from pipeline.training.spec import Kind
from pipeline.training.workers.attention import ATTENTION, Segments
from pipeline.training.workers.head import head_logprobs

_NEUTRAL: dict[str, tuple[float | None, ...]] = {
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "output_logit_soft_cap": (None,),
    "logits_scaling": (None, 1),
    "logit_scale": (None, 1),
    "lm_head_multiplier": (None, 1),
}


class Model(nn.Module):
    """A transformers decoder with a head on top; `network` is what transformers made, adapters included."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    @property
    def decoder(self) -> Any:
        """Embedding and layers, without a head."""
        raise NotImplementedError

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers, in order."""
        return list(self.decoder.layers)

    @property
    def vocabulary(self) -> int:
        """Tokens that the embedding knows."""
        return int(self.network.config.vocab_size)

    def multiplied(self) -> list[nn.Parameter]:
        """The matrices that each token is multiplied by: not an embedding, unless it is the head as well."""
        looked_up = {id(p) for m in self.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
        return [p for p in self.parameters() if p.ndim > 1 and id(p) not in looked_up]

    def hidden(self, tokens_BT: Tensor, positions_BT: Tensor, segments: Segments | None, predict_N: Tensor) -> Tensor:
        """The last hidden state [N, E] at the token before each of `predict_N`, indices into the flattened B × T."""
        output = self.decoder(input_ids=tokens_BT, position_ids=positions_BT, use_cache=False, segments=segments)
        states_NE: Tensor = output.last_hidden_state.flatten(0, 1)[predict_N - 1]
        return states_NE


class Policy(Model):
    """A transformers causal model whose forward returns log-probabilities of given tokens."""

    @property
    def decoder(self) -> Any:
        return self.network.get_decoder()

    def multiplied(self) -> list[nn.Parameter]:
        head = self.network.get_output_embeddings().weight
        others = [p for p in super().multiplied() if p is not head]
        return [*others, head]

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        segments: Segments | None,
        predict_N: Tensor,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probability [N] of the tokens at `predict_N` (indices into the flattened B × T), each given its own row
        up to the token before; and the entropy [N] of those predictions, if asked for. Nats.
        """
        hidden_NE = self.hidden(tokens_BT, positions_BT, segments, predict_N)
        head = self.network.get_output_embeddings()
        return head_logprobs(hidden_NE, head.weight, tokens_BT.flatten()[predict_N], temperature, with_entropy)


class Critic(Model):
    """A decoder whose forward returns values: what is still to be earned after the tokens read so far.

    The head is one linear layer that starts at zero, so every value is 0 until something was learned.
    """

    def __init__(self, network: Any) -> None:
        super().__init__(network)
        self.head = nn.Linear(network.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @property
    def decoder(self) -> Any:
        return self.network

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor, segments: Segments | None, predict_N: Tensor) -> Tensor:
        """Value [N] of the tokens before each one at `predict_N` (indices into the flattened B × T), by an fp32 head
        (fp64 for fp64 input).
        """
        hidden_NE = self.hidden(tokens_BT, positions_BT, segments, predict_N)
        exact = torch.promote_types(hidden_NE.dtype, torch.float32)
        return hidden_NE.to(exact) @ self.head.weight[0].to(exact) + self.head.bias.to(exact)


def build(config: ModelConfig, seed: int, kind: Kind = "policy") -> Model:
    """The model of a directory with float32 weights, on the CPU; equal on every rank.

    Random weights depend on the seed alone, and nothing else is random: dropout is off. With `config.lora.rank` the
    policy has adapters, and only they have gradients. Raises `ConfigError` when the directory holds no model that
    transformers knows, or one whose log-probabilities this module would get wrong: its logits are not hidden states
    times the head.
    """
    if not (Path(config.path) / "config.json").is_file():
        raise ConfigError("model.path", config.path, "a directory with config.json")
    options = {"dtype": torch.float32, "attn_implementation": ATTENTION}
    if config.init == "pretrained":
        network = AutoModelForCausalLM.from_pretrained(config.path, **options)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config.path), **options)
    refuse_unsupported(network)
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if kind == "critic":
        if config.lora.rank:
            raise TrainingError("a critic is trained whole: model.lora.rank of its spec must be 0")
        return Critic(network.get_decoder()).train()
    if config.lora.rank:
        from pipeline.training.workers import lora  # peft takes a second to import, and is of no use to others

        lora.add_adapters(network, config.lora, seed)
    return Policy(network).train()


def recompute_activations(model: Model) -> None:
    """Have the backward pass compute each layer's activations again instead of keeping them (Chen et al. 2016)."""
    if not model.decoder.supports_gradient_checkpointing:
        found = type(model.decoder).__name__
        raise ConfigError("training.activation_checkpointing", found, "a model whose layers can be computed again")
    model.decoder.gradient_checkpointing_enable({"use_reentrant": False})


def compile_layers(model: Model) -> None:
    """Compile each layer in place, for all lengths at once: packed lines are as long as their rows happen to be.

    A layer is first compiled for the lengths that it meets, and again, then for any, when others come. All sizes of
    the model stay constants, which `dynamic=True` would not leave them: norms would lose their fast kernels, and a
    number of heads that is not known breaks the graph at the attention.
    """
    torch._dynamo.config.recompile_limit = 32
    for layer in model.layers:
        layer.compile()


def refuse_unsupported(network: Any) -> None:
    """`ConfigError` unless the model's logits are its last hidden states times its head, with plain attention.

    Known keys are named. As others may come, the model also computes a few tokens in its own way, for comparison.
    """
    config = network.config.get_text_config()
    for key, neutral in _NEUTRAL.items():
        if getattr(config, key, None) not in neutral:
            raise _unsupported(f"{key}={getattr(config, key)}")
    head = network.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise _unsupported("a head with a bias (lm_head.bias)")
    network.eval()
    tokens_BT = torch.arange(min(4, config.vocab_size))[None]
    given = {"input_ids": tokens_BT, "position_ids": tokens_BT, "use_cache": False}
    with torch.no_grad():
        hidden = network.get_decoder()(**given).last_hidden_state
        own = network(**given).logits
    if not torch.allclose(own, hidden @ head.weight.T, rtol=1e-3, atol=1e-4):
        raise _unsupported(f"a head of its own ({type(network).__name__})")


def _unsupported(found: str) -> ConfigError:
    expected = "a model whose logits are its hidden states times its head"
    return ConfigError("model.path", found, expected, "choose one without it, such as Qwen or Llama")
