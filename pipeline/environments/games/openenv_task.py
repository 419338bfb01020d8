"""The built-in task `openenv`: environments behind a server of OpenEnv, which the job starts or which runs elsewhere.

Each worker process starts a separate server with `command` before its first call, so that `task.seconds` need not
cover the start. Only the server needs the library.
"""

from functools import cached_property
from typing import Any, Self

from pydantic import Field, model_validator

from pipeline.config.value_types import Seconds
from pipeline.environments.games.game_protocol import Game
from pipeline.environments.games.game_task import GameTask, TextActionOptions
from pipeline.environments.games.openenv_game import ACTION, OpenEnvGame, OpenEnvText
from pipeline.environments.games.openenv_server import NO_REPLY, UNREACHABLE, LocalServer, OpenEnvError, Session
from pipeline.errors import ConfigError


class OpenEnvOptions(TextActionOptions):
    """The server, and its actions and observations."""

    id: str = Field("openenv", description="A name for the environment in errors.")
    command: tuple[str, ...] = Field(
        (), description="The server as a command and its arguments; `{port}` is the port at which it must listen."
    )
    url: str = Field("", description="The URL of a server that runs already, instead of a command.")
    action: dict[str, Any] = Field(
        default_factory=dict,
        description="Fields of an action, with `{action}` for the turn's text; empty: the turn is a JSON object.",
    )
    observation: str = Field(
        "", description="Path of the text in an observation, such as `messages.0.content`; empty: all of it as JSON."
    )
    prompt: str = Field("{observation}", description="First user message: `{observation}` is the first observation.")
    reset: dict[str, Any] = Field(default_factory=dict, description="Further arguments of the environment's reset.")
    step_seconds: Seconds = Field(50, description="Timeout of one exchange with the server, in seconds.")

    @model_validator(mode="after")
    def _names_one_server(self) -> Self:
        if bool(self.command) == bool(self.url):
            raise ValueError("a command, or the URL of a server; set task.options.command=[…]")
        if self.command and not any("{port}" in part for part in self.command):
            raise ValueError("command with {port} in one of its arguments; the server must listen at that port")
        if self.action and ACTION not in str(self.action):
            raise ValueError("action with the text {action} in one of its fields")
        return self


class OpenEnvTask(GameTask):
    """The sum of the environment's rewards."""

    name = "openenv"
    Options = OpenEnvOptions
    options: OpenEnvOptions

    def prepare_worker(self) -> None:
        if self.options.command:
            try:
                _ = self._server  # starts it
            except OpenEnvError as error:
                raise ConfigError(*self._opened_by(), str(error)) from None

    def open_game(self) -> Game:
        options = self.options
        text = OpenEnvText(
            options.action,
            options.observation,
            options.action_pattern,
            options.invalid_reward,
            options.invalid_message,
            options.metrics,
        )
        return OpenEnvGame(self._connect, options.reset, text)

    def _opened_by(self) -> tuple[str, object, str]:
        if self.options.url:
            return "task.options.url", self.options.url, "the URL of a server with an environment that opens"
        command = "[" + ",".join(self.options.command) + "]"
        return "task.options.command", command, "a server with an environment that opens"

    def _connect(self) -> Session:
        if self.options.url:
            return Session(self.options.url, self.options.step_seconds)
        if not self._server.alive:
            self._end_server()
        try:
            return Session(self._server.url, self.options.step_seconds)
        except OpenEnvError as error:
            if error.code not in (NO_REPLY, UNREACHABLE):
                raise
            self._end_server()
            if error.code == NO_REPLY:  # it hangs, and the time of this call has passed: the next one starts another
                raise
        return Session(self._server.url, self.options.step_seconds)

    def _end_server(self) -> None:
        self.__dict__.pop("_server").end()

    @cached_property
    def _server(self) -> LocalServer:
        return LocalServer(self.options.command, self.options.startup_seconds)
