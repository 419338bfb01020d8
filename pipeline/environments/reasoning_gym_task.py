"""Puzzles of the library reasoning-gym.

Owns the built-in task `reasoning_gym`: the generator and the seed of prompt `index`. Promises that a prompt depends
only on options, seed and index; that the held-out prompts are the same for every seed; and that none of them is ever a
training prompt, even if a generator repeats itself. Rewards are the library's scores, from 0 to 1.

Entry i + 1 of seed s is often entry i of seed s + 1. Therefore all uses share one sequence per generator, and each run
seed, the demonstrations and the held-out prompts have separate ranges of indices. An entry travels with its prompt,
because a few generators would make a different entry in another process.
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
"""Seed of every generator; ranges of indices separate the uses."""
SPAN = 1 << 24
"""Indices of one use of one run seed. Successive candidates of a prompt are `SPAN // TRIES` indices apart."""
MAX_SEEDS = 32
"""Number of run seeds with separate ranges; seeds further apart use the same ranges at other offsets."""
TRIES = 1000


class Generator(TaskOptions):
    """One of the library's generators, with its weight in the mixture; all other keys are the generator's settings."""

    model_config = ConfigDict(extra="allow")

    weight: Annotated[float, Field(gt=0)] = 1.0

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that are passed to the library."""
        return dict(self.model_extra or {})


class ReasoningOptions(TaskOptions):
    """The generators, and the format of an answer."""

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
    demonstration_error_rate: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="Fraction of the demonstrations with the answer to another puzzle."
    )


class ReasoningGym(Task):
    """The reward is the library's score of the answer."""

    name = "reasoning_gym"
    Options = ReasoningOptions
    options: ReasoningOptions

    def __init__(self, options: ReasoningOptions, seed: int) -> None:
        super().__init__(options, seed)
        self._datasets = {name: _dataset(name, generator) for name, generator in options.datasets.items()}

    def __len__(self) -> int:
        return self.options.size

    def prompt(self, index: int) -> Prompt:
        return self._prompt(*self._entry("prompt", 1, index))

    def held_out(self) -> list[Prompt]:
        return list(self._held_out.values())

    def demonstration(self, index: int) -> Demonstration:
        name, entry = self._entry("demonstration", 2, index)
        answer = entry["answer"]
        if Random(f"slip {self.seed} {index}").random() < self.options.demonstration_error_rate:
            answer = self._entry("demonstration", 2, index + 1)[1]["answer"]
        return Demonstration(
            self._prompt(name, entry), f"<answer>{answer}</answer>" if self.options.tags else str(answer)
        )

    def reward(self, prompt: Prompt, text: str) -> float:
        name, entry = prompt.answer
        score = float(self._datasets[name].score_answer(_answer_in(text) if self.options.tags else text, entry))
        return score if self.options.partial else float(score >= 1)

    def _prompt(self, name: str, entry: Mapping[str, Any]) -> Prompt:
        system: tuple[Message, ...] = ({"role": "system", "content": self.options.system},)
        messages = (*(system if self.options.system else ()), {"role": "user", "content": entry["question"]})
        return Prompt(messages, (name, dict(entry)), {"dataset": name, "answer": entry["answer"]})

    def _entry(self, use: str, first_range: int, index: int) -> tuple[str, Any]:
        """The first entry for `index` of a use that is not held out; `first_range` is the number of the use's range
        for seed 0."""
        # Range 0 is for held-out prompts; each run seed has two more, for prompts and for demonstrations.
        rounds, seed = divmod(self.seed, MAX_SEEDS)
        for name, entry in self._draws(
            f"{use} {self.seed}", first_range + 2 * seed, index + rounds * self.options.size
        ):
            if entry["question"] not in self._held_out:
                return name, entry
        raise AssertionError("draws have no end")

    def _draws(self, use: str, range_number: int, index: int) -> Iterator[tuple[str, Any]]:
        """Entries for an index: the first choice, then replacements from the same generator."""
        names = list(self._datasets)
        weights = [generator.weight for generator in self.options.datasets.values()]
        (name,) = Random(f"{use} {index}").choices(names, weights)
        for attempt in range(TRIES):
            yield name, self._load_entry(name, range_number * SPAN + (index + attempt * (SPAN // TRIES)) % SPAN)
        raise ValueError(
            f"{name}: {TRIES} puzzles in a row are held out; make it harder, or lower task.options.held_out"
        )

    def _load_entry(self, name: str, number: int) -> Any:
        """Entry `number` of a generator. Most generators make any entry; a few have a fixed list, and need a new list
        of one entry for a number beyond its end."""
        try:
            return self._datasets[name][number]
        except IndexError:
            return _dataset(name, self.options.datasets[name], BASE_SEED + number, size=1)[0]

    @cached_property
    def _held_out(self) -> dict[str, Prompt]:
        chosen: dict[str, Prompt] = {}
        target = self.options.held_out
        for index in count():
            if len(chosen) == target:
                return chosen
            if index > TRIES + 10 * target:
                key, expected = "task.options.held_out", f"at most {len(chosen)}, the number of different puzzles drawn"
                raise ConfigError(key, target, expected, "lower it, or make the generators harder")
            name, entry = next(self._draws("held out", 0, index))
            chosen.setdefault(entry["question"], self._prompt(name, entry))
        raise AssertionError("count has no end")


def _dataset(name: str, generator: Generator, seed: int = BASE_SEED, **size: int) -> Any:
    """A generator of the library; `ConfigError` for an unknown name or a setting that the generator refuses."""
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
    reserved = {"seed", "size"} & generator.settings.keys()
    if reserved:
        raise ConfigError(
            f"{key}.{min(reserved)}", generator.settings[min(reserved)], "nothing", "the run's seed determines it"
        )
    try:
        return reasoning_gym.create_dataset(name, seed=seed, **size, **generator.settings)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(
            key, generator.settings, f"settings that {name} takes", " ".join(str(error).split())
        ) from None


def _answer_in(text: str) -> str | None:
    """The text in the last pair of answer tags, None without such a pair."""
    answers = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return str(answers[-1]).strip() if answers else None
