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
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from pipeline.config import ModelConfig
from pipeline.errors import ConfigError
from pipeline.inference.weight_sync.transports.gloo import WeightLayout
from pipeline.train.model.safetensors_files import Block, TensorFiles, write_tensors

_GENERATION = "generation_config.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
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
    key = "torch_dtype" if "torch_dtype" in settings else "dtype"
    nested = {name: value for name, value in settings.items() if isinstance(value, dict)}
    typed = {
        name: _typed_settings(value, dtype)
        for name, value in nested.items()
        if name.endswith("_config") and ("dtype" in value or "torch_dtype" in value)
    }
    return settings | typed | {key: dtype}


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
