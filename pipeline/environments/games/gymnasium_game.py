"""A Gymnasium environment as a game in text.

Owns the text of observations and the reading of actions. Imported only where games are opened.

| action space | text of an action |
|---|---|
| `Discrete` | one of the names `actions`, in the order of the numbers, else the number |
| `Text` | the text itself |
| any other | JSON, such as `[0.5, -1]` |
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import gymnasium
import numpy as np

from pipeline.environments.games.game_protocol import MAX_OBSERVATION, GameStep, read_action

DIGITS = 4
"""Decimals of a number in an observation."""
_COLOR, _RESET = re.compile(r"\x1b\[(?!0m)[0-9;]*m"), "\x1b[0m"


class GymnasiumGame:
    """One environment of `gymnasium.make`."""

    refusal = ""

    def __init__(
        self,
        id: str,
        kwargs: Mapping[str, Any],
        actions: Sequence[str],
        render: bool,
        pattern: str,
        invalid_reward: float,
        invalid_message: str,
        metrics: Sequence[str],
    ) -> None:
        """`render`: observations are what `render()` returns; `metrics`: keys of the step's info to report."""
        self._names, self._render, self._pattern = tuple(actions), render, pattern
        self._invalid_reward, self._invalid_message, self._metrics = invalid_reward, invalid_message, tuple(metrics)
        more = {"render_mode": "ansi"} if render and "render_mode" not in kwargs else {}
        self._env = gymnasium.make(id, **more, **kwargs)
        self._space = self._env.action_space
        discrete = isinstance(self._space, gymnasium.spaces.Discrete)
        if self._names and not (discrete and len(self._names) == int(self._space.n)):
            size = f"{int(self._space.n)} actions" if discrete else f"the action space {self._space}"
            self._env.close()
            raise ValueError(f"task.options.actions has {len(self._names)} names, but {id} has {size}")

    @property
    def actions(self) -> str:
        if self._names:
            return f"Actions: {', '.join(self._names)}"
        if isinstance(self._space, gymnasium.spaces.Discrete):
            return f"Actions: {int(self._space.start)} to {int(self._space.start + self._space.n) - 1}"
        return "" if isinstance(self._space, gymnasium.spaces.Text) else f"Actions: JSON in {self._space}"

    def reset(self, seed: int) -> str:
        self._space.seed(seed)
        observation, _ = self._env.reset(seed=seed)
        return self._text(observation)

    def step(self, text: str) -> GameStep:
        action = self._read(text)
        if action is None:
            return GameStep(self._invalid_message.replace("{actions}", self.actions), self._invalid_reward, valid=False)
        observation, reward, terminated, truncated, info = self._env.step(action)
        if not math.isfinite(reward):
            raise ValueError(f"the environment's reward is {reward}, no finite number")
        metrics = {name: float(info[name]) for name in self._metrics if name in info}
        return GameStep(self._text(observation), float(reward), bool(terminated or truncated), metrics=metrics)

    def random_action(self, random: Random) -> str:
        self._space.seed(random.randrange(1 << 31))
        sampled = self._space.sample()
        if isinstance(self._space, gymnasium.spaces.Discrete):
            return self._names[int(sampled) - int(self._space.start)] if self._names else str(int(sampled))
        return str(sampled) if isinstance(self._space, gymnasium.spaces.Text) else json.dumps(_plain(sampled))

    def close(self) -> None:
        self._env.close()

    def _read(self, text: str) -> Any:
        """The action in a text, None if it has none."""
        action = read_action(text, self._pattern)
        if isinstance(self._space, gymnasium.spaces.Text):
            return action if self._space.contains(action) else None
        if isinstance(self._space, gymnasium.spaces.Discrete):
            value: Any = self._number(action)
        else:
            try:
                value = _value(self._space, json.loads(action))
            except (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError):
                return None
        return value if value is not None and self._space.contains(value) else None

    def _number(self, action: str) -> Any:
        """The number of a discrete action."""
        if self._names:
            numbers = {name.casefold(): number for number, name in enumerate(self._names)}
            number = numbers.get(action.casefold())
            return None if number is None else np.int64(number + int(self._space.start))
        # Nine digits are within any integer type; int() would read far longer ones, and other alphabets' digits.
        return np.int64(action) if re.fullmatch(r"-?[0-9]{1,9}", action) else None

    def _text(self, observation: Any) -> str:
        if self._render:
            shown = self._env.render()
            if not isinstance(shown, str):
                raise TypeError(
                    f"render() returned {type(shown).__name__}, no text; set task.options.observation=value"
                )
            # Terminal colors mark a position on the map; in plain text, square brackets do.
            return _COLOR.sub("[", shown).replace(_RESET, "]").strip("\n")[:MAX_OBSERVATION]
        text = observation if isinstance(observation, str) else json.dumps(_plain(observation))
        return text[:MAX_OBSERVATION]


def _value(space: Any, data: Any) -> Any:
    """JSON values as a member of a space. Raises, or returns no member, if they are none."""
    spaces = gymnasium.spaces
    if isinstance(space, spaces.Dict):
        return (
            {name: _value(part, data[name]) for name, part in space.spaces.items()} if len(data) == len(space) else None
        )
    if isinstance(space, spaces.Tuple):
        return tuple(_value(part, entry) for part, entry in zip(space.spaces, data, strict=True))
    if isinstance(space, spaces.Text):
        return data
    if isinstance(space, spaces.Discrete):
        return np.int64(data) if isinstance(data, int) else None
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        array = np.asarray(data)
        # NumPy would round 0.5 to an integer, and read digits in texts.
        kinds = "iu" if np.issubdtype(space.dtype, np.integer) else "iuf"
        return array.astype(space.dtype) if array.dtype.kind in kinds else None
    return space.from_jsonable([data])[0]


def _plain(value: Any) -> Any:
    """An observation as JSON values, with numbers of `DIGITS` decimals."""
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float):
        return round(value, DIGITS) if math.isfinite(value) else str(value)
    return value if isinstance(value, int | str | bool | None) else str(value)
