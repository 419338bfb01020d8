"""An aiohttp server on loopback, for fakes that answer as coroutines."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from aiohttp import web

ADDRESS = "127.0.0.1"


@asynccontextmanager
async def serving(
    routes: Mapping[str, Callable[[web.Request], Awaitable[web.StreamResponse]]],
) -> AsyncIterator[int]:
    """Who POSTs to one of `routes` gets its answer, and who looks whether it lives hears so, until the block ends; the
    value is the port."""
    application = web.Application()
    application.router.add_get("/health", _lives)
    for route, answer in routes.items():
        application.router.add_post(route, answer)
    runner = web.AppRunner(application, shutdown_timeout=0.01)
    await runner.setup()
    try:
        await web.TCPSite(runner, ADDRESS, 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def _lives(_: web.Request) -> web.Response:
    return web.Response()
