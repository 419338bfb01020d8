"""One address for several servers, which are scripted here."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from pipeline.rollout.load_balancing_proxy import LoadBalancingProxy
from pipeline.utils.authenticated_http import ROUTE
from pipeline.utils.subprocesses import hold_port
from tests.fakes.async_server import ADDRESS, prove, serving
from tests.fakes.http_server import PASSWORD

Play = Callable[[aiohttp.ClientSession, str], Awaitable[None]]


def with_relay(play: Play, *others: str, answers: bool = True) -> None:
    """`play` gets a client and the address in front of a server and of `others`."""

    async def answer(request: web.Request) -> web.Response:
        if not answers:
            assert request.transport is not None
            request.transport.abort()
        return web.json_response({"asked": request.path_qs, "key": request.headers["Authorization"]})

    async def run() -> None:
        app = web.Application()
        app.router.add_get(ROUTE, prove)
        app.router.add_route("*", "/{path:.*}", answer)
        async with (
            TestServer(app) as server,
            aiohttp.ClientSession() as client,
            LoadBalancingProxy([*others, f"127.0.0.1:{server.port}"], PASSWORD) as relay,
        ):
            await play(client, relay.url)

    asyncio.run(run())


async def ask(client: aiohttp.ClientSession, url: str) -> tuple[int, dict[str, str]]:
    headers = {"Authorization": "Bearer word"}
    async with client.post(f"{url}/v1/completions?a=1", json={}, headers=headers) as response:
        return response.status, await response.json()


@pytest.mark.parametrize("times", [1, 5])
def test_a_request_goes_to_a_server_that_can_be_reached(times: int) -> None:
    async def play(client: aiohttp.ClientSession, url: str) -> None:
        for _ in range(times):
            assert await ask(client, url) == (200, {"asked": "/v1/completions?a=1", "key": "Bearer word"})

    with closing(hold_port()) as held:
        with_relay(play, f"127.0.0.1:{held.getsockname()[1]}")


def test_a_server_that_is_lost_before_it_answered_is_told_as_such() -> None:
    async def play(client: aiohttp.ClientSession, url: str) -> None:
        status, answer = await ask(client, url)
        assert status == 502
        assert "was lost" in str(answer)

    with_relay(play, answers=False)


def test_where_no_server_can_be_reached_the_answer_says_so() -> None:
    async def story() -> None:
        with closing(hold_port()) as held:
            endpoint = f"127.0.0.1:{held.getsockname()[1]}"
            async with LoadBalancingProxy([endpoint], PASSWORD) as relay, aiohttp.ClientSession() as client:
                status, answer = await ask(client, relay.url)
        assert status == 502
        assert "cannot be reached" in str(answer)

    asyncio.run(story())


def test_a_client_that_gives_up_ends_its_request_on_the_server() -> None:
    async def story() -> None:
        begun, ended = asyncio.Event(), asyncio.Event()

        async def slow(request: web.Request) -> web.Response:
            begun.set()
            while request.transport is not None and not request.transport.is_closing():
                await asyncio.sleep(0.01)
            ended.set()
            return web.Response()

        routes = {"/v1/slow": slow}
        async with serving(routes) as port, LoadBalancingProxy([f"{ADDRESS}:{port}"], PASSWORD) as relay:
            async with aiohttp.ClientSession() as client:
                asking = asyncio.create_task(client.post(f"{relay.url}/v1/slow", json={}))
                await asyncio.wait_for(begun.wait(), 30)
                asking.cancel()
                await asyncio.wait_for(ended.wait(), 10)
            async with asyncio.timeout(30):
                while relay._servers[0].running:
                    await asyncio.sleep(0.01)

    asyncio.run(story())
