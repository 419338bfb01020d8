"""An environment of OpenEnv: guess a number from 1 to 3 in two guesses.

Run as `python openenv_guess.py PORT` by an interpreter that has openenv.
"""

import sys
from random import Random

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: int


class Hint(Observation):
    text: str


class GuessEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **_):
        self._number, self._state = Random(seed).randint(1, 3), State()
        return Hint(text="1 to 3")

    def step(self, action, timeout_s=None, **_):
        self._state.step_count += 1
        right = action.number == self._number
        hint = "right" if right else "higher" if action.number < self._number else "lower"
        return Hint(text=hint, reward=float(right), done=right or self._state.step_count == 2)

    @property
    def state(self):
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(GuessEnvironment, Guess, Hint, max_concurrent_envs=256)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
