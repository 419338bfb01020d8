"""Episodes of an external agent: any command, or an HTTP service.

Owns the built-in task `agent`: starting an agent with an endpoint of the policy, and reading the
reward that it reports. Prompts come from another task, `of`, and so does the reward if the agent reports none.
Promises that only the agent's calls are trained, token by token as they were sampled; that a failure of an agent fails
one sample, with the reason; and that a command ends with all processes that it started. Must not know how the policy is
sampled.

A command gets `OPENAI_BASE_URL` and `OPENAI_API_KEY`, the same for Anthropic's clients (`ANTHROPIC_BASE_URL`,
`ANTHROPIC_API_KEY`), and

    ROLLCALL_PROMPT     a JSON file: the prompt's `messages`, its `columns`, `tools`, and the name of the `model`
    ROLLCALL_REWARD     the file to which it may write the episode's reward, in the syntax of
    `pipeline.environments.agent_report`

`{prompt}` in an argument is replaced with the text of the last message. A service receives the same JSON by POST, with
`base_url`, `anthropic_base_url` and `api_key` added, and responds when its episode is over, with the reward or an empty
body. Both kinds may instead post the reward to `<base URL>/reward`.
"""

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Annotated, Any, Literal, Self

import aiohttp
import psutil
from pydantic import Field, model_validator

from pipeline.config import TaskConfig
from pipeline.config.value_types import URL_PATTERN
from pipeline.environments import load_task
from pipeline.environments.agent_report import AgentReport, parse_report
from pipeline.environments.episode import Episode
from pipeline.environments.reward_functions import columns_of
from pipeline.environments.task_protocol import AgentEndpoint, Demonstration, Policy, Prompt, Task, TaskOptions
from pipeline.environments.tool_call_syntax import ToolCallSyntax
from pipeline.errors import ConfigError, EpisodeError, RolloutError
from pipeline.utils.network_interfaces import candidate_addresses
from pipeline.utils.subprocesses import describe_exit

AGENT = "agent"
"""The tool that runs the command, in a worker process."""
TAIL_BYTES = 2000
"""Length of the retained tail of a command's output, in bytes. A failure reason quotes its last line."""
DRAIN_SECONDS = 1.0
OTHER_KEYS = ("ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_PROFILE")
"""Variables of Anthropic's clients that name another key; the agent does not inherit them."""
NO_REWARD = (
    "the agent reported no reward: write it to the file $ROLLCALL_REWARD, post it to <base URL>/reward, or set of"
)


class Source(TaskOptions):
    """The task that provides the agent's prompts."""

    name: str = Field("dataset", description="A built-in task, or `package.module:Class` of a custom one.")
    options: dict[str, Any] = Field(default_factory=dict, description="Its options.")


class AgentOptions(TaskOptions):
    """The agent, its prompts and its tool-call syntax."""

    command: tuple[str, ...] = Field(
        (), description="The agent as a command and its arguments; `{prompt}` is the text of the last message."
    )
    service: Annotated[str, Field(pattern=URL_PATTERN)] = Field(
        "", description="The agent as a URL that receives prompts by POST, instead of a command."
    )
    of: Source = Field(
        Source(), description="The task with the agent's prompts; its reward counts if the agent reports none."
    )
    tool_call_syntax: ToolCallSyntax = Field(
        "tagged",
        description="Tool-call syntax of the policy: `<tool_call>{…}</tool_call>`, or `[tool:argument]`.",
    )
    address: Literal["loopback", "node"] = Field(
        "loopback", description="Listening address of its endpoint: this machine only, or the node's address."
    )

    @model_validator(mode="after")
    def _names_one_agent(self) -> Self:
        if self.command and self.service:
            raise ValueError(
                "a command, or the URL of a service, not both; set task.options.command=[] for the service"
            )
        if not self.command and not self.service:
            raise ValueError("a command, or the URL of a service; set task.options.command=[…]")
        return self


class AgentTask(Task):
    """The reward that the agent reports, or else the reward of the task `of`."""

    name = "agent"
    Options = AgentOptions
    options: AgentOptions

    def __init__(self, options: AgentOptions, seed: int) -> None:
        super().__init__(options, seed)
        source = TaskConfig(name=options.of.name, options=options.of.options)
        try:
            self._of = load_task(source, seed)
        except ConfigError as error:
            key = error.key.replace("task.", "task.options.of.", 1)
            raise ConfigError(key, error.value, error.expected, error.hint) from None

    def __len__(self) -> int:
        return len(self._of)

    @property
    def runs_code(self) -> bool:
        return self._of.runs_code

    @property
    def needs_sandbox(self) -> bool:
        return self._of.needs_sandbox

    def prompt(self, index: int) -> Prompt:
        return self._of.prompt(index)

    def first_prompts(self) -> list[Prompt]:
        return self._of.first_prompts()

    def held_out(self) -> Sequence[Prompt]:
        return self._of.held_out()

    def demonstration(self, index: int) -> Demonstration:
        return self._of.demonstration(index)

    def prepare_worker(self) -> None:
        self._of.prepare_worker()

    def reward(self, prompt: Prompt, text: str) -> float:
        if not self._of.has_reward:
            raise ValueError(NO_REWARD)
        return self._of.reward(prompt, text)

    async def rollout(self, prompt: Prompt, policy: Policy) -> Episode:
        """Run the agent and return its calls as an episode; `EpisodeError` when the agent fails."""
        address = "127.0.0.1" if self.options.address == "loopback" else candidate_addresses()[0]
        async with policy.endpoint(self.options.tool_call_syntax, address) as endpoint:
            if self.options.service:
                report = await self._ask_service(prompt, endpoint)
            else:
                report = await self._run_command(prompt, policy, endpoint)
        episode = endpoint.episode()
        reward = episode.reward if report.reward is None else report.reward
        return replace(episode, reward=reward, metrics={**report.metrics, **episode.metrics})

    def use(self, prompt: Prompt, name: str, arguments: Any) -> str:
        """Run the command. Returns JSON with the text of its report (`told`), or with the reason in `failed`."""
        if name != AGENT:
            return super().use(prompt, name, arguments)
        text = str(prompt.messages[-1]["content"]) if prompt.messages else ""
        command = [part.replace("{prompt}", text) for part in self.options.command]
        with tempfile.TemporaryDirectory(prefix="agent-") as folder:
            prompt_file, reward_file = Path(folder, "prompt.json"), Path(folder, "reward.json")
            prompt_file.write_text(_request_body(prompt, arguments["model"]))
            environment = {
                **{name: value for name, value in os.environ.items() if name not in OTHER_KEYS},
                "OPENAI_BASE_URL": arguments["url"],
                "OPENAI_API_KEY": arguments["key"],
                "ANTHROPIC_BASE_URL": anthropic_url(arguments["url"]),
                "ANTHROPIC_API_KEY": arguments["key"],
                "ROLLCALL_PROMPT": str(prompt_file),
                "ROLLCALL_REWARD": str(reward_file),
            }
            failed = run_command(command, environment)
            report = reward_file.read_text() if reward_file.is_file() else ""
            return json.dumps({"failed": failed, "told": report})

    async def _run_command(self, prompt: Prompt, policy: Policy, endpoint: AgentEndpoint) -> AgentReport:
        credentials = {"url": endpoint.url, "key": endpoint.key, "model": endpoint.model}
        try:
            ran = json.loads(await policy.run(prompt, AGENT, credentials))
        except RolloutError as error:
            raise EpisodeError(f"agent failed: {error}") from None
        if ran["failed"]:
            raise EpisodeError(f"agent failed: {ran['failed']}")
        return _reported_reward(ran["told"])

    async def _ask_service(self, prompt: Prompt, endpoint: AgentEndpoint) -> AgentReport:
        urls = {"base_url": endpoint.url, "anthropic_base_url": anthropic_url(endpoint.url)}
        credentials = urls | {"api_key": endpoint.key}
        body = json.loads(_request_body(prompt, endpoint.model)) | credentials
        url, limit = self.options.service, aiohttp.ClientTimeout(total=None)  # the episode's own time bounds it
        try:
            async with aiohttp.ClientSession(timeout=limit) as http, http.post(url, json=body) as response:
                answer = await response.text()
        except (aiohttp.ClientError, OSError) as error:
            raise EpisodeError(f"agent failed: {url} cannot be asked: {type(error).__name__}: {error}") from None
        if response.status >= 300:
            raise EpisodeError(f"agent failed: {url} answered with status {response.status}: {answer}")
        return _reported_reward(answer)


def anthropic_url(url: str) -> str:
    """The base URL of an endpoint, as Anthropic's clients expect it: they add `/v1` themselves."""
    return url.removesuffix("/v1")


def run_command(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Run a command to its end, then kill all processes that it started.

    Returns an empty text on success, else the exit status with the last line of output. Output is read without limit,
    but only its tail of `TAIL_BYTES` is retained.
    """
    before = _descendants()
    try:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        return f"it cannot be started: {error}"
    assert process.stdout is not None
    tail = OutputTail(process.stdout.fileno())
    try:
        code = process.wait()
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        for child in _descendants() - before:
            with suppress(psutil.Error):
                child.kill()
        last_line = tail.text()
        process.stdout.close()
    return "" if code == 0 else ": ".join(filter(None, (describe_exit(code), last_line)))


class OutputTail(Thread):
    """Reads a pipe to its end and retains the last `TAIL_BYTES` bytes."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(daemon=True)
        self._descriptor, self._tail = descriptor, b""
        self.start()

    def run(self) -> None:
        with suppress(OSError):
            while more := os.read(self._descriptor, 1 << 16):
                self._tail = (self._tail + more)[-TAIL_BYTES:]

    def text(self) -> str:
        """The last line that is not empty."""
        self.join(DRAIN_SECONDS)
        lines = self._tail.decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _descendants() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _request_body(prompt: Prompt, model: str) -> str:
    """The prompt as the JSON that the agent receives."""
    request = {"messages": list(prompt.messages), "tools": list(prompt.tools), "columns": columns_of(prompt)}
    return json.dumps(request | {"model": model}, default=str)


def _reported_reward(text: str) -> AgentReport:
    """The report that the agent wrote or responded with; an empty text reports nothing."""
    report = parse_report(text) if text.strip() and text.strip() != "null" else AgentReport()
    if isinstance(report, str):
        raise EpisodeError(report)
    return report
