"""A vLLM server that dies of one token, with everything that it works on, and is there again a moment later."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from pipeline.rollout.generate_wire import ROUTE
from pipeline.utils.authenticated_http import ROUTE as PROOF
from tests.fakes.async_server import ADDRESS, proving
from tests.fakes.http_server import PASSWORD
from tests.fakes.scripted_server import answer, choice

POISON = 3
_WORK_SECONDS, _DEATH_SECONDS, DOWN_SECONDS = 0.2, 0.05, 0.1


class MortalServer:
    """Its port is closed while it is dead; `deaths` counts."""

    def __init__(self, down: float, password: str) -> None:
        """`down`: seconds that it is dead; `password`: what it proves to know."""
        self._down = down
        self.deaths = self.port = 0
        self._working: set[asyncio.Transport] = set()
        self._dying: asyncio.Task[None] | None = None
        app = web.Application()
        app.router.add_post(ROUTE, self._generate)
        for route in ("/health", "/v1/models"):
            app.router.add_get(route, self._health)
        app.router.add_get(PROOF, proving(password))
        self._runner = web.AppRunner(app, shutdown_timeout=0.01)

    @property
    def endpoint(self) -> str:
        return f"{ADDRESS}:{self.port}"

    async def start(self) -> None:
        await self._runner.setup()
        await self._listen()

    async def stop(self) -> None:
        if self._dying is not None:
            self._dying.cancel()
        await self._runner.cleanup()

    async def _listen(self) -> None:
        self._site = web.TCPSite(self._runner, ADDRESS, self.port)
        await self._site.start()
        self.port = self._runner.addresses[0][1]

    async def _generate(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        assert isinstance(request.transport, asyncio.Transport)
        self._working.add(request.transport)
        if POISON in body["token_ids"]:
            await asyncio.sleep(_DEATH_SECONDS)
            self._dying = asyncio.create_task(self._die())
        await asyncio.sleep(_WORK_SECONDS)
        self._working.discard(request.transport)
        response = answer(choice([7] * body["sampling_params"]["max_tokens"]))
        response.force_close()  # a connection that stays open would outlive the server
        return response

    async def _health(self, request: web.Request) -> web.Response:
        response = web.Response()
        response.force_close()
        return response

    async def _die(self) -> None:
        self.deaths += 1
        await self._site.stop()
        for transport in self._working:
            transport.abort()
        self._working.clear()
        await asyncio.sleep(self._down)
        await self._listen()


@asynccontextmanager
async def a_mortal_server(down: float = DOWN_SECONDS, password: str = PASSWORD) -> AsyncIterator[MortalServer]:
    server = MortalServer(down, password)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
