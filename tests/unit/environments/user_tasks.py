"""Tasks as users may write them, none of which can be used."""

from typing import Any

from pipeline.environments import Prompt, Task, user_prompt


class Endless(Task):
    """Whole, but without demonstrations and without options."""

    name = "endless"

    def __len__(self) -> int:
        return 10

    def prompt(self, index: int) -> Prompt:
        return user_prompt(str(index))

    def held_out(self) -> list[Prompt]:
        return [user_prompt("10")]

    def reward(self, prompt: Prompt, text: str) -> float:
        return 0.0


class Empty(Endless):
    def __len__(self) -> int:
        return 0


class NothingHeldOut(Endless):
    def held_out(self) -> list[Prompt]:
        return []


class HeldOutRaises(Endless):
    def held_out(self) -> list[Prompt]:
        raise OSError("gone")


class Raises(Endless):
    def __init__(self, options: Any, seed: int) -> None:
        raise ValueError("no data")


class Abstract(Task):
    name = "abstract"


class NoTask:
    pass


class Unscored(Endless):
    """Can be used, with reward functions only."""

    name = "unscored"
    has_reward = False
