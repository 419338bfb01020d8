"""Low-rank adapters (LoRA, Hu et al. 2021) on a network, by peft.

Owns which layers get an adapter, the adapters' names, and their form on disk. Promises that a fresh adapter changes
nothing (its B is zero) and is equal on every rank, that one which does not fit raises instead of starting afresh, and
that what is saved is a directory that peft and vLLM load. Must not know ranks, optimizers or servers.

    network = add_adapters(network, config.model.lora)                  # layers are replaced in place
    for name, tensor in first_tensors(network, config.model.lora, config.seed):
        dict(network.named_parameters())[name].copy_(tensor)
    tensors = {checkpoint_name(name): p for name, p in network.named_parameters() if is_trained(name)}
    save_adapter(path, tensors, config.model)

A layer W of the base becomes W + alpha / rank · B A, with A [rank, in] and B [out, rank]; only A and B are trained.
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

    Raises `ConfigError` for a target that names no linear layer or the layers of experts, and for an adapter to go on
    from that is not there or was made with other settings.
    """
    _check_targets(network, lora.targets)
    if lora.adapter:
        _check_settings(_read_settings(Path(lora.adapter)), Path(lora.adapter), lora)
    with torch.random.fork_rng(devices=[]):
        adapted: nn.Module = inject_adapter_in_model(_peft_config(lora), network, adapter_name=_NAME)
    _check_layers(adapted, lora.targets)
    return adapted


def first_tensors(network: nn.Module, lora: LoraConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """What the adapters of a network start with, whole, by the names of its parameters.

    Fresh ones depend on the seed and their names alone: A is drawn as peft does, B is 0. With `lora.adapter` they are
    those of that directory: `CheckpointError` if it is torn or of another model.
    """
    shapes = {name: parameter.shape for name, parameter in network.named_parameters() if is_trained(name)}
    if lora.adapter:
        yield from _read(shapes, Path(lora.adapter))
        return
    for name, shape in shapes.items():
        tensor = torch.zeros(shape)
        if ".lora_A." in name:
            nn.init.kaiming_uniform_(
                tensor, a=math.sqrt(5), generator=torch.Generator().manual_seed(seed_of(seed, name))
            )
        yield name, tensor


def is_trained(name: str) -> bool:
    """Whether a parameter of a network with adapters belongs to one."""
    return ".lora_A." in name or ".lora_B." in name


def checkpoint_name(name: str) -> str:
    """The name that an adapter's parameter has in a peft checkpoint, from its name in the network."""
    return _PREFIX + name.replace(f".{_NAME}.", ".")


def save_adapter(path: Path, tensors: Mapping[str, Tensor], model: ModelConfig) -> None:
    """Write the directory of an adapter for `model.path`; `tensors` are whole, by `checkpoint_name`."""
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


def _check_targets(network: Any, targets: tuple[str, ...]) -> None:
    """The head is no target: log-probabilities are computed from its weight alone (see `head`). Experts are none yet:
    peft would adapt the one tensor that holds all of a layer, also where shared layers have the same name."""
    head, experts = network.get_output_embeddings(), expert_layers(network)
    linear = {name for name, module in network.named_modules() if isinstance(module, nn.Linear) and module is not head}
    known = sorted({name.rpartition(".")[-1] for name in linear} - experts)
    wrong = [target for target in targets if target not in known]
    if not wrong:
        return
    usable = [target for target in targets if target in known]
    if experts:
        expected = "linear layers outside of the experts, on which adapters are not supported"
        hint = f"set model.lora.targets=[{','.join(usable)}]" if usable else f"choose from: {', '.join(known)}"
        raise ConfigError("model.lora.targets", ",".join(wrong), expected, hint)
    hint = closest_match(wrong[0], known)
    if len(wrong) > 1 and usable:
        hint = f"set model.lora.targets=[{','.join(usable)}]"
    raise ConfigError("model.lora.targets", ",".join(wrong), "a linear layer of the model", hint)


def _check_layers(network: nn.Module, targets: tuple[str, ...]) -> None:
    """Whatever peft makes of the names of targets, adapters are on linear layers only."""
    for name, module in network.named_modules():
        if isinstance(module, LoraLayer) and not isinstance(module.get_base_layer(), nn.Linear):
            expected = f"names of linear layers; peft puts an adapter on {name}, which is none"
            raise ConfigError("model.lora.targets", ",".join(targets), expected, "leave out the target that names it")


def _read(shapes: Mapping[str, torch.Size], directory: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        found = load_file(directory / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{directory / WEIGHTS} cannot be read: {error}") from error
    expected = {checkpoint_name(name): shape for name, shape in shapes.items()}
    there = {name: tensor.shape for name, tensor in found.items()}
    wrong = sorted(name for name in there.keys() | expected.keys() if there.get(name) != expected.get(name))
    if wrong:
        both = [list(names[wrong[0]]) if wrong[0] in names else None for names in (there, expected)]
        raise CheckpointError(
            f"{directory} is no adapter of this model: {wrong[0]} is {both[0]} there, {both[1]} here "
            f"({len(wrong)} differ); set model.path to the model it was trained on"
        )
    return ((name, found[checkpoint_name(name)]) for name in shapes)


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
