"""Micro-batches: every row once, within the budget, the same number on every rank."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.errors import TrainingError
from pipeline.train.batching import packing
from pipeline.train.batching.packing import (
    MIN_SHARED_FRACTION,
    Budget,
    PrefixGroup,
    bins_of_rank,
    group_by_prefix,
    pack_rows,
    pack_shared_prefix,
    pad_rows,
    restore,
    split_rows,
)
from pipeline.utils.common_prefix import common_prefix


@st.composite
def alike(draw: st.DrawFn) -> list[NDArray[np.int32]]:
    """Rows of few words, so that many begin alike, some are one another's beginning, and some are the same."""
    heads = st.sampled_from([draw(st.lists(st.integers(0, 2), max_size=14)) for _ in range(4)])
    tails = st.lists(st.integers(0, 2), min_size=1, max_size=12)
    return [np.array([*draw(heads), *draw(heads), *draw(tails)], np.int32) for _ in range(draw(st.integers(0, 24)))]


lengths_of_rows = st.lists(st.integers(1, 40), min_size=0, max_size=60)
rank_counts = st.integers(1, 5)
budgets = st.builds(Budget, tokens=st.integers(40, 200), rows=st.none() | st.integers(1, 9), packed=st.booleans())


def used(lengths: list[int], budget: Budget) -> int:
    return sum(lengths) if budget.packed else len(lengths) * max(lengths, default=0)


@given(lengths_of_rows, rank_counts, budgets)
def test_every_row_lands_in_exactly_one_micro_batch(lengths: list[int], ranks: int, budget: Budget) -> None:
    shares = split_rows(lengths, ranks, budget)
    assert len(shares) == ranks
    assert sorted(index for bins in shares for one in bins for index in one) == list(range(len(lengths)))


@given(lengths_of_rows, rank_counts, budgets)
def test_no_micro_batch_exceeds_the_budget(lengths: list[int], ranks: int, budget: Budget) -> None:
    for bins in split_rows(lengths, ranks, budget):
        for one in bins:
            assert used([lengths[i] for i in one], budget) <= budget.tokens
            assert budget.rows is None or len(one) <= budget.rows


@given(lengths_of_rows, rank_counts, budgets)
def test_all_ranks_get_the_same_number_of_micro_batches(lengths: list[int], ranks: int, budget: Budget) -> None:
    assert len({len(bins) for bins in split_rows(lengths, ranks, budget)}) == 1


@given(lengths_of_rows, rank_counts)
def test_ranks_differ_by_no_more_than_one_row_of_tokens(lengths: list[int], ranks: int) -> None:
    shares = split_rows(lengths, ranks, Budget(10_000))
    tokens = [sum(lengths[i] for one in bins for i in one) for bins in shares]
    assert max(tokens) - min(tokens) <= max(lengths, default=0)


@given(lengths_of_rows, rank_counts, budgets)
def test_results_come_back_in_the_order_of_the_rows(lengths: list[int], ranks: int, budget: Budget) -> None:
    shares = split_rows(lengths, ranks, budget)
    answers = [[f"row {index}" for one in bins for index in one] for bins in shares]
    assert restore(shares, answers) == [f"row {index}" for index in range(len(lengths))]


@given(alike())
def test_each_row_is_kin_once_and_begins_as_the_one_before_it_does(rows: list[NDArray[np.int32]]) -> None:
    kin = group_by_prefix(rows)
    assert sorted(row for each in kin for row in each.rows) == list(range(len(rows)))
    for each in kin:
        assert each.shared[0] == 0
        for (one, other), shared in zip(pairwise(each.rows), each.shared[1:], strict=True):
            assert np.array_equal(rows[one][:shared], rows[other][:shared])
            assert shared >= max(1, MIN_SHARED_FRACTION * len(rows[other]))


@given(alike())
def test_as_little_is_computed_as_there_are_different_beginnings(rows: list[NDArray[np.int32]]) -> None:
    """Of kin whose first words differ; what those share that are none is next to nothing."""
    for each in group_by_prefix(rows):
        beginnings = {tuple(rows[row][:length]) for row in each.rows for length in range(1, len(rows[row]) + 1)}
        assert each.size([len(row) for row in rows]) == len(beginnings)


def test_rows_share_with_those_before_them_what_they_have_in_common() -> None:
    rows = [np.array(row, np.int32) for row in ([1, 2, 5, 6, 7], [1, 2, 3, 4], [9], [1, 2, 3], [1, 2, 3, 4])]
    assert group_by_prefix(rows) == [PrefixGroup((3, 1, 4, 0), (0, 3, 4, 2)), PrefixGroup((2,))]


@given(alike())
def test_rows_that_begin_alike_are_never_missed(rows: list[NDArray[np.int32]]) -> None:
    """With the longest beginning that any earlier row has in common with a row, each row is laid without it."""
    kin = group_by_prefix(rows)
    order = [row for each in kin for row in each.rows]
    shared = dict(zip(order, (count for each in kin for count in each.shared), strict=True))
    for place, row in enumerate(order):
        most = max((common_prefix(rows[row], rows[other]) for other in order[:place]), default=0)
        assert shared[row] == (most if most >= max(1, MIN_SHARED_FRACTION * len(rows[row])) else 0)


def test_rows_that_share_next_to_nothing_are_no_kin() -> None:
    rows = [np.array([7, *range(number, number + 24)], np.int32) for number in (0, 50)]
    assert group_by_prefix(rows) == [PrefixGroup((0,)), PrefixGroup((1,))]
    assert group_by_prefix([row[:20] for row in rows]) == [PrefixGroup((0, 1), (0, 1))]


@given(alike(), rank_counts, budgets)
def test_kin_land_once_within_the_budget_and_as_often_on_every_rank(
    rows: list[NDArray[np.int32]], ranks: int, budget: Budget
) -> None:
    lengths = [len(row) for row in rows]
    shares = split_rows(lengths, ranks, budget, group_by_prefix(rows))
    assert sorted(index for bins in shares for one in bins for index in one) == list(range(len(rows)))
    assert len({len(bins) for bins in shares}) == 1
    for one in (one for bins in shares for one in bins):
        assert used([lengths[index] for index in one], budget) <= budget.tokens
        assert budget.rows is None or len(one) <= budget.rows


@given(alike(), rank_counts, budgets)
def test_sharing_takes_no_more_micro_batches_and_then_computes_no_more(
    rows: list[NDArray[np.int32]], ranks: int, budget: Budget
) -> None:
    lengths = [len(row) for row in rows]
    shared, alone = (split_rows(lengths, ranks, budget, kin) for kin in (group_by_prefix(rows), []))

    def computed(one: list[int]) -> int:
        return sum(each.size([lengths[i] for i in one]) for each in group_by_prefix([rows[i] for i in one]))

    fullest = max(sum(computed(one) for one in bins) for bins in shared)
    assert (len(shared[0]), fullest) <= (
        len(alone[0]),
        max(sum(lengths[i] for one in bins for i in one) for bins in alone),
    )


def test_kin_stay_together_where_there_is_room() -> None:
    lengths, kin = [9, 5, 9, 5, 9, 5], [PrefixGroup((0, 2, 4), (0, 8, 8)), PrefixGroup((1, 3, 5), (0, 4, 4))]
    assert split_rows(lengths, 2, Budget(100), kin) == [[[0, 2, 4]], [[1, 3, 5]]]
    assert split_rows(lengths, 1, Budget(30), kin) == [[[0, 2, 4], [1, 3, 5]]]


def test_kin_are_cut_where_a_micro_batch_is_full() -> None:
    """A group is more than half of a micro-batch: left whole, nearly half of each would be empty."""
    kin = [PrefixGroup(tuple(range(first, first + 8)), (0, *[60] * 7)) for first in range(0, 128, 8)]
    (bins,) = split_rows([1060] * 128, 1, Budget(16_384), kin)
    assert [len(one) for one in bins] == [15] * 8 + [8]
    groups = [{row // 8 for row in one} for one in bins]
    assert sum(map(len, groups)) == 16 + 7


def test_a_prompt_that_is_nearly_all_of_its_samples_scatters_no_others() -> None:
    """Balanced by what is computed alone, its micro-batch would be filled up beyond the budget again and again."""
    lengths, kin = [1000] * 400 + [2040] * 8, [PrefixGroup((row,)) for row in range(400)]
    asked = PrefixGroup(tuple(range(400, 408)), (0, *[2000] * 7))
    shared, alone = (split_rows(lengths, 1, Budget(16384), each)[0] for each in ([*kin, asked], []))
    assert len(shared) <= len(alone) + 1


def test_kin_part_for_the_sake_of_the_fullest_rank_and_of_the_budget() -> None:
    def four(shared: int) -> list[PrefixGroup]:
        return [PrefixGroup((0, 1, 2, 3), (0, shared, shared, shared))]

    assert split_rows([9] * 4, 2, Budget(100), four(2)) == [[[0, 1]], [[2, 3]]]
    assert split_rows([9] * 4, 2, Budget(100), four(9)) == [[[0, 1, 2, 3]], [[]]]
    assert split_rows([9] * 4, 1, Budget(20), four(8)) == [[[0, 1], [2, 3]]]


@given(alike().filter(bool))
def test_a_shared_line_has_every_token_of_every_row_at_its_position_and_no_other(rows: list[NDArray[np.int32]]) -> None:
    lengths, kin = [len(row) for row in rows], group_by_prefix(rows)
    layout = pack_shared_prefix(lengths, kin)
    line = np.full(layout.shape, -1, np.int64)[0]
    line[layout.where] = np.concatenate(rows)
    np.testing.assert_array_equal(line[layout.where], np.concatenate(rows))
    np.testing.assert_array_equal(layout.positions[layout.where], np.concatenate([np.arange(n) for n in lengths]))
    assert line.min() >= 0
    assert layout.shape == (1, sum(each.size(lengths) for each in kin))


def test_a_row_is_laid_without_what_it_shares_with_the_one_before() -> None:
    layout = pack_shared_prefix([4, 2, 3, 4], [PrefixGroup((0, 2, 3), (0, 2, 3)), PrefixGroup((1,))])
    np.testing.assert_array_equal(layout.where, [0, 1, 2, 3, 6, 7, 0, 1, 4, 0, 1, 4, 5])
    np.testing.assert_array_equal(layout.positions, [0, 1, 2, 3, 2, 3, 0, 1])


def test_a_line_without_kin_is_packed() -> None:
    assert packing.make_layout([3, 1], "shared", [PrefixGroup((0,)), PrefixGroup((1,))]).packing == "packed"
    assert packing.make_layout([3, 1], "packed", [PrefixGroup((0, 1), (0, 1))]).packing == "packed"


def test_shares_fall_to_places_in_order_and_to_all_replicas_of_a_place() -> None:
    assert [list(bins_of_rank(rank, 4, size=4, shares=4)) for rank in range(4)] == [[0], [1], [2], [3]]
    assert [list(bins_of_rank(rank, 4, size=2, shares=4)) for rank in range(4)] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [list(bins_of_rank(rank, 2, size=1, shares=2)) for rank in range(2)] == [[0, 1], [0, 1]]


def test_a_short_rank_gets_an_empty_micro_batch() -> None:
    assert split_rows([5, 5, 5], ranks=2, budget=Budget(100, rows=1)) == [[[0], [2]], [[1], []]]


def test_one_micro_batch_serves_when_everything_fits() -> None:
    assert split_rows([3, 4, 5], ranks=1, budget=Budget(12)) == [[[0, 1, 2]]]


def test_padding_counts_against_the_budget() -> None:
    assert split_rows([2, 8], ranks=1, budget=Budget(10)) == [[[0, 1]]]
    assert split_rows([2, 8], ranks=1, budget=Budget(10, packed=False)) == [[[0], [1]]]


def test_many_rows_of_more_than_half_a_budget_get_one_micro_batch_each() -> None:
    (bins,) = split_rows([51] * 300, ranks=1, budget=Budget(100))
    assert [len(one) for one in bins] == [1] * 300


@pytest.mark.parametrize("length", [0, 11])
def test_a_row_that_no_micro_batch_can_hold_is_named(length: int) -> None:
    with pytest.raises(TrainingError, match=rf"row 1 has {length} tokens; a micro-batch holds 1 to 10"):
        split_rows([3, length], ranks=1, budget=Budget(10))


def test_packed_positions_restart_with_every_row() -> None:
    layout = pack_rows([3, 1, 2])
    assert layout.shape == (1, 6)
    np.testing.assert_array_equal(layout.positions, [0, 1, 2, 0, 0, 1])
    np.testing.assert_array_equal(layout.where, range(6))


def test_padded_rows_start_on_lines_of_their_own() -> None:
    layout = pad_rows([3, 1, 2])
    assert layout.shape == (3, 3)
    np.testing.assert_array_equal(layout.positions.reshape(layout.shape)[:, 0], [0, 0, 0])
    np.testing.assert_array_equal(layout.where, [0, 1, 2, 3, 6, 7])


@given(st.lists(st.integers(1, 4), max_size=60), st.integers(1, 6))
@example([4, 3, 3, 1, 1, 1], 2)
def test_each_row_goes_to_the_bin_that_has_least_by_then(lengths: list[int], bins: int) -> None:
    """Of tokens, then of rows, then by number; the longest row first."""
    filled: list[list[int]] = [[] for _ in range(bins)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        min(filled, key=lambda one: (sum(lengths[i] for i in one), len(one))).append(index)
    units = [PrefixGroup((index,)) for index in range(len(lengths))]
    assert [[unit.rows[0] for unit in one] for one in packing._balance(units, bins, lengths)] == filled


def test_many_rows_in_many_micro_batches_are_cut_in_one_pass_over_the_rows() -> None:
    """40,000 rows in 20,000 micro-batches: to look at all of these for each row would take minutes."""
    (bins,) = split_rows([3, 5] * 20_000, ranks=1, budget=Budget(8))
    assert {len(one) for one in bins} == {2}
    assert len(bins) == 20_000
