"""What the actor adds to its servers: `python -m tests.bench.bench_actor [--groups N] [--rounds N]`.

Starts a real vLLM server of the tiny model. Groups of 8 samples of 1, 4 and 16 turns, each turn 8 tokens, 8 groups at
once; between two turns a tool answers 4 tokens. `actor` makes them as a run does: the task's episodes, tools and
rewards in worker processes, groups of records in the end. `raw` posts the same requests to the same server with
nothing around them. The ways take turns. Prints samples/s, the CPU time of this process for each sample, and the ratio
to raw; each figure is the median of the rounds.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
from pydantic import Field

from pipeline.config import RunConfig
from pipeline.config.model_directory import BUILT_IN
from pipeline.environments import load_task
from pipeline.environments.chat_tokenizer import ChatTokenizer
from pipeline.environments.episode import Episode
from pipeline.environments.task_protocol import Policy, Prompt, Task, TaskOptions, user_prompt
from pipeline.environments.task_worker import Setup
from pipeline.environments.worker_pool import WorkerPool
from pipeline.rollout.generate_wire import ROUTE, GenerationRequest
from pipeline.rollout.group_rollout import GroupBuilder
from pipeline.rollout.server_pool import InferenceClient
from tests.bench.tables import markdown
from tests.fakes.configs import make_config
from tests.support.servers.vllm import (
    SECRET,
    Served,
    a_model,
    a_sender,
    model_directory,
    publish_to_all,
    starting_of,
)

SAMPLES, IN_FLIGHT, TURN_TOKENS, TURNS = 8, 8, 8, (1, 4, 16)
ASKED, TOLD = "12+34", "+1+2"
MODEL = BUILT_IN / "tiny_qwen3"
COLUMNS = ("turns", "way", "samples/s", "ms of CPU a sample", "samples/s of raw")
Way = Callable[[int], Awaitable[object]]


class TurnsOptions(TaskOptions):
    """How long an episode is."""

    turns: int = Field(1, description="Turns of an episode.")


class Turns(Task):
    """Episodes of so many turns, whatever the policy says, with a tool that answers at once."""

    name = "turns"
    Options = TurnsOptions
    options: TurnsOptions

    def __len__(self) -> int:
        return 1 << 20

    def prompt(self, index: int) -> Prompt:
        return user_prompt(ASKED)

    def held_out(self) -> list[Prompt]:
        return [user_prompt(ASKED)]

    def reward(self, prompt: Prompt, text: str) -> float:
        return 1.0

    def use(self, prompt: Prompt, name: str, arguments: Any) -> str:
        return TOLD

    async def rollout(self, prompt: Prompt, policy: Policy) -> Episode:
        episode = Episode.begin(policy.prompt)
        while True:
            turn = await policy.sample(episode.tokens)
            episode = episode.append_turn(turn, policy.decode(turn.tokens))
            if episode.turns == self.options.turns:
                return episode
            episode = episode.append_observation(policy.encode(await policy.use(prompt, "tool", {})))


class EndlessChat(ChatTokenizer):
    """The tiny model's, in which no token ends a turn: all turns are of one length."""

    stop_token_ids: tuple[int, ...] = ()

    def _find_stops(self) -> tuple[int, ...]:
        return ()


def config_of(model: Path, turns: int) -> RunConfig:
    return make_config(
        model={"path": str(model), "init": "random", "max_length": 512},
        task={"name": "tests.bench.bench_actor:Turns", "options": {"turns": turns}, "processes": 4},
        rollout={"group_size": SAMPLES, "max_tokens": TURN_TOKENS},
    )


async def measured(way: Way, groups: int) -> tuple[float, float]:
    """Samples a second, and milliseconds of this process's CPU time for each, of so many groups."""
    slots = asyncio.Semaphore(IN_FLIGHT)

    async def one(position: int) -> None:
        async with slots:
            await way(position)

    began, used = time.monotonic(), time.process_time()
    await asyncio.gather(*map(one, range(groups)))
    samples = groups * SAMPLES
    return samples / (time.monotonic() - began), (time.process_time() - used) / samples * 1e3


def raw_way(http: aiohttp.ClientSession, served: Served, chat: ChatTokenizer, turns: int) -> Way:
    """The requests of a group, posted as they are."""
    told = chat.encode(TOLD)

    async def answers(tokens: list[int], n: int) -> list[list[int]]:
        body = GenerationRequest(tokens, n, 1.0, TURN_TOKENS, []).body(salt="0")
        async with http.post(f"http://{served.endpoint}{ROUTE}", data=body) as response:
            return [choice["token_ids"] for choice in json.loads(await response.read())["choices"]]

    async def sample(tokens: list[int]) -> None:
        for _ in range(turns - 1):
            tokens += told
            tokens += (await answers(tokens, 1))[0]

    async def group(_: int) -> None:
        prompt = chat.prompt(user_prompt(ASKED).messages)
        await asyncio.gather(*(sample([*prompt, *first]) for first in await answers(prompt, SAMPLES)))

    return group


async def rounds_of(served: Served, turns: int, groups: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    config, chat = config_of(served.model, turns), EndlessChat(MODEL)
    setup = Setup(config.task, 0, MODEL)
    client = InferenceClient([served.endpoint], SECRET, 120)
    client.update(served.endpoint, 0)
    headers = {"Authorization": f"Bearer {SECRET}", "Content-Type": "application/json"}
    async with (
        client,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers) as http,
        WorkerPool(setup, 300) as pool,
    ):
        builder = GroupBuilder(load_task(config.task, 0), pool, chat, client, config)
        ways: dict[str, Way] = {"actor": builder.build, "raw": raw_way(http, served, chat, turns)}
        for way in ways.values():
            await measured(way, IN_FLIGHT)
        (group,) = [await builder.build(0)]
        assert [sample.turns for sample in group.samples] == [turns] * SAMPLES, group.failures
        seen: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, way in ways.items():
                seen[name].append(await measured(way, groups))
        return seen


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args(arguments)
    rows: list[tuple[object, ...]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = model_directory(Path(folder) / "model", tied=False)
        with starting_of(config_of(model, max(TURNS)), "127.0.0.3") as ready:
            served = ready()
            with a_sender([served]) as sender:
                publish_to_all(sender, 0, a_model(model, seed=0))
                for turns in TURNS:
                    seen = asyncio.run(rounds_of(served, turns, given.groups, given.rounds))
                    middle = {
                        name: [statistics.median(each) for each in zip(*figures, strict=True)]
                        for name, figures in seen.items()
                    }
                    rows += [(turns, name, rate, cpu, rate / middle["raw"][0]) for name, (rate, cpu) in middle.items()]
    print(markdown(COLUMNS, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
