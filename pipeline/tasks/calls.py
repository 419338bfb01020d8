"""What is asked of a task outside of the actor, and what becomes of it when the task does wrong.

Owns the calls: prompts, their text, rewards. Promises that each gives a value that can be used or one line that says
why there is none, whatever the task raises or returns: a reward that is no finite number is never a score. Knows
neither processes nor deadlines, which are the pool's (`pipeline.tasks.pool`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol, TypeVar

from pipeline.tasks.protocol import Prompt, Task
from pipeline.tasks.template import Template

T = TypeVar("T")
REASON_LENGTH = 200


@dataclass(frozen=True)
class Asked:
    """A prompt, and its messages as the chat template writes them."""

    prompt: Prompt
    text: str


class Calls(Protocol):
    """The calls, made somewhere; each gives what is asked, or the reason (`what: why`) why there is none."""

    async def prompt(self, index: int) -> Asked | str:
        """Training prompt `index`."""

    async def render(self, prompt: Prompt) -> Asked | str:
        """A prompt that the caller has."""

    async def rewards(self, prompt: Prompt, texts: Sequence[str]) -> list[float | str]:
        """What each of the policy's last turns is worth."""


class LocalCalls:
    """The calls made here and now."""

    def __init__(self, task: Task, template: Template) -> None:
        self._task, self._template = task, template

    def prompt(self, index: int) -> Asked | str:
        """Training prompt `index`."""
        prompt = guarded("prompt raised", lambda: _prompt(self._task.prompt(index)))
        return prompt if isinstance(prompt, str) else self.render(prompt)

    def render(self, prompt: Prompt) -> Asked | str:
        """The prompt with its text."""
        return guarded("prompt could not be rendered", lambda: Asked(prompt, self._template.render(prompt.messages)))

    def reward(self, prompt: Prompt, text: str) -> float | str:
        """The reward of a text, a finite number."""
        return guarded("reward raised", lambda: _score(self._task.reward(prompt, text)))


def guarded(what: str, call: Callable[[], T]) -> T | str:
    """What `call` gives, or `what ErrorName: text` of whatever it raised, `SystemExit` included."""
    try:
        return call()
    except BaseException as error:  # noqa: BLE001 the task is foreign code: whatever it raises is the sample's reason
        return reason(what, error)


def reason(what: str, error: BaseException) -> str:
    """`what ErrorName: text` on one line."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 an error of the task's own, which cannot even say what it is
        text = "its message cannot be made"
    return f"{what} {type(error).__name__}: {text}"[:REASON_LENGTH]


def _prompt(value: Any) -> Prompt:
    if not isinstance(value, Prompt):
        raise TypeError(f"expected a Prompt, found {type(value).__name__}")
    return value


def _score(value: Any) -> float | str:
    if not isinstance(value, Real):
        return f"reward is no number: {type(value).__name__} {value!r}"[:REASON_LENGTH]
    return float(value) if math.isfinite(value) else f"reward is not finite: {float(value)}"
