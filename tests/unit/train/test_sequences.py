"""Rows and the weights that a batch gives them."""

import numpy as np
import pytest

from pipeline.errors import TrainingError
from pipeline.train.batching.sequences import COLUMNS, Batch, Normalization, TrainSequence


def row(counted: int, masked: int = 1, prompt: int = 0, **fields: object) -> TrainSequence:
    mask = np.array([0] * masked + [1] * counted, np.uint8)
    return TrainSequence(np.zeros(len(mask), np.int32), mask, prompt=prompt, **fields)  # type: ignore[arg-type]


ROWS = [row(1, prompt=7), row(3, prompt=7), row(4, prompt=8), row(0, masked=3, prompt=9)]


@pytest.mark.parametrize(
    ("normalize", "weights"),
    [
        ("token", [1 / 8, 1 / 8, 1 / 8, 1 / 8]),
        ("sequence", [1 / 3, 1 / 9, 1 / 12, 0]),
        ("prompt", [1 / 8, 1 / 8, 1 / 8, 0]),
        ("fixed", [1 / 40, 1 / 40, 1 / 40, 1 / 40]),
    ],
)
def test_a_token_weighs_what_its_normalisation_says(normalize: Normalization, weights: list[float]) -> None:
    assert Batch.of(ROWS, normalize, max_length=10).weights == pytest.approx(weights)


@pytest.mark.parametrize("normalize", ["token", "sequence", "prompt"])
def test_the_weights_of_all_counted_tokens_sum_to_one(normalize: Normalization) -> None:
    batch = Batch.of([*ROWS, row(9, prompt=9)], normalize)
    assert sum(w * r.counted for w, r in zip(batch.weights, batch.rows, strict=True)) == pytest.approx(1)


def test_a_part_of_a_batch_keeps_the_weights_of_the_whole() -> None:
    part = Batch.of(ROWS, "sequence", temperature=0.7).take([2, 0])
    assert part.weights == pytest.approx((1 / 12, 1 / 3))
    assert part.rows == (ROWS[2], ROWS[0])
    assert part.temperature == 0.7


def test_a_batch_without_counted_tokens_weighs_nothing() -> None:
    assert Batch.of([row(0, masked=3)], "token").weights == (0.0,)


def test_fixed_normalisation_needs_a_length() -> None:
    with pytest.raises(TrainingError, match="max_length is 0"):
        Batch.of(ROWS, "fixed")


NAN_AT_END = np.array([np.nan, 0.0, np.nan], np.float32)


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (TrainSequence(np.zeros(0, np.int32), np.zeros(0, np.uint8)), "no tokens"),
        (TrainSequence(np.zeros(3, np.int32), np.array([0, 1], np.uint8)), "mask needs 3 entries"),
        (TrainSequence(np.zeros(2, np.int32), np.array([1, 1], np.uint8)), "the first of them 0"),
        (row(2, advantages=float("nan")), "advantages holds a value that is not finite"),
        (row(2, sampler_logprobs=NAN_AT_END), "sampler_logprobs holds a value that is not finite"),
        (row(2, sampler_logprobs=np.zeros(2, np.float32)), r"sampler_logprobs has shape \(2,\), expected \(3,\)"),
        (row(2, reference=np.float32(1)), "reference has shape"),
    ],
)
def test_a_row_that_cannot_be_trained_is_named(bad: TrainSequence, complaint: str) -> None:
    with pytest.raises(TrainingError, match=f"row 1.*{complaint}"):
        Batch.of([row(2), bad])


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_is_refused_in_every_column(column: str, value: float) -> None:
    last = np.array([0.0, 0.0, value], np.float32)
    with pytest.raises(TrainingError, match=f"row 0: {column} holds a value that is not finite"):
        Batch.of([row(2, **{column: last})])


def test_a_number_that_is_not_finite_may_stand_where_nothing_is_counted() -> None:
    masked_nan = np.array([np.nan, 0.0, 0.0], np.float32)
    assert Batch.of([row(2, sampler_logprobs=masked_nan)]).counted == 2


def test_a_batch_either_has_sampler_log_probabilities_or_has_none() -> None:
    with pytest.raises(TrainingError, match="row 1 has no sampler_logprobs"):
        Batch.of([row(2, sampler_logprobs=np.zeros(3, np.float32)), row(2)])
