"""The calls of a task made at once in the test's own process, by the code that the workers run."""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from pipeline.config import RewardConfig
from pipeline.config.model_directory import BUILT_IN
from pipeline.environments import Completion, Prompt, Task
from pipeline.environments.chat_template import ChatTemplate
from pipeline.environments.rewards import Mixture, Score
from pipeline.environments.task_calls import InProcessCalls, RenderedPrompt, ToolResult


class InlineCalls:
    """`Calls` without processes: for tasks that do not hang."""

    def __init__(self, task: Task, model: Path = BUILT_IN / "tiny_qwen3") -> None:
        self._calls, self._mixture = InProcessCalls(task, ChatTemplate(model)), Mixture(RewardConfig())

    async def prompt(self, index: int) -> RenderedPrompt | str:
        return self._calls.prompt(index)

    async def render(self, prompt: Prompt) -> RenderedPrompt | str:
        return self._calls.render(prompt)

    async def rewards(self, prompt: Prompt, answers: Sequence[Completion]) -> list[Score | str]:
        return [self._mixture.combine([self._calls.score(0, prompt, answer)]) for answer in answers]

    async def use(self, prompt: Prompt, name: str, arguments: Any) -> ToolResult | str:
        return self._calls.use(prompt, name, arguments)

    async def run(
        self, prompt: Prompt, name: str, arguments: Any, working: AbstractContextManager[None]
    ) -> ToolResult | str:
        with working:
            return await asyncio.to_thread(self._calls.use, prompt, name, arguments)
