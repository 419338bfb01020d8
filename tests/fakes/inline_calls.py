"""The calls of a task made at once in the test's own process, by the code that the workers run."""

from collections.abc import Sequence
from pathlib import Path

from pipeline.config.models import BUILT_IN
from pipeline.tasks import Prompt, Task
from pipeline.tasks.calls import Asked, LocalCalls
from pipeline.tasks.template import Template


class InlineCalls:
    """`Calls` without processes: for tasks that do not hang."""

    def __init__(self, task: Task, model: Path = BUILT_IN / "tiny_qwen3") -> None:
        self._calls = LocalCalls(task, Template(model))

    async def prompt(self, index: int) -> Asked | str:
        return self._calls.prompt(index)

    async def render(self, prompt: Prompt) -> Asked | str:
        return self._calls.render(prompt)

    async def rewards(self, prompt: Prompt, texts: Sequence[str]) -> list[float | str]:
        return [self._calls.reward(prompt, text) for text in texts]
