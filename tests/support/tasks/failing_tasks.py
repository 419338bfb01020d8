"""Tasks whose rewards do not work, for the actor's tests."""

import itertools
import time
from typing import Any

from pipeline.environments import Prompt
from pipeline.environments.arithmetic import Arithmetic
from pipeline.environments.task_protocol import TaskPart


class AlwaysRaises(Arithmetic):
    """Its verifier is broken."""

    name = "always_raises"

    def reward(self, prompt: Prompt, text: str) -> float:
        raise ValueError("the verifier is broken")


GROUPS = 8
"""Groups of which the task below still knows its parts."""
LOOKS_OF_A_GROUP = 3


class Parts(tuple[TaskPart, ...]):
    """No parts; and after so many looks an error, in the actor's own process."""

    looks = 0

    def __bool__(self) -> bool:
        self.looks += 1
        if self.looks > GROUPS * LOOKS_OF_A_GROUP:
            raise ZeroDivisionError("a foreign error")
        return False


class HangsThenBreaks(Arithmetic):
    """Its rewards never end; and after so many groups it does not know its parts."""

    name = "hangs_then_breaks"

    @property
    def parts(self) -> tuple[TaskPart, ...]:
        return Parts()

    def reward(self, prompt: Prompt, text: str) -> float:
        while True:
            time.sleep(600)


class SometimesWrong(Arithmetic):
    """Every fourth reward of a process is NaN, a string or an exception, in turn."""

    name = "sometimes_wrong"

    def __init__(self, options: Any, seed: int) -> None:
        super().__init__(options, seed)
        self._calls, self._faults = itertools.count(), itertools.cycle([float("nan"), "1.0", None])

    def reward(self, prompt: Prompt, text: str) -> Any:
        if next(self._calls) % 4:
            return super().reward(prompt, text)
        fault = next(self._faults)
        if fault is None:
            raise ZeroDivisionError("every twelfth")
        return fault
