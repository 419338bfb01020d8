"""Tensors in the safetensors files of a directory, read and written piece by piece.

Owns the list of a model directory's weight files, and the format of written ones. Promises that a read loads only the
requested rows into memory, that a write holds one block of rows at a time, and that an error of the disk becomes a
`CheckpointError` with the file and a remedy. Must not know the content of tensors.

    files = TensorFiles(directory)
    files.keys, files.shape(key), files.slice(key)[100:200]

    write_tensors(directory, layout, blocks)            # an iterable of rows of the layout's tensors, in any order

The format of a file: the length of the header in eight bytes, little-endian; the header, JSON with types, shapes and
offsets, padded with blanks to a multiple of eight; and the tensors' bytes, one after the other.
"""

import json
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

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
_RESUME = "free disk space there, or repair the disk, and resume: then the file is written again"
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
    is missing, torn or unreadable."""

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
        """The tensor of a key, which reads only the rows it is indexed with."""
        path, opened = self._opened[key]
        return TensorSlice(path, opened.get_slice(key))

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self.slice(key).get_shape())

    def parameter(self, key: str) -> Parameter:
        """The name, type and shape of the tensor of a key; `CheckpointError` for a type that cannot be written."""
        path, opened = self._opened[key]
        stored = opened.get_slice(key).get_dtype()
        dtype = next((name for name, code in _TYPES.items() if code == stored), None)
        if dtype is None:
            raise CheckpointError(f"{path} holds {key} as {stored}, which cannot be written to an export")
        return Parameter(key, dtype, self.shape(key))

    def whole(self, key: str) -> Tensor:
        path, opened = self._opened[key]
        with _named(path, "read", _COPY):
            tensor: Tensor = opened.get_tensor(key)
        return tensor


class TensorSlice:
    """One tensor of a file, which reads only the rows it is indexed with."""

    def __init__(self, path: Path, opened: Any) -> None:
        self._path, self._opened = path, opened

    def get_shape(self) -> list[int]:
        shape: list[int] = self._opened.get_shape()
        return shape

    def __getitem__(self, index: Any) -> Tensor:
        with _named(self._path, "read", _COPY):
            tensor: Tensor = self._opened[index]
        return tensor


Block = tuple[str, int, Tensor]
"""Some rows of a tensor: its name, the index of the first row, and the rows; or a scalar."""


def write_tensors(directory: Path, layout: WeightLayout, blocks: Iterable[Block], one_file: str = "") -> None:
    """Write tensors of this layout, and for more than one file their index; on return all are on disk. With `one_file`,
    a single file of this name.

    Rows may come in any order, each once. A block may change or be freed as soon as the iterable is asked for the next
    one. `CheckpointError` if the disk refuses a write.
    """
    parts = [[*layout.parameters]] if one_file else list(_split_into_files(layout.parameters, FILE_BYTES))
    names = [f"model-{n:05}-of-{len(parts):05}.safetensors" for n in range(1, len(parts) + 1)]
    names = names if len(parts) > 1 else [one_file or _WHOLE]
    with ExitStack() as stack:
        file_of = dict[str, _WrittenFile]()
        for name, parameters in zip(names, parts, strict=True):
            file = stack.enter_context(_WrittenFile(directory / name, parameters))
            file_of |= dict.fromkeys((parameter.name for parameter in parameters), file)
        for name, first, rows in blocks:
            file_of[name].write(name, first, rows)
            del rows  # before the next are made
    if len(parts) > 1:
        weight_map = {p.name: name for name, parameters in zip(names, parts, strict=True) for p in parameters}
        index = {"metadata": {"total_size": sum(p.bytes for p in layout.parameters)}, "weight_map": weight_map}
        with _named(directory / _INDEX, "written", _RESUME):
            (directory / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _names(directory: Path) -> list[str]:
    """The names of the weight files: the single file, or those of the index, with the precedence of transformers."""
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
    """A block whose disk errors become `CheckpointError` with the file and a remedy."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be {done}: {_first_line(error)}; {hint}") from error


def _first_line(error: Exception) -> str:
    """An error as one line, without the path, which the message already has."""
    return " ".join((getattr(error, "strerror", None) or str(error)).split())


def _split_into_files(parameters: Iterable[Parameter], most: int) -> Iterator[list[Parameter]]:
    """The parameters of each file, in order, at most `most` bytes per file."""
    part: list[Parameter] = []
    for parameter in parameters:
        if part and sum(p.bytes for p in part) + parameter.bytes > most:
            yield part
            part = []
        part.append(parameter)
    yield part


class _WrittenFile:
    """A file whose tensors arrive in blocks of rows: a context, at whose end all of them are on disk."""

    def __init__(self, path: Path, parameters: list[Parameter]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for parameter in parameters:
            start, end = end, end + parameter.bytes
            entry = {"dtype": _TYPES[parameter.dtype], "shape": parameter.shape, "data_offsets": [start, end]}
            header[parameter.name] = entry
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._path, self._header = path, struct.pack("<Q", len(text)) + text
        self._parameters = {parameter.name: parameter for parameter in parameters}
        self._starts = {name: len(self._header) + header[name]["data_offsets"][0] for name in self._parameters}
        self._missing = {parameter.name: parameter.bytes for parameter in parameters}

    def __enter__(self) -> Self:
        with _named(self._path, "written", _RESUME):
            self._file = self._path.open("wb")
            self._file.write(self._header)
        return self

    def write(self, name: str, first: int, rows: Tensor) -> None:
        parameter = self._parameters[name]
        whole = Parameter(name, str(rows.dtype).removeprefix("torch."), (*parameter.shape[:1], *rows.shape[1:]))
        if whole != parameter:
            raise self._wrong(f"{parameter} where {whole} came")
        with _named(self._path, "written", _RESUME):
            self._file.seek(self._starts[name] + (first * rows[0].nbytes if first else 0))
            self._file.write(_bytes(rows))
        self._missing[name] -= rows.nbytes

    def __exit__(self, failed: type[BaseException] | None, *others: object) -> None:
        with _named(self._path, "written", _RESUME), self._file:
            if failed is not None:
                return
            self._file.flush()
            os.fsync(self._file.fileno())
        for name, missing in self._missing.items():
            if missing:
                raise self._wrong(f"{missing} bytes of {name} more than came")

    def _wrong(self, difference: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path} is incomplete: its header has {difference}; this is a mistake of Rollcall's, not of yours: "
            "report it with model.path"
        )


def _bytes(tensor: Tensor) -> memoryview:
    array: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return memoryview(array)
