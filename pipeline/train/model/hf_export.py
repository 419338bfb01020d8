"""Export of a trained model as a directory for transformers, peft and vLLM.

Owns the exported names of parameters, and the directory: whole weights, or an adapter alone, with the tokenizer of the
base model. Promises that the config is that of the trained model, except for the type of the weights; that tensors of
the base which the trainer does not train, such as a vision tower, are exported unchanged; and that a model which cannot
be exported is refused before training. Must not know ranks or sharding.
"""

import copy
import json
import shutil
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, GenerationConfig

from pipeline.config import ModelConfig
from pipeline.errors import ConfigError
from pipeline.inference.weight_sync.transports.gloo import WeightLayout
from pipeline.train.batching.padding_token import padding_token
from pipeline.train.model.safetensors_files import Block, TensorFiles, write_tensors

_GENERATION = "generation_config.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_BIAS = "head.bias"
_OWN_CODE = ("config.json", "adapter_config.json")


def adapter_tensors(network: Any, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a peft checkpoint for an adapter's whole parameter `name` of the network."""
    tensors: Iterator[tuple[str, Tensor]] = _adapters().checkpoint_tensors(network, name, tensor)
    return tensors


def write_model(
    path: Path,
    network: Any,
    layout: WeightLayout,
    blocks: Iterable[Block],
    config: ModelConfig,
    untrained: Collection[str] = (),
) -> None:
    """Write the directory; `blocks` are rows of the tensors of `layout`.

    Tensors of the base's files with a key in `untrained` are copied in their type.
    """
    path.mkdir(parents=True, exist_ok=True)
    write_settings(path, network, config)
    if config.lora.travels_alone:
        _adapters().save_adapter(path, layout, blocks, config)
        return
    if untrained:
        files = TensorFiles(Path(config.path))
        layout = WeightLayout((*layout.parameters, *(files.parameter(key) for key in untrained)))
        blocks = chain(blocks, ((key, 0, files.whole(key)) for key in untrained))
    write_tensors(path, layout, blocks)


def write_settings(path: Path, network: Any, config: ModelConfig) -> None:
    """Write the directory without weights: the tokenizer, and for a whole model its config.

    The base's `generation_config.json` is copied as a file, since transformers refuses to save some valid ones, such as
    a temperature without `do_sample`.
    """
    source = Path(config.path)
    _copy_tokenizer(source, path)
    if config.lora.travels_alone:
        return
    if config.init == "random":
        _typed(network.config, config.dtype, type(network).__name__).to_json_file(path / "config.json")
    else:
        settings = json.loads((source / "config.json").read_text())
        settings.setdefault("architectures", [type(network).__name__])
        (path / "config.json").write_text(json.dumps(_typed_settings(settings, config.dtype), indent=2) + "\n")
    if network.can_generate() and not (source / _GENERATION).is_file():
        # Older models have the sampling parameters in their config.
        generation = GenerationConfig.from_pretrained(source, config_file_name="config.json", _from_model_config=True)
        generation.to_json_file(path / _GENERATION, keys_to_pop=["compile_config"])


def refuse_unwritable(network: Any, config: ModelConfig) -> None:
    """Raise `ConfigError` if the model's export would fail at the end of training: tries it without weights."""
    with TemporaryDirectory() as folder:
        try:
            write_settings(Path(folder), network, config)
        except (OSError, ValueError, TypeError) as error:
            reason = " ".join(str(error).split())
            expected = "a model whose config and tokenizer can be exported with its trained weights"
            raise ConfigError("model.path", config.path, expected, reason) from error


def write_reward_model(
    path: Path, network: Any, layout: WeightLayout, blocks: Iterable[Block], config: ModelConfig
) -> None:
    """Write a decoder with a head for one number as transformers' sequence classifier with one label.

    `blocks` are rows of the tensors of `layout`, with their names in memory. The bias of the head is left out: it is
    the same for all texts, and the classifier has none.
    """
    path.mkdir(parents=True, exist_ok=True)
    _copy_tokenizer(Path(config.path), path)
    settings = _typed(network.config, config.dtype, _classifier(network.config).__name__)
    settings.num_labels = 1
    settings.get_text_config().pad_token_id = padding_token(settings)
    settings.to_json_file(path / "config.json")
    parameters = (replace(p, name=_score_name(p.name)) for p in layout.parameters if p.name != _BIAS)
    named = ((_score_name(name), first, rows) for name, first, rows in blocks if name != _BIAS)
    write_tensors(path, WeightLayout(tuple(parameters)), named)


def refuse_unwritable_score(network: Any, config: ModelConfig, converted: bool) -> None:
    """Raise `ConfigError` if transformers has no sequence classifier for the model, or if the tensors of its files are
    `converted` in memory."""
    if converted or _classifier(network.config) is None:
        expected = "a family with a sequence classifier in transformers and without experts, for a reward model"
        raise ConfigError("model.path", config.path, expected, "choose another model, such as one of Qwen3 or Llama")


def _classifier(config: Any) -> Any:
    """transformers' class for sequence classification with this config; None without one."""
    return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)


def _score_name(name: str) -> str:
    """The name of a critic's tensor in a sequence classifier."""
    return "score.weight" if name == "head.weight" else f"model.{name}"


def _typed(config: Any, dtype: str, architecture: str) -> Any:
    """The network's config with the exported weights' type; in memory it has the float32 of the master weights."""
    typed = copy.deepcopy(config)
    typed.architectures = [architecture]
    for part in (typed, *(getattr(typed, name, None) for name in typed.sub_configs)):
        if part is not None:
            part.dtype = dtype
    return typed


def _typed_settings(settings: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The base's config.json with the exported weights' type. Everything else is unchanged, since the trained network
    may be only a part of the model in the files."""
    keys = settings.keys() & {"dtype", "torch_dtype"} or {"dtype"}  # transformers reads either, and prefers the first
    nested = {name: value for name, value in settings.items() if isinstance(value, dict)}
    typed = {
        name: _typed_settings(value, dtype)
        for name, value in nested.items()
        if name.endswith("_config") and ("dtype" in value or "torch_dtype" in value)
    }
    return settings | typed | dict.fromkeys(sorted(keys), dtype)


def _adapters() -> Any:
    """The module `lora`, imported at its first use: the import of peft takes a second, and most runs do not need it."""
    from pipeline.train.model import lora

    return lora


def _copy_tokenizer(source: Path, target: Path) -> None:
    """Copy every file of a model directory except weights of any format, and configs that are generated."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        weights = file.suffix in _WEIGHTS or file.name.endswith(".index.json")
        if file.is_file() and not weights and file.name not in _OWN_CODE:
            shutil.copy2(file, target / file.name)
