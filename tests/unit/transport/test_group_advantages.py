"""The advantage estimators against their textbook formulas."""

import math
from itertools import pairwise
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.transport.group_advantages import Baseline, advantages, has_zero_variance

BASELINES: tuple[Baseline, ...] = ("group", "group_std", "leave_one_out")
rewards_of_a_group = st.lists(st.integers(-50, 50).map(lambda tenths: tenths / 10), min_size=2, max_size=12)


def test_the_group_baseline_is_the_mean() -> None:
    assert advantages([1, 0, 0, 0], "group").tolist() == [0.75, -0.25, -0.25, -0.25]


def test_group_std_divides_by_the_population_deviation() -> None:
    rewards = [1.0, 0.0, 0.0, 0.5]
    expected = [(reward - fmean(rewards)) / pstdev(rewards) for reward in rewards]
    assert advantages(rewards, "group_std") == pytest.approx(expected, rel=1e-5)


def test_leave_one_out_compares_each_sample_with_the_others() -> None:
    rewards = [3.0, 1.0, 2.0]
    expected = [3 - 1.5, 1 - 2.5, 2 - 2]
    assert advantages(rewards, "leave_one_out") == pytest.approx(expected)


@pytest.mark.parametrize("baseline", BASELINES)
@given(rewards=rewards_of_a_group)
def test_advantages_sum_to_zero_and_keep_the_order_of_the_rewards(baseline: Baseline, rewards: list[float]) -> None:
    computed = advantages(rewards, baseline)
    assert math.fsum(computed) == pytest.approx(0, abs=1e-6)
    by_reward = sorted(range(len(rewards)), key=lambda i: rewards[i])
    assert all(computed[low] <= computed[high] for low, high in pairwise(by_reward))


@pytest.mark.parametrize("baseline", BASELINES)
@given(reward=st.floats(-1e6, 1e6), count=st.integers(1, 9))
def test_a_group_that_scores_alike_teaches_exactly_nothing(baseline: Baseline, reward: float, count: int) -> None:
    assert has_zero_variance([reward] * count)
    assert advantages([reward] * count, baseline).tolist() == [0.0] * count


@given(rewards=rewards_of_a_group, shift=st.integers(-9, 9))
def test_a_constant_added_to_all_rewards_changes_no_advantage(rewards: list[float], shift: int) -> None:
    for baseline in BASELINES:
        shifted = advantages([reward + shift for reward in rewards], baseline)
        assert shifted == pytest.approx(advantages(rewards, baseline), abs=1e-6)
