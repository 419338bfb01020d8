"""A session of an OpenEnv server as a game in text."""

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from pipeline.environments.games.game_protocol import MAX_OBSERVATION, GameStep, read_action
from pipeline.environments.games.openenv_server import CAPACITY_SECONDS, INVALID_ACTION, OpenEnvError, Session

ACTION = "{action}"


@dataclass(frozen=True)
class OpenEnvText:
    """How actions and observations are written.

    Attributes:
        action: fields of an action, where a text `{action}` is replaced by the turn; empty: the turn is JSON.
        observation: path of the observation's text, such as `messages.0.content`; empty: the observation as JSON.
        pattern, invalid_reward, invalid_message: as in `TextActionOptions`.
        metrics: fields of the observation whose numbers are reported. (A server never sends the metadata.)
    """

    action: Mapping[str, Any]
    observation: str
    pattern: str
    invalid_reward: float
    invalid_message: str
    metrics: tuple[str, ...]


class OpenEnvGame:
    """One session."""

    actions = refusal = ""

    def __init__(self, connect: Callable[[], Session], reset: Mapping[str, Any], text: OpenEnvText) -> None:
        """`reset`: further arguments of the environment's reset."""
        self._connect, self._reset, self._text = connect, dict(reset), text
        self._session = connect()

    def reset(self, seed: int) -> str:
        until = time.monotonic() + CAPACITY_SECONDS
        while True:
            try:
                data = self._session.exchange("reset", {**self._reset, "seed": seed})
                break
            except OpenEnvError as error:
                # The server may still be about to release a session that was closed to make room for this one.
                if error.code != "CAPACITY_REACHED" or time.monotonic() > until:
                    raise
                self._session.close()
                time.sleep(0.1)
                self._session = self._connect()
        if data.get("done"):
            raise ValueError("the environment is over after its reset")
        return self._shown(data)

    def step(self, text: str) -> GameStep:
        action = self._action(read_action(text, self._text.pattern))
        if action is None:
            return self._invalid()
        try:
            data = self._session.exchange("step", action)
        except OpenEnvError as error:
            if error.code == INVALID_ACTION:
                self.refusal = str(error)
                return self._invalid()
            raise
        value = data.get("reward")
        reward = 0.0 if value is None else float(value)
        if not math.isfinite(reward):
            raise ValueError(f"the environment's reward is {reward}, no finite number")
        fields = data.get("observation") or {}
        metrics = {name: float(fields[name]) for name in self._text.metrics if name in fields}
        return GameStep(self._shown(data), reward, bool(data.get("done")), metrics=metrics)

    def random_action(self, random: Random) -> str:
        raise NotImplementedError("OpenEnv draws no actions: set task.options.demonstration_actions")

    def close(self) -> None:
        self._session.close()

    def _invalid(self) -> GameStep:
        message = self._text.invalid_message.replace("{actions}", "").strip()
        return GameStep(message, self._text.invalid_reward, valid=False)

    def _action(self, text: str) -> Mapping[str, Any] | None:
        if self._text.action:
            filled: Mapping[str, Any] = _filled(self._text.action, text)
            return filled if text else None
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None

    def _shown(self, data: Mapping[str, Any]) -> str:
        observation = data.get("observation")
        if self._text.observation:
            return _at(observation, self._text.observation)[:MAX_OBSERVATION]
        fields = {name: value for name, value in dict(observation or {}).items() if name != "metadata"}
        return json.dumps(fields)[:MAX_OBSERVATION]


def _filled(value: Any, text: str) -> Any:
    """A template with the turn's text."""
    if isinstance(value, Mapping):
        return {name: _filled(part, text) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_filled(part, text) for part in value]
    return value.replace(ACTION, text) if isinstance(value, str) else value


def _at(value: Any, path: str) -> str:
    """The text at a path of names and positions; `ValueError` if there is none."""
    for name in path.split("."):
        try:
            value = value[int(name)] if isinstance(value, list) else value[name]
        except (LookupError, TypeError, ValueError):
            known = ", ".join(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
            raise ValueError(f"task.options.observation={path}: no {name}; there is {known or 'nothing'}") from None
    return value if isinstance(value, str) else json.dumps(value)
