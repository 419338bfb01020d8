"""Games of several turns as a task.

Owns the options that all games share, the seed of each prompt, the episode, and demonstrations of random play. A
prompt is the first observation of a game; each turn of the policy is an action; the next observation follows as a user
message. Promises that a prompt depends only on options, seed and index; that the seeds of held-out games are the same
for every run and none of them is a training seed; and that an episode has the rewards of the game, or fails with the
reason.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from hashlib import blake2b
from importlib.util import find_spec
from random import Random
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from pipeline.config import TaskConfig
from pipeline.config.value_types import Positive, Seconds
from pipeline.data.chat_messages import Message
from pipeline.environments.episode import Episode
from pipeline.environments.games.game_process import GameProcess, shared_process
from pipeline.environments.games.game_protocol import Game, GameStep, check_pattern
from pipeline.environments.games.open_games import OpenGames, PlayedGame, digest
from pipeline.environments.task_protocol import Demonstration, Policy, Prompt, Task, TaskOptions
from pipeline.errors import ConfigError, DeadlineError, EpisodeError, RolloutError, TaskError
from pipeline.utils.optional_extras import pip_install

STEP = "step"
HELD_OUT_SEEDS = 1 << 20
"""Seeds below this number are for held-out games."""
DEMONSTRATIONS = 512
"""Demonstrations that one call of the process makes."""


class GameOptions(TaskOptions):
    """The environment, its text, and the number of games."""

    id: str = Field("", description="The environment's id; `module:id` imports the module first, which registers it.")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Keywords of the library's `make`.")
    max_turns: Positive = Field(16, description="Largest number of policy turns; the last one is played.")
    system: str = Field("", description="System message; empty: none.")
    prompt: str = Field(
        "{observation}\n{actions}",
        description="First user message: `{observation}` is the first observation, `{actions}` the valid actions.",
    )
    reply: str = Field("{observation}", description="Every later user message.")
    reward: Literal["sum", "last"] = Field(
        "sum", description="The episode's reward: the sum of the rewards of its steps, or that of the last step."
    )
    deterministic: bool = Field(
        True,
        description="Seed and actions determine a game, so any process may play it again; false: a game stays in its "
        "process, which needs task.processes=1.",
    )
    open_games: Positive = Field(64, description="Largest number of games that one process keeps open between turns.")
    metrics: tuple[str, ...] = Field(
        (), description="Keys of the environment's info whose numbers are reported as `game/<key>`."
    )
    size: Positive = Field(8192, description="Training games in an epoch.")
    held_out: Annotated[int, Field(gt=0, lt=HELD_OUT_SEEDS)] = Field(64, description="Games of an evaluation.")
    demonstration_actions: tuple[str, ...] = Field(
        (), description="Turns that demonstrations choose from at random; empty: valid actions at random."
    )
    demonstration_turns: Positive = Field(4, description="Largest number of turns of a demonstration.")
    startup_seconds: Seconds = Field(300, description="Timeout of loading the environment, in seconds.")


class TextActionOptions(GameOptions):
    """How the text of a turn becomes an action."""

    action_pattern: str = Field(
        "",
        description="Regular expression of the action in a turn, the last match counts (its group, if it has one); "
        "empty: the whole turn.",
    )
    action_format: str = Field("{action}", description="Turn of a demonstration with `{action}`.")
    invalid_reward: float = Field(-0.1, description="Reward of a turn that is no valid action.")
    invalid_message: str = Field(
        "Invalid action. {actions}", description="User message after a turn that is no valid action."
    )

    @field_validator("action_pattern")
    @classmethod
    def _is_a_pattern(cls, pattern: str) -> str:
        return check_pattern(pattern)


class GameTask(Task):
    """The reward is the game's."""

    library: ClassVar[str] = ""
    """The library's module, which is also the name of its extra; empty: none is needed in this environment."""
    options: GameOptions

    def __init__(self, options: GameOptions, seed: int) -> None:
        super().__init__(options, seed)
        if self.library and find_spec(self.library) is None:
            missing = f"the library installed (No module named {self.library!r})"
            raise ConfigError("task.name", self.name, missing, pip_install(self.library))
        if not options.id:
            raise ConfigError("task.options.id", "", f"an environment of {self.library}", "set it")
        self._demonstrations: tuple[int, Sequence[Demonstration]] = (0, ())

    @abstractmethod
    def open_game(self) -> Game:
        """Open a game; raises what the library raises. Only called in the processes of games."""

    def __len__(self) -> int:
        return self.options.size

    def prompt(self, index: int) -> Prompt:
        return self._prompt(self._train_seed("prompt", index))

    def first_prompts(self) -> list[Prompt]:
        return self._prompts_of([self._train_seed("prompt", 0)])

    def held_out(self) -> list[Prompt]:
        return list(self._held_out)

    def reward(self, prompt: Prompt, text: str) -> float:
        raise ValueError(f"the environment {self.options.id} reported no reward")

    def can_replay(self, prompt: Prompt) -> bool:
        return self.options.deterministic

    def use(self, prompt: Prompt, name: str, arguments: Any) -> str:
        """The game's reply to the last of the actions, as JSON."""
        if name != STEP:
            return super().use(prompt, name, arguments)
        return self._games.step(prompt.answer, arguments["actions"], arguments["seen"]).to_json()

    async def rollout(self, prompt: Prompt, policy: Policy) -> Episode:
        """Turns of the policy and replies of the game, until it ends; `EpisodeError` when it fails."""
        episode, history, actions = Episode.begin(policy.prompt), list[Message](), list[str]()
        seen, rewards, invalid, done = digest("", prompt.columns["observation"]), list[float](), 0, False
        metrics = dict[str, float]()
        while not done:
            turn = await policy.sample(episode.tokens)
            episode = episode.append_turn(turn, policy.decode(turn.tokens))
            history.append({"role": "assistant", "content": episode.text})
            actions.append(episode.text)
            try:
                reply = await policy.use(prompt, STEP, {"actions": list(actions), "seen": seen})
            except RolloutError as error:
                raise EpisodeError(f"environment failed: {error}") from None
            step, seen = GameStep.from_json(reply), digest(seen, reply)
            rewards.append(step.reward)
            metrics.update(step.metrics)
            invalid, done = invalid + (not step.valid), step.done
            if not episode.open or episode.turns >= self.options.max_turns:
                break
            message: Message = {"role": "user", "content": self._message(step)}
            observation = [] if done else policy.encode_observation(prompt, history, [message])
            # No room for the observation and a further turn: the game ends here, unfinished.
            if done or len(observation) >= policy.remaining_tokens(episode.tokens):
                break
            episode, history = episode.append_observation(observation), [*history, message]
        reported = {f"game/{name}": value for name, value in metrics.items()}
        reported |= {"game/invalid": float(invalid), "game/finished": float(done)}
        reward = sum(rewards) if self.options.reward == "sum" else rewards[-1]
        return replace(episode, reward=reward, conversation=tuple(history), metrics=reported)

    def demonstration(self, index: int) -> Demonstration:
        """Random play: some turns as context, and one more."""
        first, made = self._demonstrations
        if not first <= index < first + len(made):
            count = DEMONSTRATIONS if made else 1  # a check wants one
            first = index - index % count
            process = shared_process(self._config, self.seed) or self._process
            made = self._call(process, "random_games", first, count)
            self._demonstrations = first, made
        return made[index - first]

    def random_games(self, first: int, count: int) -> list[Demonstration]:
        """Demonstrations `first` to `first + count - 1`, all from one open game; in the process of games."""
        game = PlayedGame(self.open_game, HELD_OUT_SEEDS)
        try:
            if first == 0:
                self._check_demonstrations(game)
            return [self._random_game(game, index) for index in range(first, first + count)]
        finally:
            game.close()

    def prompts(self, seeds: Sequence[int]) -> list[Prompt]:
        """The prompts of games; in the process of games."""
        return [self._prompt(seed) for seed in seeds]

    @cached_property
    def _held_out(self) -> Sequence[Prompt]:
        return self._prompts_of(range(self.options.held_out))

    def _prompts_of(self, seeds: Sequence[int]) -> list[Prompt]:
        """The prompts of games that another process opens, and which ends then, unless it is shared."""
        shared = shared_process(self._config, self.seed)
        process = shared or GameProcess(self._config, self.seed)
        try:
            prompts: list[Prompt] = self._call(process, "prompts", tuple(seeds))
        finally:
            if shared is None:
                process.end()
        return prompts

    @cached_property
    def _games(self) -> OpenGames:
        return OpenGames(self.open_game, self.options.open_games, self.options.deterministic)

    @cached_property
    def _process(self) -> GameProcess:
        return GameProcess(self._config, self.seed)

    @property
    def _config(self) -> TaskConfig:
        """The config by which the process loads a task like this one."""
        name = f"{type(self).__module__}:{type(self).__qualname__}"
        return TaskConfig(name=name, options=self.options.model_dump())

    def _call(self, process: GameProcess, method: str, *arguments: Any) -> Any:
        try:
            return process.call(method, arguments, self.options.startup_seconds)
        except (TaskError, DeadlineError) as error:
            raise ConfigError(*self._opened_by(), str(error)) from None

    def _opened_by(self) -> tuple[str, object, str]:
        """The key that names the environment, its value, and what it should be."""
        return "task.options.id", self.options.id, "an environment that opens, with these task.options.kwargs"

    def _prompt(self, seed: int) -> Prompt:
        observation, actions = self._games.first(seed)
        return self._written(seed, observation, actions)

    def _written(self, seed: int, observation: str, actions: str) -> Prompt:
        text = self.options.prompt.replace("{actions}", actions).replace("{observation}", observation).strip()
        system: tuple[Message, ...] = ({"role": "system", "content": self.options.system},)
        messages = (*(system if self.options.system else ()), {"role": "user", "content": text})
        return Prompt(messages, seed, {"seed": seed, "observation": observation})

    def _message(self, step: GameStep) -> str:
        return self.options.reply.replace("{observation}", step.observation) if step.valid else step.observation

    def _random_game(self, game: PlayedGame, index: int) -> Demonstration:
        random, seed = Random(f"{self.seed} play {index}"), self._train_seed("demonstration", index)
        game.restart(seed)
        prompt = self._written(seed, game.first, game.game.actions)
        messages = list(prompt.messages)
        turn = self._random_turn(game.game, random)
        for _ in range(random.randrange(self.options.demonstration_turns)):
            step = game.step(turn)
            if step.done:
                break
            reply: Message = {"role": "user", "content": self._message(step)}
            messages += [{"role": "assistant", "content": turn}, reply]
            turn = self._random_turn(game.game, random)
        return Demonstration(replace(prompt, messages=tuple(messages)), turn)

    def _check_demonstrations(self, game: PlayedGame) -> None:
        """Raise `ValueError` if the game accepts none of the demonstrated actions as its first turn: then it reads
        actions of another kind, and every turn of the run would be invalid."""
        for action in self.options.demonstration_actions:
            game.restart(HELD_OUT_SEEDS)
            step = game.step(action)
            if step.valid:
                return
        if self.options.demonstration_actions:
            why = game.game.refusal or step.observation
            raise ValueError(f"it accepts none of task.options.demonstration_actions as the first turn: {why}")

    def _random_turn(self, game: Game, random: Random) -> str:
        if self.options.demonstration_actions:
            return random.choice(self.options.demonstration_actions)
        return self._turn_with(game.random_action(random))

    def _turn_with(self, action: str) -> str:
        """The turn of a demonstration that plays an action."""
        return action

    def _train_seed(self, use: str, index: int) -> int:
        """The seed of a training game: at least `HELD_OUT_SEEDS`, and below 2**31, as NumPy's generators need."""
        drawn = int.from_bytes(blake2b(f"{use} {self.seed} {index}".encode(), digest_size=8).digest(), "little")
        return HELD_OUT_SEEDS + drawn % ((1 << 31) - HELD_OUT_SEEDS)
