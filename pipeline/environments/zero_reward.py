"""A reward of 0 for every sample.

Owns the reward function `pipeline.environments.zero_reward:zero_reward`, for runs that learn from another signal than
rewards, such as a teacher (`teacher.url`).
"""

from collections.abc import Sequence
from typing import Any


def zero_reward(completions: Sequence[Any]) -> list[float]:
    """0 for each completion."""
    return [0.0] * len(completions)
