"""What an agent's endpoint costs: `python -m tests.bench.bench_agent_endpoint [--episodes N] [--rounds N]`.

Opens and closes endpoints, and holds conversations of 1, 4 and 16 turns with one over HTTP, whose policy answers at
once; beside it, the same turns by the bookkeeping alone (`ConversationTree`), as a task in the actor's process pays for
them. Prints milliseconds of CPU time for each call, of client and endpoint together, the median of the rounds.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiohttp

from pipeline.config.model_directory import BUILT_IN
from pipeline.environments.chat_tokenizer import ChatTokenizer
from pipeline.rollout.agent_endpoint.conversation_tree import ConversationTree
from pipeline.rollout.agent_endpoint.episode_endpoint import Endpoint
from tests.bench.tables import markdown
from tests.unit.environments.test_tasks import Said

CHAT = ChatTokenizer(BUILT_IN / "tiny_text")
TURN = Said((*CHAT.encode("4" * 64), CHAT.stop_token_ids[0]), 0, 0)
MAX_LENGTH = 1 << 20
TURNS = (1, 4, 16)
QUESTION, MORE = ({"role": "user", "content": text} for text in ("How many? " * 20, "And then?"))


async def answer(tokens: Sequence[int], n: int, max_tokens: int | None) -> list[Any]:
    return [TURN] * n


async def opened(_: int) -> int:
    async with Endpoint(CHAT, answer, MAX_LENGTH):
        return 1


async def over_http(turns: int) -> int:
    async with Endpoint(CHAT, answer, MAX_LENGTH) as endpoint:
        headers, url = {"Authorization": f"Bearer {endpoint.key}"}, f"{endpoint.url}/chat/completions"
        async with aiohttp.ClientSession(headers=headers) as http:
            messages = [QUESTION]
            for _ in range(turns):
                async with http.post(url, json={"model": "policy", "messages": messages}) as response:
                    told = await response.json()
                messages += [told["choices"][0]["message"], MORE]
    return turns


async def bookkeeping(turns: int) -> int:
    dialogue, messages = ConversationTree(CHAT), [QUESTION]
    for _ in range(turns):
        text = CHAT.decode(TURN.tokens)
        reply = {"role": "assistant", "content": text}
        dialogue.add(dialogue.match_prefix(messages), TURN, text, reply)
        messages += [reply, MORE]
    dialogue.episode()
    return turns


def cost(way: Callable[[int], Awaitable[int]], turns: int, episodes: int) -> float:
    """Milliseconds of CPU time a call."""

    async def play() -> float:
        began = time.process_time()
        calls = sum([await way(turns) for _ in range(episodes)])
        return (time.process_time() - began) / calls * 1e3

    return asyncio.run(play())


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--episodes", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args(arguments)
    ways = [("open and close", opened, 1)]
    ways += [(name, way, turns) for turns in TURNS for name, way in (("HTTP", over_http), ("alone", bookkeeping))]
    rounds = [[cost(way, turns, given.episodes) for _, way, turns in ways] for _ in range(given.rounds)]
    middle = [statistics.median(costs) for costs in zip(*rounds, strict=True)]
    rows = [(name, turns, each) for (name, _, turns), each in zip(ways, middle, strict=True)]
    print(markdown(("what", "turns", "ms of CPU a call"), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
