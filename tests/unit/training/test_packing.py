"""Micro-batches: every row once, within the budget, the same number on every rank."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.errors import TrainingError
from pipeline.training import packing
from pipeline.training.packing import Budget, pack, pad, restore, shares_of, split_rows

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


def test_shares_fall_to_places_in_order_and_to_all_replicas_of_a_place() -> None:
    assert [list(shares_of(rank, 4, size=4, shares=4)) for rank in range(4)] == [[0], [1], [2], [3]]
    assert [list(shares_of(rank, 4, size=2, shares=4)) for rank in range(4)] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [list(shares_of(rank, 2, size=1, shares=2)) for rank in range(2)] == [[0, 1], [0, 1]]


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
    layout = pack([3, 1, 2])
    assert layout.shape == (1, 6)
    np.testing.assert_array_equal(layout.positions, [0, 1, 2, 0, 0, 1])
    np.testing.assert_array_equal(layout.starts, [0, 3, 4])


def test_padded_rows_start_on_lines_of_their_own() -> None:
    layout = pad([3, 1, 2])
    assert layout.shape == (3, 3)
    np.testing.assert_array_equal(layout.positions.reshape(layout.shape)[:, 0], [0, 0, 0])
    np.testing.assert_array_equal(layout.starts, [0, 3, 6])


@given(st.lists(st.integers(1, 4), max_size=60), st.integers(1, 6))
@example([4, 3, 3, 1, 1, 1], 2)
def test_each_row_goes_to_the_bin_that_has_least_by_then(lengths: list[int], bins: int) -> None:
    """Of tokens, then of rows, then by number; the longest row first."""
    filled: list[list[int]] = [[] for _ in range(bins)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        min(filled, key=lambda one: (sum(lengths[i] for i in one), len(one))).append(index)
    assert packing._balance(range(len(lengths)), lengths, bins) == [sorted(one) for one in filled]


def test_many_rows_in_many_micro_batches_are_cut_in_one_pass_over_the_rows() -> None:
    """200,000 rows in 100,000 micro-batches: to look at all of these for each row would take hours."""
    (bins,) = split_rows([3, 5] * 100_000, ranks=1, budget=Budget(8))
    assert {len(one) for one in bins} == {2}
    assert len(bins) == 100_000
