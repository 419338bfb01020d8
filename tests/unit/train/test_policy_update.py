"""How a step is cut into optimizer steps, and how their metrics become those of the step."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import TrainingError
from pipeline.train.batching.sequences import TrainSequence
from pipeline.train.loop.policy_update import in_order_of, split_by_prompt
from pipeline.train.loop.step_metrics import (
    EqualRewards,
    NonFiniteGuard,
    StepMetrics,
    TruncatedSamples,
    is_lost,
)
from tests.fakes.configs import make_config

prompts_of_rows = st.lists(st.integers(0, 6), min_size=1, max_size=30)


def rows_of(prompts: list[int]) -> list[TrainSequence]:
    return [TrainSequence(np.zeros(2, np.int32), np.array([0, 1], np.uint8), prompt=prompt) for prompt in prompts]


@given(prompts=prompts_of_rows, count=st.integers(1, 9), seed=st.integers(0, 5))
def test_every_row_is_in_one_mini_batch_with_all_others_of_its_prompt(
    prompts: list[int], count: int, seed: int
) -> None:
    parts = split_by_prompt(rows_of(prompts), count, [seed, 3])
    assert sorted(place for part in parts for place in part) == list(range(len(prompts)))
    of_parts = [{prompts[place] for place in part} for part in parts]
    assert len(parts) == min(count, len(set(prompts)))
    assert sum(map(len, of_parts)) == len(set(prompts))
    assert max(map(len, of_parts)) - min(map(len, of_parts)) <= 1
    assert all(low < high for part in parts for low, high in pairwise(part))


def test_a_single_mini_batch_is_the_batch_in_its_order() -> None:
    assert split_by_prompt(rows_of([5, 5, 2, 9, 2]), 1, [0, 0]) == [[0, 1, 2, 3, 4]]


def test_the_cut_and_the_order_depend_on_seed_step_and_epoch_alone() -> None:
    rows = rows_of(list(range(40)))
    cuts = [split_by_prompt(rows, 4, seed) for seed in ([0, 7], [0, 7], [0, 8], [1, 7])]
    assert cuts[0] == cuts[1]
    assert len({str(cut) for cut in cuts}) == 3
    orders = [in_order_of(epoch, 20, [0, 7]) for epoch in range(4)]
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert in_order_of(2, 20, [0, 7]) == orders[2]


def test_metrics_of_a_single_optimizer_step_stay_what_they_are() -> None:
    metrics = {"loss": 0.1, "ratio": 0.3, "ratio_max": 3.0, "grad_norm": 0.7, "lr": 1e-4, "skipped": 1.0}
    tally = StepMetrics()
    tally.add(metrics, counted=7)
    assert tally.metrics() == metrics | {"grad_norm_max": 0.7}


def test_means_weigh_tokens_extremes_stay_extreme_and_skips_are_counted() -> None:
    tally = StepMetrics()
    first = {"loss": 1.0, "ratio": 1.0, "ratio_max": 1.5, "ratio_min": 0.5, "grad_norm": 2.0, "lr": 0.1, "skipped": 1.0}
    second = {"loss": 2.0, "ratio": 2.0, "ratio_max": 1.2, "ratio_min": 0.4, "grad_norm": 4.0, "lr": 0.2, "skipped": 1}
    tally.add(first, counted=30)
    tally.add(second | {"explained_variance": 0.25}, counted=10)
    assert tally.metrics() == {
        "loss": 1.5,
        "ratio": pytest.approx(1.25),
        "ratio_max": 1.5,
        "ratio_min": 0.4,
        "grad_norm": 3.0,
        "grad_norm_max": 4.0,
        "lr": 0.2,
        "skipped": 2.0,
        "explained_variance": 0.25,
    }


@pytest.mark.parametrize(("taken", "skipped", "lost"), [(4, 4, True), (4, 1, False), (4, 0, False), (0, 0, False)])
def test_a_step_is_lost_when_all_its_optimizer_steps_were_skipped(taken: float, skipped: float, lost: bool) -> None:
    assert is_lost({"optimizer_steps": taken, "skipped": skipped}) is lost


@pytest.mark.parametrize(
    ("advantage", "groups", "said"),
    [
        ("group_std", [[0.0, 0.0], [0.0, 0.0]], "in 5 steps in a row, every reward is 0: nothing is learned"),
        ("group_std", [[0.0, 0.0], [1.0, 1.0]], "in 5 steps in a row, a prompt's samples score alike"),
        ("batch", [[0.5, 0.5], [0.5, 0.5]], "in 5 steps in a row, every reward is 0.5: nothing is learned"),
        ("batch", [[0.0, 0.0], [1.0, 1.0]], ""),
        ("group_std", [[0.0, 1.0], [1.0, 1.0]], ""),
    ],
)
def test_rewards_that_teach_nothing_for_several_steps_are_warned_of_once(
    advantage: str, groups: list[list[float]], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    equal = EqualRewards(make_config(loss={"name": "grpo", "advantage_estimator": advantage}).loss)
    for _ in range(4):
        equal.note(groups)
    equal.note([[0.0, 1.0]])  # one step that teaches starts the count again
    for _ in range(4):
        equal.note(groups)
    assert not caplog.messages
    for _ in range(9):
        equal.note(groups)
    assert [message.startswith(said) for message in caplog.messages] == ([True] if said else [])


def test_a_model_is_given_up_after_five_lost_steps_in_a_row() -> None:
    skips = NonFiniteGuard()
    for skipped in (1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0):
        skips.note({"skipped": skipped})
        skips.check()
    assert skips.note({"skipped": 1.0})
    with pytest.raises(TrainingError, match="not finite in 5 steps in a row"):
        skips.check()


@pytest.mark.parametrize(
    ("fractions", "count"), [([0.06] * 12, 1), ([0.05] * 12, 0), ([0.5] * 4 + [0.0] + [0.5] * 4, 0)]
)
def test_truncated_samples_of_several_steps_are_reported_once(
    caplog: pytest.LogCaptureFixture, fractions: list[float], count: int
) -> None:
    truncated = TruncatedSamples()
    for fraction in fractions:
        truncated.note(fraction)
    assert len(caplog.messages) == count
    assert all("more than 5 % of the samples are truncated (6 % now)" in message for message in caplog.messages)
