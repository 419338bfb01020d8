"""Small HTTP servers that speak vLLM's generate route and misbehave as told, and a client of them."""

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiohttp import web

from pipeline.rollout.generate_wire import ABORT_ROUTE, ROUTE
from pipeline.rollout.server_client import Completion
from pipeline.rollout.server_pool import InferenceClient
from tests.fakes.async_server import ADDRESS, serving

T = TypeVar("T")
Answer = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


def choice(tokens: list[int], finish: str = "length", version: str = "5", index: int = 0) -> dict[str, Any]:
    return {
        "index": index,
        "finish_reason": finish,
        "token_ids": tokens,
        "weight_versions": [{"version": version, "start": 0, "end": len(tokens)}] if tokens else [],
        "logprobs": {"content": [{"token_id": token, "logprob": -0.5, "rank": 1} for token in tokens]},
    }


def older_choice(tokens: list[int], named: list[int] | None = None) -> dict[str, Any]:
    """As releases of vLLM before `weight_versions` say it: tokens by name, and no version."""
    content = [{"token": f"token_id:{token}", "logprob": -0.5, "bytes": None} for token in named or tokens]
    return {"index": 0, "finish_reason": "length", "token_ids": tokens, "logprobs": {"content": content}}


def answer(*choices: dict[str, Any]) -> web.Response:
    return web.json_response({"request_id": "r", "choices": list(choices)})


async def works(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return answer(*(choice([7] * body["sampling_params"]["max_tokens"]) for _ in range(body["sampling_params"]["n"])))


async def never_answers(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    await asyncio.sleep(3600)
    return web.Response()


async def hangs_up(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def with_status(status: int, body: str = "") -> Answer:
    async def respond(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=status, text=body)

    return respond


def always(*choices: dict[str, Any]) -> Answer:
    async def respond(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        return answer(*choices)

    return respond


def reports(usage: dict[str, Any]) -> Answer:
    async def respond(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"request_id": "r", "choices": [choice([7])], "usage": usage})

    return respond


@dataclass
class Script:
    """A server that answers by its list, and by the last of it for ever."""

    answers: list[Answer]
    endpoint: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    authorizations: list[str] = field(default_factory=list)
    interrupted: dict[str, asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))

    async def interrupt(self, request: web.Request) -> web.Response:
        for name in (await request.json())["request_ids"]:
            self.interrupted[name.removeprefix("generate-tokens-")].set()
        return web.Response()

    async def slowly(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """One token a request: the time limit comes before the second, and then the server gives what it has."""
        await self.interrupted[request.headers["X-Request-Id"]].wait()
        return answer(*(choice([7], "abort") for _ in range(body["sampling_params"]["n"])))

    async def respond(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.bodies.append(body)
        self.authorizations.append(request.headers["Authorization"])
        step = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return await step(request, body)


@asynccontextmanager
async def client_and(*scripts: Script, **settings: Any) -> AsyncIterator[InferenceClient]:
    """A client of these servers, all at version 5."""
    async with AsyncExitStack() as stack:
        for script in scripts:
            port = await stack.enter_async_context(serving({ROUTE: script.respond, ABORT_ROUTE: script.interrupt}))
            script.endpoint = f"{ADDRESS}:{port}"
        endpoints = [script.endpoint for script in scripts]
        seconds = settings.pop("seconds", 5.0)
        client = await stack.enter_async_context(InferenceClient(endpoints, "s3cret", seconds, **settings))
        for endpoint in endpoints:
            client.update(endpoint, 5)
        yield client


async def ask(
    client: InferenceClient,
    n: int = 1,
    tokens: int = 4,
    cached_on: str = "",
    cached_at: int | None = None,
    earlier: Sequence[int] = (),
    computed_at: int | None = None,
    prompt: Sequence[int] = (1, 2, 3),
) -> list[Completion]:
    return await client.generate(
        prompt,
        n=n,
        temperature=0.7,
        max_tokens=tokens,
        stop_token_ids=[2],
        cached_on=cached_on,
        cached_at=cached_at,
        earlier=earlier,
        computed_at=computed_at,
    )


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 20))
