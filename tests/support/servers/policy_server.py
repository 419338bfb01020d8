"""A small server that speaks vLLM's generate route and answers sums, with faults on demand; real HTTP, no model."""

import asyncio
import math
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from aiohttp import web

from pipeline.config.model_directory import BUILT_IN
from pipeline.environments.arithmetic import evaluate
from pipeline.environments.chat_tokenizer import ChatTokenizer
from pipeline.rollout.generate_wire import ROUTE
from tests.fakes.async_server import serving
from tests.support.runs.attempts import PASSWORD

CHAT = ChatTokenizer(BUILT_IN / "tiny_qwen3")

_PROCESS_SECONDS = 120.0

Fault = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class PolicyServer:
    """Answers right in every other sample of a request, or always when greedy, with the weights `version`. What is no
    sum gets the answer 7.

    Each sampled token has a log-probability of its own, the next multiple of −2⁻¹⁰, and `sampled` counts the tokens
    that went to a living client. Requests beyond `limit` answered ones wait.
    """

    version: int = 0
    port: int = 0
    requests: int = 0
    in_flight: int = 0
    sampled: int = 0
    limit: float = math.inf
    faults: list[Fault] = field(default_factory=list)
    hold: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.hold.set()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.requests += 1
        if self.faults:
            return await self.faults.pop(0)(request)
        asked = await request.json()
        version = self.version
        self.in_flight += 1
        try:
            while (not self.hold.is_set() or self.limit < 1) and not _is_gone(request):
                await asyncio.sleep(0.005)
        finally:
            self.in_flight -= 1
        if _is_gone(request):
            return web.Response()
        self.limit -= 1
        sampling = asked["sampling_params"]
        right = _value(CHAT.decode(asked["token_ids"]).strip("^="))
        said = [right if sampling["temperature"] == 0 or n % 2 else "0" for n in range(sampling["n"])]
        return web.json_response({"choices": [self._choice(n, text, version) for n, text in enumerate(said)]})

    def _choice(self, index: int, text: str, version: int) -> dict[str, Any]:
        tokens = CHAT.encode(f"{text}$")
        first, self.sampled = self.sampled, self.sampled + len(tokens)
        content = [{"token_id": token, "logprob": -number / 1024} for number, token in enumerate(tokens, first + 1)]
        return {
            "index": index,
            "finish_reason": "stop",
            "token_ids": tokens,
            "logprobs": {"content": content},
            "weight_versions": [{"version": str(version), "start": 0, "end": len(tokens)}],
        }

    def late(self, release: threading.Event) -> Fault:
        """The usual answer, once `release` is set."""

        async def answer(request: web.Request) -> web.StreamResponse:
            while not release.is_set():
                await asyncio.sleep(0.005)
            return await self.answer(request)

        return answer


def _value(text: str) -> str:
    try:
        return str(evaluate(text))
    except ValueError:
        return "7"


def _is_gone(request: web.Request) -> bool:
    """Whether the client has closed the connection."""
    return request.transport is None or request.transport.is_closing()


async def broken(_: web.Request) -> web.StreamResponse:
    """Status 500."""
    return web.Response(status=500, text="the engine died")


async def refused(_: web.Request) -> web.StreamResponse:
    """Status 400."""
    return web.json_response({"error": {"message": "too long"}}, status=400)


async def disconnected(request: web.Request) -> web.StreamResponse:
    """No answer: the connection is cut."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


@contextmanager
def a_policy_server(routes: Mapping[str, Fault] = MappingProxyType({})) -> Iterator[PolicyServer]:
    """A running server, which has these further `routes`; ends with the block."""
    server, loop = PolicyServer(), asyncio.new_event_loop()
    stack = AsyncExitStack()
    server.port = loop.run_until_complete(
        stack.enter_async_context(serving({ROUTE: server.answer, **routes}, PASSWORD))
    )
    thread = threading.Thread(target=loop.run_forever, name="policy server")
    thread.start()
    try:
        yield server
    finally:
        server.hold.set()
        asyncio.run_coroutine_threadsafe(stack.aclose(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


class ServerProcess:
    """A policy server in a process of its own, to be killed. It answers `limit` requests; later ones wait."""

    def __init__(self, limit: int) -> None:
        argv = [sys.executable, "-m", "tests.support.servers.policy_server", str(limit), PASSWORD]
        self._process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def sampled(self) -> int:
        """The number of tokens in all its answers; waits for the last one."""
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


async def _serve(limit: int, password: str) -> None:
    server = PolicyServer(limit=limit)
    async with serving({ROUTE: server.answer}, password) as port:
        print(port, flush=True)
        async with asyncio.timeout(_PROCESS_SECONDS):
            while server.limit >= 1:
                await asyncio.sleep(0.01)
            print(server.sampled, flush=True)
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), sys.argv[2]))
