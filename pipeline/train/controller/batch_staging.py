"""The sharding of rows over the ranks, and rows that stay on the ranks between operations.

Owns the split of a batch for the models that train it, and the storage of staged rows. The controller scatters pickled
rows with every operation on a `Batch`, or once for a staged batch; later operations then send only a reference.
Promises that a staged batch is split once, so that every operation on it computes the same micro-batches, to the last
bit; and that an invalid row is refused on the controller, before anything is sent. Must not know losses.

    staged = dispatch.stage(mini_batches)
    old = dispatch.forward("policy", staged[0])
    …
    dispatch.set_column(staged, "advantages", advantages)
    for _ in range(epochs):
        for batch in staged.batches:
            dispatch.forward_backward("policy", batch, config.loss)
            dispatch.optim_step("policy")
    dispatch.unstage(staged)

The number of shares is the least common multiple of the models' data-parallel sizes. A model of size d gives each of
its d replicas (number of shares) / d neighboring shares. With sizes 4 and 2, for instance, there are four shares: a
rank of the first model gets one, of the second two.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import TrainingError
from pipeline.train.batching import packing
from pipeline.train.batching.packing import Bins, Budget
from pipeline.train.batching.sequences import Batch, Column, TrainSequence
from pipeline.train.controller.rank_process import RankState, Shares

Values = Sequence[Sequence[NDArray[np.float32]]]
"""float32[T] of each row of each batch."""
_MicroBatches = list[Any]


@dataclass(frozen=True, eq=False)
class StagedBatchRef:
    """A reference to rows on a rank: some shares of a staged batch."""

    number: int
    index: int
    shares: range


Data = list[Batch] | StagedBatchRef
"""The rows of an operation on a rank: its micro-batches, or a reference to staged ones."""


@dataclass(frozen=True, eq=False)
class ShardedBatch:
    """A batch that is split into shares and micro-batches.

    Attributes:
        batch: the rows, on the controller.
        shares: row indices of every micro-batch of every share.
        sizes: the data-parallel sizes of the models that can use it.
        shared: for each row, the tokens that it shares with another row of its micro-batch as a prefix: they need no
            computation. Empty if no row shares any.
        number: of its staging; −1: the rows are sent with each operation.
        index: of the batch within its staging.
    """

    batch: Batch
    shares: list[Bins]
    sizes: frozenset[int]
    shared: tuple[int, ...] = ()
    number: int = -1
    index: int = 0

    @classmethod
    def shard(
        cls, batch: Batch, sizes: Iterable[int], budget: Budget, number: int = -1, index: int = 0
    ) -> "ShardedBatch":
        """Split the rows; `TrainingError` for a row that exceeds the budget."""
        chosen = frozenset(sizes)
        shares = packing.split_rows(batch.lengths, lcm(*chosen), budget, batch.prefix_groups(budget.packing))
        return cls(batch, shares, chosen, _shared_tokens(batch, shares, budget), number, index)

    @property
    def saved_tokens(self) -> int:
        """Tokens that need no computation, since rows of a micro-batch share them as a prefix."""
        return sum(self.shared)

    @property
    def rows(self) -> list[tuple[int, int]]:
        """(length, shared tokens) of each row."""
        lengths = self.batch.lengths
        return list(zip(lengths, self.shared or [0] * len(lengths), strict=True))

    @property
    def highest(self) -> int:
        """The highest token id; −1 without rows."""
        return max((int(row.tokens.max()) for row in self.batch.rows), default=-1)

    def data(self, size: int, ranks: int) -> list[Data]:
        """The rows of each of `ranks`, for a model of this data-parallel size."""
        shares_by_rank = [packing.bins_of_rank(rank, ranks, size, len(self.shares)) for rank in range(ranks)]
        if self.number < 0:
            return [
                [self.batch.take(bins) for share in shares for bins in self.shares[share]] for shares in shares_by_rank
            ]
        return [StagedBatchRef(self.number, self.index, shares) for shares in shares_by_rank]

    def in_order(self, outputs: Sequence[Sequence[NDArray[np.float32]]]) -> list[NDArray[np.float32]]:
        """The outputs of all rows in their order, from the outputs of each data-parallel replica."""
        shares_per_replica = len(self.shares) // len(outputs)
        firsts = range(0, len(self.shares), shares_per_replica)
        bins = [list(chain.from_iterable(self.shares[first : first + shares_per_replica])) for first in firsts]
        return packing.restore(bins, outputs)

    def on_rank(self, rank: int, ranks: int, values: Sequence[Any] | None = None) -> dict[int, _MicroBatches]:
        """By share, the micro-batches that a rank needs for models of any of the sizes; or, with `values` (one for each
        row), the values of these rows."""
        needed = {share for size in self.sizes for share in packing.bins_of_rank(rank, ranks, size, len(self.shares))}

        def take(bins: list[int]) -> Any:
            return self.batch.take(bins) if values is None else [values[index] for index in bins]

        return {share: [take(bins) for bins in self.shares[share]] for share in sorted(needed)}


@dataclass(frozen=True, eq=False)
class Staged:
    """Batches that are on the ranks, from `RankGroup.stage` to `RankGroup.unstage`; `staged[i]` is the i-th batch."""

    number: int
    batches: tuple[ShardedBatch, ...]

    def __getitem__(self, index: int) -> ShardedBatch:
        return self.batches[index]

    def __len__(self) -> int:
        return len(self.batches)


def _shared_tokens(batch: Batch, shares: Sequence[Bins], budget: Budget) -> tuple[int, ...]:
    """`ShardedBatch.shared`, from the prefix groups within each micro-batch."""
    shared: dict[int, int] = {}
    for bins in chain.from_iterable(shares):
        for group in batch.take(bins).prefix_groups(budget.packing):
            shared.update(zip((bins[row] for row in group.rows), group.shared, strict=True))
    return tuple(shared.get(row, 0) for row in range(len(batch.rows))) if any(shared.values()) else ()


def refuse_foreign_tokens(batch: Batch, vocabulary: int) -> None:
    """Raise `TrainingError` for the first row that has a token outside of 0 … vocabulary − 1."""
    if not batch.rows:
        return
    tokens = np.concatenate([row.tokens for row in batch.rows])
    if tokens.min() >= 0 and tokens.max() < vocabulary:
        return
    for index, row in enumerate(batch.rows):
        if row.tokens.min() < 0 or row.tokens.max() >= vocabulary:
            raise TrainingError(f"row {index} has a token outside the model's vocabulary of {vocabulary}")


def checked_values(batches: Sequence[ShardedBatch], column: Column, values: Values) -> list[list[NDArray[np.float32]]]:
    """The values as float32; `TrainingError` unless each row has one per token, finite at counted tokens."""
    if len(values) != len(batches):
        raise TrainingError(f"{column} for {len(values)} batches; there are {len(batches)}")
    return [
        _checked(f"batch {sharded.index}", sharded.batch, column, batch_values)
        for sharded, batch_values in zip(batches, values, strict=True)
    ]


def _checked(
    name: str, batch: Batch, column: Column, values: Sequence[NDArray[np.float32]]
) -> list[NDArray[np.float32]]:
    if len(values) != len(batch.rows):
        raise TrainingError(f"{name}: {column} for {len(values)} rows; it has {len(batch.rows)}")
    arrays = [np.asarray(value, np.float32) for value in values]
    for index, (row, array) in enumerate(zip(batch.rows, arrays, strict=True)):
        _replace_column(row, column, array).check(f"{name}: row {index}")
    return arrays


def put_rows(site: RankState, number: int, batches: list[Shares]) -> None:
    """Store staged rows on a rank."""
    site.staged[number] = batches


def put_column(
    site: RankState, number: int, column: Column, values: list[dict[int, list[list[NDArray[np.float32]]]]]
) -> None:
    """Set a column of staged rows on a rank."""
    for shares, values_by_share in zip(site.staged[number], values, strict=True):
        for share, batches in shares.items():
            shares[share] = [
                _with_column(batch, column, batch_values)
                for batch, batch_values in zip(batches, values_by_share[share], strict=True)
            ]


def drop_rows(site: RankState, number: int) -> None:
    """Delete staged rows on a rank."""
    del site.staged[number]


def micro_batches(site: RankState, data: Data) -> list[Batch]:
    """The micro-batches of an operation on a rank."""
    if not isinstance(data, StagedBatchRef):
        return data
    shares = site.staged[data.number][data.index]
    return [batch for share in data.shares for batch in shares[share]]


def _with_column(batch: Batch, column: Column, values: list[NDArray[np.float32]]) -> Batch:
    rows = (_replace_column(row, column, value) for row, value in zip(batch.rows, values, strict=True))
    return replace(batch, rows=tuple(rows))


def _replace_column(row: TrainSequence, column: Column, values: NDArray[np.float32]) -> TrainSequence:
    changed: dict[str, Any] = {column: values}
    return replace(row, **changed)
