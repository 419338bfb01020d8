"""The advantages of a group's samples, from the task's rewards less the penalty of samples near their limit."""

from collections.abc import Sequence

from pipeline.algorithms.advantage_estimators import sample_advantages
from pipeline.algorithms.overlong_penalty import overlong_penalty
from pipeline.config import RunConfig
from pipeline.transport.sample_records import Sample


def group_advantages(samples: Sequence[Sample], config: RunConfig) -> tuple[float, ...]:
    """The advantage of each sample of a group, by `loss.advantage_estimator`."""
    return tuple(sample_advantages(training_rewards(samples, config), config.loss.advantage_estimator))


def training_rewards(samples: Sequence[Sample], config: RunConfig) -> list[float]:
    """The reward of each sample, with `training.overlong_buffer` less its penalty.

    An episode of several turns has the limit of one turn for each: only its truncation is punished in full. Its length
    is that of all its rows, as its turns are.
    """
    training, limit = config.training, config.rollout.max_tokens
    if not training.overlong_buffer:
        return [sample.reward for sample in samples]
    return [
        sample.reward
        - training.overlong_penalty
        * overlong_penalty(
            sum(int(row.sampled.sum()) for row in sample.rows()) // sample.turns,
            limit,
            training.overlong_buffer,
            truncated=sample.finish == "length",
        )
        for sample in samples
    ]
