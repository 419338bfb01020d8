"""Environments of the library verifiers as a task.

Owns the built-in task `verifiers`: any environment of that library by its id, with a separate interpreter and separate
dependencies, whose episodes call the policy through an OpenAI-compatible endpoint. Promises that tokens come from the
endpoint and rewards from the environment; that a failure of the environment, an unscored reward and a stage that timed
out fail the sample with the reason; and that an episode whose process was lost through the fault of another episode is
run again. Must not import verifiers.
"""

import asyncio
import shutil
import sys
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, TypeVar

from pydantic import Field

from pipeline.config.value_types import NotNegative
from pipeline.environments.agent_report import report_from
from pipeline.environments.episode import Episode
from pipeline.environments.task_protocol import Policy, Prompt, Task, TaskOptions, user_prompt
from pipeline.environments.tool_call_syntax import ToolCallSyntax
from pipeline.environments.verifiers.verifiers_process import EnvironmentMissing, EnvironmentProcess, ProcessLost
from pipeline.errors import ConfigError, DeadlineError, EpisodeError

INSTALL = "python3.11 -m venv VENV && VENV/bin/pip install verifiers, then task.options.python=VENV/bin/python"
T = TypeVar("T")
TRAIN, HELD_OUT = "train", "held_out"
MAX_RUNS = 3
"""Largest number of attempts of an episode whose process is lost."""


class VerifiersOptions(TaskOptions):
    """The environment, its tasks, and its interpreter."""

    id: str = Field(
        "", description="The environment's id: the name of its package in verifiers; `-` and `_` are equivalent."
    )
    python: str = Field("", description="Python interpreter with verifiers; empty: this interpreter.")
    taskset: dict[str, Any] = Field(
        default_factory=dict, description="Settings of the environment's tasks, such as a split."
    )
    eval_taskset: dict[str, Any] = Field(
        default_factory=dict,
        description="Settings that differ for the held-out tasks, such as the split; empty: hold out the last "
        "eval_rows tasks.",
    )
    eval_rows: NotNegative = Field(
        64,
        description="Number of held-out tasks: the last ones, or the first of eval_taskset; 0 with eval_taskset: "
        "all of its tasks.",
    )
    size: NotNegative = Field(0, description="Largest number of tasks; 0: all.")
    agent: dict[str, Any] = Field(
        default_factory=dict,
        description="Settings of the trained agent, such as max_turns, timeout and harness; without any harness, a "
        "chat with the environment's tools.",
    )
    env: dict[str, Any] = Field(default_factory=dict, description="All other settings of the environment.")
    workers: Annotated[int, Field(ge=1)] = Field(1, description="Processes for its episodes.")
    tool_call_syntax: ToolCallSyntax = Field(
        "tagged",
        description="Tool-call syntax of the policy: `<tool_call>{…}</tool_call>`, or `[tool:argument]`.",
    )
    startup_seconds: Annotated[float, Field(gt=0)] = Field(
        300, description="Timeout of loading the environment, in seconds."
    )


class Verifiers(Task):
    """The reward is the environment's."""

    name = "verifiers"
    Options = VerifiersOptions
    options: VerifiersOptions

    def __init__(self, options: VerifiersOptions, seed: int) -> None:
        super().__init__(options, seed)
        if not options.id:
            raise ConfigError("task.options.id", "", "an environment of verifiers", "set it")
        if options.eval_rows == 0 and not options.eval_taskset:
            raise ConfigError("task.options.eval_rows", 0, "more than 0 without eval_taskset", "raise it, or set that")
        self._processes: list[EnvironmentProcess] = []
        self._starting = asyncio.Lock()

    def __len__(self) -> int:
        return self._counts[TRAIN] - (0 if self.options.eval_taskset else self.options.eval_rows)

    def prompt(self, index: int) -> Prompt:
        return self._reference(TRAIN, index)

    def held_out(self) -> list[Prompt]:
        if not self.options.eval_taskset:
            return [self._reference(TRAIN, index) for index in range(len(self), self._counts[TRAIN])]
        count = self._counts[HELD_OUT]
        return [self._reference(HELD_OUT, index) for index in range(min(self.options.eval_rows or count, count))]

    def reward(self, prompt: Prompt, text: str) -> float:
        raise ValueError(f"the environment {self.options.id} has no reward; set reward.functions")

    async def rollout(self, prompt: Prompt, policy: Policy) -> Episode:
        """Run an episode of the environment, which also writes the prompt; `EpisodeError` when it fails."""
        part, index = prompt.answer
        for _ in range(MAX_RUNS):
            async with policy.endpoint(self.options.tool_call_syntax) as endpoint:
                process = await self._process()
                try:
                    endpoint_fields = {"url": endpoint.url, "key": endpoint.key, "model": endpoint.model}
                    report = await process.episode(part=part, index=index, **endpoint_fields)
                except ProcessLost as lost:
                    why = str(lost)
                    continue
            return _finished(endpoint.episode(), report)
        raise EpisodeError(f"environment lost: {why}, {MAX_RUNS} times")

    async def aclose(self) -> None:
        for process in self._processes:
            await process.end()
        self._processes.clear()

    def setup(self) -> dict[str, Any]:
        """The setup message of the process."""
        options = self.options
        agent = {"runtime": {"type": "subprocess"}, "network_notice": False} | dict(options.agent)
        held_out = options.taskset | options.eval_taskset if options.eval_taskset else None
        return {
            TRAIN: {**options.env, "taskset": {"id": options.id, **options.taskset}, "agent": agent},
            HELD_OUT: held_out and {**options.env, "taskset": {"id": options.id, **held_out}, "agent": agent},
            "most": options.size,
        }

    def _reference(self, part: str, index: int) -> Prompt:
        """A prompt that only names its task; the environment writes the messages for the policy."""
        return replace(user_prompt(f"{self.options.id} {part} {index}", (part, index)), columns={"index": index})

    @cached_property
    def _counts(self) -> dict[str, int]:
        """Tasks of each part, counted by a separate short-lived process, since the caller may have no event loop."""
        return _run_detached(self._count)

    async def _count(self) -> dict[str, int]:
        process = self._start()
        try:
            counts = await process.ready(self.options.startup_seconds)
        except EnvironmentMissing as error:
            raise self._refused(error) from None
        except DeadlineError as error:
            raise ConfigError("task.options.id", self.options.id, "an environment that loads", str(error)) from None
        finally:
            await process.end()
        if counts[TRAIN] <= self.options.eval_rows and not self.options.eval_taskset:
            expected = f"less than its {counts[TRAIN]} tasks"
            raise ConfigError("task.options.eval_rows", self.options.eval_rows, expected, "lower it, or raise size")
        return counts

    def _start(self) -> EnvironmentProcess:
        python = self.options.python or sys.executable
        if shutil.which(python) is None:
            raise self._refused(EnvironmentMissing(f"there is no program {python}", "python"))
        try:
            return EnvironmentProcess(python, self.setup())
        except OSError as error:
            raise self._refused(EnvironmentMissing(str(error), "python")) from None

    def _refused(self, error: EnvironmentMissing) -> ConfigError:
        if error.key == "python":
            expected = f"an interpreter that has verifiers ({error})"
            return ConfigError("task.options.python", self.options.python, expected, INSTALL)
        expected = f"an environment that can be loaded there ({error})"
        hint = "install its package there, or set PYTHONPATH to the folder of its module"
        return ConfigError("task.options.id", self.options.id, expected, hint)

    async def _process(self) -> EnvironmentProcess:
        """The least loaded process; a new one while none is idle and there are fewer than `workers`."""
        async with self._starting:
            self._processes = [process for process in self._processes if not process.ended]
            idle = any(not process.load for process in self._processes)
            if len(self._processes) < self.options.workers and not idle:
                process = self._start()
                try:
                    await process.ready(self.options.startup_seconds)
                except (EnvironmentMissing, DeadlineError) as error:
                    raise EpisodeError(f"environment cannot be started: {error}") from None
                self._processes.append(process)
            return min(self._processes, key=lambda process: process.load)


def _finished(episode: Episode, report: Mapping[str, Any]) -> Episode:
    if "failed" in report:
        raise EpisodeError(f"environment failed: {report['failed']}")
    parsed = report_from({"reward": report["reward"], "metrics": report["metrics"]})
    if isinstance(parsed, str):
        raise EpisodeError(f"environment failed: {parsed}")
    return replace(episode, reward=parsed.reward, metrics={**parsed.metrics, **episode.metrics})


def _run_detached(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """The result of a coroutine function, whether or not an event loop runs in this thread."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(work())).result()
