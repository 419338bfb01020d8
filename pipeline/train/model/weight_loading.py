"""A model's first weights: those of its directory, or random ones.

Owns how a model that has shapes alone gets its numbers. Promises that a rank reads and keeps its own rows, beside at
most one tensor, or those that are made together, as its experts of a layer are; that every number is the same on any
number of ranks; and that none is made up: tensors that the directory lacks, or has too many, are named before anything
is trained. Must not know optimizers, nor how models are sharded.

    weights = Weights(config)                     # reads headers only
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
    """Where a model's first weights come from.

    Attributes:
        form: which tensors they are, in the network and in files.
    """

    def __init__(self, config: ModelConfig) -> None:
        """Raises `ConfigError` if the directory has tensors that the model has no place for; `CheckpointError` if its
        files cannot be read."""
        self._path = config.path
        self._files = TensorFiles(Path(config.path)) if config.init != "random" else None
        self.form = CheckpointLayout(Path(config.path), self._files.keys if self._files else ())
        self._refuse("no tensors but those of the model in its config.json", "also", self.form.unexpected_keys)
        if self.form.untrained:
            count, example = len(self.form.untrained), self.form.untrained[0]
            log.info("%d tensors of %s are not trained; exports have them unchanged: %s …", count, self._path, example)

    def fill(self, targets: Tensors, seed: int) -> set[str]:
        """Give each of `targets`, by their names in the network, its rows; returns the names of those that got some.

        Random ones depend on the seed and the names alone. Raises `ConfigError` if the directory lacks some, has some
        of another shape, or holds two unlike versions of a tensor that is tied.
        """
        sources = self._read(self._files, targets) if self._files else self._draw(seed)
        filled = set()
        for name, source in sources:
            if name in targets:
                self._refuse_other_shape(name, source, targets[name])
                fill_shard(targets[name], source)
                filled.add(name)
            del source  # before the next is made
            if name in targets and targets[name].nbytes >= _LARGE:
                give_back_heap()  # glibc keeps what is below 32 MiB, in holes that the next may not fit into
        self._refuse("every tensor of the model", "not", set(self.form.missing(filled)) & targets.keys())
        for name, key in self.form.twice.items():
            if self._files and name in targets and not is_source_of(targets[name], self._files.slice(key)):
                hint = "set tie_word_embeddings to false in its config.json if they are meant to differ"
                raise ConfigError("model.path", self._path, f"{self.form.direct[name]} and {key} to be equal", hint)
        return filled & targets.keys()

    def refuse_unfilled(self, names: Collection[str]) -> None:
        """Raises `ConfigError` if any parameters were given no numbers: they hold whatever their memory held."""
        self._refuse("every parameter of the model", "not", names)

    def _draw(self, seed: int) -> Iterator[tuple[str, Any]]:
        return self.form.drawn(lambda name: seed_of(seed, name))

    def _read(self, files: TensorFiles, targets: Tensors) -> Iterator[tuple[str, Any]]:
        for name, key in self.form.direct.items():
            yield name, files.slice(key)
        for fused in self.form.fused:
            if not set(fused.names).isdisjoint(targets):
                yield from self._convert(files, fused, targets).items()

    def _convert(self, files: TensorFiles, fused: MergedTensor, targets: Tensors) -> dict[str, Tensor | SomeRows]:
        """What `fused` makes; of stacked experts only those of this rank are read."""
        self._refuse("every tensor of the model", "not", self.form.keys_of(fused) - fused.patterns.keys())
        try:
            if not fused.stacked:
                return {**self.form.convert(fused, files.whole)}
            mine, count = rows_here(targets[fused.names[0]]), min(map(len, fused.keys.values()))
            rows = slice(mine.start, mine.stop) if mine.start < mine.stop else slice(0, 1)  # a rank may have none
            made = self.form.convert(fused, files.whole, rows)
            return {name: SomeRows(tensor, rows.start, count) for name, tensor in made.items()}
        except (RuntimeError, ValueError, IndexError) as error:
            shapes = ", ".join(f"{key} {list(files.shape(key))}" for key in list(fused.patterns)[:_NAMED])
            expected = f"tensors that make {fused.names[0]}, not {shapes}"
            raise ConfigError("model.path", self._path, expected, _COPY) from error

    def _refuse(self, expected: str, there: str, names: Collection[str]) -> None:
        if names:
            named = ", ".join(sorted(names)[:_NAMED])
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            raise ConfigError("model.path", self._path, f"{expected}; {there} in its files: {named}{more}", _COPY)

    def _refuse_other_shape(self, name: str, source: Any, target: Tensor) -> None:
        found = list(source.shape if isinstance(source, Tensor) else source.get_shape())
        if found != list(target.shape):
            expected = f"{name} to be {list(target.shape)}, as its config.json says, not {found}"
            raise ConfigError("model.path", self._path, expected, _COPY)


def seed_of(seed: int, name: str) -> int:
    """A seed for the random numbers of what is called `name`: near seeds and names give unlike ones."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") >> 1
