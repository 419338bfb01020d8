"""Adaptive concurrency on a real server whose KV cache is small.

    python -m tests.bench.bench_concurrency [--seconds 90] [--rounds 2] [--fixed 8 48] [--most 48] [--model wide]
        [--out FILE.json]

Starts one vLLM server of a model with random weights: the tests' tiny one (0.8 million parameters) or a wider one (4.1
million), whose prompts cost more. Its KV cache (`inference.kv_cache_bytes`) has 24,576 tokens. An episode has a prompt
of 1,000 tokens that no other episode shares, and eight turns: each samples 20 tokens, and an observation follows,
together 300. A tool works between two turns for an exponentially distributed time. A fixed number of episodes is in
flight, or the number that the controller of `rollout.adaptive_concurrency` sets, with the start, the period and the
readings of a run. The ways take turns. The first third of a way is not counted. Turns in flight at the end are
cancelled.

`cpu` is the CPU time of the server's processes for each turn: other load on the machine changes the turns/s, but hardly
the CPU time. Figures are medians of the rounds.
"""

import argparse
import asyncio
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any
from urllib.request import urlopen

import psutil

from pipeline.config import RunConfig
from pipeline.rollout.concurrency_control import ConcurrencyController, ServerLoad, Slots
from pipeline.rollout.issue_loop import ADAPT_SECONDS, START_GROUPS
from pipeline.rollout.server_pool import InferenceClient
from tests.bench.bench_sticky_routing import GROWTH, LENGTH, SAMPLED, TURNS, cache_counts, tokens
from tests.bench.tables import markdown
from tests.fakes.configs import make_config
from tests.support.servers.vllm import SECRET, Served, model_directory, starting_of

OWN, CACHE_TOKENS = 1000, 24_576
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {},
    "wide": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "layer_types": ["full_attention"] * 6,
    },
}
FLOAT_BYTES = 4
ADAPTIVE = "adaptive"
COLUMNS = ("episodes in flight", "mean", "turns/s", "tokens/s", "prefix hit rate", "preemptions", "ms of CPU a turn")
Figures = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90.0, help="seconds of a way in a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--fixed", type=int, nargs="*", default=[8, 48], help="fixed numbers of episodes in flight")
    parser.add_argument("--most", type=int, default=48, help="rollout.concurrency of the controller")
    parser.add_argument("--model", choices=[*SIZES], default="tiny")
    parser.add_argument("--tool", type=float, default=1.0, help="mean seconds of a tool between two turns")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures of all rounds")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        config = served_config(Path(name), given.model)
        with starting_of(config, "127.0.0.3") as ready:
            rounds = asyncio.run(measure(ready(), given))
    if given.out:
        command = {name: value for name, value in vars(given).items() if name != "out"}
        given.out.write_text(json.dumps({"command": command, "rounds": rounds}, indent=1))
    print(table(rounds))
    return 0


def table(rounds: Sequence[dict[str, Figures]]) -> str:
    def median(way: str, name: str) -> float:
        return float(statistics.median(round_[way][name] for round_ in rounds))

    rows = []
    for way in rounds[0]:
        figures = (f"{median(way, 'turns'):.2f}", f"{median(way, 'tokens'):.0f}", f"{median(way, 'hits'):.2f}")
        more = (f"{median(way, 'preemptions'):.0f}", f"{1e3 * median(way, 'cpu'):.0f}")
        rows.append([way, f"{median(way, 'limit'):.0f}", *figures, *more])
    return markdown(COLUMNS, rows)


def served_config(folder: Path, size: str) -> RunConfig:
    """The config of the server: a model with a context of `LENGTH` tokens, and its KV cache."""
    model = model_directory(folder / "model", tied=True)
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": LENGTH} | SIZES[size]
    (model / "config.json").write_text(json.dumps(config))
    token = 2 * FLOAT_BYTES * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    keys = {"path": str(model), "init": "random", "max_length": LENGTH}
    return make_config(model=keys, inference={"kv_cache_bytes": CACHE_TOKENS * token})


async def measure(server: Served, given: argparse.Namespace) -> list[dict[str, Figures]]:
    ways = {f"{number}": number for number in given.fixed} | {ADAPTIVE: given.most}
    async with InferenceClient([server.endpoint], SECRET, 600, fixed=True, watches_load=True) as client:
        client.update(server.endpoint, 0)
        await episode(client, Random(-1), 0.0, lambda: None)  # the first requests compile
        rounds = []
        for number in range(given.rounds):
            figures = {}
            for way, most in [*ways.items()] if number % 2 == 0 else reversed(ways.items()):
                bench = Way(client, server, Random(f"{number} {way}"), given.tool)
                figures[way] = await bench.run(most, given.seconds, adapts=way == ADAPTIVE)
                print(way, figures[way], file=sys.stderr, flush=True)
            rounds.append({way: figures[way] for way in ways})
    return rounds


class Way:
    """Episodes without end, under one rule for their number."""

    def __init__(self, client: InferenceClient, server: Served, random: Random, tool: float) -> None:
        self._client, self._server, self._random, self._tool = client, server, random, tool
        self._turns = self._in_flight = 0
        self._limits: list[int] = []

    async def run(self, most: int, seconds: float, *, adapts: bool) -> Figures:
        """The figures of `seconds`, without the first third."""
        self._slots = Slots(START_GROUPS if adapts else most)
        await self._client.load()  # readings of an earlier way
        tasks = [asyncio.create_task(self._issue())]
        tasks += [asyncio.create_task(self._adapt(most))] if adapts else []
        try:
            await asyncio.sleep(seconds / 3)
            before, began, first = self._counts(), time.monotonic(), len(self._limits)
            await asyncio.sleep(seconds * 2 / 3)
            after, took = self._counts(), time.monotonic() - began
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        turns, queried, hit, preemptions, cpu = (new - old for new, old in zip(after, before, strict=True))
        return {
            "turns": turns / took,
            "tokens": turns * SAMPLED / took,
            "hits": hit / queried,
            "preemptions": preemptions,
            "cpu": cpu / turns,
            "limit": statistics.mean(self._limits[first:]) if adapts else most,
            "limits": self._limits,
        }

    async def _issue(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                await self._slots.acquire()
                group.create_task(self._one(Random(self._random.random())))

    async def _one(self, random: Random) -> None:
        self._in_flight += 1
        try:
            await episode(self._client, random, self._tool, self._count)
        finally:
            self._in_flight -= 1
            self._slots.release()

    def _count(self) -> None:
        self._turns += 1

    async def _adapt(self, most: int) -> None:
        """As `IssueLoop._adapt`, with a record of the limits."""
        controller = ConcurrencyController(most, START_GROUPS)
        while True:
            self._slots.set_limit(controller.limit)
            self._limits.append(controller.limit)
            await asyncio.sleep(ADAPT_SECONDS)
            load = await self._client.load()
            controller.update(ServerLoad(self._in_flight, **asdict(load)))

    def _counts(self) -> tuple[float, ...]:
        """Turns, prompt tokens, cached ones, preemptions, and CPU seconds of the server, since their start."""
        queried, hit = cache_counts([self._server.endpoint])
        return self._turns, queried, hit, preemptions(self._server.endpoint), cpu_seconds(self._server.child.pid)


async def episode(client: InferenceClient, random: Random, tool: float, count: Callable[[], Any]) -> None:
    """One episode; `count` is called after each turn."""
    context, server, earlier = tokens(random, OWN), "", list[int]()
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep
    for _ in range(TURNS):
        (turn,) = await client.generate(
            context,
            n=1,
            temperature=1.0,
            max_tokens=SAMPLED,
            stop_token_ids=[],
            cached_on=server,
            cached_at=0,
            earlier=earlier,
            computed_at=0,
        )
        count()
        earlier, server = [*context, *turn.tokens], turn.server
        context = [*earlier, *tokens(random, GROWTH - len(turn.tokens))]
        if tool:
            await pause(random.expovariate(1 / tool))


def preemptions(endpoint: str) -> float:
    """Requests that the server has stopped for lack of KV cache."""
    with urlopen(f"http://{endpoint}/metrics") as answer:
        return sum(map(float, re.findall(r"^vllm:num_preemptions_total\S* (\S+)", answer.read().decode(), re.M)))


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and its running descendants."""
    process, used = psutil.Process(pid), 0.0
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            used += times.user + times.system
    return used


if __name__ == "__main__":
    sys.exit(main())
