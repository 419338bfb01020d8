"""Credit against loops that follow the formulas word for word."""

from statistics import fmean, pstdev
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.algorithms.advantage_estimators import EPSILON, discounted_sums, gae
from pipeline.config import LossConfig
from pipeline.errors import TrainingError
from pipeline.train.batching.sequences import TrainSequence
from pipeline.train.batching.token_advantages import (
    TokenAdvantages,
    assign_advantages,
    needs_token_advantages,
)

numbers = st.integers(-30, 30).map(lambda tenths: tenths / 10)
fractions = st.sampled_from([0.0, 0.5, 0.9, 1.0])
batches = st.lists(st.lists(st.tuples(numbers, numbers), max_size=6), max_size=5)


def a_loss(**settings: Any) -> LossConfig:
    return LossConfig.model_validate({"name": "ppo", **settings})


def a_row(mask: str, reward: float, prompt: int = 0) -> TrainSequence:
    """A row whose counted tokens are the `1`s of its mask."""
    return TrainSequence(np.zeros(len(mask), np.int32), np.array(list(mask), np.uint8), reward, prompt=prompt)


def arrays(*rows: list[float]) -> list[Any]:
    return [np.array(row, np.float32) for row in rows]


@given(rows=batches, gamma=fractions, gae_lambda=fractions)
def test_gae_is_the_discounted_sum_of_temporal_differences(
    rows: list[list[tuple[float, float]]], gamma: float, gae_lambda: float
) -> None:
    rewards = [np.array([reward for reward, _ in row]) for row in rows]
    values = [np.array([value for _, value in row]) for row in rows]
    advantages, returns = gae(rewards, values, gamma, gae_lambda=gae_lambda)
    assert len(advantages) == len(returns) == len(rows)
    for row, found, promised in zip(rows, advantages, returns, strict=True):
        for k in range(len(row)):
            expected = 0.0
            for later in range(k, len(row)):
                after = row[later + 1][1] if later + 1 < len(row) else 0.0
                difference = row[later][0] + gamma * after - row[later][1]
                expected += (gamma * gae_lambda) ** (later - k) * difference
            assert found[k] == pytest.approx(expected, abs=1e-9)
            assert promised[k] == pytest.approx(expected + row[k][1], abs=1e-9)


@given(rows=st.lists(st.lists(numbers, max_size=7), max_size=5), decay=fractions)
def test_a_discounted_sum_counts_what_follows_in_its_own_row(rows: list[list[float]], decay: float) -> None:
    found = discounted_sums([np.array(row, np.float64) for row in rows], decay)
    for row, sums in zip(rows, found, strict=True):
        expected = [sum(decay ** (later - k) * row[later] for later in range(k, len(row))) for k in range(len(row))]
        assert sums == pytest.approx(expected, abs=1e-9)


def test_without_a_discount_the_first_return_is_what_the_sample_got() -> None:
    loss = a_loss(advantage_estimator="gae", gae_lambda=1.0)
    credit = assign_advantages([a_row("0111", 2.0)], loss, values=arrays([9, 0.5, 1, 1.5]))
    assert credit.returns is not None
    assert credit.returns[0].tolist() == [0, 2, 2, 2]


def test_tokens_of_tools_are_no_actions_and_discount_nothing() -> None:
    loss = a_loss(advantage_estimator="group", gamma=0.5)
    (found,) = assign_advantages([a_row("0100010", 8.0)], loss).advantages
    assert found.tolist() == [0, 4, 0, 0, 0, 8, 0]


def test_the_advantages_of_gae_are_whitened_over_the_counted_tokens_of_the_batch() -> None:
    loss = a_loss(advantage_estimator="gae", gamma=1.0, gae_lambda=0.5)
    rows = [a_row("011", 1.0), a_row("001", 0.0)]
    credit = assign_advantages(rows, loss, values=arrays([7, 0.2, 0.4], [7, 7, 0.3]))
    raw = [0.4 - 0.2 + 0.5 * 0.6, 1 - 0.4, 0 - 0.3]
    white = [(each - fmean(raw)) / (pstdev(raw) + EPSILON) for each in raw]
    assert credit.advantages[0].tolist() == pytest.approx([0, white[0], white[1]], abs=1e-6)
    assert credit.advantages[1].tolist() == pytest.approx([0, 0, white[2]], abs=1e-6)


def test_the_batch_baseline_standardises_the_rewards_of_all_samples_long_or_short() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0, 5.0]
    masks = ["01", "0111", "01", "011", "000"]
    found = assign_advantages(
        [a_row(*each) for each in zip(masks, rewards, strict=True)], a_loss(advantage_estimator="batch")
    )
    expected = [(each - fmean(rewards)) / (pstdev(rewards) + EPSILON) for each in rewards]
    assert [float(each.max(initial=-9, where=each != 0)) for each in found.advantages[:4]] == pytest.approx(
        expected[:4], abs=1e-6
    )
    assert found.advantages[4].tolist() == [0, 0, 0]


def test_group_advantages_are_divided_by_the_deviation_of_the_batch() -> None:
    loss = a_loss(advantage_estimator="group_batch")
    found = assign_advantages([a_row("01", each) for each in (0.5, -0.5, 0.0, 0.0)], loss)
    assert [each[1] for each in found.advantages] == pytest.approx([2**0.5, -(2**0.5), 0, 0], abs=1e-5)


POLICY = arrays([0, -1.0, -2.0, -0.5])
REFERENCE = arrays([0, -1.5, -1.5, -1.0])


@pytest.mark.parametrize(
    ("estimator", "estimates"),
    [("k1", [0.5, -0.5, 0.5]), ("k2", [0.125, 0.125, 0.125])],
)
def test_a_kl_in_the_reward_is_charged_to_the_tokens_before_it(estimator: str, estimates: list[float]) -> None:
    loss = a_loss(advantage_estimator="group", kl=0.1, kl_in="reward", kl_estimator=estimator)
    (found,) = assign_advantages([a_row("0111", 3.0)], loss, POLICY, REFERENCE).advantages
    expected = [3 - 0.1 * sum(estimates[k:]) for k in range(3)]
    assert found.tolist() == pytest.approx([0, *expected], abs=1e-6)


def test_with_k1_and_no_discount_each_token_answers_for_its_own_divergence_from_a_teacher() -> None:
    loss = a_loss(advantage_estimator="group", kl=0.5, kl_in="reward", kl_estimator="k1", gamma=0)
    found = assign_advantages([a_row("0101", 0.0)], loss, arrays([0, -1, 0, -3]), arrays([0, -2, 0, -1]))
    assert found.advantages[0].tolist() == [0, -0.5, 0, 1]


def test_a_kl_in_the_loss_leaves_the_advantages_alone() -> None:
    loss = a_loss(advantage_estimator="group", kl=0.1)
    assert not needs_token_advantages(loss)
    assert assign_advantages([a_row("0111", 3.0)], loss, POLICY, REFERENCE).advantages[0].tolist() == [0, 3, 3, 3]


def test_with_a_kl_in_the_reward_the_batch_baseline_is_over_tokens() -> None:
    loss = a_loss(advantage_estimator="batch", kl=0.1, kl_in="reward", kl_estimator="k1")
    (found,) = assign_advantages([a_row("0111", 3.0)], loss, POLICY, REFERENCE).advantages
    assert found[1:].mean() == pytest.approx(0, abs=1e-6)
    assert found[1:].std() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("advantage", ["batch", "group_batch", "gae"])
@given(shift=numbers, mask=st.sampled_from(["01", "0011"]))
def test_a_batch_that_scores_alike_teaches_nothing(advantage: str, shift: float, mask: str) -> None:
    rows = [a_row(mask, shift) for _ in range(3)]
    values = [np.full(len(mask), shift, np.float32) for _ in rows]
    credit = assign_advantages(rows, a_loss(advantage_estimator=advantage, gae_lambda=1.0), values=values)
    assert all(np.abs(each).max() < 1e-3 for each in credit.advantages)


@pytest.mark.parametrize("advantage", ["group", "batch", "gae"])
def test_a_batch_without_a_counted_token_is_credited_with_nothing(advantage: str) -> None:
    credit: TokenAdvantages = assign_advantages(
        [a_row("000", 1.0)], a_loss(advantage_estimator=advantage), values=arrays([0, 0, 0])
    )
    assert [each.tolist() for each in credit.advantages] == [[0, 0, 0]]


def test_what_is_missing_is_named() -> None:
    with pytest.raises(TrainingError, match="without values"):
        assign_advantages([a_row("01", 1.0)], a_loss(advantage_estimator="gae"))
    with pytest.raises(TrainingError, match="without references"):
        assign_advantages([a_row("01", 1.0)], a_loss(kl=0.1, kl_in="reward"), logprobs=arrays([0, 0]))
    row = TrainSequence(np.zeros(2, np.int32), np.array([0, 1], np.uint8), np.ones(2, np.float32))
    with pytest.raises(TrainingError, match="row 0 has an advantage for each token"):
        assign_advantages([row], a_loss(advantage_estimator="batch"))
