"""What a server lets in: keys, routes, and the methods of its workers."""

import asyncio
import json
from typing import Any

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from pipeline.inference.vllm import auth_middleware
from pipeline.utils.mutual_auth import is_proof
from pipeline.utils.weights_route import HEADER, LOAD

KEY = "s3cret"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth_middleware, "server_password", lambda: KEY)


def ask(path: str, body: bytes = b"", key: str = KEY, query: bytes = b"") -> tuple[int, bytes, list[bytes]]:
    """Status and body of the answer, and the bodies that reached the server behind the guard."""
    passed_on: list[bytes] = []
    sent: list[dict[str, Any]] = []
    parts = [body[:5], body[5:]]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def server(scope: Any, receive: Any, send: Any) -> None:
        passed_on.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    headers = [(b"authorization", f"Bearer {key}".encode())]
    scope = {"type": "http", "path": path, "headers": headers, "server": ("127.0.0.3", 8000), "query_string": query}
    asyncio.run(auth_middleware.AuthMiddleware(server)(scope, receive, send))
    return sent[0]["status"], sent[1]["body"], passed_on


@pytest.mark.parametrize(
    "path",
    [
        *sorted(auth_middleware.API_PATHS - {auth_middleware.RPC}),
        *auth_middleware.OPEN,
        "/v1/models",
        "/v1/chat/completions",
    ],
)
def test_what_a_run_asks_is_open_to_whoever_has_the_key(path: str) -> None:
    assert ask(path)[0] == 200
    assert ask(path, key="guess")[0] == (200 if path in auth_middleware.OPEN else 401)


@pytest.mark.parametrize(
    "path", ["/server_info", "/sleep", "/wake_up", "/reset_mm_cache", "/update_weight_version", "/weight_checker"]
)
def test_development_routes_that_no_run_asks_are_closed_also_with_the_key(path: str) -> None:
    status, body, passed_on = ask(path)
    assert (status, passed_on) == (403, [])
    assert path in json.loads(body)["error"]


@pytest.mark.parametrize("method", sorted(auth_middleware.METHODS))
def test_the_methods_of_our_extension_may_be_called_with_their_arguments_alone(method: str) -> None:
    names = auth_middleware.METHODS[method]
    call = {"method": method} | ({"kwargs": dict.fromkeys(sorted(names), "x")} if names else {})
    status, _, passed_on = ask(auth_middleware.RPC, json.dumps(call).encode())
    assert status == 200
    assert [json.loads(body) for body in passed_on] == [call]
    other = call | {"kwargs": {"path": "/home/owner"}}
    assert ask(auth_middleware.RPC, json.dumps(other).encode())[::2] == (403, [])


@pytest.mark.parametrize(
    "body",
    [
        b'{"method": "save_sharded_state", "args": ["/home/owner/.ssh", "authorized_keys"]}',
        b'{"method": "served_weights", "args": ["x"]}',
        b'{"method": "served_weights", "kwargs": {"x": "y"}}',
        b'{"method": ["served_weights"]}',
        b'{"method": "adopt_server"}',
        b'{"method": "adopt_server", "kwargs": {"group": 1}}',
        b'{"method": "adopt_server", "kwargs": ["group"]}',
        b'["served_weights"]',
        b'{"method": "served_weights"}' + b" " * (1 << 13),
        b"",
        b"\xff",
    ],
)
def test_no_other_method_and_no_argument_reaches_the_workers(body: bytes) -> None:
    assert ask(auth_middleware.RPC, body)[::2] == (403, [])


def test_of_two_methods_in_one_body_only_the_one_that_was_checked_is_passed_on() -> None:
    body = b'{"method": "save_sharded_state", "method": "served_weights"}'
    assert ask(auth_middleware.RPC, body)[2] == [b'{"method": "served_weights"}']


def test_whoever_asks_for_a_proof_gets_it_for_this_server_alone() -> None:
    nonce = bytes(range(16))
    status, body, passed_on = ask("/rollcall/proof", key="", query=b"nonce=" + nonce.hex().encode())
    assert (status, passed_on) == (200, [])
    assert is_proof(bytes.fromhex(body.decode()), KEY, "http server 127.0.0.3:8000", nonce)
    assert not is_proof(bytes.fromhex(body.decode()), KEY, "http server 127.0.0.3:8001", nonce)


@pytest.mark.parametrize("query", [b"", b"nonce=", b"nonce=00", b"nonce=xyz", b"\xff"])
def test_a_proof_needs_a_whole_nonce(query: bytes) -> None:
    assert ask("/rollcall/proof", query=query)[0] == 400


class Loading:
    """One server behind the guard, which remembers; `status` is what vLLM answers."""

    def __init__(self) -> None:
        self.status = 200
        self.passed_on: list[tuple[str, bytes]] = []
        self._guard = auth_middleware.AuthMiddleware(self._server)

    async def _server(self, scope: Any, receive: Any, send: Any) -> None:
        self.passed_on.append((scope["path"], (await receive())["body"]))
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    def ask(self, path: str, body: bytes = b"{}", weights: str = "") -> int:
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        headers = [(b"authorization", f"Bearer {KEY}".encode())]
        headers += [(HEADER.lower().encode(), weights.encode())] if weights else []
        asyncio.run(self._guard({"type": "http", "path": path, "headers": headers}, receive, send))
        return int(sent[0]["status"])

    def sample(self, weights: str = "") -> int:
        return self.ask("/inference/v1/generate", weights=weights)


def test_a_server_samples_for_the_weights_alone_that_were_loaded_last() -> None:
    server = Loading()
    assert server.sample("/w/a") == 404, "it has the weights of its start"
    assert server.ask(LOAD, b'{"folder": "/w/a"}') == 200
    assert [(path, json.loads(body)) for path, body in server.passed_on] == [
        (auth_middleware.RPC, {"method": "reload_weights", "kwargs": {"weights_path": "/w/a"}})
    ]
    assert (server.sample("/w/a"), server.sample("/w/b"), server.sample()) == (200, 404, 200)
    server.status = 500
    assert server.ask(LOAD, b'{"folder": "/w/b"}') == 500
    server.status = 200
    assert (server.sample("/w/a"), server.sample("/w/b")) == (404, 404), "it may have either, or parts of both"


@pytest.mark.parametrize(
    "body", [b"", b"{}", b'{"folder": ["/w/a"]}', b'{"folder": "/w/a", "is_checkpoint_format": 0}']
)
def test_only_a_folder_is_loaded(body: bytes) -> None:
    server = Loading()
    assert server.ask(LOAD, body) == 400
    assert not server.passed_on
