"""A single-player game of TextArena.

Owns the text of observations: the library's wrappers repeat the whole game so far, and this game returns only the new
part. Imported only where games are opened.
"""

import importlib
import math
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import textarena

from pipeline.environments.games.game_protocol import MAX_OBSERVATION, GameStep

PLAYER = 0
OWN_ACTION = textarena.ObservationType.PLAYER_ACTION


class TextArenaGame:
    """One game of `textarena.make`, played by player 0."""

    actions = refusal = ""

    def __init__(self, id: str, kwargs: Mapping[str, Any], metrics: Sequence[str]) -> None:
        """`id` may be `module:id`, as in Gymnasium: the module registers the game. `metrics`: keys of the player's
        info at the end to report."""
        module, colon, name = id.rpartition(":")
        if colon:
            importlib.import_module(module)
        self._env = textarena.make(name, **kwargs)
        self._metrics, self._seen = tuple(metrics), ""

    def reset(self, seed: int) -> str:
        try:
            self._env.reset(num_players=1, seed=seed)
        except AssertionError as error:
            raise ValueError(f"only games of one player can be trained: {' '.join(str(error).split())}") from None
        return self._text()

    def step(self, text: str) -> GameStep:
        done, _ = self._env.step(action=text)
        if not done:
            return GameStep(self._text())
        rewards, info = self._env.close()
        reward = float((rewards or {}).get(PLAYER, 0.0))
        if not math.isfinite(reward):
            raise ValueError(f"the game's reward is {reward}, no finite number")
        report = info.get(PLAYER, {})
        metrics = {name: float(report[name]) for name in self._metrics if name in report}
        return GameStep(str(report.get("reason", ""))[:MAX_OBSERVATION], reward, done=True, metrics=metrics)

    def random_action(self, random: Random) -> str:
        raise NotImplementedError("a game of TextArena names no actions: set task.options.demonstration_actions")

    def close(self) -> None:
        return None  # a game holds no resources; `close` of the library returns the rewards

    def _text(self) -> str:
        """The new part of the observation."""
        player, observation = self._env.get_observation()
        if player != PLAYER:
            raise ValueError(f"only games of one player can be trained; player {player} is to act")
        if not isinstance(observation, str):  # without a wrapper: (sender, text, kind) of each new message
            new = [text for _, text, kind in observation if kind is not OWN_ACTION]
            return "\n".join(new).strip()[:MAX_OBSERVATION]
        seen, self._seen = self._seen, observation
        return observation.removeprefix(seen).strip()[:MAX_OBSERVATION]
