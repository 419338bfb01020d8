"""OpenAI's routes of the gateway, over a server that is scripted here."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from pipeline.tinker.forwarding import CHAT, COMPLETION
from pipeline.tinker.tinker_records import ServerFacts
from pipeline.utils.authenticated_http import ROUTE
from tests.fakes.async_server import prove
from tests.fakes.http_server import PASSWORD
from tests.unit.tinker.gateway_case import ADA, Client, with_gateway

MESSAGES = [{"role": "user", "content": "1+1"}]
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
Answer = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


class Script:
    """A server with the routes of vLLM's OpenAI API."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.answers: list[Answer] = []
        """What answers the next requests; then `whole` and `streamed` do."""
        self.gate = asyncio.Event()
        """Answers wait until it is set."""
        self.gate.set()
        self.let_go = asyncio.Event()
        """Set when a client of a request that hangs has gone."""

    async def start(self) -> str:
        app = web.Application()
        app.router.add_get(ROUTE, prove)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._health)
        app.router.add_post("/v1/load_lora_adapter", self._load)
        for route in (CHAT, COMPLETION):
            app.router.add_post(route, self._answer)
        app.router.add_post("/inference/v1/generate", self._generate)
        self._server = TestServer(app)
        await self._server.start_server()
        return f"127.0.0.1:{self._server.port}"

    async def stop(self) -> None:
        await self._server.close()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=self.health)

    health = 200

    async def _load(self, request: web.Request) -> web.Response:
        self.asked.append((request.path, await request.json()))
        return web.Response(text="ok")

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append((request.path, body))
        await self.gate.wait()
        if self.answers:
            return await self.answers.pop(0)(request, body)
        return await (streamed if body.get("stream") else whole)(request, body)

    async def _generate(self, request: web.Request) -> web.Response:
        """A sample of the SDK."""
        self.asked.append((request.path, await request.json()))
        await self.gate.wait()
        logprobs = {"content": [{"token_id": 4, "logprob": -0.5}]}
        choice = {"index": 0, "token_ids": [4], "finish_reason": "stop", "logprobs": logprobs}
        return web.json_response({"choices": [choice]})

    async def hang(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        try:
            await asyncio.sleep(60)
        finally:
            self.let_go.set()
        return web.Response()


async def whole(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    choice = {"index": 0, "message": {"role": "assistant", "content": "2"}, "finish_reason": "stop"}
    return web.json_response({"id": "x", "model": body["model"], "choices": [choice], "usage": USAGE})


async def streamed(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return await _stream(request, body, ("1", "2" * 200_000), whole=True)


async def torn(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return await _stream(request, body, ("1",), whole=False)


async def dead(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def _stream(request: web.Request, body: dict[str, Any], texts: tuple[str, ...], *, whole: bool) -> Any:
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await answer.prepare(request)
    for text in texts:
        event = {"model": body["model"], "choices": [{"index": 0, "delta": {"content": text}}], "usage": USAGE}
        await answer.write(b": keep-alive\n\ndata: " + json.dumps(event).encode() + b"\n\n")
    if not whole:
        return await dead(request, body)
    await answer.write(b"data: " + json.dumps({"model": body["model"], "choices": [], "usage": USAGE}).encode())
    await answer.write(b"\n\ndata: [DONE]\n\n")
    return answer


def with_script(tmp_path: Path, play: Callable[[Client, Script], Awaitable[None]]) -> None:
    async def run(client: Client) -> None:
        script = Script()
        client.sampling.set_servers(ServerFacts((await script.start(),), PASSWORD))
        try:
            await play(client, script)
        finally:
            await script.stop()

    with_gateway(tmp_path, run)


async def ask(client: Client, body: dict[str, Any], key: str = "tml-ada", route: str = CHAT) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}"}
    async with client.http.post(route, json=body, headers=headers) as answer:
        return answer.status, await answer.json()


async def events(client: Client, body: dict[str, Any]) -> list[Any]:
    async with client.http.post(CHAT, json={"stream": True, **body}, headers=ADA) as answer:
        assert (answer.status, answer.content_type) == (200, "text/event-stream")
        lines = (await answer.text()).split("\n\n")
    assert lines.pop() == ""
    return [line.removeprefix("data: ") if "[DONE]" in line else json.loads(line[6:]) for line in lines]
