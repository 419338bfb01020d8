"""An aiohttp server on loopback, for fakes that answer as coroutines."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from aiohttp import web

from pipeline.utils.authenticated_http import ROUTE, proof_answer
from tests.fakes.http_server import PASSWORD

ADDRESS = "127.0.0.1"


@asynccontextmanager
async def serving(
    routes: Mapping[str, Callable[[web.Request], Awaitable[web.StreamResponse]]], password: str = PASSWORD
) -> AsyncIterator[int]:
    """Who asks one of `routes` gets its answer, and who looks whether it lives hears so, until the block ends; the
    value is the port."""
    application = web.Application()
    application.router.add_get("/health", _lives)
    application.router.add_get(ROUTE, proving(password))
    for route, answer in routes.items():
        application.router.add_route("*", route, answer)
    runner = web.AppRunner(application, shutdown_timeout=0.01)
    await runner.setup()
    try:
        await web.TCPSite(runner, ADDRESS, 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def proving(password: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    """The route by which a server proves to know the password."""

    async def answer(request: web.Request) -> web.Response:
        assert request.transport is not None
        host, port = request.transport.get_extra_info("sockname")
        return web.Response(body=proof_answer(password, host, port, request.query_string.encode()))

    return answer


prove = proving(PASSWORD)


async def _lives(_: web.Request) -> web.Response:
    return web.Response()
