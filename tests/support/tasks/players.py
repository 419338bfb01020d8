"""A group of episodes of a task whose policy is a function of the conversation's text."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipeline.environments import load_task
from pipeline.environments.chat_tokenizer import ChatTokenizer
from pipeline.environments.task_worker import Setup
from pipeline.environments.worker_pool import WorkerPool
from pipeline.rollout.group_rollout import GroupBuilder
from pipeline.transport.sample_records import Group
from tests.fakes.configs import make_config
from tests.fakes.inline_calls import InlineCalls
from tests.unit.environments.test_tasks import Said
from tests.unit.environments.test_tool_task import bytes_model

Play = Callable[[str], str]


class Players:
    """Servers that answer the text they see by a function, and remember it."""

    def __init__(self, chat: ChatTokenizer, play: Play) -> None:
        self.chat, self.play = chat, play
        self.seen: list[str] = []

    async def generate(self, token_ids: Sequence[int], *, n: int, **_: Any) -> list[Said]:
        self.seen.append(self.chat.decode(token_ids))
        turns = [self.play(self.seen[-1]) for _ in range(n)]
        return [Said((*self.chat.encode(turn), self.chat.stop_token_ids[0]), 5, 6) for turn in turns]


def group_of(
    folder: Path,
    name: str,
    options: dict[str, Any],
    play: Play,
    samples: int = 2,
    max_length: int = 4096,
    position: int = 0,
    **task_keys: Any,
) -> tuple[Group, Players]:
    """The group of a position. Calls of the task are made in this process, or with `task_keys` by worker processes."""
    model = bytes_model(folder)
    config = make_config(
        model={"path": "tiny", "max_length": max_length},
        task={"name": name, "options": options, **task_keys},
        rollout={"group_size": samples, "max_tokens": 64, "max_consecutive_failures": 1000},
    )
    task, chat = load_task(config.task, 0), ChatTokenizer(model)
    players = Players(chat, play)

    async def scenario() -> Group:
        try:
            if not task_keys:
                return await GroupBuilder(task, InlineCalls(task, model), chat, players, config).build(position)
            async with WorkerPool(Setup(config.task, 0, model), 120) as pool:
                return await GroupBuilder(task, pool, chat, players, config).build(position)
        finally:
            await task.aclose()

    return asyncio.run(asyncio.wait_for(scenario(), 300)), players


def turns_after(text: str) -> list[str]:
    """The contents of the conversation's messages, of all roles, in order; the last is the one to answer."""
    parts = text.split("<|im_start|>")[1:-1]
    return [part.partition("\n")[2].removesuffix("\n").removesuffix("<|im_end|>") for part in parts]
