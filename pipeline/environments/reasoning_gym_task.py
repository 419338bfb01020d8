"""Puzzles of the library reasoning-gym.

Owns the built-in task `reasoning_gym`: which of its generators makes prompt `index`, with which seed. Promises that a
prompt depends only on options, seed and index; that the held-out prompts are the same for every seed; and that none of
them is ever a training prompt, though a generator may repeat itself. Rewards are the library's own, from 0 to 1.

Entry i + 1 of seed s is often entry i of seed s + 1, so each run seed, the demonstrations and the held-out prompts have
ranges of indices of their own in one sequence for each generator. An entry travels with its prompt: a few generators
would make another one in another process.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import count
from random import Random
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from pipeline.config import closest_match
from pipeline.data.chat_messages import Message
from pipeline.environments.task_protocol import Demonstration, Prompt, Task, TaskOptions
from pipeline.errors import ConfigError
from pipeline.utils.optional_extras import pip_install

TAGS = "Think about the question first. Then give the final answer, and nothing else, between <answer> and </answer>."
BASE_SEED = 20_000_003
"""Of every generator; ranges of indices tell the uses apart."""
SPAN = 1 << 24
"""Indices of one use of one run seed; tries of one prompt are this many divided by `size` apart."""
MAX_SEEDS = 32
"""Run seeds with ranges of their own; those further apart begin elsewhere in the same ones."""
TRIES = 1000


class Generator(TaskOptions):
    """One of the library's generators: how often it is drawn; all other keys are its own settings."""

    model_config = ConfigDict(extra="allow")

    weight: Annotated[float, Field(gt=0)] = 1.0

    @property
    def settings(self) -> dict[str, Any]:
        """What the library is given."""
        return dict(self.model_extra or {})


class ReasoningOptions(TaskOptions):
    """Which generators, and how their answers are read."""

    datasets: dict[str, Generator] = Field(
        min_length=1, description="Generators by name, each with its settings, and its `weight` in the mixture."
    )
    size: Annotated[int, Field(gt=0, le=1 << 20)] = Field(8192, description="Training prompts in an epoch.")
    held_out: Annotated[int, Field(gt=0, le=1 << 16)] = Field(256, description="Prompts of an evaluation.")
    system: str = Field(TAGS, description="System message; empty: none.")
    tags: bool = Field(
        True, description="The answer is between <answer> and </answer>; otherwise it is the whole text."
    )
    partial: bool = Field(
        True, description="Use the library's partial scores; otherwise only a full score counts, as 1."
    )
    slips: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="Fraction of the demonstrations with the answer to another puzzle."
    )


class ReasoningGym(Task):
    """The library's score of the answer."""

    name = "reasoning_gym"
    Options = ReasoningOptions
    options: ReasoningOptions

    def __init__(self, options: ReasoningOptions, seed: int) -> None:
        super().__init__(options, seed)
        self._datasets = {name: _dataset(name, generator) for name, generator in options.datasets.items()}

    def __len__(self) -> int:
        return self.options.size

    def prompt(self, index: int) -> Prompt:
        return self._asked(*self._entry("prompt", 1, index))

    def held_out(self) -> list[Prompt]:
        return list(self._held_out.values())

    def demonstration(self, index: int) -> Demonstration:
        name, entry = self._entry("demonstration", 2, index)
        answer = entry["answer"]
        if Random(f"slip {self.seed} {index}").random() < self.options.slips:
            answer = self._entry("demonstration", 2, index + 1)[1]["answer"]
        return Demonstration(
            self._asked(name, entry), f"<answer>{answer}</answer>" if self.options.tags else str(answer)
        )

    def reward(self, prompt: Prompt, text: str) -> float:
        name, entry = prompt.answer
        score = float(self._datasets[name].score_answer(_answer_in(text) if self.options.tags else text, entry))
        return score if self.options.partial else float(score >= 1)

    def _asked(self, name: str, entry: Mapping[str, Any]) -> Prompt:
        system: tuple[Message, ...] = ({"role": "system", "content": self.options.system},)
        messages = (*(system if self.options.system else ()), {"role": "user", "content": entry["question"]})
        return Prompt(messages, (name, dict(entry)), {"dataset": name, "answer": entry["answer"]})

    def _entry(self, use: str, place: int, index: int) -> tuple[str, Any]:
        """The first entry for `index` of a use that is not held out; `place` is that of its range for seed 0."""
        rounds, seed = divmod(self.seed, MAX_SEEDS)
        for name, entry in self._draws(f"{use} {self.seed}", place + 2 * seed, index + rounds * self.options.size):
            if entry["question"] not in self._held_out:
                return name, entry
        raise AssertionError("draws have no end")

    def _draws(self, use: str, place: int, index: int) -> Iterator[tuple[str, Any]]:
        """Entries for an index: the first one, and others of the same generator, which take its place."""
        names = list(self._datasets)
        weights = [generator.weight for generator in self.options.datasets.values()]
        (name,) = Random(f"{use} {index}").choices(names, weights)
        for again in range(TRIES):
            yield name, self._made(name, place * SPAN + (index + again * (SPAN // TRIES)) % SPAN)
        raise ValueError(
            f"{name}: {TRIES} puzzles in a row are held out; make it harder, or lower task.options.held_out"
        )

    def _made(self, name: str, number: int) -> Any:
        """Entry `number` of a generator. Most make any; a few have a list of them, and make a list of one for each."""
        try:
            return self._datasets[name][number]
        except IndexError:
            return _dataset(name, self.options.datasets[name], BASE_SEED + number, size=1)[0]

    @cached_property
    def _held_out(self) -> dict[str, Prompt]:
        chosen: dict[str, Prompt] = {}
        wanted = self.options.held_out
        for index in count():
            if len(chosen) == wanted:
                return chosen
            if index > TRIES + 10 * wanted:
                key, expected = "task.options.held_out", f"at most {len(chosen)}, the different puzzles that were found"
                raise ConfigError(key, wanted, expected, "lower it, or make the generators harder")
            name, entry = next(self._draws("held out", 0, index))
            chosen.setdefault(entry["question"], self._asked(name, entry))
        raise AssertionError("count has no end")


def _dataset(name: str, generator: Generator, seed: int = BASE_SEED, **size: int) -> Any:
    """A generator of the library; `ConfigError` when there is none, or for a setting that it does not take."""
    key = f"task.options.datasets.{name}"
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(
            "task.name", "reasoning_gym", f"the library installed ({error})", pip_install("reasoning-gym")
        ) from None
    if name not in DATASETS:
        raise ConfigError(key, generator.settings, "a generator of reasoning-gym", closest_match(name, list(DATASETS)))
    taken = {"seed", "size"} & generator.settings.keys()
    if taken:
        raise ConfigError(f"{key}.{min(taken)}", generator.settings[min(taken)], "nothing", "the run's seed says it")
    try:
        return reasoning_gym.create_dataset(name, seed=seed, **size, **generator.settings)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(
            key, generator.settings, f"settings that {name} takes", " ".join(str(error).split())
        ) from None


def _answer_in(text: str) -> str | None:
    """What stands in the last pair of answer tags, None if nothing does."""
    found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return str(found[-1]).strip() if found else None
