"""Requests to a server, from several processes, as the actor's: token ids in, token ids and log-probabilities out."""

import asyncio
import collections
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from subprocess import PIPE
from typing import IO, Any, cast

import aiohttp

from pipeline.rollout.generate_wire import FINAL_ONLY

ROUTE = "/inference/v1/generate"
PROCESSES = 8
START_SECONDS, DRAIN_SECONDS = 60, 120


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
        last: token ids, one of which each prompt ends with; empty: any.
        prompts: the prompts, from which each request draws one; empty: 16 random token ids.
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
    last: tuple[int, ...] = ()
    prompts: tuple[tuple[int, ...], ...] = ()

    @contextmanager
    def running(self) -> Iterator[Answers]:
        """Within the block the requests go on, from its first moment; afterwards the value is filled."""
        answers = Answers()
        with ExitStack() as opened:
            pool = opened.enter_context(ThreadPoolExecutor(PROCESSES))
            children = [opened.enter_context(self._started(seed)) for seed in range(PROCESSES)]

            def lines(seconds: float) -> list[Any]:
                reads = [pool.submit(cast(IO[str], child.stdout).readline) for child in children]
                _, late = wait(reads, seconds)
                if late:
                    raise RuntimeError(f"{len(late)} processes that ask the server said nothing for {seconds:.0f} s")
                said = [json.loads(read.result() or '"a process that asks the server ended"') for read in reads]
                if trouble := [part for part in said if isinstance(part, str)]:
                    raise RuntimeError(trouble[0])
                return said

            lines(START_SECONDS)
            for child in children:
                print("go", file=child.stdin, flush=True)
            yield answers
            parts = lines(self.seconds + DRAIN_SECONDS)
        answers.tokens_per_second = sum(tokens / seconds for tokens, seconds, _ in parts)
        for _, _, seen in parts:
            answers.logprobs.update({float(value): times for value, times in seen.items()})

    @contextmanager
    def _started(self, seed: int) -> Iterator[subprocess.Popen[str]]:
        """A process of its own, which needs none of what the asking one has imported."""
        told = json.dumps([asdict(self), self.requests // PROCESSES, seed])
        with subprocess.Popen([sys.executable, "-m", __name__, told], stdin=PIPE, stdout=PIPE, text=True) as child:
            try:
                yield child
            finally:
                child.kill()


def main(told: str) -> None:
    """Say that it is ready; once told to go, ask for as long as it should, and say what came back."""
    traffic, requests, seed = json.loads(told)
    print(json.dumps(["ready"]), flush=True)
    sys.stdin.readline()
    try:
        said: Any = asyncio.run(_all(Traffic(**traffic), requests, random.Random(seed)))
    except Exception as error:  # noqa: BLE001 - the boundary of the process
        said = f"{type(error).__name__}: {error}"
    print(json.dumps(said), flush=True)


async def _all(traffic: Traffic, requests: int, draw: random.Random) -> tuple[int, float, dict[float, int]]:
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
                prompt[-1] = draw.choice(traffic.last or prompt[-1:])
                prompt = list(draw.choice(traffic.prompts)) if traffic.prompts else prompt
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


if __name__ == "__main__":
    main(sys.argv[1])
