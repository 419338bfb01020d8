"""The loss scale of float16: when it changes, what a step does with it, and which failures it explains."""

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.errors import TrainingError
from pipeline.train.loop.step_metrics import MAX_SKIPPED, NonFiniteGuard, StepMetrics
from pipeline.train.model.loss_scale import GROWTH_STEPS, LARGEST, LossScale
from pipeline.train.model.optimizer import Optimizer, OptimizerStep
from tests.unit.train.test_optimizer import CONFIG, fill_gradients, make_parameters


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def overflow(parameters: list[Tensor], value: float = math.inf) -> None:
    fill_gradients(parameters, 1)
    assert parameters[0].grad is not None
    parameters[0].grad[0, 0] = value


def test_the_scale_halves_at_an_overflow_and_doubles_after_enough_good_steps() -> None:
    scale = LossScale(8)
    assert [scale.update(finite=False), scale.value] == [True, 4]
    for _ in range(GROWTH_STEPS - 1):
        assert not scale.update(finite=True)
    assert scale.value == 4
    scale.update(finite=False)  # the count begins again
    assert (scale.value, scale.good_steps) == (2, 0)
    for _ in range(GROWTH_STEPS):
        scale.update(finite=True)
    assert (scale.value, scale.good_steps) == (4, 0)


def test_the_scale_is_at_least_1_where_no_overflow_is_its_fault_and_has_a_bound_above() -> None:
    scale = LossScale(2)
    assert [scale.update(finite=False) for _ in range(3)] == [True, False, False]
    assert scale.value == 1
    large = LossScale(LARGEST)
    for _ in range(GROWTH_STEPS):
        large.update(finite=True)
    assert large.value == LARGEST


@pytest.mark.parametrize("clip", [0.5, 1e9])
def test_a_scaled_gradient_makes_the_step_of_the_gradient_to_the_last_bit(clip: float) -> None:
    config = CONFIG.model_copy(update={"clip_norm": clip})
    plain, scaled = make_parameters(), make_parameters()
    one, other = Optimizer(plain, config, steps=10), Optimizer(scaled, config, steps=10, scale=LossScale(1 << 16))
    for step in range(4):
        fill_gradients(plain, step)
        fill_gradients(scaled, step, size=other.loss_scale)
        expected, taken = one.step(), other.step()
        assert taken == OptimizerStep(expected.grad_norm, expected.lr, False, 1 << 16, False)
        assert all(map(torch.equal, (*plain, *one.moments()), (*scaled, *other.moments())))


def test_an_overflow_changes_nothing_but_the_scale() -> None:
    parameters = make_parameters()
    optimizer = Optimizer(parameters, CONFIG, steps=10, scale=LossScale(4))
    fill_gradients(parameters, 0, size=4)
    optimizer.step()
    before = [tensor.clone() for tensor in (*parameters, *optimizer.moments())]
    overflow(parameters)
    step = optimizer.step()
    assert (step.skipped, step.loss_scale, step.overflowed) == (True, 4, True)
    assert all(map(torch.equal, before, (*parameters, *optimizer.moments())))
    assert optimizer.progress() == {"taken": 1, "skipped": 1, "loss_scale": 2, "good_steps": 0}


def test_a_resumed_optimizer_goes_on_with_the_scale_and_its_good_steps() -> None:
    first, second = (Optimizer(make_parameters(), CONFIG, steps=10, scale=LossScale(1 << 10)) for _ in range(2))
    for step in range(3):
        fill_gradients(first._parameters, step)
        first.step()
    second.load_progress(first.progress())
    assert second.progress() == first.progress() == {"taken": 3, "skipped": 0, "loss_scale": 1 << 10, "good_steps": 3}


def test_without_a_scale_the_counters_of_a_checkpoint_are_as_before() -> None:
    optimizer = Optimizer(make_parameters(), CONFIG, steps=10)
    assert optimizer.loss_scale == 1
    assert optimizer.progress().keys() == {"taken", "skipped"}


def steps_until_failure(value: float, loss: float, scale: int) -> int:
    """Steps with a gradient of this value until the run fails."""
    parameters = make_parameters()
    optimizer, guard = Optimizer(parameters, CONFIG, steps=10, scale=LossScale(scale)), NonFiniteGuard()
    for step in range(100):
        overflow(parameters, value)
        taken = optimizer.step()
        metrics = {"skipped": float(taken.skipped), "overflows": float(taken.overflowed), "loss": loss}
        assert guard.note(metrics), "the step had no update"
        if guard._row == MAX_SKIPPED:
            with pytest.raises(TrainingError, match=r"set model\.dtype=bfloat16 in a new run, or lower optim\.lr$"):
                guard.check()
            return step + 1
        guard.check()
    raise AssertionError("the run goes on forever")


def test_overflows_end_at_scale_1_and_fail_the_run_only_there() -> None:
    assert steps_until_failure(math.inf, loss=1.0, scale=1) == MAX_SKIPPED
    assert steps_until_failure(math.inf, loss=1.0, scale=1 << 16) == 16 + MAX_SKIPPED


def test_a_loss_that_is_not_finite_fails_the_run_as_without_a_scale() -> None:
    assert steps_until_failure(math.nan, loss=math.nan, scale=1 << 16) == MAX_SKIPPED


def test_overflows_between_failures_do_not_hide_them() -> None:
    guard = NonFiniteGuard()
    lost, overflowed = {"skipped": 1.0, "overflows": 0.0, "loss": 1.0}, {"skipped": 1.0, "overflows": 1.0, "loss": 1.0}
    for _ in range(MAX_SKIPPED):
        guard.note(lost)
        guard.note(overflowed)
    with pytest.raises(TrainingError, match=f"{MAX_SKIPPED} steps in a row"):
        guard.check()


def test_a_step_of_several_optimizer_steps_counts_overflows_and_has_the_last_scale() -> None:
    metrics = StepMetrics()
    for scale, overflows in ((4.0, 1.0), (2.0, 0.0)):
        metrics.add({"loss_scale": scale, "overflows": overflows, "skipped": overflows}, counted=10)
    assert metrics.metrics() == {"loss_scale": 2.0, "overflows": 1.0, "skipped": 1.0}
