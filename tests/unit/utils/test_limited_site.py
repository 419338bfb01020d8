"""Connections to a server of ours that have shown no key."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import aiohttp
import pytest
from aiohttp import web

from pipeline.utils import connection_limits
from pipeline.utils.connection_limits import SpareRoom
from pipeline.utils.limited_site import LimitedSite, is_authenticated, limit_connections

MOST = 4


def with_site(play: Callable[[int], Awaitable[None]], spare: SpareRoom | None = None) -> None:
    """`play` gets the port of a server that echoes whoever has the key, and admits `MOST` who have shown none, and more
    while there is `spare` room."""

    async def echo(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != "key":
            return web.Response(status=401)
        is_authenticated(request)
        return web.Response(body=await request.read())

    async def run() -> None:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_post("/", echo)
        admits = limit_connections(app, "a test", MOST, spare)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await LimitedSite(runner, "127.0.0.1", 0, admits).start()
            await play(runner.addresses[0][1])
        finally:
            await runner.cleanup()

    asyncio.run(run())


async def connected(stack: AsyncExitStack, port: int, said: bytes) -> asyncio.StreamReader:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    stack.callback(writer.close)
    writer.write(said)
    return reader


async def post(http: aiohttp.ClientSession, port: int, body: bytes) -> bytes:
    async with http.post(f"http://127.0.0.1:{port}/", data=body, headers={"Authorization": "key"}) as answer:
        assert answer.status == 200
        return await answer.read()


@pytest.mark.parametrize("said", [b"", b"POST / HTTP/1.1\r\nHost", b"POST / HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_the_oldest_strangers_make_room_and_who_has_the_key_stays(said: bytes) -> None:
    async def play(port: int) -> None:
        async with aiohttp.ClientSession() as http, AsyncExitStack() as strangers:
            assert await post(http, port, b"first") == b"first"
            silent = [await connected(strangers, port, said) for _ in range(3 * MOST)]
            async with aiohttp.ClientSession() as another:
                assert await post(another, port, b"x" * 1_000_000) == b"x" * 1_000_000
            for reader in silent[: 2 * MOST]:
                await asyncio.wait_for(reader.read(), 30)  # comes to an end
            assert await post(http, port, b"second") == b"second"

    with_site(play)


def test_a_connection_that_shows_no_key_in_time_is_cut(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection_limits.ConnectionLimiter.__init__, "__defaults__", (MOST, 0.2))

    async def play(port: int) -> None:
        async with aiohttp.ClientSession() as http, AsyncExitStack() as strangers:
            assert await post(http, port, b"first") == b"first"
            silent = [await connected(strangers, port, b"POST") for _ in range(MOST)]
            assert [await asyncio.wait_for(reader.read(), 30) for reader in silent] == [b""] * MOST
            assert await post(http, port, b"second") == b"second"

    with caplog.at_level(logging.WARNING):
        with_site(play)
    assert f"closed {MOST} connections that proved nothing within" in caplog.text


def test_spare_room_admits_more_until_it_is_taken_and_is_free_again_afterwards() -> None:
    spare = SpareRoom(2 * MOST)

    async def play(port: int) -> None:
        async with AsyncExitStack() as strangers:
            silent = [await connected(strangers, port, b"POST") for _ in range(4 * MOST)]
            for reader in silent[:MOST]:
                await asyncio.wait_for(reader.read(), 30)  # comes to an end
            assert spare.free == 0
            async with aiohttp.ClientSession() as http:
                assert await post(http, port, b"one with the key") == b"one with the key"
        async with asyncio.timeout(30):
            while spare.free < 2 * MOST:
                await asyncio.sleep(0.01)

    with_site(play, spare)
    assert spare.free == 2 * MOST
