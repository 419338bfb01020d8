"""When fine-tuning is measured on held-out rows, what comes out, and which model is kept."""

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import pytest

from pipeline.train.batching.sequences import Batch, TrainSequence
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.loop.eval_loss import EvalLoss
from pipeline.train.loop.group_batches import Interrupted

ROWS = [TrainSequence(np.arange(n, dtype=np.int32), np.array([0] + [1] * (n - 1), np.uint8)) for n in (2, 5, 3)]


class Model:
    """Says −`loss` of every token, also of those that do not count; `asked` has the rows of each call."""

    def __init__(self) -> None:
        self.loss, self.asked = 1.0, list[int]()

    def forward(self, _name: str, batch: Batch) -> list[Any]:
        self.asked.append(len(batch.rows))
        return [np.full(len(row), -self.loss * (1 + row.tokens[-1]), np.float32) for row in batch.rows]


class Measured:
    """A `EvalLoss`, what it told and which models it kept."""

    def __init__(self, batch: int = 2, every: int = 2, so_far: Mapping[int, float] | None = None) -> None:
        self.model, self.told, self.kept = Model(), dict[int, Mapping[str, float]](), list[float]()
        dispatch, note, keep = cast(RankGroup, self.model), self.told.__setitem__, self._keep
        self.loss = EvalLoss(dispatch, ROWS, batch, every, so_far or {}, note, keep, self._pulse)
        self.ending = False

    def _keep(self) -> None:
        self.kept.append(self.model.loss)

    def _pulse(self) -> None:
        if self.ending:
            raise Interrupted("draining")


@pytest.mark.parametrize("batch", [1, 2, 3, 64])
def test_it_is_the_mean_over_counted_tokens_whatever_the_portions(batch: int) -> None:
    (measured := Measured(batch)).loss.at(0)
    assert measured.told[0]["eval/loss"] == pytest.approx((1 * 2 + 4 * 5 + 2 * 3) / 7)
    assert measured.told[0]["eval/tokens"] == 7
    assert sum(measured.model.asked) == len(ROWS)


def test_it_is_measured_first_last_and_in_between_and_never_twice() -> None:
    measured = Measured(every=2)
    for step in range(6):
        measured.loss.at(step)
    measured.loss.at(5, last=True)
    measured.loss.at(5, last=True)
    assert list(measured.told) == [0, 2, 4, 5]
    sparse = Measured(every=0)
    for step in range(6):
        sparse.loss.at(step)
    assert list(sparse.told) == [0]


def test_only_a_model_that_is_better_than_all_before_is_kept_and_not_the_one_before_training() -> None:
    measured = Measured(every=1)
    for step, loss in enumerate([3.0, 2.0, 2.5, 1.0, 1.0, 4.0]):
        measured.model.loss = loss
        measured.loss.at(step)
    assert measured.kept == [2.0, 1.0]


def test_a_resumed_job_knows_what_was_measured() -> None:
    measured = Measured(every=1, so_far={0: 20.0, 1: 3.0})
    measured.loss.at(1)
    measured.model.loss = 2.0
    measured.loss.at(2)
    assert list(measured.told) == [2]
    assert measured.kept == []  # 8 is more than the 3 of step 1
    measured.model.loss = 0.5
    measured.loss.at(3)
    assert measured.kept == [0.5]


def test_an_attempt_that_ends_tells_nothing_of_half_a_measure() -> None:
    (measured := Measured()).ending = True
    with pytest.raises(Interrupted):
        measured.loss.at(0)
    assert measured.told == {}
