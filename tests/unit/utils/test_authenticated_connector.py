"""aiohttp's connections to servers that prove themselves, and to others."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from pipeline.utils.authenticated_connector import AuthenticatedConnector
from pipeline.utils.authenticated_http import ROUTE
from tests.fakes.async_server import prove
from tests.fakes.http_server import PASSWORD

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def echo(request: web.Request) -> web.Response:
    return web.json_response({"body": await request.text(), "key": request.headers["Authorization"]})


async def lies(_: web.Request) -> web.Response:
    return web.Response(text="0" * 64)


async def hangs_up(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


class Asked:
    """A server, and the requests that it heard beside those for a proof."""

    def __init__(self, answer: Answer) -> None:
        self.proofs, self.others = 0, list[str]()
        self.gate = asyncio.Event()
        """Requests are answered while it is set."""
        self.gate.set()
        self._answer = answer

    async def _prove(self, request: web.Request) -> web.StreamResponse:
        self.proofs += 1
        return await self._answer(request)

    async def _echo(self, request: web.Request) -> web.Response:
        self.others.append(request.path)
        await self.gate.wait()
        return await echo(request)

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get(ROUTE, self._prove)
        app.router.add_post("/work", self._echo)
        return app


async def post(http: aiohttp.ClientSession, port: int, body: str) -> str:
    headers = {"Authorization": f"Bearer {PASSWORD}"}
    async with http.post(f"http://127.0.0.1:{port}/work", data=body, headers=headers) as response:
        return str((await response.json())["body"])


def test_a_connection_is_proved_once_and_used_again() -> None:
    asked = Asked(prove)

    async def story() -> None:
        connector = AuthenticatedConnector(lambda: PASSWORD)
        async with TestServer(asked.app()) as server, aiohttp.ClientSession(connector=connector) as http:
            for body in ("a", "b" * 1_000_000, "c"):
                assert await post(http, server.port or 0, body) == body

    asyncio.run(story())
    assert asked.proofs == 1


@pytest.mark.parametrize("answer", [lies, hangs_up, echo])
def test_a_server_that_cannot_prove_itself_gets_no_request(answer: Answer) -> None:
    asked = Asked(answer)

    async def story() -> None:
        connector = AuthenticatedConnector(lambda: PASSWORD)
        async with TestServer(asked.app()) as server, aiohttp.ClientSession(connector=connector) as http:
            with pytest.raises(aiohttp.ClientConnectorError):
                await post(http, server.port or 0, "a")

    asyncio.run(story())
    assert asked.proofs == 1
    assert asked.others == []


def test_a_proof_of_another_server_is_none() -> None:
    """Whoever listens in one server's place may ask another one."""
    passed_on = Asked(prove)

    async def story() -> None:
        async with TestServer(passed_on.app()) as real:

            async def pass_on(request: web.Request) -> web.Response:
                async with (
                    aiohttp.ClientSession() as http,
                    http.get(f"http://127.0.0.1:{real.port}{request.path_qs}") as given,
                ):
                    return web.Response(body=await given.read())

            between = Asked(pass_on)
            connector = AuthenticatedConnector(lambda: PASSWORD)
            async with TestServer(between.app()) as server, aiohttp.ClientSession(connector=connector) as http:
                with pytest.raises(aiohttp.ClientConnectorError, match="does not know this attempt's secret"):
                    await post(http, server.port or 0, "a")
            assert between.others == []

    asyncio.run(story())
    assert passed_on.proofs == 1


def test_a_request_that_is_cancelled_just_as_its_proof_arrives_ends() -> None:
    asked = Asked(prove)

    async def story() -> None:
        tasks: list[asyncio.Task[str]] = []

        def secret() -> str:  # asked for once the proof has been read, to check it
            tasks[0].cancel()
            return PASSWORD

        async with (
            TestServer(asked.app()) as server,
            aiohttp.ClientSession(connector=AuthenticatedConnector(secret)) as http,
        ):
            tasks.append(asyncio.create_task(post(http, server.port or 0, "a")))
            with pytest.raises(asyncio.CancelledError):
                await tasks[0]

    asyncio.run(story())
    assert asked.proofs == 1


def test_a_request_ends_when_it_is_cancelled_at_whatever_moment() -> None:
    """The turn of the event loop at which it is cancelled goes from its start to when the server works on it."""
    asked = Asked(prove)
    asked.gate.clear()

    async def story() -> None:
        async with TestServer(asked.app()) as server:
            turns = 0
            while not asked.others:
                connector = AuthenticatedConnector(lambda: PASSWORD)
                async with aiohttp.ClientSession(connector=connector) as http:
                    task = asyncio.create_task(post(http, server.port or 0, "a"))
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    task.cancel()
                    await asyncio.wait([task], timeout=5)
                    assert task.cancelled(), f"after {turns} turns"
                turns += 1
            asked.gate.set()
            assert turns > 5

    asyncio.run(story())


@pytest.mark.parametrize("is_lost", [True, False], ids=["without a transport", "without an address"])
def test_a_connection_that_is_lost_at_once_is_one_that_failed(is_lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a server is killed between its accept and the request for a proof."""

    class Unconnected(asyncio.Transport):
        def get_extra_info(self, name: str, default: object = None) -> object:
            return None

    async def connect(self: aiohttp.TCPConnector, *arguments: object) -> SimpleNamespace:
        return SimpleNamespace(transport=None if is_lost else Unconnected(), close=lambda: None)

    async def story() -> None:
        async with aiohttp.ClientSession(connector=AuthenticatedConnector(lambda: PASSWORD)) as http:
            await post(http, 1, "x")

    monkeypatch.setattr(aiohttp.TCPConnector, "_create_connection", connect)
    with pytest.raises(aiohttp.ClientConnectorError, match="closed the connection at once"):
        asyncio.run(story())
