"""What it gains that an episode's turns go to one server: `python -m tests.bench.bench_sticky_routing [--rounds N]`.

Three real vLLM servers of a tiny model, and one client. Episodes of 8 turns begin with 2,000 tokens that all share and
32 of their own; a turn samples 20 tokens and adds an observation, together 300. In one way a later turn names the
server of the turn before (`cached_on`), in the other the least loaded server gets it. Between two turns a tool works
for an exponentially distributed time: without one, the server that has just ended a turn is often the least loaded, so
both ways send the next turn there. The ways take turns, each round with other tokens. With `--seconds` a way plays
episodes for so long in place of a number of them, and its unfinished episodes are cancelled. Figures are medians of the
rounds; ratios are those of a round.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from random import Random
from urllib.request import urlopen

from pipeline.rollout.server_pool import InferenceClient
from tests.bench.tables import markdown
from tests.fakes.configs import make_config
from tests.support.servers.vllm import SECRET, Served, model_directory, starting_of

SERVERS, TURNS, SHARED, OWN, SAMPLED, GROWTH = 3, 8, 2000, 32, 20, 300
LENGTH = 4608
WAYS = ("sticky", "least loaded")
Figures = tuple[float, float]
"""Turns a second, and the fraction of prompt tokens that were in a prefix cache."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, episodes=24, concurrency=12)
    parser.add_argument("--out", type=Path, help="a JSON file for the figures of all rounds")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        servers = served(Path(name), stack)
        rounds = asyncio.run(measure([server.endpoint for server in servers], given))
    if given.out:
        given.out.write_text(json.dumps({"command": vars(given) | {"out": str(given.out)}, "rounds": rounds}, indent=1))
    print(table(rounds))
    return 0


def add_options(parser: argparse.ArgumentParser, *, episodes: int, concurrency: int) -> None:
    """The options of `measure`, with these defaults."""
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--episodes", type=int, default=episodes, help="episodes of a way in a round")
    parser.add_argument("--seconds", type=float, help="seconds of a way in a round, in place of --episodes")
    parser.add_argument("--concurrency", type=int, default=concurrency, help="episodes at a time")
    parser.add_argument("--tool", type=float, default=0.0, help="mean seconds of a tool between two turns")


def table(rounds: Sequence[dict[str, Figures]]) -> str:
    rows = []
    for way in WAYS:
        ratios = [round_[way][0] / round_[WAYS[1]][0] for round_ in rounds]
        speed, hits = (statistics.median(round_[way][index] for round_ in rounds) for index in (0, 1))
        rows.append([way, f"{speed:.2f}", f"{statistics.median(ratios):.2f}", f"{hits:.2f}"])
    return markdown(["later turns go to", "turns/s", "ratio", "prefix-cache hit rate"], rows)


def served(folder: Path, stack: ExitStack) -> list[Served]:
    """Three servers of a tiny model with a context of 4,608 tokens."""
    model = model_directory(folder / "model", tied=True)
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": LENGTH}
    (model / "config.json").write_text(json.dumps(config))
    keys = make_config(model={"path": str(model), "init": "random", "max_length": LENGTH})
    starts = [stack.enter_context(starting_of(keys, f"127.0.0.{3 + index}", index=index)) for index in range(SERVERS)]
    return [ready() for ready in starts]


async def measure(endpoints: Sequence[str], given: argparse.Namespace) -> list[dict[str, Figures]]:
    """The figures of each way in each of `given.rounds`."""
    async with InferenceClient([*endpoints], SECRET, 300, fixed=True) as client:
        for endpoint in endpoints:
            client.update(endpoint, 0)
        # The first requests of a server compile, and a few at a time reach each.
        await play(client, Random(-1), range(4 * len(endpoints)), 2 * len(endpoints), sticky=True)
        rounds = []
        for number in range(given.rounds):
            figures = {}
            for way in WAYS if number % 2 == 0 else reversed(WAYS):
                random, sticky = Random(f"{number} {way}"), way == "sticky"
                starts = count() if given.seconds else range(given.episodes)
                before, began = cache_counts(endpoints), time.monotonic()
                turns = await play(
                    client, random, starts, given.concurrency, sticky=sticky, tool=given.tool, seconds=given.seconds
                )
                seconds = time.monotonic() - began
                queried, hit = (after - old for after, old in zip(cache_counts(endpoints), before, strict=True))
                figures[way] = turns / seconds, hit / queried
            rounds.append(figures)
            print(figures, file=sys.stderr, flush=True)
    return rounds


async def play(
    client: InferenceClient,
    random: Random,
    starts: Iterable[int],
    concurrency: int,
    *,
    sticky: bool,
    tool: float = 0.0,
    seconds: float | None = None,
) -> int:
    """The turns played: an episode for each of `starts`, `concurrency` at a time, for at most `seconds`."""
    shared, left, turns = tokens(random, SHARED), iter(starts), 0

    async def episodes(own: Random) -> None:
        nonlocal turns
        for _ in left:
            context, server = shared + tokens(own, OWN), ""
            for _ in range(TURNS):
                (turn,) = await client.generate(
                    context, n=1, temperature=1.0, max_tokens=SAMPLED, stop_token_ids=[], cached_on=server
                )
                turns += 1
                context = [*context, *turn.tokens, *tokens(own, GROWTH - len(turn.tokens))]
                server = turn.server if sticky else ""
                if tool:
                    await asyncio.sleep(own.expovariate(1 / tool))

    with suppress(TimeoutError):
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(episodes(Random(random.random())))
    return turns


def tokens(random: Random, count: int) -> list[int]:
    """Random tokens of the tiny model's vocabulary, without its first special ones."""
    return [random.randrange(3, 17) for _ in range(count)]


def cache_counts(endpoints: Sequence[str]) -> tuple[float, float]:
    """Prompt tokens for which all servers have looked in their prefix caches, and those that they found."""
    queried = hit = 0.0
    for endpoint in endpoints:
        with urlopen(f"http://{endpoint}/metrics") as answer:
            for line in answer.read().decode().splitlines():
                queried += float(line.split()[-1]) if line.startswith("vllm:prefix_cache_queries_total") else 0
                hit += float(line.split()[-1]) if line.startswith("vllm:prefix_cache_hits_total") else 0
    return queried, hit


if __name__ == "__main__":
    sys.exit(main())
