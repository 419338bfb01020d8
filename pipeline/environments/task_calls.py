"""Calls of a task outside the actor, and the handling of their failures.

Owns the calls: prompts, their text, rewards. Promises that each returns a usable value or one line with the reason why
there is none, whatever the task raises or returns: a reward that is no finite number is never a score. Knows neither
processes nor deadlines, which the pool owns (`pipeline.environments.worker_pool`).
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pipeline.environments.chat_template import ChatTemplate
from pipeline.environments.guarded_call import call_guarded
from pipeline.environments.reward_functions import PartialScore, RewardFunction, number
from pipeline.environments.rewards import Score
from pipeline.environments.task_protocol import Completion, Prompt, Task

T = TypeVar("T")
TIMEOUT_FRACTION = 0.9
"""Fraction of a call's deadline that an `async` function may take.

An expired call is cancelled, and its process survives."""


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt, and its messages as the chat template writes them."""

    prompt: Prompt
    text: str


@dataclass(frozen=True)
class ToolResult:
    """The result of a tool."""

    text: str


class TaskCalls(Protocol):
    """The calls of a task. Each returns its value, or the reason (`what: why`) why there is none."""

    async def prompt(self, index: int) -> RenderedPrompt | str:
        """Training prompt `index`."""

    async def render(self, prompt: Prompt) -> RenderedPrompt | str:
        """A given prompt with its text."""

    async def rewards(self, prompt: Prompt, answers: Sequence[Completion]) -> list[Score | str]:
        """The score of each answer to a prompt."""

    async def use(self, prompt: Prompt, name: str, arguments: Any) -> ToolResult | str:
        """The result of one of the task's tools."""

    async def run(
        self, prompt: Prompt, name: str, arguments: Any, working: AbstractContextManager[None]
    ) -> ToolResult | str:
        """The result of a tool without a deadline; the caller cancels it. `working` is entered while the tool runs."""


class InProcessCalls:
    """The calls, executed in this process."""

    def __init__(
        self,
        task: Task,
        template: ChatTemplate,
        functions: Sequence[RewardFunction | None] = (None,),
        seconds: float = float("inf"),
    ) -> None:
        """`functions`: those of `reward.functions`, in order; None for the task's own reward. `seconds`: the deadline
        of a call, which the pool enforces for code that does not await."""
        self._task, self._template, self._functions = task, template, functions
        self._seconds = seconds * TIMEOUT_FRACTION
        self._runner: asyncio.Runner | None = None

    def close(self) -> None:
        """Close the event loop that `async` functions used."""
        if self._runner is not None:
            self._runner.close()

    def replies(self, method: str, shared: tuple[Any, ...], items: Sequence[Any]) -> Iterator[Any]:
        """The result of `method` for each item, in order. An `async` function works on all items concurrently."""
        if method == "score" and self._awaits(shared[0]):
            yield from self._scores_at_once(shared[0], shared[1], items)
        else:
            yield from (call_guarded("task raised", lambda: getattr(self, method)(*shared, item)) for item in items)  # noqa: B023

    def prompt(self, index: int) -> RenderedPrompt | str:
        """Training prompt `index`."""
        prompt = call_guarded("prompt raised", lambda: _prompt(self._task.prompt(index)))
        return prompt if isinstance(prompt, str) else self.render(prompt)

    def render(self, prompt: Prompt) -> RenderedPrompt | str:
        """The prompt with its text."""
        return call_guarded(
            "prompt could not be rendered",
            lambda: RenderedPrompt(prompt, self._template.render(prompt.messages, prompt.tools)),
        )

    def score(self, which: int, prompt: Prompt, answer: Completion) -> PartialScore | str:
        """Function number `which`'s score of an answer."""
        function = self._functions[which]
        if function is None:
            reported = answer.reward
            return call_guarded(
                "reward raised", lambda: _part(self._task.reward(prompt, answer.text) if reported is None else reported)
            )
        return self.score_all(which, prompt, (answer,))[0]

    def score_all(self, which: int, prompt: Prompt, answers: Sequence[Completion]) -> list[PartialScore | str]:
        """Function number `which`'s scores of all answers to a prompt, from one call of the function."""
        function = self._functions[which]
        if function is None:
            return [self.score(which, prompt, answer) for answer in answers]
        if not function.is_async:
            return function.score(prompt, answers)
        return self._loop.run_until_complete(self._limited(function, prompt, answers))

    def use(self, prompt: Prompt, name: str, arguments: Any) -> ToolResult | str:
        """The result of one of the task's tools."""
        return call_guarded(f"tool {name} raised", lambda: ToolResult(str(self._task.use(prompt, name, arguments))))

    def _scores_at_once(
        self, which: int, prompt: Prompt, answers: Sequence[Completion]
    ) -> Iterator[PartialScore | str]:
        function, loop = self._functions[which], self._loop
        assert function is not None
        tasks = [loop.create_task(self._limited(function, prompt, (answer,))) for answer in answers]
        for task in tasks:
            (part,) = loop.run_until_complete(task)
            yield part

    async def _limited(
        self, function: RewardFunction, prompt: Prompt, answers: Sequence[Completion]
    ) -> list[PartialScore | str]:
        try:
            async with asyncio.timeout(self._seconds) as limit:
                return await function.score_async(prompt, answers)
        except TimeoutError:
            assert limit.expired()
            return [f"reward {function.name} took too long: it awaited more than {self._seconds:g} s"] * len(answers)

    def _awaits(self, which: int) -> bool:
        function = self._functions[which]
        return function is not None and function.is_async

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        """One event loop for all calls: functions keep connections that belong to their loop."""
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.get_loop()


def _prompt(value: Any) -> Prompt:
    if not isinstance(value, Prompt):
        raise TypeError(f"expected a Prompt, found {type(value).__name__}")
    return value


def _part(value: Any) -> PartialScore | str:
    score = number("reward", value)
    return score if isinstance(score, str) else PartialScore(score)
