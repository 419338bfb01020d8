"""How the rows of a batch are cut into micro-batches and laid out in memory.

Owns two pure decisions: `split_rows`, which rank trains which rows in which micro-batch, and the `Layout` of one
micro-batch (padded to a rectangle, or packed end to end). Promises that every row lands in exactly one micro-batch,
that all ranks get the same number of micro-batches (short ranks get empty ones, because every micro-batch is a
collective operation), that no micro-batch exceeds the budget, and that equal input gives equal output everywhere. Must
not know torch, models or losses.

Notation: R rows, of which row i has `lengths[i]` tokens; B × T the rectangle that a model reads.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import TrainingError

V = TypeVar("V")
Bins = list[list[int]]


@dataclass(frozen=True)
class Budget:
    """What one micro-batch may hold: at most `tokens` (padding included) and, if set, at most `rows` rows."""

    tokens: int
    rows: int | None = None
    packed: bool = True


@dataclass(frozen=True)
class Layout:
    """Where the tokens of a micro-batch's rows lie in its B × T rectangle.

    Attributes:
        shape: (B, T); B is 1 when the rows are packed.
        starts: int64[R], index of each row's first token in the flattened rectangle.
        lengths: int64[R], tokens of each row.
        positions: int64[B × T], position of each token in its own row: restarts at 0 with every row.
        packed: whether rows share a line, so that attention must be kept inside each.
    """

    shape: tuple[int, int]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    positions: NDArray[np.int64]
    packed: bool

    @property
    def rows(self) -> int:
        return len(self.lengths)


def pack(lengths: Sequence[int]) -> Layout:
    """Rows laid end to end on one line, without padding: shape (1, Σ lengths)."""
    positions = np.concatenate([np.arange(length, dtype=np.int64) for length in lengths])
    starts = np.cumsum([0, *lengths[:-1]], dtype=np.int64)
    return Layout((1, len(positions)), starts, np.array(lengths, np.int64), positions, packed=True)


def pad(lengths: Sequence[int]) -> Layout:
    """One row a line, padded on the right to the longest: shape (R, max(lengths))."""
    rows, longest = len(lengths), max(lengths)
    positions = np.tile(np.arange(longest, dtype=np.int64), rows)
    starts = np.arange(rows, dtype=np.int64) * longest
    return Layout((rows, longest), starts, np.array(lengths, np.int64), positions, packed=False)


def split_rows(lengths: Sequence[int], ranks: int, budget: Budget) -> list[Bins]:
    """Row indices of every micro-batch of every rank: `result[rank][micro_batch]`. These are the shares of the rows.

    Ranks are balanced by tokens, and so are the micro-batches of a rank when packed. All ranks get the same number of
    micro-batches, as few as the budget allows with this balance; some may be empty. Raises `TrainingError` for a row
    that no micro-batch can hold.
    """
    _check(lengths, budget)
    cut = _cut_packed if budget.packed else _cut_padded
    shares = _balance(range(len(lengths)), lengths, ranks)
    count = 1
    while True:
        bins = [cut(share, lengths, budget, count) for share in shares]
        most = max(len(each) for each in bins)
        if most == count:
            return bins
        count = most


def shares_of(rank: int, ranks: int, size: int, shares: int) -> range:
    """The shares that fall to a rank when a model's data-parallel size is `size`, a divisor of both other counts.

    Neighbouring ranks, `ranks / size` of them, get the same: they are replicas.
    """
    each = shares // size
    place = rank * size // ranks
    return range(place * each, (place + 1) * each)


def restore(shares: Sequence[Bins], values: Sequence[Sequence[V]]) -> list[V]:
    """Values in row order, from each rank's values in the order of its micro-batches."""
    ordered: dict[int, V] = {}
    for bins, of_rank in zip(shares, values, strict=True):
        indices = [index for one in bins for index in one]
        ordered.update(zip(indices, of_rank, strict=True))
    return [ordered[index] for index in range(len(ordered))]


def _check(lengths: Sequence[int], budget: Budget) -> None:
    for index, length in enumerate(lengths):
        if not 0 < length <= budget.tokens:
            raise TrainingError(
                f"row {index} has {length} tokens; a micro-batch holds 1 to {budget.tokens}: "
                "raise training.micro_batch_tokens or drop the row"
            )


def _balance(indices: Sequence[int], lengths: Sequence[int], bins: int) -> Bins:
    """Longest first, each to the bin with the fewest tokens (then rows, then lowest number); rows ascend in a bin."""
    loads = [(0, 0, number) for number in range(bins)]
    filled: Bins = [[] for _ in range(bins)]
    for index in sorted(indices, key=lambda i: (-lengths[i], i)):
        tokens, rows, number = loads[0]
        filled[number].append(index)
        heapq.heapreplace(loads, (tokens + lengths[index], rows + 1, number))
    return [sorted(one) for one in filled]


def _cut_packed(share: list[int], lengths: Sequence[int], budget: Budget, least: int) -> Bins:
    """At least `least` balanced bins, each within the budget."""
    count = max(least, -(-sum(lengths[i] for i in share) // budget.tokens))
    while True:
        bins = _balance(share, lengths, count)
        too_full = sum(not _holds(budget, len(one), sum(lengths[i] for i in one)) for one in bins)
        if not too_full:
            return bins
        count += -(-too_full // 2)


def _cut_padded(share: list[int], lengths: Sequence[int], budget: Budget, least: int) -> Bins:
    """Rows of like length together, so that little is padded; at least `least` bins, the last ones perhaps empty."""
    bins: Bins = [[]]
    for index in sorted(share, key=lambda i: (lengths[i], i)):
        rows = len(bins[-1]) + 1
        if not _holds(budget, rows, rows * lengths[index]):
            bins.append([])
        bins[-1].append(index)
    return [sorted(one) for one in bins] + [[] for _ in range(least - len(bins))]


def _holds(budget: Budget, rows: int, tokens: int) -> bool:
    return tokens <= budget.tokens and (budget.rows is None or rows <= budget.rows)
