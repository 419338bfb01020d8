"""Requests to a server, from several processes, as the actor's: token ids in, token ids and log-probabilities out."""

import asyncio
import collections
import json
import multiprocessing
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Empty
from typing import Any

from pipeline.rollouts.server import FINAL_ONLY

ROUTE = "/inference/v1/generate"
PROCESSES = 8


@dataclass
class Answers:
    """What came back: tokens a second, and how often each log-probability (rounded to 0.01) was seen."""

    tokens_per_second: float = 0.0
    logprobs: collections.Counter[float] = field(default_factory=collections.Counter)


@dataclass(frozen=True)
class Traffic:
    """`requests` at a time to `endpoint` for `seconds`, each of `tokens` tokens.

    Attributes:
        greedy: whether to take the likeliest token, and count log-probabilities.
        logprobs: whether to ask for them.
        ends: how many token ids, from 2 on, end a completion; 0: none does.
        group: requests of one prompt that are asked at once, and the next ones when all of them are answered, as a run
            does. Where completions end one by one and the next is asked for each, nearly every step of the engine has
            a prompt in it, and is not one of its recorded graphs.
    """

    endpoint: str
    secret: str
    requests: int
    seconds: float
    tokens: int = 512
    greedy: bool = False
    logprobs: bool = True
    ends: int = 0
    group: int = 1

    @contextmanager
    def running(self) -> Iterator[Answers]:
        """Within the block the requests go on; afterwards the value is filled."""
        context = multiprocessing.get_context("spawn")
        queue, answers = context.Queue(), Answers()
        share = self.requests // PROCESSES
        started = [context.Process(target=_ask, args=(self, share, queue, seed)) for seed in range(PROCESSES)]
        for process in started:
            process.start()
        try:
            yield answers
            parts = [queue.get(timeout=self.seconds + 120) for _ in started]
        except Empty:
            raise RuntimeError("a process that asks the server gave no result") from None
        finally:
            for process in started:
                process.join(10)
                process.kill()
        if told := [part for part in parts if isinstance(part, str)]:
            raise RuntimeError(told[0])
        answers.tokens_per_second = sum(tokens / seconds for tokens, seconds, _ in parts)
        for _, _, seen in parts:
            answers.logprobs.update(seen)


def _ask(traffic: Traffic, requests: int, queue: Any, seed: int) -> None:
    try:
        queue.put(asyncio.run(_all(traffic, requests, random.Random(seed))))
    except Exception as error:  # noqa: BLE001 - the boundary of the process
        queue.put(f"{type(error).__name__}: {error}")


async def _all(traffic: Traffic, requests: int, draw: random.Random) -> tuple[int, float, dict[float, int]]:
    import aiohttp

    seen: collections.Counter[float] = collections.Counter()
    tokens, started = 0, time.monotonic()
    headers = {"Authorization": f"Bearer {traffic.secret}"}
    limit = aiohttp.ClientTimeout(total=600)

    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=limit, headers=headers
    ) as session:

        async def one() -> None:
            nonlocal tokens
            while time.monotonic() - started < traffic.seconds:
                prompt = [draw.randrange(3, 1000) for _ in range(16)]
                for answer in await asyncio.gather(*(generate(session, traffic, prompt) for _ in range(traffic.group))):
                    tokens += len(answer["token_ids"])
                    if traffic.greedy:
                        seen.update(round(token["logprob"], 2) for token in answer["logprobs"]["content"])

        await asyncio.gather(*(one() for _ in range(requests // traffic.group)))
    return tokens, time.monotonic() - started, dict(seen)


async def generate(session: Any, traffic: Traffic, prompt: list[int]) -> dict[str, Any]:
    """The one choice of the server's answer to a prompt."""
    sampling = {
        "max_tokens": traffic.tokens,
        "temperature": 0.0 if traffic.greedy else 1.0,
        "ignore_eos": True,
        "stop_token_ids": [*range(2, 2 + traffic.ends)],
        "detokenize": False,
        "output_kind": FINAL_ONLY,
        **({"logprobs": 0} if traffic.logprobs else {}),
    }
    body = {"model": "policy", "token_ids": prompt, "sampling_params": sampling}
    async with session.post(f"http://{traffic.endpoint}{ROUTE}", json=body) as response:
        text = await response.read()
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {text[:300]!r}")
    choice: dict[str, Any] = json.loads(text)["choices"][0]
    return choice
