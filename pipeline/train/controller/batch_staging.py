"""Rows on their way to the ranks.

Owns how the rows of a call are cut for the models that take them, which of them each rank gets, and what stays there
between calls. Rows travel pickled through the controller's scatter, with every operation on a `Batch`, or once, when
they are staged; then only a handle travels. Promises that the rows of a staged batch are cut once, so that every
operation on it computes the same micro-batches, to the last bit; and that a row which no model could take is refused on
the controller, before anything is sent. Must not know losses.

    staged = dispatch.stage(mini_batches)
    old = dispatch.forward("policy", staged[0])
    …
    dispatch.amend(staged, "advantages", advantages)
    for _ in range(epochs):
        for batch in staged.batches:
            dispatch.forward_backward("policy", batch, config.loss)
            dispatch.optim_step("policy")
    dispatch.unstage(staged)

Rows are cut into as many shares as the least common multiple of the models' data-parallel sizes; a model of size d
gives each of its d places as many neighbouring shares as there are.
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
"""float32[T] for each row of each batch."""
_Cut = list[Any]


@dataclass(frozen=True, eq=False)
class StagedBatchRef:
    """Rows that a rank has: some shares of a batch of a staging."""

    number: int
    index: int
    shares: range


Data = list[Batch] | StagedBatchRef
"""What an operation on a rank gets: its micro-batches, or where they are."""


@dataclass(frozen=True, eq=False)
class ShardedBatch:
    """A batch that is cut.

    Attributes:
        batch: the rows, on the controller.
        shares: row indices of every micro-batch of every share.
        sizes: the data-parallel sizes that they are cut for.
        spared: tokens that are not computed once more, since rows of a micro-batch share them.
        number, index: of the staging that it belongs to, and its place in that; −1: it travels with its operation.
    """

    batch: Batch
    shares: list[Bins]
    sizes: frozenset[int]
    saved_tokens: int = 0
    number: int = -1
    index: int = 0

    @classmethod
    def shard(
        cls, batch: Batch, sizes: Iterable[int], budget: Budget, number: int = -1, index: int = 0
    ) -> "ShardedBatch":
        """Cut the rows; `TrainingError` for one that the budget cannot hold."""
        chosen = frozenset(sizes)
        shares = packing.split_rows(batch.lengths, lcm(*chosen), budget, batch.prefix_groups(budget.packing))
        spared = sum(
            group.saved_tokens
            for share in shares
            for bins in share
            for group in batch.take(bins).prefix_groups(budget.packing)
        )
        return cls(batch, shares, chosen, spared, number, index)

    @property
    def highest(self) -> int:
        """The highest token; −1 without rows."""
        return max((int(row.tokens.max()) for row in self.batch.rows), default=-1)

    def data(self, size: int, ranks: int) -> list[Data]:
        """What each of `ranks` gets for a model of this data-parallel size."""
        given = [packing.bins_of_rank(rank, ranks, size, len(self.shares)) for rank in range(ranks)]
        if self.number < 0:
            return [[self.batch.take(bins) for share in shares for bins in self.shares[share]] for shares in given]
        return [StagedBatchRef(self.number, self.index, shares) for shares in given]

    def in_order(self, answers: Sequence[Sequence[NDArray[np.float32]]]) -> list[NDArray[np.float32]]:
        """The answers about every row, from those of each data-parallel place."""
        each = len(self.shares) // len(answers)
        firsts = range(0, len(self.shares), each)
        places = [list(chain.from_iterable(self.shares[first : first + each])) for first in firsts]
        return packing.restore(places, answers)

    def on_rank(self, rank: int, ranks: int, values: Sequence[Any] | None = None) -> dict[int, _Cut]:
        """The micro-batches of the shares that a rank needs for a model of any of the sizes, by share; or, of `values`,
        one for each row, those of their rows."""
        needed = {share for size in self.sizes for share in packing.bins_of_rank(rank, ranks, size, len(self.shares))}

        def take(bins: list[int]) -> Any:
            return self.batch.take(bins) if values is None else [values[index] for index in bins]

        return {share: [take(bins) for bins in self.shares[share]] for share in sorted(needed)}


@dataclass(frozen=True, eq=False)
class Staged:
    """Rows that are on the ranks, from `RankGroup.stage` to `RankGroup.unstage`; `staged[i]` is the i-th batch."""

    number: int
    batches: tuple[ShardedBatch, ...]

    def __getitem__(self, index: int) -> ShardedBatch:
        return self.batches[index]

    def __len__(self) -> int:
        return len(self.batches)


def refuse_foreign_tokens(batch: Batch, vocabulary: int) -> None:
    """`TrainingError` with the number of the first row that has a token outside of 0 … vocabulary − 1."""
    if not batch.rows:
        return
    tokens = np.concatenate([row.tokens for row in batch.rows])
    if tokens.min() >= 0 and tokens.max() < vocabulary:
        return
    for index, row in enumerate(batch.rows):
        if row.tokens.min() < 0 or row.tokens.max() >= vocabulary:
            raise TrainingError(f"row {index} has a token outside the model's vocabulary of {vocabulary}")


def checked_values(batches: Sequence[ShardedBatch], column: Column, values: Values) -> list[list[NDArray[np.float32]]]:
    """The values as float32; `TrainingError` unless each row gets as many as it has tokens, finite where it counts."""
    if len(values) != len(batches):
        raise TrainingError(f"{column} for {len(values)} batches; there are {len(batches)}")
    return [
        _checked(f"batch {cut.index}", cut.batch, column, given) for cut, given in zip(batches, values, strict=True)
    ]


def _checked(
    name: str, batch: Batch, column: Column, values: Sequence[NDArray[np.float32]]
) -> list[NDArray[np.float32]]:
    if len(values) != len(batch.rows):
        raise TrainingError(f"{name}: {column} for {len(values)} rows; it has {len(batch.rows)}")
    arrays = [np.asarray(value, np.float32) for value in values]
    for index, (row, array) in enumerate(zip(batch.rows, arrays, strict=True)):
        _with(row, column, array).check(f"{name}: row {index}")
    return arrays


def put_rows(site: RankState, number: int, batches: list[Shares]) -> None:
    """On every rank: keep rows."""
    site.staged[number] = batches


def put_column(
    site: RankState, number: int, column: Column, values: list[dict[int, list[list[NDArray[np.float32]]]]]
) -> None:
    """On every rank: give rows that are kept a further column."""
    for shares, given in zip(site.staged[number], values, strict=True):
        for share, micro in shares.items():
            shares[share] = [_with_column(batch, column, of) for batch, of in zip(micro, given[share], strict=True)]


def drop_rows(site: RankState, number: int) -> None:
    """On every rank: forget rows."""
    del site.staged[number]


def micro_batches(site: RankState, data: Data) -> list[Batch]:
    """On every rank: the rows of an operation."""
    if not isinstance(data, StagedBatchRef):
        return data
    shares = site.staged[data.number][data.index]
    return [batch for share in data.shares for batch in shares[share]]


def _with_column(batch: Batch, column: Column, values: list[NDArray[np.float32]]) -> Batch:
    return replace(batch, rows=tuple(_with(row, column, value) for row, value in zip(batch.rows, values, strict=True)))


def _with(row: TrainSequence, column: Column, values: NDArray[np.float32]) -> TrainSequence:
    changed: dict[str, Any] = {column: values}
    return replace(row, **changed)
