"""A task's demonstrations as rows.

The demonstrations of a step depend on its number alone, so a resumed job trains the rows that an uninterrupted job
would train. Must not know ranks, models or losses.
"""

from collections.abc import Sequence

import numpy as np

from pipeline.config import RunConfig
from pipeline.config.model_directory import model_directory
from pipeline.environments import load_task
from pipeline.environments.chat_tokenizer import ChatTokenizer
from pipeline.train.batching.sequences import TrainSequence


class TaskDemonstrations:
    """Callable (step, count) → the step's rows, from the demonstrations step · count … (step + 1) · count − 1."""

    def __init__(self, config: RunConfig) -> None:
        self._task = load_task(config.task, config.seed)
        self._chat = ChatTokenizer(model_directory(config.model))

    def __call__(self, step: int, count: int) -> Sequence[TrainSequence]:
        return [self._row(step * count + number) for number in range(count)]

    def _row(self, index: int) -> TrainSequence:
        tokens, prompt = self._chat.demonstration(self._task.demonstration(index))
        mask = np.ones(len(tokens), np.uint8)
        mask[:prompt] = 0  # the loss counts the answer only
        return TrainSequence(tokens=np.array(tokens, np.int32), mask=mask, prompt=index)
