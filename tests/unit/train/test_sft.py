"""Supervised fine-tuning, with a dispatch that only remembers."""

from collections.abc import Sequence
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest

from pipeline.errors import TrainingError
from pipeline.train.batching.packing import Budget
from pipeline.train.batching.sequences import Batch, TrainSequence
from pipeline.train.controller.batch_staging import ShardedBatch
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.loop.sft import SupervisedFineTuning
from pipeline.train.loss_specs import SFT
from pipeline.train.train_jobs import DemonstrationsInput, SftJob, SftSchedule


class Ranks:
    """What a step asked for, in order; `failing` is the operation that fails."""

    def __init__(self, failing: str = "") -> None:
        self.asked: list[str] = []
        self._failing = failing

    def cut(self, names: Sequence[str], batch: Batch) -> ShardedBatch:
        return ShardedBatch.shard(batch, [1], Budget(64))

    def __getattr__(self, name: str) -> Any:
        def operation(*args: object, **settings: object) -> dict[str, float]:
            self.asked.append(name)
            if name == self._failing:
                raise TrainingError(f"{name} failed on rank 1")
            return {"skipped": 0.0}

        return operation


def rows(step: int, count: int) -> Sequence[TrainSequence]:
    return [
        TrainSequence(np.array([1, 2], np.int32), np.array([0, 1], np.uint8), prompt=step * count + i)
        for i in range(count)
    ]


def fine_tuning(ranks: Ranks) -> SupervisedFineTuning:
    job = SftJob(inputs=DemonstrationsInput(), schedule=SftSchedule(steps=3, batch=2))
    return SupervisedFineTuning(job, cast(RankGroup, ranks), rows, lambda: None)


def test_a_step_is_one_optimizer_step_and_leaves_a_whole_model() -> None:
    algorithm = fine_tuning(ranks := Ranks())
    algorithm.begin(0)
    algorithm.step(0)
    assert ranks.asked == ["reset_optimizer", "forward_backward", "optim_step"]
    assert algorithm.is_checkpointable


def test_a_warm_up_comes_after_the_optimizer_is_made_and_before_the_model_is_measured() -> None:
    job = SftJob(inputs=DemonstrationsInput(), schedule=SftSchedule(steps=3, batch=2))
    told: Any = Mock()
    SupervisedFineTuning(job, told, rows, lambda: None, "basic", told, told).begin(0)
    assert [call[0] for call in told.mock_calls] == ["reset_optimizer", "run", "at"]
    assert told.run.call_args.args == ({"policy": SFT}, ["policy"])


@pytest.mark.parametrize(("failing", "is_checkpointable"), [("forward_backward", True), ("optim_step", False)])
def test_a_model_is_not_intact_when_its_optimizer_step_failed(failing: str, is_checkpointable: bool) -> None:
    algorithm = fine_tuning(Ranks(failing))
    with pytest.raises(TrainingError, match="failed on rank 1"):
        algorithm.step(0)
    assert algorithm.is_checkpointable is is_checkpointable
