"""The built-in task `textarena`: games of TextArena for one player. The game reads actions and refuses invalid ones."""

from pydantic import Field

from pipeline.environments.games.game_protocol import Game
from pipeline.environments.games.game_task import GameOptions, GameTask


class TextArenaOptions(GameOptions):
    """The game and its text."""

    prompt: str = Field(
        "{observation}", description="First user message: `{observation}` is the first observation, with the rules."
    )


class TextArenaTask(GameTask):
    """The game's reward for the player."""

    name = "textarena"
    library = "textarena"
    Options = TextArenaOptions
    options: TextArenaOptions

    def open_game(self) -> Game:
        from pipeline.environments.games.textarena_game import TextArenaGame

        return TextArenaGame(self.options.id, self.options.kwargs, self.options.metrics)
