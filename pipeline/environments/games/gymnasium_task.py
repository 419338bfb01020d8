"""The built-in task `gymnasium`: any environment of Gymnasium whose observations and actions have a text."""

from typing import Literal

from pydantic import Field

from pipeline.environments.games.game_protocol import Game
from pipeline.environments.games.game_task import GameTask, TextActionOptions


class GymnasiumOptions(TextActionOptions):
    """The environment, its observations and its actions."""

    observation: Literal["value", "render"] = Field(
        "value",
        description="Text of an observation: its value (a string as it is, anything else as JSON), or what `render()` "
        "returns with the render mode `ansi`.",
    )
    actions: tuple[str, ...] = Field(
        (), description="Names of discrete actions, in the order of their numbers; empty: the numbers."
    )


class GymnasiumTask(GameTask):
    """The sum of the environment's rewards."""

    name = "gymnasium"
    library = "gymnasium"
    Options = GymnasiumOptions
    options: GymnasiumOptions

    def open_game(self) -> Game:
        from pipeline.environments.games.gymnasium_game import GymnasiumGame

        options = self.options
        return GymnasiumGame(
            options.id,
            options.kwargs,
            options.actions,
            options.observation == "render",
            options.action_pattern,
            options.invalid_reward,
            options.invalid_message,
            options.metrics,
        )

    def _turn_with(self, action: str) -> str:
        return self.options.action_format.replace("{action}", action)
