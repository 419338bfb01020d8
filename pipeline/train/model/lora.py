"""Low-rank adapters (LoRA, Hu et al. 2021) on a network, by peft.

Owns which layers get an adapter, the adapters' names, and their directory on disk. Promises that a new adapter changes
no output (its B is zero) and is equal on every rank, that an adapter directory which does not fit raises an error, and
that peft and vLLM load a saved directory. Must not know ranks, optimizers or servers.

    network = add_adapters(network, config.model.lora)                  # layers are replaced in place
    for name, tensor in first_tensors(network, config.model.lora, config.seed):
        dict(network.named_parameters())[name].copy_(tensor)
    trained = {name: p for name, p in network.named_parameters() if is_trained(name)}
    tensors = dict(chain(*(checkpoint_tensors(network, name, parameter) for name, parameter in trained.items())))
    blocks = ((name, 0, tensor) for name, tensor in tensors.items())
    save_adapter(path, WeightLayout.of(tensors.items()), blocks, config.model)

A layer W of the base becomes W + alpha / rank · B A, with A [rank, in] and B [out, rank]; only A and B are trained.
Linear layers are adapted by peft, the experts of a mixture by `expert_lora`.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftConfig
from peft import inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from pipeline.config import LoraConfig, ModelConfig, closest_match
from pipeline.errors import CheckpointError, ConfigError
from pipeline.inference.weight_sync.server_sync import adapter_settings
from pipeline.inference.weight_sync.transports.gloo import WeightLayout
from pipeline.train.model.checkpoint_layout import expert_layers
from pipeline.train.model.expert_lora import (
    ExpertMatrix,
    adapter_parameter,
    adapter_tensors,
    add_expert_adapters,
    expert_matrices,
    expert_tensors,
)
from pipeline.train.model.safetensors_files import Block, write_tensors
from pipeline.train.model.weight_loading import seed_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = "default"
_PREFIX = "base_model.model."
_PLAIN: dict[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "use_rslora": False,
    "lora_bias": False,
    "fan_in_fan_out": False,
}
_EMPTY = ("modules_to_save", "rank_pattern", "alpha_pattern", "layers_to_transform", "layer_replication")


def add_adapters(network: nn.Module, lora: LoraConfig) -> nn.Module:
    """Put an uninitialized adapter on every targeted layer and freeze all other parameters; returns the same network.

    Raises `ConfigError` for a target that is no linear layer or names experts that cannot have adapters, and for a
    `lora.adapter` that is missing or has other settings.
    """
    experts = _targeted_experts(network, lora.targets)
    if lora.adapter:
        _check_settings(_read_settings(Path(lora.adapter)), Path(lora.adapter), lora)
    network.requires_grad_(False)
    if any(name.rpartition(".")[-1] in lora.targets for name in _linear_layers(network)):
        # Peft recognizes a mixture by the network's config and would adapt the tensors of experts by its own method. A
        # shell without a config hides it.
        shell = nn.ModuleDict({"network": network}) if experts else network
        with torch.random.fork_rng(devices=[]):
            inject_adapter_in_model(_peft_config(lora), shell, adapter_name=_NAME)
    _check_layers(network, lora.targets)
    add_expert_adapters(network, experts, lora)
    return network


def first_tensors(network: nn.Module, lora: LoraConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """The initial values of a network's adapters: whole tensors, by parameter name.

    New adapters depend on the seed and the name alone: A is Kaiming-uniform as in peft, B is 0. With `lora.adapter` the
    values are read from that directory: `CheckpointError` if it is incomplete or belongs to another model.
    """
    shapes = {name: parameter.shape for name, parameter in network.named_parameters() if is_trained(name)}
    if lora.adapter:
        yield from _read(network, shapes, Path(lora.adapter))
        return
    for name, shape in shapes.items():
        tensor = torch.zeros(shape)
        if ".lora_A" in name:
            # [X, rank, in] of experts becomes [X · rank, in]: the fan-in is that of one layer.
            rows = tensor.flatten(0, -2)
            nn.init.kaiming_uniform_(rows, a=math.sqrt(5), generator=torch.Generator().manual_seed(seed_of(seed, name)))
        yield name, tensor


def is_trained(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return ".lora_A" in name or ".lora_B" in name


def checkpoint_tensors(network: nn.Module, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The whole parameter `name` of an adapter as tensors of a peft checkpoint: one, or for experts one view each."""
    for key, part in adapter_tensors(network, name, tensor):
        yield _PREFIX + key.replace(f".{_NAME}.", "."), part


def save_adapter(path: Path, layout: WeightLayout, blocks: Iterable[Block], model: ModelConfig) -> None:
    """Write the directory of an adapter for `model.path`, of rows of the tensors of `checkpoint_tensors`."""
    path.mkdir(parents=True, exist_ok=True)
    write_tensors(path, layout, blocks, one_file=WEIGHTS)
    names = [parameter.name for parameter in layout.parameters]
    modules = [target for target in model.lora.targets if any(f".{target}.lora_A." in name for name in names)]
    stacks = [f"experts.{target}" for target in model.lora.targets if target not in modules]
    settings = {"target_modules": modules, "target_parameters": stacks} if stacks else {}
    _peft_config(model.lora, base=model.path, inference_mode=True, **settings).save_pretrained(str(path))


def _peft_config(
    lora: LoraConfig, base: str | None = None, inference_mode: bool = False, **settings: list[str]
) -> PeftConfig:
    return PeftConfig(
        **adapter_settings(lora) | settings,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=inference_mode,
    )


def _linear_layers(network: Any) -> set[str]:
    """The names of the layers that may have an adapter: all linear layers except the head.

    `lm_head` computes log-probabilities from the head's weight alone.
    """
    head = network.get_output_embeddings()
    return {name for name, module in network.named_modules() if isinstance(module, nn.Linear) and module is not head}


def _targeted_experts(network: Any, targets: tuple[str, ...]) -> list[ExpertMatrix]:
    """The targeted matrices of experts; `ConfigError` unless each target can have an adapter.

    Other layers may have the same names as the matrices of experts (such as `gate_proj` of a dense layer), so the
    targets must name all of the experts' matrices or none.
    """
    of_experts, stacked = expert_layers(network), expert_tensors(network)
    named = (of_experts | stacked).intersection(targets)
    matrices = expert_matrices(network) if named else []  # takes seconds for a large model
    adaptable = dict.fromkeys(matrix.name for matrix in matrices)
    known = {name.rpartition(".")[-1] for name in _linear_layers(network)} - of_experts | adaptable.keys()
    wrong = [target for target in targets if target not in known]
    if wrong:
        refused = () if adaptable else (of_experts | stacked).intersection(wrong)
        raise _target_error(wrong, targets, sorted(known), bool(refused))
    chosen = [name for name in adaptable if name in targets]
    if chosen and len(chosen) < len(adaptable):
        others = ",".join(target for target in targets if target not in adaptable)
        expected = f"all layers of the experts ({','.join(adaptable)}), which servers take only together, or none"
        hint = f"add {','.join(name for name in adaptable if name not in chosen)}"
        raise ConfigError(
            "model.lora.targets", ",".join(chosen), expected, f"{hint}, or set {others}" if others else hint
        )
    return matrices if chosen else []


def _target_error(wrong: list[str], targets: tuple[str, ...], known: list[str], experts: bool) -> ConfigError:
    usable = [target for target in targets if target in known]
    if experts:
        expected = "linear layers outside of the experts, which cannot have adapters in this family"
        hint = f"set model.lora.targets=[{','.join(usable)}]" if usable else f"choose from: {', '.join(known)}"
        return ConfigError("model.lora.targets", ",".join(wrong), expected, hint)
    hint = closest_match(wrong[0], known)
    if len(wrong) > 1 and usable:
        hint = f"set model.lora.targets=[{','.join(usable)}]"
    return ConfigError("model.lora.targets", ",".join(wrong), "a linear layer of the model", hint)


def _check_layers(network: nn.Module, targets: tuple[str, ...]) -> None:
    """`ConfigError` if peft put an adapter on a layer that is not linear: it matches targets by the ends of names."""
    for name, module in network.named_modules():
        if isinstance(module, LoraLayer) and not isinstance(module.get_base_layer(), nn.Linear):
            expected = f"names of linear layers; peft puts an adapter on {name}, which is none"
            raise ConfigError("model.lora.targets", ",".join(targets), expected, "leave out the target that names it")


def _read(network: nn.Module, shapes: Mapping[str, torch.Size], directory: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        saved = load_file(directory / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{directory / WEIGHTS} cannot be read: {error}") from error
    parts = {
        name: dict(checkpoint_tensors(network, name, torch.empty(shape, device="meta")))
        for name, shape in shapes.items()
    }
    expected = {key: part.shape for of_name in parts.values() for key, part in of_name.items()}
    present = {key: tensor.shape for key, tensor in saved.items()}
    wrong = sorted(key for key in present.keys() | expected.keys() if present.get(key) != expected.get(key))
    if wrong:
        both = [list(keys[wrong[0]]) if wrong[0] in keys else None for keys in (present, expected)]
        raise CheckpointError(
            f"{directory} is no adapter of this model: {wrong[0]} is {both[0]} there, {both[1]} here "
            f"({len(wrong)} differ); set model.path to the model it was trained on"
        )
    for name, shape in shapes.items():
        yield name, adapter_parameter(name, shape, [saved[key] for key in parts[name]])


def _read_settings(directory: Path) -> dict[str, Any]:
    for name in (CONFIG, WEIGHTS):
        if not (directory / name).is_file():
            raise ConfigError("model.lora.adapter", str(directory), f"a directory with {CONFIG} and {WEIGHTS}")
    try:
        settings: dict[str, Any] = json.loads((directory / CONFIG).read_text())
    except ValueError as error:
        raise CheckpointError(f"{directory / CONFIG} is no JSON: {error}") from error
    return settings


def _check_settings(saved: dict[str, Any], directory: Path, lora: LoraConfig) -> None:
    """`ConfigError` for an adapter with other settings, which is another function or has other shapes."""
    expected = adapter_settings(lora) | _PLAIN
    stacks = [name.rpartition(".")[-1] for name in saved.get("target_parameters") or ()]
    if stacks and isinstance(saved.get("target_modules"), list):
        saved = saved | {"target_modules": [*saved["target_modules"], *stacks]}
    for key, value in expected.items():
        actual = saved.get(key, value if key in _PLAIN else None)
        same = set(actual) == set(value) if isinstance(actual, list) and isinstance(value, list) else actual == value
        if not same:
            raise _mismatch_error(directory, f"{key}={actual!r}", f"{key}={value!r}")
    for key in _EMPTY:
        if saved.get(key):
            raise _mismatch_error(directory, f"{key}={saved[key]!r}", f"no {key}")


def _mismatch_error(directory: Path, actual: str, expected: str) -> ConfigError:
    hint = "make model.lora.rank, alpha and targets those that it was trained with, or choose another adapter"
    return ConfigError("model.lora.adapter", f"{directory} with {actual}", f"an adapter with {expected}", hint)
