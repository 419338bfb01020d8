"""A reward function that does whatever can be done wrong, as the answer says, and servers that ask for all of it."""

from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any

from pipeline.environments.chat_tokenizer import ChatTokenizer
from tests.support.tasks.hostile_task import DOES, REASONS, Hostile, HostileOptions
from tests.unit.environments.test_tasks import Said

HUNDRED = {
    "ok": 60,
    "raise": 10,
    "nan": 10,
    "text": 4,
    "nothing": 3,
    "sys.exit": 2,
    "exit": 2,
    "exit well": 1,
    "kill": 2,
    "fork": 2,
    "eat": 1,
    "hang": 1,
    "print": 1,
    "leave": 1,
}
"""How many of a hundred samples do what."""
FINE = {"ok": 1.0, "fork": 0.5}


def hostile(data_source: str, solution_str: str, ground_truth: str, notes: str) -> Any:
    """A function of verl's form; `notes` is a folder in which whoever hangs leaves a file of its pid."""
    return DOES[solution_str](Hostile(HostileOptions(notes=notes), 0))


def reason_of(text: str, seconds: float) -> str:
    """What is said of a sample whose answer was `text`."""
    expected = REASONS.get(text, f"reward took too long: more than task.seconds={seconds:g}")
    return expected.replace("reward", "reward hostile", 1)


class Provoking:
    """Servers whose answers are the hundred in turn, well mixed."""

    def __init__(self, chat: ChatTokenizer) -> None:
        hundred = list(chain.from_iterable(repeat(text, count) for text, count in HUNDRED.items()))
        self._turns = [Said((*chat.encode(text), chat.stop_token_ids[0])) for text in hundred]
        self.said = 0

    async def generate(self, token_ids: Sequence[int], *, n: int, **_: Any) -> list[Said]:
        turns = [self._turns[(self.said + place) * 37 % len(self._turns)] for place in range(n)]
        self.said += n
        return turns
