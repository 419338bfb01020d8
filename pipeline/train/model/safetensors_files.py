"""Tensors in the safetensors files of a directory, read and written piece by piece.

Owns which files of a model directory hold its weights, and the form of those that are written. Promises that reading
brings into memory what is asked for and no page of a file beside it, that writing holds one tensor at a time, and that
what a disk refuses is a `CheckpointError` with the file and the mend. Must not know what the tensors are.

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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeline.errors import CheckpointError
from pipeline.inference.weight_sync.transports.gloo import Parameter, WeightLayout

FILE_BYTES = 4 << 30
"""A file is no larger than this, unless one tensor is."""
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_COPY = "copy the whole model to that directory again, or set model.path to one that is whole"
_PROVIDE = (
    "model.path must hold all weights as safetensors: copy the whole model there, have transformers convert older "
    "forms (save_pretrained), or ask for random weights (model.init=random)"
)
_RESUME = "make room there, or mend the disk, and resume: then it is written anew"
_TYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


class TensorFiles:
    """The weights of a model directory, by key; files are opened once and stay open. `CheckpointError` for a file that
    is missing or torn, or that the disk gives no more."""

    def __init__(self, directory: Path) -> None:
        """Read the headers."""
        self._opened: dict[str, tuple[Path, Any]] = {}
        for name in _names(directory):
            path = directory / name
            with _named(path, "read", _COPY):
                opened: Any = safe_open(path, "pt", backend="pread")
            self._opened |= dict.fromkeys(opened.keys(), (path, opened))

    @property
    def keys(self) -> list[str]:
        return list(self._opened)

    def slice(self, key: str) -> "TensorSlice":
        """The tensor of that key, of which what it is indexed with is read."""
        path, opened = self._opened[key]
        return TensorSlice(path, opened.get_slice(key))

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self.slice(key).get_shape())

    def parameter(self, key: str) -> Parameter:
        """The name, type and shape of that tensor; `CheckpointError` for a type that could not be written again."""
        path, opened = self._opened[key]
        stored = opened.get_slice(key).get_dtype()
        dtype = next((name for name, each in _TYPES.items() if each == stored), None)
        if dtype is None:
            raise CheckpointError(f"{path} holds {key} as {stored}, which cannot be written to an export")
        return Parameter(key, dtype, self.shape(key))

    def whole(self, key: str) -> Tensor:
        path, opened = self._opened[key]
        with _named(path, "read", _COPY):
            tensor: Tensor = opened.get_tensor(key)
        return tensor


class TensorSlice:
    """One tensor of a file; reads what it is indexed with."""

    def __init__(self, path: Path, opened: Any) -> None:
        self._path, self._opened = path, opened

    def get_shape(self) -> list[int]:
        shape: list[int] = self._opened.get_shape()
        return shape

    def __getitem__(self, index: Any) -> Tensor:
        with _named(self._path, "read", _COPY):
            tensor: Tensor = self._opened[index]
        return tensor


def write_tensors(directory: Path, layout: WeightLayout, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write tensors of this layout, and for more than one file the index that names them; all are on disk then.

    Each tensor may change, or go, as soon as the next one is asked for. `CheckpointError` if the disk does not take it.
    """
    files = list(_split_into_files(layout.parameters, FILE_BYTES))
    names = [_WHOLE] if len(files) == 1 else [f"model-{n:05}-of-{len(files):05}.safetensors" for n in _count(files)]
    coming = iter(tensors)
    for name, parameters in zip(names, files, strict=True):
        with _named(directory / name, "written", _RESUME):
            _write_file(directory / name, parameters, coming)
    if len(files) > 1:
        places = {p.name: name for name, parameters in zip(names, files, strict=True) for p in parameters}
        index = {"metadata": {"total_size": sum(p.bytes for p in layout.parameters)}, "weight_map": places}
        with _named(directory / _INDEX, "written", _RESUME):
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
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{directory} has no {_WHOLE}, and its {_INDEX} cannot be read: {_first_line(error)}; {_PROVIDE}"
        ) from error
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{directory / _INDEX} has no weight_map from tensors to files; {_COPY}") from error


@contextmanager
def _named(path: Path, done: str, hint: str) -> Iterator[None]:
    """What the disk refuses, with the file and the mend."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be {done}: {_first_line(error)}; {hint}") from error


def _first_line(error: Exception) -> str:
    """On one line; without the path, which the message has."""
    return " ".join((getattr(error, "strerror", None) or str(error)).split())


def _split_into_files(parameters: Iterable[Parameter], most: int) -> Iterator[list[Parameter]]:
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
                found = f"{path} is not whole: {name!r} came where its header says {parameter}"
                raise CheckpointError(
                    f"{found}; this is a mistake of Rollcall's, not of yours: report it with model.path"
                )
            file.write(_bytes(tensor))
            del tensor
        file.flush()
        os.fsync(file.fileno())


def _bytes(tensor: Tensor) -> memoryview:
    array: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return memoryview(array)
