"""The interface of one open game in text.

Owns the reply to an action, and the reading of the action in a turn. Must not know any library of games.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any, Protocol

MAX_OBSERVATION = 20_000
"""Largest length of an observation in characters; the rest is cut off."""


class GameLost(Exception):
    """A game that was open is gone, without a reply to its last action: it may be played again."""


@dataclass(frozen=True)
class GameStep:
    """The reply of a game to one action.

    Attributes:
        observation: the text of the next user message.
        reward: of this step.
        done: whether the game is over.
        valid: whether the text was an action; otherwise the game is as before.
        metrics: numbers that the game reports, by name.
    """

    observation: str
    reward: float = 0.0
    done: bool = False
    valid: bool = True
    metrics: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> str:
        """The step as one line. Equal steps give equal lines."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "GameStep":
        """The step that `to_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        return cls(**fields)


class Game(Protocol):
    """One game, open until `close`. Any method may raise whatever the library raises."""

    def reset(self, seed: int) -> str:
        """Start the game of this seed. Returns the first observation."""

    def step(self, text: str) -> GameStep:
        """The reply to a turn of the policy."""

    @property
    def actions(self) -> str:
        """A sentence with the valid actions; empty if the library does not name them."""

    @property
    def refusal(self) -> str:
        """The library's reason for the last invalid action; empty if it has none."""

    def random_action(self, random: Random) -> str:
        """The text of a valid action; `NotImplementedError` if the library cannot draw one."""

    def close(self) -> None:
        """Release all resources of the game."""


def read_action(text: str, pattern: str) -> str:
    """The action in a turn: the last match of the pattern (its first group, if it has one), or the whole turn."""
    if not pattern:
        return text.strip()
    matches = list(re.finditer(pattern, text))
    if not matches:
        return ""
    last = matches[-1]
    return str(last.group(1 if last.re.groups else 0) or "").strip()


def check_pattern(pattern: str) -> str:
    """The pattern of an action; `ValueError` if it is no regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"a regular expression ({error})") from None
    return pattern
