"""A task's demonstrations as rows.

Owns which demonstrations belong to a step: always the same ones, so that a job that was interrupted goes on as if it
had not been. Must not know ranks, models or losses.
"""

from collections.abc import Sequence

import numpy as np

from pipeline.config import RunConfig
from pipeline.config.model_directory import model_directory
from pipeline.environments import load_task
from pipeline.environments.chat_tokenizer import ChatTokenizer
from pipeline.train.batching.sequences import TrainSequence


class TaskDemonstrations:
    """Called with a step and a count: that step's rows, which have the numbers step · count and those after it."""

    def __init__(self, config: RunConfig) -> None:
        self._task = load_task(config.task, config.seed)
        self._chat = ChatTokenizer(model_directory(config.model))

    def __call__(self, step: int, count: int) -> Sequence[TrainSequence]:
        return [self._row(step * count + number) for number in range(count)]

    def _row(self, index: int) -> TrainSequence:
        tokens, prompt = self._chat.demonstration(self._task.demonstration(index))
        mask = np.ones(len(tokens), np.uint8)
        mask[:prompt] = 0
        return TrainSequence(tokens=np.array(tokens, np.int32), mask=mask, prompt=index)
