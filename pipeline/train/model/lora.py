"""Low-rank adapters (LoRA, Hu et al. 2021) on a network, by peft.

Owns which layers get an adapter, the adapters' names, and their form on disk. Promises that a fresh adapter changes
nothing (its B is zero) and is equal on every rank, that one which does not fit raises instead of starting afresh, and
that what is saved is a directory that peft and vLLM load. Must not know ranks, optimizers or servers.

    network = add_adapters(network, config.model.lora)                  # layers are replaced in place
    for name, tensor in first_tensors(network, config.model.lora, config.seed):
        dict(network.named_parameters())[name].copy_(tensor)
    trained = {name: p for name, p in network.named_parameters() if is_trained(name)}
    save_adapter(path, dict(chain(*(checkpoint_tensors(network, *each) for each in trained.items()))), config.model)

A layer W of the base becomes W + alpha / rank · B A, with A [rank, in] and B [out, rank]; only A and B are trained.
Linear layers are adapted by peft, the experts of a mixture by `expert_lora`.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftConfig
from peft import inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pipeline.config import LoraConfig, ModelConfig, closest_match
from pipeline.errors import CheckpointError, ConfigError
from pipeline.inference.weight_sync.server_sync import adapter_settings
from pipeline.train.model.checkpoint_layout import expert_layers
from pipeline.train.model.expert_lora import (
    ExpertMatrix,
    adapter_tensors,
    add_expert_adapters,
    expert_matrices,
    expert_tensors,
)
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
    """The same network with an adapter on every targeted layer, and all else frozen; they hold no numbers of use yet.

    Raises `ConfigError` for a target that names no linear layer or the layers of experts that can have no adapters, and
    for an adapter to go on from that is not there or was made with other settings.
    """
    experts = _targeted_experts(network, lora.targets)
    if lora.adapter:
        _check_settings(_read_settings(Path(lora.adapter)), Path(lora.adapter), lora)
    network.requires_grad_(False)
    if any(name.rpartition(".")[-1] in lora.targets for name in _linear_layers(network)):
        # Of a mixture peft would adapt the tensors of experts in its own way: it tells one by its config.
        shell = nn.ModuleDict({"network": network}) if experts else network
        with torch.random.fork_rng(devices=[]):
            inject_adapter_in_model(_peft_config(lora), shell, adapter_name=_NAME)
    _check_layers(network, lora.targets)
    add_expert_adapters(network, experts, lora)
    return network


def first_tensors(network: nn.Module, lora: LoraConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """What the adapters of a network start with, whole, by the names of its parameters.

    Fresh ones depend on the seed and their names alone: A is drawn as peft does, B is 0. With `lora.adapter` they are
    those of that directory: `CheckpointError` if it is torn or of another model.
    """
    shapes = {name: parameter.shape for name, parameter in network.named_parameters() if is_trained(name)}
    if lora.adapter:
        yield from _read(network, shapes, Path(lora.adapter))
        return
    for name, shape in shapes.items():
        tensor = torch.zeros(shape)
        if ".lora_A" in name:
            rows = tensor.flatten(0, -2)  # those of an expert are drawn as a layer's are
            nn.init.kaiming_uniform_(rows, a=math.sqrt(5), generator=torch.Generator().manual_seed(seed_of(seed, name)))
        yield name, tensor


def is_trained(name: str) -> bool:
    """Whether a parameter of a network with adapters belongs to one."""
    return ".lora_A" in name or ".lora_B" in name


def checkpoint_tensors(network: nn.Module, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """An adapter's whole parameter of that name in the network as the tensors of a peft checkpoint: one, or of experts
    one for each, which are views."""
    for each, part in adapter_tensors(network, name, tensor):
        yield _PREFIX + each.replace(f".{_NAME}.", "."), part


def save_adapter(path: Path, tensors: Mapping[str, Tensor], model: ModelConfig) -> None:
    """Write the directory of an adapter for `model.path`; `tensors` are those of `checkpoint_tensors`."""
    path.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / WEIGHTS)
    _peft_config(model.lora, base=model.path, inference_mode=True).save_pretrained(str(path))


def _peft_config(lora: LoraConfig, base: str | None = None, inference_mode: bool = False) -> PeftConfig:
    return PeftConfig(
        **adapter_settings(lora),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=inference_mode,
    )


def _linear_layers(network: Any) -> set[str]:
    """The names of those that may have an adapter. The head may not: log-probabilities are computed from its weight
    alone (see `lm_head`)."""
    head = network.get_output_embeddings()
    return {name for name, module in network.named_modules() if isinstance(module, nn.Linear) and module is not head}


def _targeted_experts(network: Any, targets: tuple[str, ...]) -> list[ExpertMatrix]:
    """The matrices of experts that the targets name; `ConfigError` unless each target can have an adapter.

    Layers of other names may be called like those of experts, so a target names all or none of them.
    """
    of_experts, stacked = expert_layers(network), expert_tensors(network)
    named = (of_experts | stacked).intersection(targets)
    matrices = expert_matrices(network) if named else []  # which takes seconds, of a large model
    adaptable = dict.fromkeys(matrix.name for matrix in matrices)
    known = {name.rpartition(".")[-1] for name in _linear_layers(network)} - of_experts | adaptable.keys()
    wrong = [target for target in targets if target not in known]
    if wrong:
        refused = () if adaptable else (of_experts | stacked).intersection(wrong)
        raise _target_error(wrong, targets, sorted(known), bool(refused))
    chosen = [name for name in adaptable if name in targets]
    if chosen and len(chosen) < len(adaptable):
        others = ",".join(target for target in targets if target not in adaptable)
        expected = f"all layers of the experts ({','.join(adaptable)}), which vLLM takes only together, or none"
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
    """Whatever peft makes of the names of targets, adapters are on linear layers only."""
    for name, module in network.named_modules():
        if isinstance(module, LoraLayer) and not isinstance(module.get_base_layer(), nn.Linear):
            expected = f"names of linear layers; peft puts an adapter on {name}, which is none"
            raise ConfigError("model.lora.targets", ",".join(targets), expected, "leave out the target that names it")


def _read(network: nn.Module, shapes: Mapping[str, torch.Size], directory: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        found = load_file(directory / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{directory / WEIGHTS} cannot be read: {error}") from error
    parts = {
        name: dict(checkpoint_tensors(network, name, torch.empty(shape, device="meta")))
        for name, shape in shapes.items()
    }
    expected = {key: part.shape for of_name in parts.values() for key, part in of_name.items()}
    there = {key: tensor.shape for key, tensor in found.items()}
    wrong = sorted(key for key in there.keys() | expected.keys() if there.get(key) != expected.get(key))
    if wrong:
        both = [list(keys[wrong[0]]) if wrong[0] in keys else None for keys in (there, expected)]
        raise CheckpointError(
            f"{directory} is no adapter of this model: {wrong[0]} is {both[0]} there, {both[1]} here "
            f"({len(wrong)} differ); set model.path to the model it was trained on"
        )
    for name, shape in shapes.items():
        yield name, torch.stack([found[key] for key in parts[name]]).view(shape)


def _read_settings(directory: Path) -> dict[str, Any]:
    for name in (CONFIG, WEIGHTS):
        if not (directory / name).is_file():
            raise ConfigError("model.lora.adapter", str(directory), f"a directory with {CONFIG} and {WEIGHTS}")
    try:
        settings: dict[str, Any] = json.loads((directory / CONFIG).read_text())
    except ValueError as error:
        raise CheckpointError(f"{directory / CONFIG} is no JSON: {error}") from error
    return settings


def _check_settings(found: dict[str, Any], directory: Path, lora: LoraConfig) -> None:
    """An adapter of other settings would be another function, or of other shapes."""
    wanted = adapter_settings(lora) | _PLAIN
    for key, value in wanted.items():
        have = found.get(key, value if key in _PLAIN else None)
        same = set(have) == set(value) if isinstance(have, list) and isinstance(value, list) else have == value
        if not same:
            raise _mismatch_error(directory, f"{key}={have!r}", f"{key}={value!r}")
    for key in _EMPTY:
        if found.get(key):
            raise _mismatch_error(directory, f"{key}={found[key]!r}", f"no {key}")


def _mismatch_error(directory: Path, found: str, expected: str) -> ConfigError:
    hint = "make model.lora.rank, alpha and targets those that it was trained with, or choose another adapter"
    return ConfigError("model.lora.adapter", f"{directory} with {found}", f"an adapter with {expected}", hint)
