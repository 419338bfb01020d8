"""What every route of clients does.

Owns who asks, how large a body may be, and what an error becomes. Promises that a mistake of a client is one line with
a status which the SDK does not ask again for, and that no body is larger than `request_bytes`, decompressed."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from pipeline.api import wire
from pipeline.api.errors import ApiError, Missing
from pipeline.api.keys import Keys, Owner
from pipeline.errors import one_line

log = logging.getLogger(__name__)
API = "/api/v1/"
Body = dict[str, Any]
Handler = Callable[[Owner, web.Request], Awaitable[web.Response]]
OpenHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]
JsonHandler = Callable[[Owner, Body], Awaitable[Body]]


class Router:
    """Routes under /api/v1 of an application."""

    def __init__(self, app: web.Application, keys: Keys, request_bytes: int) -> None:
        self._app, self._keys, self._limit = app, keys, request_bytes

    def post(self, route: str, handler: JsonHandler) -> None:
        """A route whose body and answer are JSON objects."""

        async def read(owner: Owner, request: web.Request) -> web.Response:
            return web.json_response(await handler(owner, await self.read_json(request)))

        self.add("POST", route, read)

    def add(self, method: str, route: str, handler: Handler) -> None:
        """A route that reads its request itself."""

        async def answer(request: web.Request) -> web.Response:
            try:
                return await handler(self._keys.owner(_key_of(request)), request)
            except ApiError as error:
                return web.json_response({"detail": str(error)}, status=error.status)
            except (TypeError, AttributeError, KeyError, ValueError, OverflowError, msgspec.MsgspecError) as error:
                log.warning("%s is malformed: %s", request.path, one_line(error))
                return web.json_response({"detail": f"the request is malformed: {one_line(error)}"}, status=400)

        self._app.router.add_route(method, API + route, answer)

    def add_open(
        self, method: str, route: str, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> None:
        """A route for whoever knows its address, without a key."""

        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                return await handler(request)
            except ApiError as error:
                return web.json_response({"detail": str(error)}, status=error.status)

        self._app.router.add_route(method, API + route, answer)

    def refuse_others(self) -> None:
        """Answer every route that there is not in one line. To be called when all others are there."""

        async def refuse(owner: Owner, request: web.Request) -> web.Response:
            route = request.path.removeprefix(API)
            raise Missing(f"{request.method} {route} is not served here; docs/tinker.md lists what is")

        self.add("*", "{rest:.*}", refuse)

    async def read(self, request: web.Request) -> bytes:
        """The body, decompressed; `ApiError` 413 if it is too large."""
        body = bytearray()
        async for chunk in request.content.iter_chunked(1 << 16):
            body += chunk
            if len(body) > self._limit:
                raise ApiError(f"the request is larger than serve.request_bytes={self._limit}", 413)
        return wire.decompressed(bytes(body), request.headers.get("Content-Encoding", ""), self._limit)

    async def read_json(self, request: web.Request) -> Body:
        """The body as a JSON object; `ApiError` if it is none."""
        body = msgspec.json.decode(await self.read(request))
        if not isinstance(body, dict):
            raise ApiError("the body is no JSON object")
        return body


def _key_of(request: web.Request) -> str:
    return request.headers.get("X-API-Key", "") or request.headers.get("Authorization", "").removeprefix("Bearer ")
