"""A task that works for all points of a sweep but one."""

from pipeline.environments.arithmetic import Arithmetic
from pipeline.environments.task_protocol import Demonstration

BROKEN_SEED = 2


class BrokenForOneSeed(Arithmetic):
    """In the run whose seed is `BROKEN_SEED` only the first of its demonstrations works, at which a launcher looks."""

    name = "broken_for_one_seed"

    def __init__(self, options: object, seed: int) -> None:
        super().__init__(options, seed)
        self._broken = seed == BROKEN_SEED

    def demonstration(self, index: int) -> Demonstration:
        if self._broken and index > 0:
            raise ValueError("the task is broken")
        return super().demonstration(index)
