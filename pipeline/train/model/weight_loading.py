"""The initial weights of a model: those of its directory, or random ones.

Owns the filling of a model that has only shapes. Promises that a rank reads and stores its own rows, plus temporarily
one tensor, or the tensors of one conversion, such as its experts of a layer; that the values do not depend on the
number of ranks; and that missing and unexpected tensors of the directory raise an error before any training. Must not
know optimizers, nor the sharding of models.

    weights = WeightLoader(config)                # reads headers only
    weights.fill(tensors, seed)                   # sharded or not, on any device
"""

import hashlib
import logging
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline.config import ModelConfig
from pipeline.errors import ConfigError
from pipeline.train.model.checkpoint_layout import CheckpointLayout, MergedTensor, Tensors
from pipeline.train.model.cpu_offload import give_back_heap
from pipeline.train.model.row_shards import SomeRows, fill_shard, is_source_of, rows_here
from pipeline.train.model.safetensors_files import TensorFiles

log = logging.getLogger(__name__)

_NAMED = 5
_LARGE = 1 << 20
_COPY = "copy the whole model there again, with the config.json that belongs to it"


class WeightLoader:
    """Fills models with their initial weights, from a directory or a seed.

    Attributes:
        form: the layout of tensors in the network and in the files.
    """

    def __init__(self, config: ModelConfig) -> None:
        """Read the headers of the files. Raises `ConfigError` if the directory has tensors that are not in the model;
        `CheckpointError` if its files cannot be read."""
        self._path = config.path
        self._files = TensorFiles(Path(config.path)) if config.init != "random" else None
        self.form = CheckpointLayout(Path(config.path), self._files.keys if self._files else ())
        self._refuse("no tensors but those of the model in its config.json", "also", self.form.unexpected_keys)
        if self.form.untrained:
            count, example = len(self.form.untrained), self.form.untrained[0]
            log.info("%d tensors of %s are not trained; exports have them unchanged: %s …", count, self._path, example)

    def fill(self, targets: Tensors, seed: int) -> set[str]:
        """Fill each of `targets`, by name in the network, with its rows; returns the names of the filled ones.

        Random values depend on the seed and the name alone. Raises `ConfigError` if the directory lacks a tensor, has
        one of another shape, or has two different versions of a tied tensor.
        """
        sources = self._read(self._files, targets) if self._files else self._draw(seed)
        filled = set()
        for name, source in sources:
            if name in targets:
                self._refuse_other_shape(name, source, targets[name])
                fill_shard(targets[name], source)
                filled.add(name)
            del source  # released before the next one is read
            if name in targets and targets[name].nbytes >= _LARGE:
                # glibc does not return freed blocks below 32 MiB, and the next tensor may not fit into the holes.
                give_back_heap()
        self._refuse("every tensor of the model", "not", set(self.form.missing(filled)) & targets.keys())
        for name, key in self.form.duplicate_keys.items():
            if self._files and name in targets and not is_source_of(targets[name], self._files.slice(key)):
                hint = "set tie_word_embeddings to false in its config.json if they are meant to differ"
                raise ConfigError("model.path", self._path, f"{self.form.direct[name]} and {key} to be equal", hint)
        return filled & targets.keys()

    def refuse_unfilled(self, names: Collection[str]) -> None:
        """Raise `ConfigError` for parameters without initial values, whose memory is uninitialized."""
        self._refuse("every parameter of the model", "not", names)

    def _draw(self, seed: int) -> Iterator[tuple[str, Any]]:
        return self.form.init_weights(lambda name: seed_of(seed, name))

    def _read(self, files: TensorFiles, targets: Tensors) -> Iterator[tuple[str, Any]]:
        for name, key in self.form.direct.items():
            yield name, files.slice(key)
        for merged in self.form.merged:
            if not set(merged.names).isdisjoint(targets):
                yield from self._convert(files, merged, targets).items()

    def _convert(self, files: TensorFiles, merged: MergedTensor, targets: Tensors) -> dict[str, Tensor | SomeRows]:
        """The network's tensors of a conversion; of stacked experts only those of this rank are read."""
        self._refuse("every tensor of the model", "not", self.form.keys_of(merged) - merged.patterns.keys())
        try:
            if not merged.stacked:
                return {**self.form.convert(merged, files.whole)}
            own, count = rows_here(targets[merged.names[0]]), min(map(len, merged.keys.values()))
            # A rank without experts converts one anyway, for the shapes.
            rows = slice(own.start, own.stop) if own.start < own.stop else slice(0, 1)
            converted = self.form.convert(merged, files.whole, rows)
            return {name: SomeRows(tensor, rows.start, count) for name, tensor in converted.items()}
        except (RuntimeError, ValueError, IndexError) as error:
            shapes = ", ".join(f"{key} {list(files.shape(key))}" for key in list(merged.patterns)[:_NAMED])
            expected = f"tensors that make {merged.names[0]}, not {shapes}"
            raise ConfigError("model.path", self._path, expected, _COPY) from error

    def _refuse(self, expected: str, there: str, names: Collection[str]) -> None:
        if names:
            named = ", ".join(sorted(names)[:_NAMED])
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            raise ConfigError("model.path", self._path, f"{expected}; {there} in its files: {named}{more}", _COPY)

    def _refuse_other_shape(self, name: str, source: Any, target: Tensor) -> None:
        shape = list(source.shape if isinstance(source, Tensor) else source.get_shape())
        if shape != list(target.shape):
            expected = f"{name} to be {list(target.shape)}, as in its config.json, not {shape}"
            raise ConfigError("model.path", self._path, expected, _COPY)


def seed_of(seed: int, name: str) -> int:
    """The seed of the tensor `name`: a hash, so that similar seeds and names give unrelated random numbers."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") >> 1
