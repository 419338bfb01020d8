"""An aiohttp site that limits connections whose peers have not proved who they are.

Owns the counting of a connection from its first byte to its end. Whoever checks keys calls `is_authenticated`; until
then the connection is one of `ConnectionLimiter`'s. Must not know what a key is.
"""

import asyncio

from aiohttp import web

from pipeline.utils.connection_limits import ConnectionLimiter

_ADMISSION = web.AppKey("admission", ConnectionLimiter)
_BACKLOG = 1024


def is_authenticated(request: web.Request) -> None:
    """The peer of this request has shown its key: its connection is limited no more."""
    if (admission := request.app.get(_ADMISSION)) is not None:
        admission.release(request.transport)


class LimitedSite(web.BaseSite):
    """Listens at `host`:`port` for a runner of this application, which must not have been set up.

    `held`: another process holds the port for this one (`pipeline.utils.listeners.hold_address`).
    """

    def __init__(
        self, runner: web.AppRunner, host: str, port: int, admission: ConnectionLimiter, held: bool = False
    ) -> None:
        super().__init__(runner, backlog=_BACKLOG)
        self._host, self._port, self._admission, self._held = host, port, admission, held

    @property
    def name(self) -> str:
        return f"http://{self._host}:{self._port}"

    async def start(self) -> None:
        await super().start()
        make = self._runner.server
        assert make is not None
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Watched(make(), self._admission),
            self._host,
            self._port,
            backlog=self._backlog,
            reuse_port=self._held or None,
        )


def limit_connections(app: web.Application, name: str, most: int) -> ConnectionLimiter:
    """What counts the connections of this application; to be called before its runner is set up."""
    app[_ADMISSION] = ConnectionLimiter(name, most)
    return app[_ADMISSION]


class _Watched(asyncio.Protocol):
    """aiohttp's own protocol, and the admission that is told of the connection's beginning and end."""

    def __init__(self, inner: asyncio.Protocol, admission: ConnectionLimiter) -> None:
        self._inner, self._admission = inner, admission
        self.data_received, self.eof_received = inner.data_received, inner.eof_received  # type: ignore[method-assign]
        self.pause_writing, self.resume_writing = inner.pause_writing, inner.resume_writing  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        self._admission.admit(transport)
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._admission.release(self._transport)
        self._inner.connection_lost(exc)
