"""Several tasks in one run.

Owns the built-in task `mix`: the prompts, episodes and rewards of the tasks of `task.tasks`, each with its weight. A
task of a mix has a label, by default its name, which its prompts carry (`Prompt.task`) and its metrics have in their
names. Prompts are numbered one task after the other. Which prompt a position has is the matter of
`pipeline.rollout.prompt_order`, which reads `parts`.

Promises that each call of a prompt reaches the task that made the prompt, that held-out prompts alternate between the
tasks, and that an error in a task of the mix is a `ConfigError` that names its key, such as
`task.tasks.1.options.terms`. All tasks share the worker processes and their limits (`task.seconds` and so on).

    task: {name: mix, tasks: [{name: arithmetic, weight: 2}, {name: countdown, options: {numbers: 3}}]}
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, chain, zip_longest
from math import gcd, lcm
from typing import Any

from pipeline.config import TaskConfig
from pipeline.config.task_keys import MIX
from pipeline.environments.episode import Episode
from pipeline.environments.task_protocol import Demonstration, Policy, Prompt, Task, TaskOptions, TaskPart
from pipeline.environments.user_imports import user_import_errors
from pipeline.errors import ConfigError

KEY = "task.tasks"
MAX_ROUND = 1000
"""Largest number of positions after which a mix has its weights exactly; weights that need more are rounded."""
RESERVED = ("held_out", "masked", "mean", "rewards", "std", "task", "tools", "truncated")
"""Labels that would give a task's metric the name of another metric."""


class Mix(Task):
    """Each prompt is one of a task of the mix, which runs its episode and computes its reward."""

    name = MIX
    Options = TaskOptions

    def __init__(self, tasks: Sequence[tuple[str, int, Task]], seed: int) -> None:
        """`tasks` are label, share (positions in a round) and task, in order; the labels differ."""
        super().__init__(TaskOptions(), seed)
        self._tasks = {label: task for label, _, task in tasks}
        self._parts = tuple(TaskPart(label, share, len(task)) for label, share, task in tasks)
        self._starts = list(accumulate((part.size for part in self._parts), initial=0))
        self._held_out: list[Prompt] | None = None

    @property
    def parts(self) -> tuple[TaskPart, ...]:
        return self._parts

    @property
    def runs_code(self) -> bool:
        return any(task.runs_code for task in self._tasks.values())

    @property
    def needs_sandbox(self) -> bool:
        return any(task.needs_sandbox for task in self._tasks.values())

    @property
    def has_reward(self) -> bool:  # type: ignore[override]
        return all(task.has_reward for task in self._tasks.values())

    def __len__(self) -> int:
        return self._starts[-1]

    def prompt(self, index: int) -> Prompt:
        number = bisect_right(self._starts, index) - 1
        label = self._parts[number].label
        return replace(self._tasks[label].prompt(index - self._starts[number]), task=label)

    def first_prompts(self) -> list[Prompt]:
        return [replace(one, task=label) for label, task in self._tasks.items() for one in task.first_prompts()]

    def held_out(self) -> Sequence[Prompt]:
        """The held-out prompts of all tasks in turn, so that the first N of them are of all tasks."""
        if self._held_out is None:
            columns = ([replace(one, task=label) for one in task.held_out()] for label, task in self._tasks.items())
            self._held_out = [one for one in chain.from_iterable(zip_longest(*columns)) if one is not None]
        return self._held_out

    def reward(self, prompt: Prompt, text: str) -> float:
        return self._tasks[prompt.task].reward(prompt, text)

    def use(self, prompt: Prompt, name: str, arguments: Any) -> str:
        return self._tasks[prompt.task].use(prompt, name, arguments)

    async def rollout(self, prompt: Prompt, policy: Policy) -> Episode:
        return await self._tasks[prompt.task].rollout(prompt, policy)

    def can_replay(self, prompt: Prompt) -> bool:
        return self._tasks[prompt.task].can_replay(prompt)

    def prepare_worker(self) -> None:
        for task in self._tasks.values():
            task.prepare_worker()

    async def aclose(self) -> None:
        for task in self._tasks.values():
            await task.aclose()

    def demonstration(self, index: int) -> Demonstration:
        """Demonstrations alternate between the tasks by their shares; `NotImplementedError` if one task has none."""
        if index == 0:  # so that a task without demonstrations is found before training begins
            for task in self._tasks.values():
                task.demonstration(0)
        turn, slot = divmod(index, sum(part.share for part in self._parts))
        ends = list(accumulate(part.share for part in self._parts))
        number = bisect_right(ends, slot)
        part = self._parts[number]
        shown = self._tasks[part.label].demonstration(turn * part.share + slot - (ends[number] - part.share))
        return replace(shown, prompt=replace(shown.prompt, task=part.label))


def load_mix(config: TaskConfig, seed: int, load: Callable[[TaskConfig, int], Task]) -> Mix:
    """The mix of a config; `load` makes each of its tasks. `ConfigError` for the first mistake."""
    if config.options:
        name = next(iter(config.options))
        hint = f"move it to the options of a task in {KEY}"
        raise ConfigError(f"task.options.{name}", config.options[name], "nothing: a mix has no options", hint)
    if not config.tasks:
        hint = f"{KEY}=[{{name: arithmetic, weight: 2}}, {{name: chain_sum}}]"
        raise ConfigError(KEY, [], "at least one task", hint)
    _check_labels(config)
    shares = shares_of([entry.weight for entry in config.tasks])
    tasks = []
    for number, (entry, share, alone) in enumerate(zip(config.tasks, shares, config.alone(), strict=True)):
        with _keys_below(number):
            task = load(alone, seed)
            with user_import_errors("task.name", entry.name, "a task with training prompts"):
                if len(task) == 0:
                    raise ConfigError("task.name", entry.name, "a task with training prompts", "its __len__ is 0")
        tasks.append((entry.title, share, task))
    return Mix(tasks, seed)


def shares_of(weights: Sequence[float]) -> list[int]:
    """The positions of each task in a round: the smallest integers in proportion to the weights, at least 1 each.

    Weights that need a round of more than `MAX_ROUND` positions are rounded to one of about that length.

    >>> shares_of([2, 1]), shares_of([0.7, 0.3]), shares_of([1, 0.0001])
    ([2, 1], [7, 3], [1000, 1])
    """
    exact = [Fraction(repr(weight)) for weight in weights]
    common = lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * common) for weight in exact]
    divisor = gcd(*whole)
    whole = [number // divisor for number in whole]
    if sum(whole) <= MAX_ROUND:
        return whole
    return [max(1, round(MAX_ROUND * weight / sum(exact))) for weight in exact]


def _check_labels(config: TaskConfig) -> None:
    counts = Counter[str]()
    for number, entry in enumerate(config.tasks):
        if entry.name == MIX:
            raise ConfigError(f"{KEY}.{number}.name", MIX, "a task that is no mix", "list its tasks here instead")
        if entry.title in RESERVED:
            expected = "another label: a metric has this name"
            raise ConfigError(f"{KEY}.{number}.label", entry.title, expected, "set another label")
        counts[entry.title] += 1
        if counts[entry.title] > 1:
            expected = "a label that no other task of the mix has"
            hint = f"tell them apart: {{name: {entry.name}, label: {entry.title}-2, …}}"
            raise ConfigError(f"{KEY}.{number}.label", entry.title, expected, hint)


@contextmanager
def _keys_below(number: int) -> Iterator[None]:
    """Errors of a task of the mix with the key of its entry."""
    try:
        yield
    except ConfigError as error:
        key = f"{KEY}.{number}.{error.key.removeprefix('task.')}"
        raise ConfigError(key, error.value, error.expected, error.hint) from error
