"""The advantage estimators against their textbook formulas."""

import math
from itertools import pairwise
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.algorithms.advantage_estimators import ADVANTAGE_ESTIMATORS, has_zero_variance, sample_advantages

WITHIN_GROUP = [name for name, entry in ADVANTAGE_ESTIMATORS.items() if entry.within_group]
rewards_of_a_group = st.lists(st.integers(-50, 50).map(lambda tenths: tenths / 10), min_size=2, max_size=12)


def test_the_group_baseline_is_the_mean() -> None:
    assert sample_advantages([1, 0, 0, 0], "group") == [0.75, -0.25, -0.25, -0.25]


def test_group_std_divides_by_the_population_deviation() -> None:
    rewards = [1.0, 0.0, 0.0, 0.5]
    expected = [(reward - fmean(rewards)) / pstdev(rewards) for reward in rewards]
    assert sample_advantages(rewards, "group_std") == pytest.approx(expected, rel=1e-5)


def test_leave_one_out_compares_each_sample_with_the_others() -> None:
    rewards = [3.0, 1.0, 2.0]
    expected = [3 - 1.5, 1 - 2.5, 2 - 2]
    assert sample_advantages(rewards, "leave_one_out") == pytest.approx(expected)


@pytest.mark.parametrize("name", WITHIN_GROUP)
@given(rewards=rewards_of_a_group)
def test_advantages_sum_to_zero_and_keep_the_order_of_the_rewards(name: str, rewards: list[float]) -> None:
    computed = sample_advantages(rewards, name)
    assert math.fsum(computed) == pytest.approx(0, abs=1e-6)
    by_reward = sorted(range(len(rewards)), key=lambda i: rewards[i])
    assert all(computed[low] <= computed[high] for low, high in pairwise(by_reward))


@pytest.mark.parametrize("name", WITHIN_GROUP)
@given(reward=st.floats(-1e6, 1e6), count=st.integers(1, 9))
def test_a_group_that_scores_alike_teaches_exactly_nothing(name: str, reward: float, count: int) -> None:
    assert has_zero_variance([reward] * count)
    assert sample_advantages([reward] * count, name) == [0.0] * count


@given(rewards=rewards_of_a_group, shift=st.integers(-9, 9))
def test_a_constant_added_to_all_rewards_changes_no_advantage(rewards: list[float], shift: int) -> None:
    for name in WITHIN_GROUP:
        shifted = sample_advantages([reward + shift for reward in rewards], name)
        assert shifted == pytest.approx(sample_advantages(rewards, name), abs=1e-6)
