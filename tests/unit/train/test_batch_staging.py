"""How rows are cut for models of several data-parallel sizes, and which of them each rank gets."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import TrainingError
from pipeline.train.batching.packing import Budget
from pipeline.train.batching.sequences import Batch, TrainSequence
from pipeline.train.controller.batch_staging import ShardedBatch, StagedBatchRef, checked_values, refuse_foreign_tokens

RANKS = 4
BUDGET = Budget(64)
all_lengths = st.lists(st.integers(1, 40), max_size=30)
all_sizes = st.sets(st.sampled_from([1, 2, 4]), min_size=1)


def batch_of(lengths: list[int]) -> Batch:
    """Rows whose first token is their number."""
    rows = []
    for number, length in enumerate(lengths):
        mask = np.ones(length, np.uint8)
        mask[0] = 0
        rows.append(TrainSequence(np.full(length, number, np.int32), mask))
    return Batch.of(rows)


def numbers(batches: list[Batch]) -> list[list[int]]:
    return [[int(row.tokens[0]) for row in batch.rows] for batch in batches]


@given(all_lengths, all_sizes)
def test_a_model_takes_every_row_once_and_replicas_take_the_same(lengths: list[int], sizes: set[int]) -> None:
    cut = ShardedBatch.shard(batch_of(lengths), sizes, BUDGET)
    for size in sizes:
        given_to = [numbers(data) for data in cut.data(size, RANKS) if isinstance(data, list)]
        replicas = RANKS // size
        assert all(given_to[rank] == given_to[rank - rank % replicas] for rank in range(RANKS))
        firsts = given_to[::replicas]
        assert sorted(row for bins in firsts for one in bins for row in one) == list(range(len(lengths)))
        assert len({len(bins) for bins in firsts}) == 1


def test_what_is_spared_is_what_rows_of_one_micro_batch_share() -> None:
    row = TrainSequence(np.arange(8, dtype=np.int32), np.array([0] * 4 + [1] * 4, np.uint8))
    batch = Batch.of([row] * 4)
    assert ShardedBatch.shard(batch, [1], BUDGET).saved_tokens == 24
    assert ShardedBatch.shard(batch, [1], Budget(16)).saved_tokens == 16
    assert ShardedBatch.shard(batch, [1], replace(BUDGET, shared=False)).saved_tokens == 0
    assert ShardedBatch.shard(batch, [1], replace(BUDGET, packed=False)).saved_tokens == 0


@given(all_lengths, all_sizes)
def test_answers_of_all_places_are_in_the_order_of_the_rows(lengths: list[int], sizes: set[int]) -> None:
    cut = ShardedBatch.shard(batch_of(lengths), sizes, BUDGET)
    for size in sizes:
        places = [numbers(data) for data in cut.data(size, RANKS) if isinstance(data, list)][:: RANKS // size]
        answers = [[np.float32([row]) for one in bins for row in one] for bins in places]
        assert [int(answer[0]) for answer in cut.in_order(answers)] == list(range(len(lengths)))


@given(all_lengths, all_sizes)
def test_a_rank_keeps_the_micro_batches_that_its_handles_name(lengths: list[int], sizes: set[int]) -> None:
    batch = batch_of(lengths)
    staged, travelling = (
        ShardedBatch.shard(batch, sizes, BUDGET, number=3, index=1),
        ShardedBatch.shard(batch, sizes, BUDGET),
    )
    for rank in range(RANKS):
        kept = staged.on_rank(rank, RANKS)
        for size in sizes:
            handle, direct = staged.data(size, RANKS)[rank], travelling.data(size, RANKS)[rank]
            assert isinstance(handle, StagedBatchRef)
            assert isinstance(direct, list)
            assert numbers([one for share in handle.shares for one in kept[share]]) == numbers(direct)


@given(all_lengths, all_sizes)
def test_values_go_where_their_rows_are(lengths: list[int], sizes: set[int]) -> None:
    cut = ShardedBatch.shard(batch_of(lengths), sizes, BUDGET)
    for rank in range(RANKS):
        rows, values = cut.on_rank(rank, RANKS), cut.on_rank(rank, RANKS, list(range(len(lengths))))
        assert {share: numbers(batches) for share, batches in rows.items()} == values


def test_only_what_some_model_takes_is_kept_on_a_rank() -> None:
    cut = ShardedBatch.shard(batch_of([5] * 8), {4, 2}, BUDGET)
    assert [sorted(cut.on_rank(rank, RANKS)) for rank in range(RANKS)] == [[0, 1], [0, 1], [2, 3], [2, 3]]


@pytest.mark.parametrize("token", [-1, 7])
def test_a_token_that_the_model_does_not_know_is_named_by_its_row(token: int) -> None:
    batch = batch_of([2, 2, 2])
    batch.rows[1].tokens[1] = token
    with pytest.raises(TrainingError, match="row 1 has a token outside the model's vocabulary of 7"):
        refuse_foreign_tokens(batch, 7)
    refuse_foreign_tokens(batch.take([0, 2]), 7)


def test_values_that_do_not_fit_their_rows_are_refused_by_name() -> None:
    batches = [
        ShardedBatch.shard(batch_of([2, 3]), {1}, BUDGET, 0, 0),
        ShardedBatch.shard(batch_of([4]), {1}, BUDGET, 0, 1),
    ]
    good = [[np.zeros(2, np.float32), np.zeros(3, np.float32)], [np.zeros(4, np.float32)]]
    assert [len(each) for each in checked_values(batches, "returns", good)] == [2, 1]
    bad = np.float32([0, np.nan, 0])
    for values, said in (
        (good[:1], "returns for 1 batches; there are 2"),
        ([good[0][:1], good[1]], "batch 0: returns for 1 rows; it has 2"),
        ([[good[0][0], bad], good[1]], "batch 0: row 1: returns holds a value that is not finite"),
        ([good[0], [np.zeros(3, np.float32)]], r"batch 1: row 0: returns has shape \(3,\), expected \(4,\)"),
    ):
        with pytest.raises(TrainingError, match=said):
            checked_values(batches, "returns", values)


def test_what_is_not_counted_may_be_anything() -> None:
    cut = ShardedBatch.shard(batch_of([3]), {1}, BUDGET)
    checked_values([cut], "advantages", [[np.float32([np.nan, 1, 2])]])
