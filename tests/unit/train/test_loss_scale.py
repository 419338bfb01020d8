"""The loss scale of float16: when it changes, what a step does with it, and which failures it explains."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.errors import TrainingError
from pipeline.train.batching.sequences import Batch, TrainSequence
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.loop.overflow_retries import MAX_OVERFLOWS, train_batch
from pipeline.train.loop.policy_update import MiniBatch, PolicyUpdate
from pipeline.train.loop.step_metrics import MAX_SKIPPED, NonFiniteGuard, StepMetrics
from pipeline.train.loss_specs import SFT
from pipeline.train.model.loss_scale import GROWTH_STEPS, LARGEST, LossScale
from pipeline.train.model.optimizer import Optimizer, OptimizerStep
from tests.fakes.configs import make_config
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


class Ranks:
    """One rank with an optimizer, whose gradients overflow above the scale `fits`."""

    def __init__(self, scale: int, fits: float, loss: float = 1.0) -> None:
        self.parameters, self.passes = make_parameters(), 0
        self.optimizer = Optimizer(self.parameters, CONFIG, steps=10, scale=LossScale(scale))
        self._fits, self._loss = fits, loss

    def forward_backward(self, *_: object, **__: object) -> dict[str, float]:
        self.passes += 1
        scale = self.optimizer.loss_scale
        fill_gradients(self.parameters, 0, size=scale)
        if scale > self._fits:
            overflow(self.parameters)
        return {"loss": self._loss, "flops": 1e6}

    def optim_step(self, _: str) -> dict[str, float]:
        step = self.optimizer.step()
        metrics = {"grad_norm": step.grad_norm, "skipped": float(step.skipped), "overflows": float(step.overflowed)}
        return metrics | {"loss_scale": float(step.loss_scale or 0)}

    def train(self) -> dict[str, float]:
        rows: Any = None
        return train_batch(cast(RankGroup, self), "policy", rows, SFT)


def test_a_batch_is_trained_again_at_half_the_scale_until_its_gradients_fit() -> None:
    ranks, at_once = Ranks(1 << 10, fits=1 << 8), Ranks(1 << 8, fits=1 << 8)
    trained = ranks.train()
    assert {name: trained[name] for name in ("skipped", "overflows", "loss_scale")} == {
        "skipped": 0.0,
        "overflows": 2.0,
        "loss_scale": 1 << 8,
    }
    assert at_once.train() == trained | {"overflows": 0.0, "flops": 1e6}
    assert trained["flops"] == 3e6, "of all passes"
    assert all(
        map(
            torch.equal,
            (*ranks.parameters, *ranks.optimizer.moments()),
            (*at_once.parameters, *at_once.optimizer.moments()),
        )
    )
    assert (ranks.passes, at_once.passes) == (3, 1)
    assert ranks.optimizer.progress() == {"taken": 1, "skipped": 2, "loss_scale": 1 << 8, "good_steps": 1}


def test_a_batch_that_fits_at_no_scale_takes_few_passes_and_a_few_halvings() -> None:
    ranks = Ranks(1 << 16, fits=0)
    trained = ranks.train()
    assert (trained["skipped"], trained["overflows"], ranks.passes) == (1, MAX_OVERFLOWS, MAX_OVERFLOWS)
    assert ranks.optimizer.loss_scale == 1 << 16 - MAX_OVERFLOWS


def test_a_mini_batch_of_several_epochs_halves_the_scale_no_more_often_than_one_and_once_in_each_further() -> None:
    row = TrainSequence(np.zeros(2, np.int32), np.array([0, 1], np.uint8))
    mini_batches = [MiniBatch((0,), Batch.of([row], "token"))]
    config = make_config(training={"update_epochs": 3})
    for fits, passes in ((0, MAX_OVERFLOWS + 2), (1 << 14, 5)):
        ranks = Ranks(1 << 16, fits=fits)
        update = PolicyUpdate(cast(RankGroup, ranks), config)
        metrics = update._train("policy", SFT, cast(Any, [None]), mini_batches, 0)
        assert (ranks.passes, metrics["skipped"]) == (passes, 0 if fits else 3)


def test_at_scale_1_and_with_a_loss_that_is_not_finite_a_batch_has_one_pass() -> None:
    for ranks in (Ranks(1, fits=0), Ranks(1 << 16, fits=0, loss=math.nan)):
        assert ranks.train()["skipped"] == ranks.passes == 1


def test_a_step_that_fails_in_a_repeated_pass_is_known_to_its_caller() -> None:
    ranks, open_steps = Ranks(1 << 10, fits=1 << 9), []

    @contextmanager
    def stepping() -> Iterator[None]:
        open_steps.append(ranks.passes)
        yield
        open_steps.append(-ranks.passes)

    train_batch(cast(RankGroup, ranks), "policy", cast(Any, None), SFT, stepping=stepping)
    assert open_steps == [1, -1, 2, -2]


@pytest.mark.parametrize(("scale", "loss"), [(1, 1.0), (1 << 16, 1.0), (LARGEST, 1.0), (1 << 16, math.nan)])
def test_batches_that_fit_at_no_scale_fail_the_run(scale: int, loss: float) -> None:
    ranks, guard = Ranks(scale, fits=0, loss=loss), NonFiniteGuard()
    for _ in range(MAX_SKIPPED - 1):
        assert guard.note(ranks.train()), "the step had no update"
        guard.check()
    guard.note(ranks.train())
    with pytest.raises(TrainingError, match=r"set model\.dtype=bfloat16 in a new run, or lower optim\.lr$"):
        guard.check()


def test_a_batch_that_was_trained_at_last_is_no_failure() -> None:
    ranks, guard = Ranks(1 << 10, fits=1 << 8), NonFiniteGuard()
    assert not guard.note(ranks.train())


def test_a_step_of_several_optimizer_steps_counts_overflows_and_has_the_last_scale() -> None:
    metrics = StepMetrics()
    for scale, overflows in ((4.0, 1.0), (2.0, 0.0)):
        metrics.add({"loss_scale": scale, "overflows": overflows, "skipped": 0.0}, counted=10)
    assert metrics.metrics() == {"loss_scale": 2.0, "overflows": 1.0, "skipped": 0.0}
