"""An aiohttp site that limits unauthenticated connections.

A connection counts toward its `ConnectionLimiter` from its start until the key check calls `is_authenticated`, or until
it ends.
"""

import asyncio

from aiohttp import web

from pipeline.utils.connection_limits import ConnectionLimiter, SpareRoom

_ADMISSION = web.AppKey("admission", ConnectionLimiter)
_BACKLOG = 1024


def is_authenticated(request: web.Request) -> None:
    """Mark the peer of this request as authenticated: its connection stops counting toward the limit."""
    if (admission := request.app.get(_ADMISSION)) is not None:
        admission.release(request.transport)


class LimitedSite(web.BaseSite):
    """Listens at `host`:`port` for a runner of this application. Create it before the runner's setup.

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


def limit_connections(app: web.Application, name: str, most: int, spare: SpareRoom | None = None) -> ConnectionLimiter:
    """Attach a limiter of `most` unauthenticated connections to this application, before its runner is set up. Beyond
    these it may use `spare` room, which other applications share."""
    app[_ADMISSION] = ConnectionLimiter(name, most, spare=spare)
    return app[_ADMISSION]


class _Watched(asyncio.Protocol):
    """Wraps aiohttp's protocol and reports the start and end of its connection to the limiter."""

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
