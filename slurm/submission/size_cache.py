"""The sizes of models, remembered across commands.

Owns the key and the file of a model's `Sizes`, in this user's cache. Counting them imports torch and transformers,
which takes seconds of each submission and dry run. The result depends on nothing but the key's parts: the model's
config, the keys of `model.*`, the releases of the libraries, and this project's code. An unreadable or damaged file
counts as absent, and a cache that cannot be written costs the next command the same seconds.
"""

import hashlib
import json
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import msgspec

from pipeline.config import ModelConfig
from pipeline.config.model_directory import model_directory
from pipeline.config.packaged_model import cache_folder
from pipeline.topology.sizes import Sizes
from pipeline.utils import shared_files
from pipeline.utils.source_digest import source_digest

_LIBRARIES = ("torch", "transformers", "peft")
_SOURCES = ("pipeline/train/model", "pipeline/topology", "pipeline/config")


def remembered_sizes(model: ModelConfig, count: Callable[[ModelConfig], Sizes]) -> Sizes:
    """The sizes of `model`: of an earlier command with the same key, or else those that `count` returns.

    Raises what `count` raises, such as `ConfigError` for a model that transformers does not support; no failure is
    remembered. `ConfigError` for a `model.path` without a model.
    """
    file = cache_folder() / "sizes" / f"{_key(model)}.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=Sizes)
    except (OSError, msgspec.MsgspecError):
        pass  # absent or damaged: counted below
    sizes = count(model)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        shared_files.write_atomic(file, msgspec.json.encode(sizes))
    except OSError:
        pass  # a home directory without space or permission: the next command counts again
    return sizes


def _key(model: ModelConfig) -> str:
    """A digest of everything that decides the sizes. Any difference in a part gives another key."""
    parts = {
        "config": (model_directory(model) / "config.json").read_text(),
        "keys": model.model_dump(mode="json", exclude={"path"}),
        "releases": [_release(library) for library in _LIBRARIES],
        "sources": source_digest(_SOURCES),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _release(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return ""
