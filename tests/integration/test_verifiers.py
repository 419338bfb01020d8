"""Environments of verifiers, by its own code in its own interpreter: turns, tools, rewards, and what goes wrong there.

Skipped without the library, which needs 566 MB: `VERIFIERS_PYTHON=VENV/bin/python` names an interpreter that has it.
"""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.config import TaskConfig
from pipeline.environments import load_task
from pipeline.environments.chat_tokenizer import ChatTokenizer
from pipeline.environments.verifiers import verifiers_process as environment_process
from pipeline.environments.verifiers import verifiers_task as environment_task
from pipeline.errors import ConfigError
from pipeline.rollout.group_rollout import GroupBuilder
from pipeline.transport.sample_records import Group
from tests.fakes.configs import make_config
from tests.fakes.inline_calls import InlineCalls
from tests.unit.environments.test_tasks import Said
from tests.unit.environments.test_tool_task import bytes_model

PYTHON = os.environ.get("VERIFIERS_PYTHON", sys.executable)
ENVIRONMENTS = Path(__file__).parents[1] / "support" / "tasks" / "vf_environments"


def _installed() -> bool:
    found = subprocess.run([PYTHON, "-c", "import verifiers.v1"], capture_output=True, timeout=300, check=False)
    return found.returncode == 0


pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
needs_verifiers = pytest.mark.skipif(
    not _installed(), reason="no verifiers: pip install it into a venv and set VERIFIERS_PYTHON to that one's python"
)
Say = Callable[[str], str]


@pytest.fixture(autouse=True)
def _environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ENVIRONMENTS))


class Saying:
    """Servers that answer what they see, by a function; remember it."""

    def __init__(self, chat: ChatTokenizer, say: Say) -> None:
        self.chat, self.say = chat, say
        self.seen: list[list[int]] = []

    async def generate(self, token_ids: Sequence[int], *, n: int, **_: Any) -> list[Said]:
        self.seen.append(list(token_ids))
        said = self.say(self.chat.decode(token_ids))
        return [Said((*self.chat.encode(said), self.chat.stop_token_ids[0]), 5, 6)] * n


def group_of(tmp_path: Path, environment: str, say: Say, samples: int = 2, **options: Any) -> tuple[Group, Saying]:
    model = bytes_model(tmp_path)
    settings = {"id": environment, "python": PYTHON, "eval_rows": 2, **options}
    config = make_config(
        model={"path": "tiny", "max_length": options.pop("max_length", 2048)},
        task={"name": "verifiers", "options": settings},
        rollout={"group_size": samples, "max_tokens": 64, "max_consecutive_failures": 1000},
    )
    task, chat = load_task(config.task, 0), ChatTokenizer(model)
    servers = Saying(chat, say)

    async def story() -> Group:
        try:
            return await GroupBuilder(task, InlineCalls(task, model), chat, servers, config).build(0)
        finally:
            await task.aclose()

    return asyncio.run(asyncio.wait_for(story(), 600)), servers


def the_sum(text: str) -> str:
    (asked,) = re.findall(r"(\d+\+\d+)<\|im_end\|>", text)
    return str(eval(asked))


@needs_verifiers
def test_a_single_turn_has_the_reward_and_its_parts_by_name(tmp_path: Path) -> None:
    group, servers = group_of(tmp_path, "vf-sums", the_sum)
    assert group.failures == ()
    for sample in group.samples:
        sample.check()
        parts = {name: value for name, value in sample.metrics.items() if not name.startswith("agent/")}
        said = servers.chat.decode(sample.token_array()[sample.sampled_array() == 1].tolist())
        assert sample.reward == 1.5
        assert parts == {"rewards/right": 1.0, "rewards/short": 1.0, "env/characters": len(said)}
        row = sample.token_array().tolist()
        assert row[: len(servers.seen[0])] == servers.seen[0]


@needs_verifiers
def test_turns_of_a_user_are_read_and_all_turns_of_the_policy_are_one_row(tmp_path: Path) -> None:
    def bisect(text: str) -> str:
        low, high = 1, 8
        for guess, told in re.findall(r"assistant\n(\d)<\|im_end\|>\n<\|im_start\|>user\n(\w+)", text):
            low, high = (int(guess) + 1, high) if told == "higher" else (low, int(guess) - 1)
        return str((low + high) // 2)

    group, servers = group_of(tmp_path, "vf-guess", bisect, group_size=2)
    assert group.failures == ()
    sample = group.samples[0]
    assert (sample.reward, sample.branches) == (1.0, ())
    assert sample.turns == sample.metrics["env/guesses"] == len(servers.seen) / 2
    row = sample.token_array().tolist()
    assert all(row[: len(seen)] == seen for seen in servers.seen)


@needs_verifiers
def test_tools_of_an_environment_are_called_and_read(tmp_path: Path) -> None:
    def look_up(text: str) -> str:
        if answer := re.search(r"<tool_response>\n(\d+)", text):
            return f"There are {answer[1]}."
        (name,) = re.findall(r'"name": ?"([^"]*people)"', text)
        town = "Ulm" if "in Ulm" in text else "Jena"
        return f'<tool_call>\n{{"name": "{name}", "arguments": {{"town": "{town}"}}}}\n</tool_call>'

    group, servers = group_of(tmp_path, "vf-towns", look_up)
    assert group.failures == ()
    sample = group.samples[0]
    assert (sample.reward, sample.turns, sample.branches) == (1.0, 2, ())
    text = servers.chat.decode(sample.token_array().tolist())
    assert "Use the register." in text
    assert re.search(r"<tool_response>\n(126405|110731)\n</tool_response>", text)


@needs_verifiers
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raises", "environment failed: TaskError: task Sum scoring: ValueError: the judge has left"),
        ("waits", "environment failed: it ran out of time: scoring_timeout"),
        ("exits", "environment lost: its process exited with code 3, 2 times"),
        ("blocks", "environment lost: its process stood still for more than 5 s, in a call that blocks it, 2 times"),
    ],
)
def test_what_an_environment_does_wrong_is_the_reason_and_never_a_zero(
    how: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_process, "STALL_SECONDS", 5.0)
    monkeypatch.setattr(environment_task, "MAX_RUNS", 2)
    group, _ = group_of(tmp_path, "vf-sums", the_sum, taskset={"how": how})
    assert group.samples == ()
    assert set(group.failures) == {reason}
    assert not [child for child in psutil.Process().children(recursive=True) if "bridge.py" in str(child.cmdline())]


@needs_verifiers
def test_held_out_tasks_are_none_that_are_trained(tmp_path: Path) -> None:
    def prompts(**options: Any) -> tuple[list[Any], list[Any]]:
        settings = {"id": "vf-sums", "python": PYTHON, "eval_rows": 4, **options}
        task = load_task(TaskConfig(name="verifiers", options=settings), 0)
        return [task.prompt(index).answer for index in range(len(task))], [each.answer for each in task.held_out()]

    trained, held_out = prompts()
    assert (len(trained), len(held_out)) == (8, 4)
    assert not set(trained) & set(held_out)
    trained, held_out = prompts(eval_taskset={"split": "test"})
    assert (len(trained), held_out) == (12, [("held_out", index) for index in range(4)])


@needs_verifiers
@pytest.mark.parametrize(
    ("options", "key", "words"),
    [
        ({"id": "vf-none"}, "task.options.id", "taskset 'vf-none' not found"),
        ({"taskset": {"color": "red"}}, "task.options.id", "color"),
        ({"eval_rows": 12}, "task.options.eval_rows", "less than its 12 tasks"),
    ],
)
def test_an_environment_that_cannot_be_had_is_named(options: dict[str, Any], key: str, words: str) -> None:
    task = load_task(TaskConfig(name="verifiers", options={"id": "vf-sums", "python": PYTHON} | options), 0)
    with pytest.raises(ConfigError) as error:
        len(task)
    assert error.value.key == key
    assert words in str(error.value)


@pytest.mark.parametrize("python", ["/nowhere/python", sys.executable])
def test_an_interpreter_without_verifiers_is_told_how_to_get_it(python: str) -> None:
    if python == PYTHON and _installed():
        pytest.skip("this interpreter has verifiers")
    task = load_task(TaskConfig(name="verifiers", options={"id": "vf-sums", "python": python}), 0)
    with pytest.raises(ConfigError, match="pip install verifiers") as error:
        task.held_out()
    assert error.value.key == "task.options.python"
    missing = error.value.expected
    assert ("there is no program /nowhere/python" in missing) == (python == "/nowhere/python"), missing
