"""The sizes of a model, from its config alone.

Owns the counting of parameters and cache. Promises that no weight is read or allocated, and that a size which cannot be
determined for an architecture is 0, not a guess. Must not know ranks, devices, or the use of the sizes
(`pipeline.topology.gpu_memory`).

    sizes_of(config.model)          # Sizes(parameters=4022468096, …)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.config import ModelConfig
from pipeline.config.model_directory import model_directory
from pipeline.errors import ConfigError, RollcallError, one_line
from pipeline.topology.sizes import Sizes
from pipeline.train.model import attention_shapes as shapes
from pipeline.train.model.activation_size import ATTENTION, activations_of
from pipeline.train.model.experts import ADAPTERS, experts_per_token, fused_experts, refuse_unspreadable
from pipeline.train.model.lm_head import CHUNK
from pipeline.train.model.routers import use_exact_routers
from pipeline.train.model.routing_replay import RoutingReplay


def sizes_of(config: ModelConfig) -> Sizes:
    """The sizes of the policy; `ConfigError` for a directory without a model that transformers supports."""
    network = _meta_model(model_directory(config), config)
    with _supported(config):
        return _count(network)


def _count(network: Any) -> Sizes:
    settings, head = network.config.get_text_config(), network.get_output_embeddings().weight
    layer_sizes = [sum(p.numel() for p in layer.parameters()) for layer in network.get_decoder().layers]
    parameters = sum(p.numel() for p in network.parameters())
    activations, selected = activations_of(network)
    return Sizes(
        parameters=parameters,
        trained=sum(p.numel() for p in network.parameters() if p.requires_grad),
        outside_layers=parameters - sum(layer_sizes),
        layer=max(layer_sizes),
        **_experts(network),
        layers=len(layer_sizes),
        hidden=settings.hidden_size,
        vocabulary=head.shape[0],
        head_trained=head.requires_grad,
        logits=CHUNK,
        activations=activations,
        selected=selected,
        **_cache(settings, len(layer_sizes)),
        kv_heads=shapes.kv_heads(settings),
        width=head.dtype.itemsize,
    )


def check_experts(config: ModelConfig, ep: int) -> None:
    """Raise `ConfigError` unless the experts of the policy can be distributed over `ep` ranks (`training.mesh.ep`)."""
    refuse_unspreadable(_meta_model(model_directory(config), config), ep)


def check_routers(config: ModelConfig) -> None:
    """Raise `ConfigError` unless the policy has routers whose choice can be replaced (`training.routing_replay`)."""
    RoutingReplay(_meta_model(model_directory(config), config))


def check_served_adapters(config: ModelConfig) -> None:
    """`ConfigError` for adapters on experts that servers would have to serve."""
    if _adapts_experts(config):
        expected = "attention layers alone where servers take adapters, or a run that merges them"
        raise ConfigError("model.lora.targets", ",".join(config.lora.targets), expected, "set model.lora.merge=true")


def check_client_adapters(config: ModelConfig, ep: int, served: bool) -> None:
    """`ConfigError` for adapters on experts that a client cannot have: spread over `ep` ranks, where what is packed of
    several adapters lies in the order of ranks, or where servers would have to serve them."""
    if config.lora.rank and (served or ep > 1) and _adapts_experts(config):
        expected = "attention layers alone for adapters of clients on experts with servers or training.mesh.ep above 1"
        raise ConfigError("model.lora.targets", ",".join(config.lora.targets), expected, "set train_mlp to false")


def _adapts_experts(config: ModelConfig) -> bool:
    return any(hasattr(module, ADAPTERS) for module in fused_experts(_meta_model(model_directory(config), config)))


def _experts(network: Any) -> dict[str, Any]:
    """The fields of `Sizes` about experts; without fused experts their default, 0."""
    modules: list[Any] = fused_experts(network)
    if not modules:
        return {}
    module_sizes = [sum(p.numel() for p in module.parameters()) for module in modules]
    return {
        "experts": sum(module_sizes),
        "experts_layer": max(module_sizes),
        "experts_of_layer": len(modules[0].down_proj),
        "experts_per_token": experts_per_token(network.config.get_text_config()),
    }


def _meta_model(directory: Path, config: ModelConfig) -> Any:
    """The network in compute type on the meta device, with the adapters of the config."""
    with _supported(config), torch.device("meta"):
        network = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(directory), dtype=getattr(torch, config.dtype), attn_implementation=ATTENTION
        )
        use_exact_routers(network)
        if config.lora.rank:
            from pipeline.train.model import lora  # the import of peft takes a second

            # An adapter to start from has the same size as a new one, and need not be read.
            lora.add_adapters(network, config.lora.model_copy(update={"adapter": ""}))
    return network.train()


@contextmanager
def _supported(config: ModelConfig) -> Iterator[None]:
    """Raise `ConfigError` for any error of transformers: config.json is input, and a mistake raises what the code of
    its family happens to raise."""
    try:
        yield
    except RollcallError:
        raise
    except Exception as error:  # noqa: BLE001 (the boundary to transformers)
        expected = "a model that transformers supports, with a list of layers"
        raise ConfigError("model.path", config.path, expected, one_line(error)[:400]) from None


def _cache(settings: Any, layers: int) -> dict[str, Any]:
    """`kv`, `kv_window` and `window` of `Sizes`: numbers per token in the KV cache of all layers that have one."""
    kinds, size = shapes.layer_kinds(settings, layers), shapes.window(settings)
    windowed = sum(kind in shapes.WINDOWED for kind in kinds) if size else 0
    caching = sum(map(shapes.attends, kinds))
    per_layer = _kv_of_layer(settings)
    return {
        "kv": (caching - windowed) * per_layer,
        "kv_window": windowed * per_layer,
        "window": size if windowed else 0,
    }


def _kv_of_layer(settings: Any) -> int:
    """Numbers per token in the cache of one layer: keys and values of all its heads, or the latent of MLA."""
    latent = int(getattr(settings, "kv_lora_rank", None) or 0)
    if latent:
        return latent + int(getattr(settings, "qk_rope_head_dim", 0))
    return 2 * shapes.kv_heads(settings) * shapes.head_dim(settings)
