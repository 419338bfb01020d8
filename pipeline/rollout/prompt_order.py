"""The prompt of each position, for a task and for a mix of tasks.

Owns the order of prompts. It depends only on the task, the seed and the position, so a run that was interrupted
continues where it was, and a position that is issued again has the same prompt. Pure: no I/O and no clock.

A task alone is visited in epochs: `pipeline.transport.ledger.prompt_at`. A mix is visited in rounds. A round has
`share` positions of each task, in an order that differs from round to round, so the weights are exact after each round.
The k-th position of a task, counted over all rounds, has the prompt that position k would have if the task were alone:
each task has its own epochs, however long the others are.

    order = PromptOrder(task, seed)
    order.at(17)            # the index of the prompt, for `Task.prompt`
    order.label(index)      # the task of a mix that it belongs to; empty for another task
"""

import hashlib
from bisect import bisect_right
from itertools import accumulate

from pipeline.environments import Task
from pipeline.transport.ledger import prompt_at


class PromptOrder:
    """The order of a task's prompts with a seed."""

    def __init__(self, task: Task, seed: int) -> None:
        self._size, self._seed, self.parts = len(task), seed, task.parts
        self._ends = list(accumulate(part.share for part in self.parts))
        self._starts = list(accumulate((part.size for part in self.parts), initial=0))
        # Two tasks of one size would otherwise be visited in the same order.
        self._seeds = [_seed_of(f"{seed} {part.label}") for part in self.parts]

    @property
    def tasks(self) -> int:
        """The number of tasks: 1 without a mix."""
        return len(self.parts) or 1

    def at(self, position: int) -> int:
        """The prompt at a position."""
        return self.nth(*self.turn(position))

    def turn(self, position: int) -> tuple[int, int]:
        """The number of the task at a position, and which of the task's turns it is, counted from 0."""
        if not self.parts:
            return 0, position
        length = self._ends[-1]
        slot = prompt_at(position, length, self._seed)
        number = bisect_right(self._ends, slot)
        share = self.parts[number].share
        return number, position // length * share + slot - (self._ends[number] - share)

    def nth(self, number: int, turn: int) -> int:
        """The prompt of a turn of task `number`."""
        if not self.parts:
            return prompt_at(turn, self._size, self._seed)
        return self._starts[number] + prompt_at(turn, self.parts[number].size, self._seeds[number])

    def label(self, index: int) -> str:
        """The label of the task that a prompt belongs to; empty without a mix."""
        return self.parts[bisect_right(self._starts, index) - 1].label if self.parts else ""


def _seed_of(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")
