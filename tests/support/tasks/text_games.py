"""Environments of Gymnasium, good ones and bad ones. Importing this module registers them."""

import os
import random
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete, Text

CLOSED: list[str] = []


class Guess(gymnasium.Env[str, str]):
    """Guess a number of one digit: hints until it is right."""

    observation_space, action_space = Text(64), Text(1, min_length=1, charset="0123456789")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.number, self.guesses = int(self.np_random.integers(10)), 0
        return "Guess.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.guesses += 1
        right = int(action) == self.number
        hint = "right" if right else "higher" if self.number > int(action) else "lower"
        return hint, 1.0 if right else -0.125, right, False, {"guesses": self.guesses, "name": "guess"}

    def close(self) -> None:
        CLOSED.append(type(self).__name__)


class Dice(Guess):
    """Draws from the clock and the process: no two games are the same."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return f"{time.perf_counter_ns()} {os.urandom(4).hex()}", 0.0, False, False, {}


class GlobalDice(Guess):
    """Draws from the global generators, which it seeds at its start."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        random.seed(seed)
        return f"{random.random()} {np.random.random()}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return f"{random.random()} {np.random.random()}", 0.0, False, False, {}


class Faulty(Guess):
    """Goes wrong by the digit."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == "0":
            raise ValueError("the board is gone")
        if action == "1":
            return "?", float("nan"), False, False, {}
        if action == "2":
            os._exit(3)
        if action == "3":
            time.sleep(600)
        return "x" * 1_000_000, 0.0, False, False, {}


class Spaces(gymnasium.Env[Any, Any]):
    """Echoes an action of the space that its keyword names."""

    observation_space = Text(1000)

    def __init__(self, space: str) -> None:
        self.action_space = {
            "discrete": Discrete(3, start=-1),
            "box": Box(-1, 1, (2,), np.float32),
            "multi": MultiDiscrete([2, 3]),
            "dict": gymnasium.spaces.Dict({"x": Discrete(2), "y": Box(0, 1, (1,), np.float32)}),
            "tuple": gymnasium.spaces.Tuple((Discrete(2), Text(3))),
        }[space]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return "Act.", {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        return {"action": action, "at": np.float32(0.123456)}, 1.0, False, False, {}


class Closed(Guess):
    """Cannot start."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        raise OSError("no such\nboard")


for _kind in (Guess, Dice, GlobalDice, Faulty, Spaces, Closed):
    gymnasium.register(f"Rollcall{_kind.__name__}-v0", _kind, disable_env_checker=True)
