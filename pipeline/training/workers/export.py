"""A trained model as files that others load.

Owns the names under which parameters leave the trainer, and the directory that transformers, peft and vLLM read: whole
weights, or an adapter alone, beside the tokenizer of the model they came from. Must not know ranks or sharding.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline.config import LoraConfig, ModelConfig


def public_name(name: str, lora: LoraConfig) -> str:
    """The name of a network's parameter in a Hugging Face checkpoint; with adapters, in one of peft."""
    return _adapters().checkpoint_name(name) if lora.rank else name


def write_model(path: Path, network: Any, tensors: Mapping[str, Tensor], config: ModelConfig) -> None:
    """Write the directory; `tensors` are whole, by `public_name`."""
    _copy_tokenizer(Path(config.path), path)
    if config.lora.rank:
        _adapters().save_adapter(path, tensors, config)
    else:
        network.save_pretrained(path, state_dict=dict(tensors))


def _adapters() -> Any:
    """Imported where it is needed only: peft takes a second, and runs without adapters do without it."""
    from pipeline.training.workers import lora

    return lora


def _copy_tokenizer(source: Path, target: Path) -> None:
    """Every file of a model directory except its weights and its config, which the export writes itself."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        weights = file.suffix in (".safetensors", ".bin") or file.name.endswith(".index.json")
        if file.is_file() and not weights and file.name != "config.json":
            shutil.copy2(file, target / file.name)
