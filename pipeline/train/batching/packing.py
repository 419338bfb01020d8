"""The split of a batch's rows into micro-batches, and their layout in memory.

Owns three pure decisions:

- `group_by_prefix`: the groups of rows with a common prefix, whose tokens are computed only once;
- `split_rows`: the rank and the micro-batch of each row;
- `Layout`: one micro-batch padded to a rectangle, packed end to end, or packed with each shared prefix stored once.

Promises that every row is in exactly one micro-batch; that all ranks get the same number of micro-batches (some may be
empty), because every micro-batch is a collective operation; that no micro-batch exceeds the budget; and that equal
input gives equal output on every machine. Must not know torch, models or losses.

Notation: R rows; row i has `lengths[i]` tokens. A model reads a rectangle of B × T tokens. For rows `a b c`, `x` and
`a b`:

    padded, 3 × 3    a b c      packed, 1 × 6    a b c x a b      shared, 1 × 4    a b c x
                     x · ·                                        (`a b` is stored once; `where` of `a b c` is 0 1 2,
                     a b ·                                        of `a b` 0 1, of `x` 3)
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import TrainingError
from pipeline.utils.common_prefix import common_prefix

V = TypeVar("V")
Bins = list[list[int]]
Packing = Literal["padded", "packed", "shared"]
"""The layout of a micro-batch: one row per line; end to end; or end to end with each shared prefix stored once."""

MIN_SHARED_FRACTION = 1 / 20
"""A row joins a prefix group if it shares at least this fraction of its tokens with the row before it."""


@dataclass(frozen=True)
class Budget:
    """The limits of one micro-batch: at most `tokens` and, if set, at most `rows` rows.

    Padding counts. A shared prefix counts for each of its rows, since attention reads every row whole.
    """

    tokens: int
    rows: int | None = None
    packed: bool = True
    shared: bool = True

    @property
    def packing(self) -> Packing:
        if not self.packed:
            return "padded"
        return "shared" if self.shared else "packed"


@dataclass(frozen=True)
class PrefixGroup:
    """Rows with a common prefix, sorted by their tokens.

    Attributes:
        rows: indices of the rows.
        shared: for each row, the length of the prefix it shares with the row before it; 0 for the first.
    """

    rows: tuple[int, ...]
    shared: tuple[int, ...] = (0,)

    @property
    def saved_tokens(self) -> int:
        """Tokens that need no computation if these rows are in one micro-batch."""
        return sum(self.shared)

    def size(self, lengths: Sequence[int]) -> int:
        """Tokens that are computed if these rows are in one micro-batch."""
        return sum(lengths[row] for row in self.rows) - self.saved_tokens

    def slice(self, first: int, end: int) -> "PrefixGroup":
        """The group of the rows `first` … `end` − 1 of this one."""
        # The first row of a slice has no row before it to share with, so its count becomes 0.
        return PrefixGroup(self.rows[first:end], (0, *self.shared[first + 1 : end]))


PrefixGroups = list[PrefixGroup]
"""The rows of one micro-batch, or of one rank."""


@dataclass(frozen=True)
class Layout:
    """The position of each row's tokens in the B × T rectangle of a micro-batch.

    Attributes:
        shape: (B, T); B is 1 when the rows are packed.
        lengths: int64[R], tokens of each row.
        where: int64[Σ lengths], index in the flattened rectangle of each token of each row, row after row. Several rows
            have the same index for a token that they share.
        positions: int64[B × T], position of each token in its row (for rotary embeddings).
        packing: kind of the layout; `shared` only if some rows share tokens.
    """

    shape: tuple[int, int]
    lengths: NDArray[np.int64]
    where: NDArray[np.int64]
    positions: NDArray[np.int64]
    packing: Packing


def group_by_prefix(rows: Sequence[NDArray[np.int32]], packing: Packing = "shared") -> list[PrefixGroup]:
    """The prefix groups of rows, from their tokens; every row is in one group, perhaps alone. Empty unless `packing` is
    `shared`. See `MIN_SHARED_FRACTION`."""
    if packing != "shared":
        return []
    # In lexicographic order the longest common prefix of a row with any earlier row is the one with its predecessor,
    # so comparing neighbors finds all sharing. Big-endian bytes sort like the token ids.
    order = sorted(range(len(rows)), key=lambda index: rows[index].astype(">u4").tobytes())
    groups: list[tuple[list[int], list[int]]] = []
    for rank, row in enumerate(order):
        shared = common_prefix(rows[order[rank - 1]], rows[row]) if rank else 0
        if shared < MIN_SHARED_FRACTION * len(rows[row]) or not shared:
            groups.append(([], []))
            shared = 0
        groups[-1][0].append(row)
        groups[-1][1].append(shared)
    return [PrefixGroup(tuple(indices), tuple(shared)) for indices, shared in groups]


def make_layout(lengths: Sequence[int], packing: Packing, groups: Sequence[PrefixGroup] = ()) -> Layout:
    """The layout of kind `packing` for rows of these lengths; `shared` needs their prefix `groups`."""
    if packing == "padded":
        return pad_rows(lengths)
    if packing == "shared" and any(group.saved_tokens for group in groups):
        return pack_shared_prefix(lengths, groups)
    return pack_rows(lengths)


def pack_rows(lengths: Sequence[int]) -> Layout:
    """The layout of rows end to end, without padding: shape (1, Σ lengths)."""
    positions = np.concatenate([np.arange(length, dtype=np.int64) for length in lengths])
    where = np.arange(len(positions), dtype=np.int64)
    return Layout((1, len(positions)), np.array(lengths, np.int64), where, positions, "packed")


def pad_rows(lengths: Sequence[int]) -> Layout:
    """The layout with one row per line, padded on the right to the longest: shape (R, max(lengths))."""
    rows, longest = len(lengths), max(lengths)
    positions = np.tile(np.arange(longest, dtype=np.int64), rows)
    where = np.concatenate([row * longest + np.arange(length, dtype=np.int64) for row, length in enumerate(lengths)])
    return Layout((rows, longest), np.array(lengths, np.int64), where, positions, "padded")


def pack_shared_prefix(lengths: Sequence[int], groups: Sequence[PrefixGroup]) -> Layout:
    """The layout of rows end to end, group by group, each row without the prefix that it shares with the row before:
    shape (1, Σ lengths − Σ shared)."""
    where: list[NDArray[np.int64]] = [np.zeros(0, np.int64)] * len(lengths)
    previous, positions, used = where[0], [], 0
    for group in groups:
        for row, shared in zip(group.rows, group.shared, strict=True):
            suffix = np.arange(shared, lengths[row], dtype=np.int64)
            # Indices [lengths[row]]: the shared tokens are those of the previous row, the suffix starts at `used`.
            previous = where[row] = np.concatenate([previous[:shared], used + suffix - shared])
            positions.append(suffix)
            used += len(suffix)
    return Layout((1, used), np.array(lengths, np.int64), np.concatenate(where), np.concatenate(positions), "shared")


def fill(layout: Layout, length: int) -> Layout:
    """A packed layout extended to `length` tokens, by one more row whose tokens do not count."""
    used = len(layout.positions)
    if used == length:
        return layout
    return replace(
        layout,
        shape=(1, length),
        lengths=np.append(layout.lengths, length - used),
        where=np.append(layout.where, np.arange(used, length)),
        positions=np.append(layout.positions, np.arange(length - used)),
    )


def split_rows(lengths: Sequence[int], ranks: int, budget: Budget, groups: Sequence[PrefixGroup] = ()) -> list[Bins]:
    """Row indices of every micro-batch of every rank: `result[rank][micro_batch]`. `result[rank]` is a rank's share.

    Ranks are balanced by computed tokens. `groups`, if given, contain every row once. A group stays together unless
    that needs more micro-batches, or leaves more tokens to the most loaded rank, than splitting it. All ranks get the
    same number of micro-batches, near the minimum that the budget allows; some may be empty. Raises `TrainingError` for
    a row that exceeds the budget of a micro-batch.
    """
    _check(lengths, budget)
    groups = groups or [PrefixGroup((index,)) for index in range(len(lengths))]
    partitions = _rank_partitions(groups, lengths, ranks, budget)
    candidates = [_equalize_micro_batches(shares, lengths, budget) for shares in partitions]
    # A step takes as long as its slowest rank: fewest micro-batches first, then the smallest maximum of tokens.
    best = min(candidates, key=lambda ranks: (len(ranks[0]), max(_computed(bins, lengths) for bins in ranks)))
    return [[sorted(row for group in one for row in group.rows) for one in bins] for bins in best]


def bins_of_rank(rank: int, ranks: int, size: int, shares: int) -> range:
    """The shares of a rank for a model of data-parallel size `size`, which divides `ranks` and `shares`.

    `ranks / size` neighboring ranks get the same shares: they compute them together (`training.mesh.cp`).
    """
    shares_per_replica = shares // size
    replica = rank * size // ranks
    return range(replica * shares_per_replica, (replica + 1) * shares_per_replica)


def restore(shares: Sequence[Bins], values: Sequence[Sequence[V]]) -> list[V]:
    """Values in row order, from each rank's values in the order of its micro-batches; the inverse of `split_rows`."""
    ordered: dict[int, V] = {}
    for bins, rank_values in zip(shares, values, strict=True):
        indices = [index for one in bins for index in one]
        ordered.update(zip(indices, rank_values, strict=True))
    return [ordered[index] for index in range(len(ordered))]


def _check(lengths: Sequence[int], budget: Budget) -> None:
    for index, length in enumerate(lengths):
        if not 0 < length <= budget.tokens:
            raise TrainingError(
                f"row {index} has {length} tokens; a micro-batch holds 1 to {budget.tokens}: "
                "raise training.micro_batch_tokens or drop the row"
            )


def _rank_partitions(
    groups: Sequence[PrefixGroup], lengths: Sequence[int], ranks: int, budget: Budget
) -> Iterator[list[PrefixGroups]]:
    """Partitions of the groups over the ranks, balanced by computed tokens: with whole groups; with groups in 2, 4, 8 …
    parts; at last row by row. One rank gets whole groups only."""
    parts, largest = 1, max((len(group.rows) for group in groups), default=1)
    while parts == 1 or (ranks > 1 and parts < 2 * largest):
        units = [part for group in groups for part in _split_group(group, parts, lengths, budget)]
        yield _balance(units, ranks, [unit.size(lengths) for unit in units])
        parts *= 2


def _split_group(group: PrefixGroup, count: int, lengths: Sequence[int], budget: Budget) -> Iterator[PrefixGroup]:
    """The group in at least `count` parts (at most one per row), each within the budget of a micro-batch."""
    max_rows = -(-len(group.rows) // count)
    first = used = 0
    for index, row in enumerate(group.rows):
        rows = index + 1 - first
        if rows > 1 and (rows > max_rows or not _fits(budget, rows, used + lengths[row])):
            yield group.slice(first, index)
            first, used = index, 0
        used += lengths[row]
    yield group.slice(first, len(group.rows))


def _balance(units: Sequence[PrefixGroup], bins: int, sizes: Sequence[int]) -> list[PrefixGroups]:
    """Longest-processing-time scheduling: largest unit first, each to the least loaded bin. Ties go to the bin with
    fewest rows, then to the lowest index, so that every machine computes the same bins."""
    loads = [(0, 0, index) for index in range(bins)]
    filled: list[PrefixGroups] = [[] for _ in range(bins)]
    for unit in sorted(range(len(units)), key=lambda unit: (-sizes[unit], units[unit].rows[0])):
        size, rows, index = loads[0]
        filled[index].append(units[unit])
        heapq.heapreplace(loads, (size + sizes[unit], rows + len(units[unit].rows), index))
    return filled


def _equalize_micro_batches(
    shares: Sequence[Sequence[PrefixGroup]], lengths: Sequence[int], budget: Budget
) -> list[list[PrefixGroups]]:
    """The micro-batches of each rank, the same number for all ranks."""
    count = 1
    while True:
        split = [_micro_batches(share, lengths, budget, count) for share in shares]
        largest = max(len(bins) for bins in split)
        # `_micro_batches` returns at least `count`, so equality means that every rank has exactly `count`.
        if largest == count:
            return split
        count = largest


def _micro_batches(
    share: Sequence[PrefixGroup], lengths: Sequence[int], budget: Budget, least: int
) -> list[PrefixGroups]:
    """The micro-batches of a rank: at least `least`, some perhaps empty.

    Padded micro-batches hold rows of similar length, which minimizes padding. For packed ones there are three
    candidates: whole groups, groups split where a micro-batch is full, and single rows. The candidate with the fewest
    micro-batches is chosen, then the one with the fewest computed tokens.
    """
    single_rows = [PrefixGroup((row,)) for unit in share for row in unit.rows]
    if not budget.packed:
        by_length = sorted(single_rows, key=lambda one: (lengths[one.rows[0]], one.rows))
        return _in_order(by_length, lengths, budget, least)
    candidates = [_balanced(share, lengths, budget, least)]
    if len(single_rows) > len(share):
        candidates.append(_in_order(share, lengths, budget, least))
        candidates.append(_balanced(single_rows, lengths, budget, least))
    return min(candidates, key=lambda bins: (len(bins), _computed(bins, lengths)))


def _computed(bins: Sequence[PrefixGroups], lengths: Sequence[int]) -> int:
    """Tokens that a rank computes."""
    return sum(unit.size(lengths) for one in bins for unit in one)


def _balanced(units: Sequence[PrefixGroup], lengths: Sequence[int], budget: Budget, least: int) -> list[PrefixGroups]:
    """At least `least` bins of whole units, balanced by computed tokens, or by all tokens if the first exceeds the
    budget, which counts all tokens."""
    total = [sum(lengths[row] for row in unit.rows) for unit in units]
    computed = [unit.size(lengths) for unit in units]
    count = max(least, -(-sum(total) // budget.tokens))
    # Ends: with one bin per unit every bin fits, since `_check` and `_split_group` bound each unit.
    while True:
        for sizes in (computed, total) if computed != total else (total,):
            bins = _balance(units, count, sizes)
            rows = [[lengths[row] for unit in one for row in unit.rows] for one in bins]
            overfull = sum(not _fits(budget, len(one), sum(one)) for one in rows)
            if not overfull:
                return bins
        count += -(-overfull // 2)


def _in_order(units: Sequence[PrefixGroup], lengths: Sequence[int], budget: Budget, least: int) -> list[PrefixGroups]:
    """At least `least` bins, filled one after the other, the last ones perhaps empty. A unit is split where a bin is
    full. For a padded budget the rows must have ascending lengths."""
    bins: list[PrefixGroups] = [[]]
    rows = tokens = 0
    for unit in units:
        first = 0
        for index, row in enumerate(unit.rows):
            rows += 1
            # Lengths ascend, so this row is the longest: the rectangle has rows × its length tokens.
            tokens = tokens + lengths[row] if budget.packed else rows * lengths[row]
            if not _fits(budget, rows, tokens):
                if first < index:
                    bins[-1].append(unit.slice(first, index))
                bins.append([])
                first, rows, tokens = index, 1, lengths[row]
        bins[-1].append(unit.slice(first, len(unit.rows)))
    return bins + [[] for _ in range(least - len(bins))]


def _fits(budget: Budget, rows: int, tokens: int) -> bool:
    return tokens <= budget.tokens and (budget.rows is None or rows <= budget.rows)
