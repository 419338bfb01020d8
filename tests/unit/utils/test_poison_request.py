"""Which servers count as dead, and who waits for whom on a last try."""

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp
import pytest
from aiohttp import web

from pipeline.utils.poison_request import MAX_SERVER_CRASHES, PoisonRequestGuard, is_dead
from pipeline.utils.subprocesses import hold_port
from tests.patience import WAIT_SECONDS

LAST = MAX_SERVER_CRASHES - 1


async def seen(status: int) -> bool:
    """Whether a server that answers so when it is asked for its health counts as dead."""

    async def health(request: web.Request) -> web.Response:
        return web.Response(status=status)

    app = web.Application()
    app.router.add_get("/health", health)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with aiohttp.ClientSession() as http:
            return await is_dead(http, f"127.0.0.1:{runner.addresses[0][1]}")
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(("status", "dead"), [(200, False), (401, False), (500, True), (503, True)])
def test_a_server_without_its_engine_is_dead(status: int, dead: bool) -> None:
    assert asyncio.run(seen(status)) is dead


def test_a_server_whose_port_is_closed_is_dead() -> None:
    async def ask(port: int) -> bool:
        async with aiohttp.ClientSession() as http:
            return await is_dead(http, f"127.0.0.1:{port}")

    with hold_port() as holder:
        assert asyncio.run(ask(holder.getsockname()[1]))


async def order(suspects: PoisonRequestGuard, deaths: int, end_first: Callable[[], Awaitable[None]]) -> list[str]:
    """What two requests do of which the first works until `end_first` returns."""
    log: list[str] = []

    async def first() -> None:
        async with suspects.attempt(deaths):
            log.append("first")
            await end_first()
            log.append("first ends")

    async def later(name: str) -> None:
        async with suspects.attempt(deaths):
            log.append(name)
            await asyncio.sleep(0.05)
            log.append(f"{name} ends")

    await asyncio.wait_for(asyncio.gather(first(), later("second"), later("third")), WAIT_SECONDS)
    return log


def test_last_tries_go_one_at_a_time() -> None:
    log = asyncio.run(order(PoisonRequestGuard(), LAST, lambda: asyncio.sleep(0.05)))
    assert log == ["first", "first ends", "second", "second ends", "third", "third ends"]


def test_others_do_not_wait() -> None:
    log = asyncio.run(order(PoisonRequestGuard(), LAST - 1, lambda: asyncio.sleep(0.1)))
    assert log[:3] == ["first", "second", "third"]


def test_once_a_request_was_given_up_the_others_go_at_once() -> None:
    suspects = PoisonRequestGuard()

    async def killed() -> None:
        await asyncio.sleep(0.05)
        suspects.abandon()

    log = asyncio.run(order(suspects, LAST, killed))
    assert log == ["first", "first ends", "second", "third", "second ends", "third ends"]
