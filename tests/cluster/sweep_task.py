"""A task that works for all points of a sweep but one."""

from pipeline.tasks import Prompt
from pipeline.tasks.arithmetic import Arithmetic

BROKEN_SEED = 2


class BrokenForOneSeed(Arithmetic):
    """Its verifier raises in the run whose seed is `BROKEN_SEED`."""

    name = "broken_for_one_seed"

    def __init__(self, options: object, seed: int) -> None:
        super().__init__(options, seed)
        self._broken = seed == BROKEN_SEED

    def reward(self, prompt: Prompt, text: str) -> float:
        if self._broken:
            raise ValueError("the verifier is broken")
        return super().reward(prompt, text)
