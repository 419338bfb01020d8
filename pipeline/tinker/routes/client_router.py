"""What every route of clients does.

Owns who asks, how large a body may be, and what an error becomes. Promises that a mistake of a client is one line with
a status which the SDK does not ask again for, and that no body is larger than `request_bytes`, decompressed, nor has so
many parts (`pipeline.tinker.json_limits`) that it holds up other clients."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from pipeline.errors import one_line
from pipeline.tinker import tinker_wire
from pipeline.tinker.api_errors import ApiError, NotFoundError
from pipeline.tinker.api_keys import Keys, Owner
from pipeline.tinker.json_limits import MAX_JSON, json_object
from pipeline.utils.limited_site import is_authenticated

log = logging.getLogger(__name__)
API = "/api/v1/"
Body = dict[str, Any]
Handler = Callable[[Owner, web.Request], Awaitable[web.StreamResponse]]
OpenHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]
JsonHandler = Callable[[Owner, Body], Awaitable[Body]]


class Router:
    """Routes below a prefix of an application."""

    def __init__(self, app: web.Application, keys: Keys, request_bytes: int, prefix: str = API) -> None:
        self._app, self._keys, self._limit, self._prefix = app, keys, request_bytes, prefix

    def refusal(self, error: ApiError) -> web.Response:
        """An error as clients read it."""
        return web.json_response({"detail": str(error)}, status=error.status)

    def post(self, route: str, handler: JsonHandler) -> None:
        """A route whose body and answer are JSON objects."""

        async def read(owner: Owner, request: web.Request) -> web.Response:
            return web.json_response(await handler(owner, await self.read_json(request)))

        self.add("POST", route, read)

    def add(self, method: str, route: str, handler: Handler) -> None:
        """A route that reads its request itself."""

        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                owner = self._keys.owner(_key_of(request))
                is_authenticated(request)
                return await handler(owner, request)
            except ApiError as error:
                return self.refusal(error)
            except (TypeError, AttributeError, KeyError, ValueError, OverflowError, msgspec.MsgspecError) as error:
                log.warning("%s is malformed: %s", request.path, one_line(error))
                return self.refusal(ApiError(f"the request is malformed: {one_line(error)}"))

        self._app.router.add_route(method, self._prefix + route, answer)

    def add_open(
        self, method: str, route: str, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> None:
        """Add a route that needs no key."""

        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                return await handler(request)
            except ApiError as error:
                return self.refusal(error)

        self._app.router.add_route(method, self._prefix + route, answer)

    def refuse_others(self) -> None:
        """Answer every route that there is not in one line. To be called when all others are there."""

        async def refuse(owner: Owner, request: web.Request) -> web.Response:
            route = request.path.removeprefix(self._prefix)
            raise NotFoundError(f"{request.method} {route} is not served here; docs/tinker.md lists what is")

        self.add("*", "{rest:.*}", refuse)

    async def read(self, request: web.Request, most: int | None = None) -> bytes:
        """The body, decompressed; `ApiError` 413 if it is larger than `request_bytes`, or than `most`."""
        limit = self._limit if most is None else min(most, self._limit)
        body = bytearray()
        try:
            async for chunk in request.content.iter_chunked(1 << 16):
                body += chunk
                if len(body) > limit:
                    name = "serve.request_bytes=" if limit == self._limit else "what JSON may have, "
                    raise ApiError(f"the request is larger than {name}{limit}", 413)
        except ConnectionError as error:  # its client ended, or lost the network: nobody reads the answer
            raise ApiError(f"the request was cut off after {len(body)} bytes: {one_line(error)}") from None
        encoding = request.headers.get("Content-Encoding", "")
        if encoding in tinker_wire.PLAIN:
            return bytes(body)
        return await asyncio.to_thread(tinker_wire.decompressed, bytes(body), encoding, limit)

    async def read_json(self, request: web.Request) -> Body:
        """The body as a JSON object; `ApiError` if it is none, or too large."""
        return json_object(await self.read(request, MAX_JSON))


def _key_of(request: web.Request) -> str:
    return request.headers.get("X-API-Key", "") or request.headers.get("Authorization", "").removeprefix("Bearer ")
