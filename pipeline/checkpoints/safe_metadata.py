"""Reading what `torch.distributed.checkpoint` (DCP) wrote without running what is in it.

Owns which names the pickles of a checkpoint may hold: those that DCP itself writes. Promises that a checkpoint which
somebody else wrote can at worst be refused: its metadata builds values of these types and nothing else, and its plain
values are what `torch.load` takes for weights. Its hashes do not promise that, since whoever wrote the files wrote the
hashes too.
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
    """DCP's metadata; `CheckpointError` when the file, called `path` then, holds anything else."""
    try:
        found = _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # broken pickles raise whatever comes
        raise _unexpected_class(path, one_line(error)) from error
    if not isinstance(found, Metadata):
        raise _unexpected_class(path, type(found).__name__)
    return found


def read_value(data: io.BytesIO, name: str) -> Any:
    """A plain value of the checkpoint, called `name` there; `CheckpointError` for what could run code."""
    try:
        return torch.load(data, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise _unexpected_class(name, str(error).partition("\n")[0]) from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _unexpected_class(where: object, found: str) -> CheckpointError:
    said = " ".join(found.split())
    return CheckpointError(
        f"{where} is not what torch.distributed.checkpoint writes ({said}), and nothing of it was run; restore from a "
        "checkpoint that a run of yours wrote"
    )
