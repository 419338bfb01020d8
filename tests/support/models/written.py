"""Whole tensors, written as a rank writes blocks of rows."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from pipeline.config import ModelConfig
from pipeline.inference.weight_sync.transports.gloo import WeightLayout
from pipeline.train.model.lora import save_adapter
from pipeline.train.model.safetensors_files import Block


def whole_blocks(tensors: Mapping[str, Tensor]) -> Iterator[Block]:
    return ((name, 0, tensor) for name, tensor in tensors.items())


def save_whole_adapter(path: Path, tensors: Mapping[str, Tensor], model: ModelConfig) -> None:
    save_adapter(path, WeightLayout.of(tensors.items()), whole_blocks(tensors), model)
