"""A trained model as files that others load.

Owns the names under which parameters leave the trainer, and the directory that transformers, peft and vLLM read: whole
weights, or an adapter alone, beside the tokenizer of the model they came from. Promises that the settings beside the
weights are those of the model that was trained, but for the type of the weights; that tensors of its files which the
trainer leaves out, such as a vision tower, are exported unchanged; and that what is needed is there before anything is
trained, not only at the end. Must not know ranks or sharding.
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
from pipeline.train.model.safetensors_files import TensorFiles, write_tensors

_GENERATION = "generation_config.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_OWN_CODE = ("config.json", "adapter_config.json")


def adapter_tensors(network: Any, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """An adapter's whole parameter of that name in the network as the tensors of a checkpoint of peft."""
    found: Iterator[tuple[str, Tensor]] = _adapters().checkpoint_tensors(network, name, tensor)
    return found


def write_model(
    path: Path,
    network: Any,
    layout: WeightLayout,
    tensors: Iterable[tuple[str, Tensor]],
    config: ModelConfig,
    untrained: Collection[str] = (),
) -> None:
    """Write the directory; `tensors` come whole, one by one, of the type `config.dtype`, as `layout` says.

    Tensors of the model's own files whose keys are `untrained` are copied, in the type that they have there.
    """
    path.mkdir(parents=True, exist_ok=True)
    write_settings(path, network, config)
    if config.lora.travels_alone:
        _adapters().save_adapter(path, dict(tensors), config)
        return
    if untrained:
        files = TensorFiles(Path(config.path))
        layout = WeightLayout((*layout.parameters, *(files.parameter(key) for key in untrained)))
        tensors = chain(tensors, ((key, files.whole(key)) for key in untrained))
    write_tensors(path, layout, tensors)


def write_settings(path: Path, network: Any, config: ModelConfig) -> None:
    """Write all of the directory but the weights: the tokenizer, and for a whole model its config.

    What the model's directory says of sampling is copied as it is. transformers would rather not save some of what it
    loads, such as a temperature without `do_sample`.
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
        # Older models say in their config how to sample.
        said = GenerationConfig.from_pretrained(source, config_file_name="config.json", _from_model_config=True)
        said.to_json_file(path / _GENERATION, keys_to_pop=["compile_config"])


def refuse_unwritable(network: Any, config: ModelConfig) -> None:
    """`ConfigError` if the model could be trained, but not written at the end: tried out, without weights."""
    with TemporaryDirectory() as folder:
        try:
            write_settings(Path(folder), network, config)
        except (OSError, ValueError, TypeError) as error:
            found = " ".join(str(error).split())
            expected = "a model whose settings and tokenizer can be written again beside its trained weights"
            raise ConfigError("model.path", config.path, expected, found) from error


def _typed(config: Any, dtype: str, architecture: str) -> Any:
    """The network's config as that of weights of this type: in memory it is the master weights' float32."""
    typed = copy.deepcopy(config)
    typed.architectures = [architecture]
    for each in (typed, *(getattr(typed, name, None) for name in typed.sub_configs)):
        if each is not None:
            each.dtype = dtype
    return typed


def _typed_settings(settings: dict[str, Any], dtype: str) -> dict[str, Any]:
    """A config.json as that of weights of this type; all else stays as the model's author wrote it, since the network
    may be a part of what the files hold."""
    key = "torch_dtype" if "torch_dtype" in settings else "dtype"
    nested = {name: value for name, value in settings.items() if isinstance(value, dict)}
    typed = {
        name: _typed_settings(value, dtype)
        for name, value in nested.items()
        if name.endswith("_config") and ("dtype" in value or "torch_dtype" in value)
    }
    return settings | typed | {key: dtype}


def _adapters() -> Any:
    """Imported where it is needed only: peft takes a second, and runs without adapters do without it."""
    from pipeline.train.model import lora

    return lora


def _copy_tokenizer(source: Path, target: Path) -> None:
    """Every file of a model directory except its weights, in whatever form, and the configs that are written anew."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        weights = file.suffix in _WEIGHTS or file.name.endswith(".index.json")
        if file.is_file() and not weights and file.name not in _OWN_CODE:
            shutil.copy2(file, target / file.name)
