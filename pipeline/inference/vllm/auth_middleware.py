"""Authentication of a server's requests, and the restriction to the routes that a run uses.

vLLM requires an API key only on the routes of its public API, not on those that pause a server or change its weights.
This middleware requires it on every route that can change anything, closes all unused routes, and proves to clients
that the server knows the key before they send it (`pipeline.utils.authenticated_http`). It also records which whole
model's weights the server has, and refuses requests for other weights (`pipeline.utils.weights_route`).
"""

import hmac
import json
from typing import Any

from pipeline.inference.vllm.server_password import server_password
from pipeline.utils.authenticated_http import ROUTE, proof_answer
from pipeline.utils.weights_route import HEADER, LOAD

OPEN = ("/health", "/metrics", "/ping", "/version")
PUBLIC = "/v1/"
"""Routes of OpenAI's API, for evaluation commands."""
API_PATHS = frozenset(
    {
        *("/inference/v1/generate", "/inference/v1/abort_requests", "/tokenize", "/detokenize"),
        *("/pause", "/resume", "/reset_prefix_cache", "/get_world_size", "/collective_rpc"),
        *("/init_weight_transfer_engine", "/update_weights", "/finish_weight_update"),
    }
)
"""The other routes that a run uses. Those of weight sync need vLLM's development mode, which opens many more."""
RPC = "/collective_rpc"
METHODS: dict[str, frozenset[str]] = {
    **dict.fromkeys(("served_weights", "weights_failure", "begin_update", "leave_weights"), frozenset()),
    "adopt_server": frozenset({"group"}),
    "feed_server": frozenset({"group", "version", "seconds"}),
}
"""The permitted methods of `/collective_rpc` with the names of their arguments, which are texts
(`pipeline.inference.vllm.worker_extension`). vLLM would call any method of its workers, including one that writes
files."""
_RPC_BYTES = 1 << 12
_SAMPLING = ("/inference/v1/generate", "/v1/completions", "/v1/chat/completions")


class AuthMiddleware:
    """An ASGI middleware: status 401 without `Authorization: Bearer <key>`, except on `OPEN`; 403 for unused routes."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._key = server_password()
        self._expected = f"Bearer {self._key}".encode()
        self._weights: str | None = None
        """The folder of the last loaded weights; None for the initial weights, and during a load."""

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
        """Respond to a client's challenge with the proof that this server knows the key."""
        host, port = scope["server"]
        body = proof_answer(self._key, host, port, scope["query_string"])
        await _answer(send, 200 if body else 400, body or b"")

    def _refusal(self, scope: Any) -> tuple[int, str] | None:
        """Status and reason of a refused request; None for a permitted one."""
        if not self._admits(scope):
            return 401, "this server requires the run's password"
        if not _is_api_path(scope["path"]):
            return 403, f"no run uses {scope['path']}, so it is closed here"
        header = dict(scope["headers"]).get(HEADER.lower().encode())
        folder = None if header is None else header.decode(errors="replace")
        if folder is not None and scope["path"] in _SAMPLING and folder != self._weights:
            return 404, f"the weights here are not those of {folder}"
        return None

    async def _call(self, scope: Any, receive: Any, send: Any) -> None:
        """Forward a call of one of `METHODS`, encoded again so that vLLM parses exactly the checked content."""
        content = await _json_object(receive)
        arguments = content.pop("kwargs", {})
        method = _only_text(content, "method")
        if method not in METHODS or not _are_texts(arguments, METHODS[method]):
            await _refuse(send, 403, f"{RPC} takes a method of {sorted(METHODS)} with its own arguments")
            return
        call = {"method": method, "kwargs": arguments} if arguments else {"method": method}
        await self._app(scope, _once(call, receive), send)

    async def _load(self, scope: Any, receive: Any, send: Any) -> None:
        """Call vLLM's reload of the weights in a folder. After a failure, the server's weights are unknown."""
        folder = _only_text(await _json_object(receive), "folder")
        if not folder:
            await _refuse(send, 400, f"{LOAD} takes a folder")
            return
        self._weights = None

        async def record_success(message: Any) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                self._weights = folder
            await send(message)

        call = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        await self._app(scope | {"path": RPC, "raw_path": RPC.encode()}, _once(call, receive), record_success)

    def _admits(self, scope: Any) -> bool:
        authorization = dict(scope["headers"]).get(b"authorization", b"")
        return scope["path"] in OPEN or hmac.compare_digest(authorization, self._expected)


def _is_api_path(path: str) -> bool:
    return path in OPEN or path in API_PATHS or path == LOAD or path.startswith(PUBLIC)


def _once(body: Any, receive: Any) -> Any:
    """An ASGI `receive` that yields this body as JSON first, and then the client's messages."""
    pending = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive_body() -> Any:
        return pending.pop() if pending else await receive()

    return receive_body


async def _json_object(receive: Any) -> dict[str, Any]:
    """The object of a JSON body; empty for any other body."""
    body, more = b"", True
    while more and len(body) <= _RPC_BYTES:
        part = await receive()
        body += part.get("body", b"")
        more = part.get("more_body", False)
    try:
        content = json.loads(body) if len(body) <= _RPC_BYTES else None
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _only_text(content: dict[str, Any], name: str) -> str:
    """The value of an object with this one key and a text; empty for any other object."""
    return str(content[name]) if _are_texts(content, frozenset({name})) else ""


def _are_texts(content: Any, names: frozenset[str]) -> bool:
    """Whether this is an object with exactly these keys, and texts."""
    is_object = isinstance(content, dict) and content.keys() == names
    return is_object and all(isinstance(value, str) for value in content.values())


async def _refuse(send: Any, status: int, reason: str) -> None:
    await _answer(send, status, json.dumps({"error": reason}).encode())


async def _answer(send: Any, status: int, body: bytes) -> None:
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
