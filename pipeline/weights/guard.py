"""Keeps strangers out of a server.

vLLM asks for an API key on the routes of its public API only, not on those that pause a server or change its weights.
This middleware asks everywhere except where nothing can be changed.
"""

import hmac
from typing import Any

from pipeline.weights.password import server_password

OPEN = ("/health", "/metrics", "/ping", "/version")


class Guard:
    """An ASGI middleware: 401 without `Authorization: Bearer <key>`, except on the `OPEN` routes."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._expected = f"Bearer {server_password()}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] in ("http", "websocket") and not self._admits(scope):
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b'{"error": "this server asks for the run\'s password"}'})
            return
        await self._app(scope, receive, send)

    def _admits(self, scope: Any) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return scope["path"] in OPEN or hmac.compare_digest(given, self._expected)
