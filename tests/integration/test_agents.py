"""Agents that run as commands and as services: what becomes of their episodes, whatever they do."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import RunConfig, TaskConfig
from pipeline.config.data_keys import located_options
from pipeline.config.model_directory import BUILT_IN
from pipeline.environments import load_task
from pipeline.environments.chat_tokenizer import ChatTokenizer
from pipeline.environments.task_worker import Setup
from pipeline.environments.worker_pool import WorkerPool
from pipeline.errors import ConfigError
from pipeline.rollout.group_rollout import GroupBuilder
from pipeline.transport.sample_records import Group
from pipeline.utils.waiting import wait_for
from tests.fakes.configs import make_config
from tests.fakes.jumping_loop import pass_time, run_jumping
from tests.patience import WAIT_SECONDS
from tests.support.processes import gone
from tests.support.runs.launched import ROOT
from tests.unit.environments.test_tasks import Said

pytestmark = pytest.mark.integration

MODEL = BUILT_IN / "tiny_text"
CHAT = ChatTokenizer(MODEL)
HOUR = 3600.0
FOUR = (*CHAT.encode("4"), CHAT.stop_token_ids[0])


class Answering:
    """Servers that say 4."""

    async def generate(self, token_ids: Sequence[int], *, n: int, **_: Any) -> list[Said]:
        return [Said(FOUR, 5, 6)] * n


def config(options: dict[str, Any], **rollout: Any) -> RunConfig:
    of = {"name": "tests.unit.rollout.test_group_rollout:Sums"}
    return make_config(
        model={"path": "tiny_text", "max_length": 256},
        task={"name": "agent", "options": {"of": of, **options}, "processes": 2},
        rollout={"group_size": 2, "max_tokens": 16, "max_consecutive_failures": 1000, **rollout},
    )


@asynccontextmanager
async def a_builder(config: RunConfig, servers: Answering) -> AsyncIterator[GroupBuilder]:
    async with WorkerPool(Setup(config.task, config.seed, MODEL), 60) as pool:
        yield GroupBuilder(load_task(config.task, 0), pool, CHAT, servers, config)


def group_of(options: dict[str, Any], servers: Answering | None = None, **rollout: Any) -> Group:
    async def built() -> Group:
        async with a_builder(config(options, **rollout), servers or Answering()) as builder:
            return await builder.build(0)

    return asyncio.run(asyncio.wait_for(built(), 120))


def command(how: str, notes: Path) -> dict[str, Any]:
    return {"command": [sys.executable, "-m", "tests.support.tasks.agents_at_work", how, str(notes)]}


@pytest.mark.parametrize(
    ("how", "reward"), [("scores", 1.0), ("posts", 0.75), ("prints", 0.25), ("asks", 1.0), ("messages", 1.0)]
)
def test_an_agent_s_calls_are_the_row_and_what_it_tells_is_the_reward(
    how: str, reward: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`asks` tells none: then the task it works on says what its last answer is worth. A token in the environment is
    not the agent's."""
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "of another account")
    group = group_of(command(how, tmp_path))
    assert group.failures == ()
    assert [sample.reward for sample in group.samples] == [reward] * 2
    sample = group.samples[0]
    sample.check()
    assert CHAT.decode(sample.token_array().tolist()).endswith("U:2+2\nA:4")
    assert sample.sampled_array().tolist()[-3:] == [0, 1, 1]
    assert sample.metrics["agent/calls"] == 1
    assert sample.metrics.get("agent/steps") == (3 if how in ("scores", "messages") else None)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("fails", "agent failed: exited with code 1: there is no such town"),
        ("silent", "rollout sampled nothing"),
        ("mumbles", 'the agent\'s report has the keys score: expected a number, or {"reward": number'),
    ],
)
def test_an_agent_that_fails_costs_its_sample_with_its_reason(how: str, reason: str, tmp_path: Path) -> None:
    group = group_of(command(how, tmp_path))
    assert group.samples == ()
    assert [failure[: len(reason)] for failure in group.failures] == [reason] * 2


def test_a_command_that_is_not_there_is_told(tmp_path: Path) -> None:
    (reason, _) = group_of({"command": ["/nowhere/agent"]}).failures
    assert reason.startswith("agent failed: it cannot be started:")
    assert "/nowhere/agent" in reason


def test_an_agent_that_hangs_is_ended_after_its_own_time(tmp_path: Path) -> None:
    async def story() -> Group:
        async with a_builder(config(command("hangs", tmp_path), episode_seconds=HOUR), Answering()) as builder:
            building = asyncio.create_task(builder.build(0))
            await asyncio.to_thread(wait_for, "both to hang", lambda: len(list(tmp_path.iterdir())) == 2, 60)
            await pass_time(HOUR + 1)
            return await building

    group = run_jumping(story())
    assert [reason.partition(":")[0] for reason in group.failures] == ["rollout took too long DeadlineError"] * 2
    pids = [int(note.name) for note in tmp_path.iterdir()]
    wait_for("the agents to end", lambda: all(map(gone, pids)), WAIT_SECONDS)


def test_what_an_agent_leaves_ends_with_its_episode(tmp_path: Path) -> None:
    group = group_of(command("leaves", tmp_path))
    assert len(group.samples) == 2
    pids = [int(note.name) for note in tmp_path.iterdir()]
    assert len(pids) == 2
    assert all(map(gone, pids))


def test_the_wait_for_the_servers_and_for_a_worker_is_no_time_of_the_agent_s(tmp_path: Path) -> None:
    """Of a day that the servers take for each answer, and the first agent takes of the second, none is its own."""

    class Slow(Answering):
        async def generate(self, token_ids: Sequence[int], *, n: int, **_: Any) -> list[Said]:
            await pass_time(24 * HOUR)
            return await super().generate(token_ids, n=n)

    async def story() -> Group:
        alone = config(command("scores", tmp_path), episode_seconds=HOUR)
        alone = alone.model_copy(update={"task": alone.task.model_copy(update={"processes": 1})})
        async with a_builder(alone, Slow()) as builder:
            return await builder.build(0)

    group = run_jumping(story())
    assert (len(group.samples), group.failures) == (2, ())


@asynccontextmanager
async def a_service(*program: str) -> AsyncIterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, *program, str(port)], cwd=ROOT)
    try:
        await asyncio.to_thread(wait_for, "the service", lambda: _listens(port), 60)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(WAIT_SECONDS)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def served_group(*program: str) -> Group:
    async def story() -> Group:
        async with a_service(*program) as url, a_builder(config({"service": url}), Answering()) as builder:
            return await builder.build(0)

    return asyncio.run(asyncio.wait_for(story(), 120))


@pytest.mark.parametrize("protocol", ["chat", "messages", "responses"])
def test_every_protocol_gives_the_same_sample(protocol: str) -> None:
    group = served_group("-m", "tests.support.tasks.protocol_agents", protocol)
    assert [sample.reward for sample in group.samples] == [1.0, 1.0], group.failures
    sample = group.samples[0]
    assert CHAT.decode(sample.token_array().tolist()).endswith("U:2+2\nA:4")
    assert tuple(sample.token_array()[sample.sampled_array() == 1].tolist()) == FOUR


def test_an_agent_may_be_a_service() -> None:
    group = served_group("docs/examples/agent_service.py")
    assert [sample.reward for sample in group.samples] == [1.0, 1.0]
    (reason, _) = group_of({"service": "http://127.0.0.1:9/"}).failures
    assert reason.startswith("agent failed: http://127.0.0.1:9/ cannot be asked: ClientConnectorError")


def test_the_agent_of_the_page_asks_with_openai_s_client() -> None:
    """It is asked again for what is no number, in the same conversation."""

    class Mumbling(Answering):
        async def generate(self, token_ids: Sequence[int], *, n: int, **_: Any) -> list[Said]:
            again = CHAT.decode(token_ids).count("A:") > 1
            return [Said(FOUR if again else tuple(CHAT.encode("four<eos>")), 5, 6)]

    group = group_of({"command": [sys.executable, "docs/examples/agent.py"]}, Mumbling())
    assert [sample.reward for sample in group.samples] == [1.0, 1.0], group.failures
    sample = group.samples[0]
    assert CHAT.decode(sample.token_array().tolist()).endswith("A:four<eos>\nU:End with the result, a number.\nA:4")
    assert (sample.turns, sample.branches, sample.metrics["agent/answered"]) == (2, (), 1.0)


@pytest.mark.parametrize(
    ("options", "key", "expected"),
    [
        ({}, "task.options", "a command, or the URL of a service"),
        ({"command": ["a"], "service": "http://b"}, "task.options", "a command, or the URL of a service, not both"),
        ({"service": "127.0.0.1:8123"}, "task.options.service", "a URL that begins with http:// or https://"),
        ({"command": ["a"], "of": {"name": "sums"}}, "task.options.of.name", "a built-in task"),
        ({"command": ["a"]}, "task.options.of.options.path", "a file, a folder"),
        (
            {"command": ["a"], "of": {"name": "arithmetic", "options": {"term": 2}}},
            "task.options.of.options.term",
            "a k",
        ),
    ],
)
def test_what_is_wrong_is_named_before_anything_starts(options: dict[str, Any], key: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_task(TaskConfig(name="agent", options=options), 0)
    assert error.value.key == key
    assert error.value.expected.startswith(expected)


def test_paths_of_an_agent_hold_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").touch()
    (tmp_path / "prompts.jsonl").touch()
    options = {"command": ["python", "agent.py", "{prompt}"], "of": {"options": {"path": "prompts.jsonl"}}}
    located = located_options(options)
    os.chdir("/")
    assert located["command"] == ["python", str(tmp_path / "agent.py"), "{prompt}"]
    assert located["of"] == {"options": {"path": str(tmp_path / "prompts.jsonl")}}


def test_the_python_of_a_virtual_environment_stays_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "python").symlink_to(sys.executable)
    assert located_options({"command": ["python", "{port}"]}) == {"command": [str(tmp_path / "python"), "{port}"]}
    assert located_options({"python": "python"}) == {"python": str(tmp_path / "python")}
    others = {"python": "python3.11", "command": ["python3", "-c", "x" * 5000]}
    assert located_options(others) == others, "neither a command of PATH nor a long text is a file"
