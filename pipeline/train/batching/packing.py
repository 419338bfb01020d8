"""How the rows of a batch are cut into micro-batches and laid out in memory.

Owns three pure decisions: `group_by_prefix`, which rows begin alike, so that what they share needs to be computed only
once; `split_rows`, which rank trains which rows in which micro-batch; and the `Layout` of one micro-batch (padded to a
rectangle, packed end to end, or packed with what rows share laid once). Promises that every row lands in exactly one
micro-batch, that all ranks get the same number of micro-batches (short ranks get empty ones, because every micro-batch
is a collective operation), that no micro-batch exceeds the budget, and that equal input gives equal output everywhere.
Must not know torch, models or losses.

Notation: R rows, of which row i has `lengths[i]` tokens; B × T the rectangle that a model reads.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import TrainingError

V = TypeVar("V")
Bins = list[list[int]]
Packing = Literal["padded", "packed", "shared"]
"""How the rows of a micro-batch lie: one a line; end to end; or end to end with what they share only once."""

MIN_SHARED_FRACTION = 1 / 20
"""A row is kin of another if they share at least this part of its tokens."""


@dataclass(frozen=True)
class Budget:
    """What one micro-batch may hold: at most `tokens` and, if set, at most `rows` rows.

    Padding counts. What rows share counts for each of them, since attention reads every row whole.
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
    """Rows that begin alike, in the order of their tokens.

    Attributes:
        rows: their indices.
        shared: how many tokens each begins with as the one before it does; 0 for the first.
    """

    rows: tuple[int, ...]
    shared: tuple[int, ...] = (0,)

    @property
    def saved_tokens(self) -> int:
        """Tokens that are not computed if these rows lie in one micro-batch."""
        return sum(self.shared)

    def size(self, lengths: Sequence[int]) -> int:
        """Tokens that are computed then."""
        return sum(lengths[row] for row in self.rows) - self.saved_tokens

    def slice(self, first: int, end: int) -> "PrefixGroup":
        """Those of them from place `first` up to `end`."""
        return PrefixGroup(self.rows[first:end], (0, *self.shared[first + 1 : end]))


PrefixGroups = list[PrefixGroup]
"""What one micro-batch, or one rank, holds."""


@dataclass(frozen=True)
class Layout:
    """Where the tokens of a micro-batch's rows lie in its B × T rectangle.

    Attributes:
        shape: (B, T); B is 1 when the rows are packed.
        lengths: int64[R], tokens of each row.
        where: int64[Σ lengths], index in the flattened rectangle of each token of each row, row after row; a token that
            several rows share has one index.
        positions: int64[B × T], position of each token in its own row.
        packing: how the rows lie; `shared` only if some of them share tokens.
    """

    shape: tuple[int, int]
    lengths: NDArray[np.int64]
    where: NDArray[np.int64]
    positions: NDArray[np.int64]
    packing: Packing


def group_by_prefix(rows: Sequence[NDArray[np.int32]], packing: Packing = "shared") -> list[PrefixGroup]:
    """Rows that begin alike, each row once, given their tokens; see `MIN_SHARED_FRACTION`. None where `packing` shares
    nothing.

    In the order of tokens no row before a row has more in common with it than the one right before it.
    """
    if packing != "shared":
        return []
    order = sorted(range(len(rows)), key=lambda index: rows[index].astype(">u4").tobytes())
    found: list[tuple[list[int], list[int]]] = []
    for place, row in enumerate(order):
        shared = _common(rows[order[place - 1]], rows[row]) if place else 0
        if shared < MIN_SHARED_FRACTION * len(rows[row]) or not shared:
            found.append(([], []))
            shared = 0
        found[-1][0].append(row)
        found[-1][1].append(shared)
    return [PrefixGroup(tuple(indices), tuple(shared)) for indices, shared in found]


def make_layout(lengths: Sequence[int], packing: Packing, kin: Sequence[PrefixGroup] = ()) -> Layout:
    """Rows as `packing` says; `shared` with those that are kin."""
    if packing == "padded":
        return pad_rows(lengths)
    if packing == "shared" and any(each.saved_tokens for each in kin):
        return pack_shared_prefix(lengths, kin)
    return pack_rows(lengths)


def pack_rows(lengths: Sequence[int]) -> Layout:
    """Rows laid end to end on one line, without padding: shape (1, Σ lengths)."""
    positions = np.concatenate([np.arange(length, dtype=np.int64) for length in lengths])
    where = np.arange(len(positions), dtype=np.int64)
    return Layout((1, len(positions)), np.array(lengths, np.int64), where, positions, "packed")


def pad_rows(lengths: Sequence[int]) -> Layout:
    """One row a line, padded on the right to the longest: shape (R, max(lengths))."""
    rows, longest = len(lengths), max(lengths)
    positions = np.tile(np.arange(longest, dtype=np.int64), rows)
    where = np.concatenate([row * longest + np.arange(length, dtype=np.int64) for row, length in enumerate(lengths)])
    return Layout((rows, longest), np.array(lengths, np.int64), where, positions, "padded")


def pack_shared_prefix(lengths: Sequence[int], kin: Sequence[PrefixGroup]) -> Layout:
    """Rows laid end to end on one line, kin next to each other, each without what it shares with the one before."""
    where: list[NDArray[np.int64]] = [np.zeros(0, np.int64)] * len(lengths)
    before, positions, used = where[0], [], 0
    for each in kin:
        for row, shared in zip(each.rows, each.shared, strict=True):
            own = np.arange(shared, lengths[row], dtype=np.int64)
            before = where[row] = np.concatenate([before[:shared], used + own - shared])
            positions.append(own)
            used += len(own)
    return Layout((1, used), np.array(lengths, np.int64), np.concatenate(where), np.concatenate(positions), "shared")


def fill(layout: Layout, length: int) -> Layout:
    """A packed layout whose line has `length` tokens: what is lacking becomes one row more, of which nothing counts."""
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


def split_rows(lengths: Sequence[int], ranks: int, budget: Budget, kin: Sequence[PrefixGroup] = ()) -> list[Bins]:
    """Row indices of every micro-batch of every rank: `result[rank][micro_batch]`. These are the shares of the rows.

    Ranks are balanced by tokens that are computed. `kin`, if given, have every row once; they stay together as far as
    that takes no more micro-batches, and leaves no more to the rank that computes most, than rows that share nothing.
    All ranks get the same number of micro-batches, about as few as the budget allows; some may be empty. Raises
    `TrainingError` for a row that no micro-batch can hold.
    """
    _check(lengths, budget)
    dealt = _rank_partitions(kin or [PrefixGroup((index,)) for index in range(len(lengths))], lengths, ranks, budget)
    ways = [_equalize_micro_batches(shares, lengths, budget) for shares in dealt]
    best = min(ways, key=lambda ranks: (len(ranks[0]), max(_computed(bins, lengths) for bins in ranks)))
    return [[sorted(row for unit in one for row in unit.rows) for one in bins] for bins in best]


def bins_of_rank(rank: int, ranks: int, size: int, shares: int) -> range:
    """The shares that fall to a rank when a model's data-parallel size is `size`, a divisor of both other counts.

    Neighbouring ranks, `ranks / size` of them, get the same: they compute it together (`training.mesh.cp`).
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


def _common(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """How many tokens both begin with."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length


def _rank_partitions(
    kin: Sequence[PrefixGroup], lengths: Sequence[int], ranks: int, budget: Budget
) -> Iterator[list[PrefixGroups]]:
    """What each rank may get: kin whole; in 2, 4, 8 … parts; at last row by row. Balanced by what is computed."""
    parts, most = 1, max((len(each.rows) for each in kin), default=1)
    while parts == 1 or (ranks > 1 and parts < 2 * most):
        units = [part for each in kin for part in _parts(each, parts, lengths, budget)]
        yield _balance(units, ranks, [unit.size(lengths) for unit in units])
        parts *= 2


def _parts(kin: PrefixGroup, count: int, lengths: Sequence[int], budget: Budget) -> Iterator[PrefixGroup]:
    """Prefix groups in at least `count` parts, as far as there are rows, each of which a micro-batch holds."""
    most = -(-len(kin.rows) // count)
    first = used = 0
    for place, row in enumerate(kin.rows):
        rows = place + 1 - first
        if rows > 1 and (rows > most or not _fits(budget, rows, used + lengths[row])):
            yield kin.slice(first, place)
            first, used = place, 0
        used += lengths[row]
    yield kin.slice(first, len(kin.rows))


def _balance(units: Sequence[PrefixGroup], bins: int, sizes: Sequence[int]) -> list[PrefixGroups]:
    """Largest first, each to the bin that has least by then (then fewest rows, then lowest number)."""
    loads = [(0, 0, number) for number in range(bins)]
    filled: list[PrefixGroups] = [[] for _ in range(bins)]
    for place in sorted(range(len(units)), key=lambda place: (-sizes[place], units[place].rows[0])):
        size, rows, number = loads[0]
        filled[number].append(units[place])
        heapq.heapreplace(loads, (size + sizes[place], rows + len(units[place].rows), number))
    return filled


def _equalize_micro_batches(
    shares: Sequence[Sequence[PrefixGroup]], lengths: Sequence[int], budget: Budget
) -> list[list[PrefixGroups]]:
    """The micro-batches of each rank, as many of each."""
    count = 1
    while True:
        cut = [_micro_batches(share, lengths, budget, count) for share in shares]
        most = max(len(bins) for bins in cut)
        if most == count:
            return cut
        count = most


def _micro_batches(
    share: Sequence[PrefixGroup], lengths: Sequence[int], budget: Budget, least: int
) -> list[PrefixGroups]:
    """The micro-batches of a rank: at least `least`, some perhaps empty.

    Padded, rows of like length lie together, so that little is padded. Packed, kin stay whole, or are cut where a
    micro-batch is full, or nobody heeds them: what takes fewest micro-batches, then what computes least.
    """
    alone = [PrefixGroup((row,)) for unit in share for row in unit.rows]
    if not budget.packed:
        return _in_order(sorted(alone, key=lambda one: (lengths[one.rows[0]], one.rows)), lengths, budget, least)
    ways = [_balanced(share, lengths, budget, least)]
    if len(alone) > len(share):
        ways.append(_in_order(share, lengths, budget, least))
        ways.append(_balanced(alone, lengths, budget, least))
    return min(ways, key=lambda bins: (len(bins), _computed(bins, lengths)))


def _computed(bins: Sequence[PrefixGroups], lengths: Sequence[int]) -> int:
    """Tokens that a rank computes."""
    return sum(unit.size(lengths) for one in bins for unit in one)


def _balanced(units: Sequence[PrefixGroup], lengths: Sequence[int], budget: Budget, least: int) -> list[PrefixGroups]:
    """At least `least` bins of whole units: balanced by what they compute, or if one does not hold its rows then, by
    these."""
    whole = [sum(lengths[row] for row in unit.rows) for unit in units]
    computed = [unit.size(lengths) for unit in units]
    count = max(least, -(-sum(whole) // budget.tokens))
    while True:
        for sizes in (computed, whole) if computed != whole else (whole,):
            bins = _balance(units, count, sizes)
            rows = [[lengths[row] for unit in one for row in unit.rows] for one in bins]
            too_full = sum(not _fits(budget, len(one), sum(one)) for one in rows)
            if not too_full:
                return bins
        count += -(-too_full // 2)


def _in_order(units: Sequence[PrefixGroup], lengths: Sequence[int], budget: Budget, least: int) -> list[PrefixGroups]:
    """At least `least` bins, the last ones perhaps empty: one is filled after the other, and units are cut between
    them. Padded, rows have to come with ascending lengths."""
    bins: list[PrefixGroups] = [[]]
    rows = tokens = 0
    for unit in units:
        first = 0
        for place, row in enumerate(unit.rows):
            rows += 1
            tokens = tokens + lengths[row] if budget.packed else rows * lengths[row]
            if not _fits(budget, rows, tokens):
                if first < place:
                    bins[-1].append(unit.slice(first, place))
                bins.append([])
                first, rows, tokens = place, 1, lengths[row]
        bins[-1].append(unit.slice(first, len(unit.rows)))
    return bins + [[] for _ in range(least - len(bins))]


def _fits(budget: Budget, rows: int, tokens: int) -> bool:
    return tokens <= budget.tokens and (budget.rows is None or rows <= budget.rows)
