"""Tasks in Harbor's format: an instruction, a shell in the sandbox, and tests that give the reward.

Owns the built-in task `harbor`. An episode runs in one worker process from its first command to its tests, and calls
the policy through an endpoint, as agents do. Promises that the tests are not in the sandbox before the policy's last
turn, and that no process of the policy runs at the same time; that a failure of the sandbox, and tests that time out or
write no reward, fail the sample with the reason; and that the sandbox ends with the episode. The tests run in the
policy's filesystem, as Harbor's do.
"""

import json
import math
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Annotated, Any

from pydantic import Field

from pipeline.config.value_types import Fraction, NotNegative, Positive, Seconds
from pipeline.data.chat_messages import Message
from pipeline.environments.agent_report import report_from
from pipeline.environments.episode import Episode
from pipeline.environments.harbor.harbor_folder import HarborError, HarborFolder, find_tasks, read_task
from pipeline.environments.harbor.shell_session import ShellError, ShellLost, ShellSession, open_shell
from pipeline.environments.task_protocol import Demonstration, Policy, Prompt, Task, TaskOptions
from pipeline.environments.tool_call_syntax import ToolCallSyntax
from pipeline.errors import ConfigError, EpisodeError, RolloutError
from pipeline.utils.subprocesses import describe_exit

EPISODE = "episode"
SHELL = "shell"
REWARDS = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")
FULL = "context_length_exceeded"
SCHEMA = {
    "type": "function",
    "function": {
        "name": SHELL,
        "description": "Runs a bash command and returns its output. Files last from one command to the next.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


class HarborOptions(TaskOptions):
    """The tasks, the conversation, and the limits of the sandbox."""

    path: str = Field("", description="A folder of tasks in Harbor's format, or one task.")
    eval_path: str = Field("", description="Folder of the held-out tasks; empty: the last eval_rows of path.")
    eval_rows: NotNegative = Field(16, description="Number of held-out tasks; with eval_path 0: all of them.")
    ignore_image: bool = Field(
        False, description="Run tasks that need a container image without it: this machine has what they need."
    )
    system: str = Field("", description="System message; empty: none.")
    max_turns: Positive = Field(16, description="Largest number of policy turns; the commands of the last one run.")
    tool_call_syntax: ToolCallSyntax = Field(
        "tagged", description="Tool-call syntax: `<tool_call>{…}</tool_call>`, or `[shell:command]`."
    )
    command_seconds: Seconds = Field(30, description="Timeout of one command, in seconds.")
    test_seconds: Seconds = Field(
        120, description="Timeout of the tests, in seconds; a shorter one in task.toml applies."
    )
    memory_bytes: Annotated[int, Field(ge=1 << 24)] = Field(
        1 << 30, description="Memory limit of each process in the sandbox, and of all together, in bytes."
    )
    max_output: Positive = Field(4000, description="Largest length of a command's result in characters.")
    reward_key: str = Field("reward", description="Key of the reward in reward.json; its other numbers are metrics.")
    demonstration_error_rate: Fraction = Field(
        0.0, description="Fraction of the demonstrations with the solution of another task."
    )


class Harbor(Task):
    """The reward that the tests write."""

    name = "harbor"
    Options = HarborOptions
    options: HarborOptions

    def __init__(self, options: HarborOptions, seed: int) -> None:
        super().__init__(options, seed)
        train, held_out = self._tasks("path"), self._tasks("eval_path") if options.eval_path else []
        if not options.eval_path:
            if not 0 < options.eval_rows < len(train):
                expected = f"from 1 to {len(train) - 1}, of the {len(train)} tasks of path"
                raise ConfigError("task.options.eval_rows", options.eval_rows, expected, "or set eval_path")
            train, held_out = train[: -options.eval_rows], train[-options.eval_rows :]
        self._folders = {"train": train, "held_out": held_out[: options.eval_rows or None]}

    @property
    def runs_code(self) -> bool:
        return True

    @property
    def needs_sandbox(self) -> bool:
        return True

    def __len__(self) -> int:
        return len(self._folders["train"])

    def prompt(self, index: int) -> Prompt:
        return self._prompt("train", index)

    def held_out(self) -> list[Prompt]:
        return [self._prompt("held_out", index) for index in range(len(self._folders["held_out"]))]

    def reward(self, prompt: Prompt, text: str) -> float:
        raise ValueError("the tests of the task reported no reward")

    def demonstration(self, index: int) -> Demonstration:
        """The reference solution as one call of the shell."""
        solved = [number for number, folder in enumerate(self._folders["train"]) if folder.solution]
        if not solved:
            raise NotImplementedError("no task has solution/solve.sh; set training.sft.steps=0")
        random = Random(f"{self.seed} demonstration {index}")
        number = random.choice(solved)
        shown = random.choice(solved) if random.random() < self.options.demonstration_error_rate else number
        solution = self._folders["train"][shown].solution
        if self.options.tool_call_syntax == "short":
            return Demonstration(self.prompt(number), f"[{SHELL}:{solution}]")
        call = json.dumps({"name": SHELL, "arguments": {"command": solution}})
        return Demonstration(self.prompt(number), f"<tool_call>\n{call}\n</tool_call>")

    async def rollout(self, prompt: Prompt, policy: Policy) -> Episode:
        """Run the episode in a worker process; `EpisodeError` when it fails."""
        async with policy.endpoint(self.options.tool_call_syntax) as endpoint:
            credentials = {"url": endpoint.url, "key": endpoint.key, "model": endpoint.model}
            try:
                report = json.loads(await policy.run(prompt, EPISODE, credentials))
            except RolloutError as error:
                raise EpisodeError(f"environment failed: {error}") from None
        if "failed" in report:
            raise EpisodeError(f"environment failed: {report['failed']}")
        episode = endpoint.episode()
        return replace(episode, reward=report["reward"], metrics={**episode.metrics, **report["metrics"]})

    def use(self, prompt: Prompt, name: str, arguments: Any) -> str:
        """The whole episode: the report of the tests as JSON, or the reason in `failed`."""
        if name != EPISODE:
            return super().use(prompt, name, arguments)
        part, index = prompt.answer
        folder: HarborFolder = self._folders[part][index]
        seconds = max(self.options.command_seconds, self.options.test_seconds)
        try:
            with open_shell(
                folder.directories, folder.workdir, folder.env, seconds, self.options.memory_bytes
            ) as shell:
                shell.write(folder.files)
                shell.run(["mkdir", "-p", folder.workdir, "/logs/verifier"], self.options.command_seconds)
                commands = self._converse(prompt, shell, arguments)
                report = self._test(folder, shell)
        except ShellError as error:
            return json.dumps({"failed": str(error)})
        if isinstance(report, str):
            return json.dumps({"failed": report})
        return json.dumps({**report, "metrics": {**report["metrics"], "harbor/commands": float(commands)}})

    def _converse(self, prompt: Prompt, shell: ShellSession, credentials: Mapping[str, str]) -> int:
        """Turns of the policy until one calls no command. Returns the number of commands."""
        messages, commands = [dict(message) for message in prompt.messages], 0
        for _ in range(self.options.max_turns):
            reply = _ask(credentials, messages)
            calls = reply.get("tool_calls") if reply else None
            if reply is None or not calls:
                break
            messages.append({key: value for key, value in reply.items() if value is not None})
            for call in calls:
                result = self._called(call["function"], shell)
                messages.append({"role": "tool", "tool_call_id": call["id"], "name": SHELL, "content": result})
                commands += 1
        return commands

    def _called(self, function: Mapping[str, Any], shell: ShellSession) -> str:
        """The result of one call, as the policy reads it."""
        try:
            command = json.loads(function["arguments"])["command"]
        except (ValueError, TypeError, LookupError, RecursionError):
            command = None
        if function.get("name") != SHELL or not isinstance(command, str) or "\0" in command:
            return f"error: the only tool is {SHELL}, with a text as its command"
        try:
            ran = shell.run(["bash", "-c", command], self.options.command_seconds)
        except ShellLost:
            raise
        except ShellError as error:
            return f"error: {error}"[: self.options.max_output]
        end = f"error: it took more than {self.options.command_seconds:g} s" if ran.code is None else ""
        end = end or (f"exit code {ran.code}" if ran.code else "")
        return "\n".join(filter(None, (ran.output.strip(), end)))[-self.options.max_output :]

    def _test(self, folder: HarborFolder, shell: ShellSession) -> dict[str, Any] | str:
        """The report of the tests, or the reason why there is none."""
        shell.kill_all()
        shell.write(folder.tests, clear=["/tests", "/logs"])
        seconds = min(self.options.test_seconds, folder.test_seconds)
        # The policy's files must not be imported by accident from its home directory.
        env = {**folder.test_env, "HOME": "/tests", "PYTHONNOUSERSITE": "1"}
        shell.run(["mkdir", "-p", "/logs/verifier"], seconds)
        ran = shell.run(["bash", "/tests/test.sh"], seconds, **env)
        shell.kill_all()
        if ran.code is None:
            return f"the tests took more than {seconds:g} s"
        text = shell.read(REWARDS)
        if text is None:
            last = (ran.output.strip().splitlines() or ["nothing printed"])[-1]
            end = describe_exit(ran.code) if ran.code >= 0 else f"were {describe_exit(ran.code)}"
            return f"the tests {end} and wrote no reward to {REWARDS[1]}: {last}"
        return parse_reward(text, self.options.reward_key)

    def _prompt(self, part: str, index: int) -> Prompt:
        folder = self._folders[part][index]
        system: tuple[Message, ...] = ({"role": "system", "content": self.options.system},)
        user: Message = {"role": "user", "content": folder.instruction}
        messages = (*(system if self.options.system else ()), user)
        return Prompt(messages, (part, index), {"task": folder.name}, tools=(SCHEMA,))

    def _tasks(self, key: str) -> list[HarborFolder]:
        path = str(getattr(self.options, key))
        paths = find_tasks(Path(path)) if path else []
        expected = "a folder with tasks: subfolders that have a task.toml"
        if not paths:
            raise ConfigError(f"task.options.{key}", path, expected, "set it" if not path else "there are none")
        try:
            return [read_task(folder, self.options.ignore_image) for folder in paths]
        except HarborError as error:
            raise ConfigError(f"task.options.{key}", path, "tasks that can run in the sandbox", str(error)) from None


def parse_reward(text: str, key: str = "reward") -> dict[str, Any] | str:
    """The reward and the metrics in the text of a reward file, or the reason why there are none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return f"the tests' reward is no number: {text.strip()[:80]!r}"
    if isinstance(value, Mapping):
        numbers = {name: number for name, number in value.items() if isinstance(number, int | float)}
        if key not in numbers:
            return f"the tests' reward has no number {key}; set task.options.reward_key"
        metrics = {f"harbor/{name}": float(number) for name, number in numbers.items() if name != key}
        value = {"reward": numbers[key], "metrics": {n: v for n, v in metrics.items() if math.isfinite(v)}}
    report = report_from(value)
    if isinstance(report, str) or report.reward is None:
        return f"the tests' reward is no finite number: {text.strip()[:80]!r}"
    return {"reward": report.reward, "metrics": dict(report.metrics)}


def _ask(credentials: Mapping[str, str], messages: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The policy's next message; None when the conversation fills the context."""
    body = json.dumps({"model": credentials["model"], "messages": list(messages), "tools": [SCHEMA]}).encode()
    headers = {"Authorization": f"Bearer {credentials['key']}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{credentials['url']}/chat/completions", body, headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the endpoint is on this machine
    try:
        with opener.open(request) as response:  # the actor cancels it: no deadline of this process
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        if FULL in error.read().decode(errors="replace"):
            return None
        raise
    choice = answer["choices"][0]
    message: Mapping[str, Any] = choice["message"]
    return message if choice["finish_reason"] != "length" else None
