"""Micro-batches as tensors: how many rows have each token that is read."""

import numpy as np
import pytest
import torch

from pipeline.train.batching.packing import Packing
from pipeline.train.batching.sequences import Batch, TrainSequence
from pipeline.train.model.collate import collate

ROWS = ([1, 2, 3, 4], [1, 2, 3, 5, 6], [7, 8])


def make_batch() -> Batch:
    rows = [TrainSequence(np.array(row, np.int32), np.ones(len(row), np.uint8)) for row in ROWS]
    return Batch(tuple(rows), (1.0,) * len(rows))


@pytest.mark.parametrize("how", ["padded", "packed", "shared"])
def test_a_token_counts_for_each_row_that_has_it_and_padding_for_none(how: Packing) -> None:
    micro = collate(make_batch(), how, torch.device("cpu"))
    tokens_T = micro.tokens_BT.flatten().numpy()
    counted = np.bincount(tokens_T, weights=micro.rows_T)
    assert counted.tolist() == np.bincount([token for row in ROWS for token in row]).tolist()
    assert micro.rows_T.max() == (2 if how == "shared" else 1)
    assert (micro.rows_T == 0).any() == (how == "padded")


def test_nothing_counts_in_a_micro_batch_without_rows() -> None:
    micro = collate(Batch((), ()), "packed", torch.device("cpu"))
    assert micro.rows_T.tolist() == [0, 0]
