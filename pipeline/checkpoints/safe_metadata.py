"""Safe unpickling of the files of `torch.distributed.checkpoint` (DCP).

The metadata's pickle may name only the classes that DCP itself writes, and plain values are loaded with
`weights_only=True`. So a forged checkpoint can run no code; it is refused. The hashes of a checkpoint do not protect
against forgery, since its author has written the hashes too.
"""

import io
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata

from pipeline.errors import CheckpointError, one_line

_CLASSES = (
    *(metadata.Metadata, metadata.MetadataIndex, metadata.StorageMeta, metadata.TensorProperties),
    *(metadata.TensorStorageMetadata, metadata.BytesStorageMetadata, metadata.ChunkStorageMetadata),
    *(metadata._MEM_FORMAT_ENCODING, filesystem._StorageInfo),
)
_ALLOWED: dict[tuple[str, str], Any] = {(kind.__module__, kind.__qualname__): kind for kind in _CLASSES} | {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
}


def read_metadata(data: bytes, path: str) -> Metadata:
    """DCP's metadata in `data`. `CheckpointError`, which names the file `path`, for any other content."""
    try:
        value = _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # a broken pickle can raise any exception
        raise _unexpected_class(path, one_line(error)) from error
    if not isinstance(value, Metadata):
        raise _unexpected_class(path, type(value).__name__)
    return value


def read_value(data: io.BytesIO, name: str) -> Any:
    """The plain value `name` of the checkpoint. `CheckpointError` for a pickle that could run code."""
    try:
        return torch.load(data, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise _unexpected_class(name, str(error).partition("\n")[0]) from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        # A dtype is pickled by its name in torch, such as torch.bfloat16.
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it needs {module}.{name}")


def _unexpected_class(where: object, reason: str) -> CheckpointError:
    one_liner = " ".join(reason.split())
    return CheckpointError(
        f"{where} is not what torch.distributed.checkpoint writes ({one_liner}), and nothing of it was run; restore "
        "from a checkpoint that a run of yours wrote"
    )
