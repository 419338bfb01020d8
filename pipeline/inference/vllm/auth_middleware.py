"""Keeps strangers out of a server, and its clients to what the run needs.

It also notes which whole model's weights the server has, and refuses requests that are for others
(`pipeline.utils.weights_route`).

vLLM asks for an API key on the routes of its public API only, not on those that pause a server or change its weights.
This middleware asks everywhere except where nothing can be changed, closes every route that the run does not use, and
proves to clients that the server knows the key before they send it (`pipeline.utils.authenticated_http`).
"""

import hmac
import json
from typing import Any

from pipeline.inference.vllm.server_password import server_password
from pipeline.utils.authenticated_http import ROUTE, proof_answer
from pipeline.utils.weights_route import HEADER, LOAD

OPEN = ("/health", "/metrics", "/ping", "/version")
PUBLIC = "/v1/"
"""Routes of OpenAI's API, for the command of an evaluation."""
API_PATHS = frozenset(
    {
        *("/inference/v1/generate", "/inference/v1/abort_requests", "/tokenize", "/detokenize"),
        *("/pause", "/resume", "/reset_prefix_cache", "/get_world_size", "/collective_rpc"),
        *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"),
    }
)
"""The other routes that a run asks. vLLM's development mode, which those of weights belong to, opens many more."""
RPC, METHODS = "/collective_rpc", frozenset({"served_weights", "leave_weights"})
"""What may be called there, without arguments (`pipeline.inference.vllm.worker_extension`). vLLM itself would call any
method of its
workers, such as one that writes files."""
_RPC_BYTES = 1 << 12
_SAMPLING = ("/inference/v1/generate", "/v1/completions", "/v1/chat/completions")


class AuthMiddleware:
    """An ASGI middleware: 401 without `Authorization: Bearer <key>`, except on the `OPEN` routes; 403 for what the run
    does not use."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._key = server_password()
        self._expected = f"Bearer {self._key}".encode()
        self._weights: str | None = None
        """The folder of the weights that were loaded last; None for those of the start, and while others come."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
        elif scope["path"] == ROUTE and scope["type"] == "http":
            await self._prove(scope, send)
        elif refusal := self._refusal(scope):
            await _refuse(send, *refusal)
        elif scope["path"] == LOAD:
            await self._load(scope, receive, send)
        else:
            await (self._call if scope["path"] == RPC else self._app)(scope, receive, send)

    async def _prove(self, scope: Any, send: Any) -> None:
        """Answer a client that asks whether this server knows the key."""
        host, port = scope["server"]
        body = proof_answer(self._key, host, port, scope["query_string"])
        await _answer(send, 200 if body else 400, body or b"")

    def _refusal(self, scope: Any) -> tuple[int, str] | None:
        """Status and reason for a request that goes no further."""
        if not self._admits(scope):
            return 401, "this server asks for the run's password"
        if not _is_api_path(scope["path"]):
            return 403, f"no run uses {scope['path']}, so it is closed here"
        wanted = dict(scope["headers"]).get(HEADER.lower().encode())
        if wanted is not None and scope["path"] in _SAMPLING and wanted.decode(errors="replace") != self._weights:
            return 404, f"the weights here are not those of {wanted.decode(errors='replace')}"
        return None

    async def _call(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass on a call of one of `METHODS`, written anew so that vLLM reads what was checked."""
        method = await _only_text(receive, "method")
        if method not in METHODS:
            await _refuse(send, 403, f"{RPC} takes a method of {sorted(METHODS)} without arguments")
            return
        await self._app(scope, _once({"method": method}, receive), send)

    async def _load(self, scope: Any, receive: Any, send: Any) -> None:
        """Have vLLM load the weights of a folder. If it fails, the server has no known weights."""
        folder = await _only_text(receive, "folder")
        if not folder:
            await _refuse(send, 400, f"{LOAD} takes a folder")
            return
        self._weights = None

        async def noting(message: Any) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                self._weights = folder
            await send(message)

        call = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        await self._app(scope | {"path": RPC, "raw_path": RPC.encode()}, _once(call, receive), noting)

    def _admits(self, scope: Any) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return scope["path"] in OPEN or hmac.compare_digest(given, self._expected)


def _is_api_path(path: str) -> bool:
    return path in OPEN or path in API_PATHS or path == LOAD or path.startswith(PUBLIC)


def _once(body: Any, receive: Any) -> Any:
    """Receives a body that is written here, as vLLM reads it, and then what comes."""
    left = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def written() -> Any:
        return left.pop() if left else await receive()

    return written


async def _only_text(receive: Any, name: str) -> str:
    """The text that a body has under this name, and nothing else; empty for any other body."""
    body, more = b"", True
    while more and len(body) <= _RPC_BYTES:
        part = await receive()
        body += part.get("body", b"")
        more = part.get("more_body", False)
    try:
        asked = json.loads(body) if len(body) <= _RPC_BYTES else None
    except ValueError:
        return ""
    if not isinstance(asked, dict) or asked.keys() != {name} or not isinstance(asked[name], str):
        return ""
    return str(asked[name])


async def _refuse(send: Any, status: int, why: str) -> None:
    await _answer(send, status, json.dumps({"error": why}).encode())


async def _answer(send: Any, status: int, body: bytes) -> None:
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
