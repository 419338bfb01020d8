"""The models: a causal language model that answers with log-probabilities, and a critic that answers with values.

Owns how a model directory becomes a network, and what is computed of a micro-batch. Promises that a model whose
log-probabilities would be wrong is refused before it has weights. Knows transformers; must not know ranks, losses or
optimizers.

    model = outline(config, kind)                 # shapes alone, on the meta device
    …shard it…
    fill(model, Weights(config), config, seed, device)

Notation: B lines of T tokens, N tokens to predict, E hidden size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.config import ModelConfig
from pipeline.errors import ConfigError, TrainingError
from pipeline.train.model.checkpoint_layout import CheckpointLayout, Tensors
from pipeline.train.model.cpu_offload import local
from pipeline.train.model.experts import experts_per_token, use_grouped_experts
from pipeline.train.model.lm_head import head_logprobs
from pipeline.train.model.packed_attention import ATTENTION, Segments
from pipeline.train.model.rope import fix_frequencies
from pipeline.train.model.row_shards import fill_shard
from pipeline.train.model.supported_architectures import refuse_unloadable, refuse_unsupported
from pipeline.train.model.weight_loading import WeightLoader
from pipeline.train.worker_spec import ModelKind

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""What configs call the experts of a layer."""


class DecoderModel(nn.Module):
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
        return int(self.network.config.get_text_config().vocab_size)

    def multiplied(self) -> list[nn.Parameter]:
        """The matrices that each token is multiplied by: not an embedding, unless it is the head as well."""
        looked_up = {id(p) for m in self.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
        return [p for p in self.parameters() if p.ndim > 1 and id(p) not in looked_up]

    @property
    def flops_per_token(self) -> int:
        """Floating-point operations of a forward and backward pass for one token: 2 for each parameter that is
        multiplied, 2 more for the gradient of what came in, 2 more for its own gradient if it is trained.

        Of a mixture's experts those that a token is sent to count. Attention between tokens and all that is no matrix
        product are left out.
        """
        taken = _experts_taken(self)
        return round(sum((6 if p.requires_grad else 4) * p.numel() * taken.get(id(p), 1.0) for p in self.multiplied()))

    def hidden(self, tokens_BT: Tensor, positions_BT: Tensor, segments: Segments | None, before_N: Tensor) -> Tensor:
        """The last hidden state [N, E] at each of `before_N`, indices into the flattened B × T."""
        output = self.decoder(input_ids=tokens_BT, position_ids=positions_BT, use_cache=False, segments=segments)
        # Places repeat where rows share tokens: of the ways to look them up, this one adds their gradients up in order.
        return embedding(before_N, output.last_hidden_state.flatten(0, 1))


def _experts_taken(model: DecoderModel) -> dict[int, float]:
    """The share of a mixture's experts that a token is sent to, by the id of each parameter of experts: one matrix for
    each along its first dimension, or parameters of modules in a list."""
    settings = model.network.config.get_text_config()
    counts = {count for name in _EXPERTS if isinstance(count := getattr(settings, name, None), int) and count > 1}
    taken = experts_per_token(settings)
    if not counts or not taken:
        return {}
    stacked = {id(p): taken / p.shape[0] for p in model.parameters() if p.ndim == 3 and p.shape[0] in counts}
    lists = [m for name, m in model.named_modules() if name.endswith(".experts") and isinstance(m, nn.ModuleList)]
    listed = {id(p): taken / len(each) for each in lists if len(each) in counts for p in each.parameters()}
    return stacked | listed


class PolicyModel(DecoderModel):
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
        before_N: Tensor,
        targets_N: Tensor,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probability [N] of `targets_N`, each after the token at `before_N` (indices into the flattened B × T) and
        those before it in its row; and the entropy [N] of those predictions, if asked for. Nats.
        """
        hidden_NE = self.hidden(tokens_BT, positions_BT, segments, before_N)
        head = self.network.get_output_embeddings()
        return head_logprobs(hidden_NE, head.weight, targets_N, temperature, with_entropy)


class Critic(DecoderModel):
    """A decoder whose forward returns values: what is still to be earned after the tokens read so far.

    The head is one linear layer that starts at zero, so every value is 0 until something was learned.
    """

    def __init__(self, network: Any) -> None:
        super().__init__(network)
        self.head = nn.Linear(network.config.get_text_config().hidden_size, 1)

    @property
    def decoder(self) -> Any:
        return self.network

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor, segments: Segments | None, before_N: Tensor) -> Tensor:
        """Value [N] of the tokens of a row up to each of `before_N` (indices into the flattened B × T), by an fp32 head
        (fp64 for fp64 input).
        """
        hidden_NE = self.hidden(tokens_BT, positions_BT, segments, before_N)
        exact = torch.promote_types(hidden_NE.dtype, torch.float32)
        return hidden_NE.to(exact) @ self.head.weight[0].to(exact) + self.head.bias.to(exact)


def build_on_meta(config: ModelConfig, kind: ModelKind = "policy") -> DecoderModel:
    """The model of a directory, float32, whose parameters are on the meta device; buffers have their values.

    Nothing in it is random: dropout is off. With `config.lora.rank` the policy has adapters, and only they have
    gradients. Raises `ConfigError` when the directory holds no model that transformers knows, or one whose
    log-probabilities this module would get wrong: its logits are not hidden states times the head.
    """
    if not (Path(config.path) / "config.json").is_file():
        raise ConfigError("model.path", config.path, "a directory with config.json")
    with _parameters_on_meta():
        settings = AutoConfig.from_pretrained(config.path)
        refuse_unloadable(settings)
        network = AutoModelForCausalLM.from_config(settings, dtype=torch.float32, attn_implementation=ATTENTION)
        use_grouped_experts(network)
        fix_frequencies(network, config.max_length)
        refuse_unsupported(network)
        for module in network.modules():
            _without_dropout(module)
        if kind == "critic":
            if config.lora.rank:
                raise TrainingError("a critic is trained whole: model.lora.rank of its spec must be 0")
            return Critic(network.get_decoder()).train()
        if config.lora.rank:
            _lora().add_adapters(network, config.lora)
        _freeze_unused(network)
    return PolicyModel(network).train()


def _freeze_unused(network: Any) -> None:
    """No tower for images gets a gradient, as rows are tokens alone; so none gets moments."""
    used = {id(p) for module in (network.get_decoder(), network.get_output_embeddings()) for p in module.parameters()}
    for parameter in network.parameters():
        if id(parameter) not in used:
            parameter.requires_grad_(False)


def _without_dropout(module: nn.Module) -> None:
    """Dropout is a module of its own in some families, and in others a probability that a layer keeps."""
    if isinstance(module, nn.Dropout):
        module.p = 0.0
    for name, value in list(vars(module).items()):
        if "dropout" in name and isinstance(value, float):
            setattr(module, name, 0.0)


def materialize(
    model: DecoderModel, weights: WeightLoader, config: ModelConfig, seed: int, device: torch.device
) -> None:
    """Bring an outline, sharded or not, to the device, and give it its first weights; see `WeightLoader.fill`.

    A value head starts at 0. Raises what `lora.first_tensors` raises, and `ConfigError` if a parameter got no numbers.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers(remove_duplicate=False)}
    model.to_empty(device=device)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        buffer.copy_(buffers[name])
    model.network.tie_weights()
    targets = checkpoint_tensors(model, weights.form)
    filled = {id(targets[name]) for name in weights.fill(targets, seed)}
    if isinstance(model, Critic):
        for parameter in model.head.parameters():
            local(parameter.detach()).zero_()
            filled.add(id(parameter))
    if config.lora.rank:
        named = dict(model.network.named_parameters())
        for name, tensor in _lora().first_tensors(model.network, config.lora, seed):
            fill_shard(named[name], tensor)
            filled.add(id(named[name]))
    weights.refuse_unfilled({name for name, p in model.network.named_parameters() if id(p) not in filled})


def build_model(config: ModelConfig, seed: int, kind: ModelKind = "policy") -> DecoderModel:
    """`build_on_meta` and `materialize` at once: the whole model, on the CPU."""
    model = build_on_meta(config, kind)
    materialize(model, WeightLoader(config), config, seed, torch.device("cpu"))
    return model


def checkpoint_tensors(model: DecoderModel, form: CheckpointLayout) -> Tensors:
    """What a model directory holds of a model, by its names in the network of a directory: without adapters, and
    without a value head, but with the buffers that last."""
    prefix = form.decoder if isinstance(model, Critic) else ""
    found = {
        prefix + name.replace(".base_layer.", "."): tensor
        for name, tensor in model.network.state_dict(keep_vars=True).items()
        if ".lora_" not in name
    }
    return {name: tensor for name, tensor in found.items() if name in form.tensors}


@torch.no_grad()
def copy_parameters(source: DecoderModel, target: DecoderModel) -> None:
    """Give a model the parameters of another of the same architecture, which is sharded alike; what is copied:
    see `_copied`. Raises `TrainingError` if the source lacks one."""
    whole = isinstance(source, PolicyModel) and isinstance(target, PolicyModel)
    targets, sources = (dict(_copied(each, whole)) for each in (target, source))
    missing = [name for name, p in targets.items() if name not in sources or _shape(sources[name]) != _shape(p)]
    if missing:
        expected = f"{missing[0]} of the same shape, spread alike"
        raise TrainingError(f"parameters cannot be copied: the other model has no {expected}")
    for name, parameter in targets.items():
        local(parameter).copy_(local(sources[name]))


def _copied(model: DecoderModel, whole: bool) -> Iterator[tuple[str, Tensor]]:
    """All parameters, or those of the decoder without adapters, under names that are alike in both models; and the
    buffers that last, as training may change them."""
    if whole:
        yield from _lasting(model)
        return
    for name, tensor in _lasting(model.decoder):
        if "lora_" not in name:
            yield name.replace(".base_layer.", "."), tensor


def _lasting(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    for prefix, owner in module.named_modules():
        names = owner._buffers.keys() - owner._non_persistent_buffers_set
        yield from ((f"{prefix}.{leaf}", each) for leaf in sorted(names) if (each := owner._buffers[leaf]) is not None)


def _shape(parameter: Tensor) -> tuple[torch.Size, torch.Size, object]:
    return parameter.shape, local(parameter).shape, getattr(parameter, "placements", None)


def recompute_activations(model: DecoderModel) -> None:
    """Have the backward pass compute each layer's activations again instead of keeping them (Chen et al. 2016)."""
    if not model.decoder.supports_gradient_checkpointing:
        found = type(model.decoder).__name__
        raise ConfigError("training.activation_checkpointing", found, "a model whose layers can be computed again")
    model.decoder.gradient_checkpointing_enable({"use_reentrant": False})


def compile_layers(model: DecoderModel) -> None:
    """Compile each layer in place, for all lengths at once: packed lines are as long as their rows happen to be.

    A layer is first compiled for the lengths that it meets, and again, then for any, when others come. All sizes of
    the model stay constants, which `dynamic=True` would not leave them: norms would lose their fast kernels, and a
    number of heads that is not known breaks the graph at the attention.
    """
    torch._dynamo.config.recompile_limit = 32
    for layer in model.layers:
        layer.compile()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules that are made meanwhile have parameters without numbers, but their buffers: `torch.device("meta")` would
    lose these, and what a rotary table holds is in no file."""
    register = nn.Module.register_parameter

    def register_shape(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_shape  # type: ignore[method-assign, assignment]
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _lora() -> Any:
    """Imported where it is needed only: peft takes a second, and runs without adapters do without it."""
    from pipeline.train.model import lora

    return lora
