"""Tensors in the safetensors files of a directory, read and written piece by piece.

Owns which files of a model directory hold its weights, and the form of those that are written. Promises that reading
brings into memory what is asked for and no page of a file beside it, and that writing holds one tensor at a time. Must
not know what the tensors are.

    files = TensorFiles(directory)
    files.keys, files.shape(key), files.slice(key)[100:200]

    write_tensors(directory, layout, tensors)           # tensors come one by one, in the order of the layout

A file is the length of its header in eight bytes, little-endian; the header, JSON with types, shapes and places,
padded with blanks to a multiple of eight; and the tensors' bytes, one after the other.
"""

import json
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeline.errors import CheckpointError
from pipeline.weights.wire import Layout, Parameter

FILE_BYTES = 4 << 30
"""A file is no larger than this, unless one tensor is."""
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_TYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


class TensorFiles:
    """The weights of a model directory, by key; files are opened once and stay open."""

    def __init__(self, directory: Path) -> None:
        """Read the headers; `CheckpointError` if a file is missing or torn."""
        self._directory = directory
        self._opened: dict[str, Any] = {}
        for name in _names(directory):
            try:
                opened: Any = safe_open(directory / name, "pt", backend="pread")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{directory / name} cannot be read: {error}") from error
            self._opened |= dict.fromkeys(opened.keys(), opened)

    @property
    def keys(self) -> list[str]:
        return list(self._opened)

    def slice(self, key: str) -> Any:
        """The tensor of that key, of which what it is indexed with is read."""
        return self._opened[key].get_slice(key)

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self.slice(key).get_shape())

    def whole(self, key: str) -> Tensor:
        tensor: Tensor = self._opened[key].get_tensor(key)
        return tensor


def write_tensors(directory: Path, layout: Layout, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write tensors of this layout, and for more than one file the index that names them; all are on disk then.

    Each tensor may change, or go, as soon as the next one is asked for.
    """
    files = list(_cut(layout.parameters, FILE_BYTES))
    names = [_WHOLE] if len(files) == 1 else [f"model-{n:05}-of-{len(files):05}.safetensors" for n in _count(files)]
    coming = iter(tensors)
    for name, parameters in zip(names, files, strict=True):
        _write_file(directory / name, parameters, coming)
    if len(files) > 1:
        places = {p.name: name for name, parameters in zip(names, files, strict=True) for p in parameters}
        index = {"metadata": {"total_size": sum(p.bytes for p in layout.parameters)}, "weight_map": places}
        (directory / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _count(files: list[Any]) -> range:
    return range(1, len(files) + 1)


def _names(directory: Path) -> list[str]:
    """The one file of all weights, or those that the index names: what transformers reads, and in that order."""
    if (directory / _WHOLE).is_file():
        return [_WHOLE]
    try:
        index = json.loads((directory / _INDEX).read_text())
        return sorted(set(index["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        found = " ".join(str(error).split())
        raise CheckpointError(f"{directory} has no {_WHOLE}, and its {_INDEX} cannot be read: {found}") from error


def _cut(parameters: Iterable[Parameter], most: int) -> Iterator[list[Parameter]]:
    """In order, by files of at most `most` bytes."""
    part: list[Parameter] = []
    for parameter in parameters:
        if part and sum(p.bytes for p in part) + parameter.bytes > most:
            yield part
            part = []
        part.append(parameter)
    yield part


def _write_file(path: Path, parameters: list[Parameter], tensors: Iterator[tuple[str, Tensor]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for parameter in parameters:
        start, end = end, end + parameter.bytes
        place = {"dtype": _TYPES[parameter.dtype], "shape": parameter.shape, "data_offsets": [start, end]}
        header[parameter.name] = place
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for parameter in parameters:
            name, tensor = next(tensors)
            if Parameter.of(name, tensor) != parameter:
                raise CheckpointError(f"{path}: {name!r} came where the header says {parameter}")
            file.write(_bytes(tensor))
            del tensor
        file.flush()
        os.fsync(file.fileno())


def _bytes(tensor: Tensor) -> memoryview:
    array: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return memoryview(array)
