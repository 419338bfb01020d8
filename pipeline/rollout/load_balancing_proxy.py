"""One address for all servers of a run.

Owns the forwarding of HTTP requests, for programs that use one OpenAI-compatible address. Each request goes to the
server with the fewest running requests, or to another if that one is unreachable. The response is returned unchanged,
streamed or whole, and a client that disconnects ends its request on the server. Promises that it admits nothing that
the servers would refuse, because it forwards the caller's key; and that it listens on this machine's loopback only.

    async with LoadBalancingProxy(["127.0.0.3:8000", "127.0.0.4:8000"], key) as proxy:
        proxy.url       # http://127.0.0.1:40001
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import aiohttp
from aiohttp import web

from pipeline.errors import one_line
from pipeline.utils.authenticated_connector import AuthenticatedConnector
from pipeline.utils.backoff import HasBackoff, available

CONNECT_SECONDS = 30.0
MAX_BYTES = 1 << 26
_HOP = frozenset(
    {"connection", "content-length", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
)
"""Headers that apply to a single connection."""


@dataclass(eq=False)
class _Server(HasBackoff):
    endpoint: str
    running: int = 0


class LoadBalancingProxy:
    """Forwards requests while it is open as a context."""

    def __init__(self, servers: Sequence[str], key: str) -> None:
        """`servers`: `host:port` of each, all with the same model; `key`: the password that each server must prove to
        know."""
        self._key = key
        self._servers = [_Server(endpoint) for endpoint in servers]
        self.url = ""

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            connector=AuthenticatedConnector(lambda: self._key, limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            auto_decompress=False,
        )
        app = web.Application(client_max_size=MAX_BYTES)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        # A request that its harness abandons ends on the server too.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()
        await self._http.close()

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        """The response of the first reachable server; status 502 if none is, or if its connection is lost."""
        body, left, trouble = await request.read(), list(self._servers), "there is no server"
        while left:
            server = min(available(left), key=lambda candidate: candidate.running)
            left.remove(server)
            server.running += 1
            try:
                return await self._answer_of(server, request, body)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                server.backoff.record_failure()
                trouble = f"{server.endpoint} cannot be reached: {one_line(error)}"
            finally:
                server.running -= 1
        return _bad_gateway(trouble)

    async def _answer_of(self, server: _Server, request: web.Request, body: bytes) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP}
        url, response = f"http://{server.endpoint}{request.path_qs}", web.StreamResponse()
        try:
            async with self._http.request(request.method, url, data=body, headers=headers) as answer:
                server.backoff.record_success()
                response_headers = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP}
                response = web.StreamResponse(status=answer.status, headers=response_headers)
                await response.prepare(request)
                async for part in answer.content.iter_any():
                    await response.write(part)
                await response.write_eof()
                return response
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            if response.prepared or isinstance(error, aiohttp.ClientConnectorError):
                raise
            server.backoff.record_failure()
            return _bad_gateway(f"{server.endpoint} was lost: {one_line(error)}")


def _bad_gateway(why: str) -> web.Response:
    """A response with status 502 in the format of OpenAI's errors."""
    return web.json_response({"error": {"message": why}}, status=502)
