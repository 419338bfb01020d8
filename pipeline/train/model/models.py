"""The models: a causal language model that returns log-probabilities, and a critic that returns values.

Owns the construction of a network from a model directory, and the forward pass of a micro-batch. Promises that a model
whose log-probabilities would be wrong is refused before it has weights. Uses transformers; must not know ranks, losses
or optimizers.

    model = build_on_meta(config, kind)           # shapes only, on the meta device
    …shard it…
    materialize(model, WeightLoader(config), config, seed, device)

Notation: B lines of T tokens, N tokens to predict, E hidden size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.config import ModelConfig
from pipeline.errors import ConfigError, TrainingError
from pipeline.train.model.checkpoint_layout import CheckpointLayout, Tensors
from pipeline.train.model.cpu_offload import local
from pipeline.train.model.experts import compile_arrived, experts_per_token, use_grouped_experts
from pipeline.train.model.lm_head import head_logprobs
from pipeline.train.model.logit_rule import LogitRule, logit_rule
from pipeline.train.model.model_flops import ModelFlops, attention_pairs
from pipeline.train.model.packed_attention import ATTENTION, Segments
from pipeline.train.model.rope import fix_frequencies
from pipeline.train.model.routers import use_exact_routers
from pipeline.train.model.row_shards import fill_shard
from pipeline.train.model.supported_architectures import refuse_unloadable, refuse_unsupported
from pipeline.train.model.weight_loading import WeightLoader
from pipeline.train.worker_spec import ModelKind

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of configs for the number of experts of a layer."""


class DecoderModel(nn.Module):
    """A transformers decoder with a head; `network` is the transformers model, including adapters."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    @property
    def decoder(self) -> Any:
        """The embedding and the layers, without a head."""
        raise NotImplementedError

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers, in order."""
        return list(self.decoder.layers)

    @property
    def vocabulary(self) -> int:
        """Number of token ids of the embedding."""
        return int(self.network.config.get_text_config().vocab_size)

    @property
    def head_weight(self) -> nn.Parameter:
        """The matrix of the head; perhaps also that of the embedding."""
        raise NotImplementedError

    def multiplied(self) -> list[nn.Parameter]:
        """The matrices of the decoder that each token is multiplied by: no embedding, and no head."""
        looked_up = {id(p) for m in self.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
        others = looked_up | {id(self.head_weight)}
        return [p for p in self.decoder.parameters() if p.ndim > 1 and id(p) not in others]

    @property
    def flops(self) -> ModelFlops:
        """Operations of a forward and backward pass: for each multiplied parameter 2, 2 more for the gradient of the
        input, and 2 more for the parameter's gradient if it is trained (Kaplan et al. 2020).

        A mixture's experts count by the fraction that a token is routed to. The gradient of the input is counted for
        all matrices, though the first ones of a frozen model need none.
        """
        active = _active_fractions(self)
        settings = self.network.config.get_text_config()
        return ModelFlops(
            token=sum(_operations(p) * active.get(id(p), 1.0) for p in self.multiplied()),
            prediction=_operations(self.head_weight),
            pairs=attention_pairs(settings, len(self.layers)),
        )

    def hidden(self, tokens_BT: Tensor, positions_BT: Tensor, segments: Segments | None, before_N: Tensor) -> Tensor:
        """The last hidden state [N, E] at each of `before_N`, indices into the flattened B × T."""
        output = self.decoder(input_ids=tokens_BT, position_ids=positions_BT, use_cache=False, segments=segments)
        # [B, T, E] → [B · T, E] → [N, E]. Indices repeat if rows share tokens; the backward pass of `embedding` sums
        # their gradients in a fixed order, which indexing does not.
        return embedding(before_N, output.last_hidden_state.flatten(0, 1))


def _operations(parameter: nn.Parameter) -> int:
    return (6 if parameter.requires_grad else 4) * parameter.numel()


def _active_fractions(model: DecoderModel) -> dict[int, float]:
    """The fraction of a mixture's experts that a token is routed to, by the id of each parameter of experts: stacked
    along the first dimension, or in a list of modules."""
    settings = model.network.config.get_text_config()
    counts = {count for name in _EXPERTS if isinstance(count := getattr(settings, name, None), int) and count > 1}
    active = experts_per_token(settings)
    if not counts or not active:
        return {}
    stacked = {id(p): active / p.shape[0] for p in model.parameters() if p.ndim == 3 and p.shape[0] in counts}
    lists = [m for name, m in model.named_modules() if name.endswith(".experts") and isinstance(m, nn.ModuleList)]
    listed = {id(p): active / len(experts) for experts in lists if len(experts) in counts for p in experts.parameters()}
    return stacked | listed


class PolicyModel(DecoderModel):
    """A transformers causal model whose forward returns log-probabilities of given tokens."""

    @property
    def decoder(self) -> Any:
        return self.network.get_decoder()

    @property
    def head_weight(self) -> nn.Parameter:
        return cast(nn.Parameter, self.network.get_output_embeddings().weight)

    @cached_property
    def logit_rule(self) -> LogitRule:
        """How the family scales and caps its logits."""
        return logit_rule(self.network.config.get_text_config())

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        segments: Segments | None,
        before_N: Tensor,
        targets: Tensor,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probability of each of `targets`, predicted from the tokens of its row up to `before_N` (indices into the
        flattened B × T): [N], or of K targets each [N, K]; and with `with_entropy` the entropy [N] of each prediction.
        Nats.
        """
        hidden_NE = self.hidden(tokens_BT, positions_BT, segments, before_N)
        head = self.network.get_output_embeddings()
        return head_logprobs(hidden_NE, head.weight, targets, temperature, with_entropy, self.logit_rule)


class Critic(DecoderModel):
    """A decoder whose forward returns values: the expected return after the tokens read so far.

    The head is one linear layer initialized to zero, so every value is 0 before the first update.
    """

    def __init__(self, network: Any) -> None:
        super().__init__(network)
        self.head = nn.Linear(network.config.get_text_config().hidden_size, 1)

    @property
    def decoder(self) -> Any:
        return self.network

    @property
    def head_weight(self) -> nn.Parameter:
        return cast(nn.Parameter, self.head.weight)

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor, segments: Segments | None, before_N: Tensor) -> Tensor:
        """Value [N] of a row's tokens up to each of `before_N` (indices into the flattened B × T), by an fp32 head
        (fp64 for fp64 input).
        """
        hidden_NE = self.hidden(tokens_BT, positions_BT, segments, before_N)
        exact = torch.promote_types(hidden_NE.dtype, torch.float32)
        return hidden_NE.to(exact) @ self.head.weight[0].to(exact) + self.head.bias.to(exact)  # [N, E] · [E] → [N]


def build_on_meta(config: ModelConfig, kind: ModelKind = "policy") -> DecoderModel:
    """The model of a directory in float32, with parameters on the meta device and buffers with values.

    Dropout is off, so nothing is random. With `config.lora.rank` the policy has adapters, and only they are trained.
    Raises `ConfigError` if the directory has no model that transformers supports, or one whose logits are not hidden
    states times the head, since this module would compute wrong log-probabilities.
    """
    if not (Path(config.path) / "config.json").is_file():
        raise ConfigError("model.path", config.path, "a directory with config.json")
    with _parameters_on_meta():
        settings = AutoConfig.from_pretrained(config.path)
        refuse_unloadable(settings)
        network = AutoModelForCausalLM.from_config(settings, dtype=torch.float32, attn_implementation=ATTENTION)
        use_grouped_experts(network)
        use_exact_routers(network)
        fix_frequencies(network, config.max_length)
        refuse_unsupported(network)
        for module in network.modules():
            _without_dropout(module)
        if kind != "policy":
            if config.lora.rank:
                raise TrainingError("a critic is trained whole: model.lora.rank of its spec must be 0")
            return Critic(network.get_decoder()).train()
        if config.lora.rank:
            _lora().add_adapters(network, config.lora)
        _freeze_unused(network)
    return PolicyModel(network).train()


def store_frozen(model: DecoderModel, dtype: torch.dtype, trained: bool) -> None:
    """Store the parameters of a model on the meta device in `dtype`, the compute type, if they have no gradients; with
    `trained` false, all of them.

    Passes gather parameters in the compute type anyway, so no result changes. Trained parameters stay in float32, to
    which an optimizer step adds changes below the precision of 16 bits.
    """
    for parameter in model.parameters():
        if not (trained and parameter.requires_grad):
            parameter.data = parameter.data.to(dtype)


def _freeze_unused(network: Any) -> None:
    """Freeze parameters outside of decoder and head, such as a vision tower: rows are tokens only, so these would get
    no gradients, and need no moments."""
    used = {id(p) for module in (network.get_decoder(), network.get_output_embeddings()) for p in module.parameters()}
    for parameter in network.parameters():
        if id(parameter) not in used:
            parameter.requires_grad_(False)


def _without_dropout(module: nn.Module) -> None:
    """Set a module's dropout to 0: some families have `nn.Dropout` modules, others a probability as an attribute."""
    if isinstance(module, nn.Dropout):
        module.p = 0.0
    for name, value in list(vars(module).items()):
        if "dropout" in name and isinstance(value, float):
            setattr(module, name, 0.0)


def materialize(
    model: DecoderModel, weights: WeightLoader, config: ModelConfig, seed: int, device: torch.device
) -> None:
    """Allocate a model from `build_on_meta`, sharded or not, on the device, and fill it with its initial weights; see
    `WeightLoader.fill`.

    A value head starts at 0. Raises errors of `lora.first_tensors`, and `ConfigError` if a parameter got no values.
    """
    # `to_empty` allocates buffers too, without their values.
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
    """The tensors of a model that are in a model directory, by their names there: persistent buffers included, adapters
    and a value head excluded."""
    prefix = form.decoder if isinstance(model, Critic) else ""
    tensors = {
        # peft renames the module of an adapted matrix to `base_layer`.
        prefix + name.replace(".base_layer.", "."): tensor
        for name, tensor in model.network.state_dict(keep_vars=True).items()
        if ".lora_" not in name
    }
    return {name: tensor for name, tensor in tensors.items() if name in form.tensors}


@torch.no_grad()
def copy_parameters(source: DecoderModel, target: DecoderModel) -> None:
    """Copy the parameters of a model (`_copied`) to another of the same architecture and sharding. Raises
    `TrainingError` if the source lacks one."""
    whole = isinstance(source, PolicyModel) and isinstance(target, PolicyModel)
    targets, sources = (dict(_copied(model, whole)) for model in (target, source))
    missing = [name for name, p in targets.items() if name not in sources or _shape(sources[name]) != _shape(p)]
    if missing:
        expected = f"{missing[0]} of the same shape and sharding"
        raise TrainingError(f"parameters cannot be copied: the other model has no {expected}")
    for name, parameter in targets.items():
        local(parameter).copy_(local(sources[name]))


def _copied(model: DecoderModel, whole: bool) -> Iterator[tuple[str, Tensor]]:
    """All parameters, or the decoder's without adapters, with names that are equal in both models; and the persistent
    buffers, since training may change them."""
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
        yield from (
            (f"{prefix}.{leaf}", buffer) for leaf in sorted(names) if (buffer := owner._buffers[leaf]) is not None
        )


def _shape(parameter: Tensor) -> tuple[torch.Size, torch.Size, object]:
    """Of the whole parameter and of this rank's part, and how it is sharded; None if the part is the whole, whether
    FSDP manages it or, as a frozen base, does not."""
    whole, part = parameter.shape, local(parameter).shape
    return whole, part, None if part == whole else getattr(parameter, "placements", None)


def compile_layers(model: DecoderModel) -> None:
    """Compile each layer in place, for all lengths, since the length of a packed line varies with its rows.

    A layer is first compiled for its first length, and at a second one for all lengths.
    """
    # Not `dynamic=True`: that would make sizes of the model symbolic too. Norms would lose their fast kernels, and a
    # symbolic number of heads breaks the graph at the attention.
    torch._dynamo.config.recompile_limit = 32
    for layer in model.layers:
        layer.compile()
    compile_arrived(model.network)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """A block in which new modules get parameters on the meta device, and buffers with values.

    `torch.device("meta")` would create buffers without values, and no file contains those of a rotary table.
    """
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
    """The module `lora`, imported at its first use: the import of peft takes a second, and most runs do not need it."""
    from pipeline.train.model import lora

    return lora
