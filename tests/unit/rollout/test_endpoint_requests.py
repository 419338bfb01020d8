"""Requests to an episode's endpoint that are long, many at once, or odd."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI

from pipeline.environments.chat_tokenizer import ChatTokenizer
from pipeline.errors import DeadlineError
from pipeline.rollout.agent_endpoint.episode_endpoint import Endpoint
from tests.unit.environments.test_tool_task import bytes_model
from tests.unit.rollout.test_agent_endpoint import MAX_LENGTH, Policy, user

LONG = "hello world " * 200
HELLO = {"messages": [user("hi")]}


@pytest.fixture
def chat(tmp_path: Path) -> ChatTokenizer:
    return ChatTokenizer(bytes_model(tmp_path))


async def post(endpoint: Endpoint, route: str, body: Any) -> tuple[int, Any]:
    """The status and the JSON of a response. `body` may be bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {endpoint.key}"}
    async with aiohttp.ClientSession(headers=headers) as http, http.post(f"{endpoint.url}/{route}", data=data) as said:
        return said.status, await said.json()


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "look", **fields}}


CALLED = {"role": "assistant", "content": "", "tool_calls": [function(arguments=json.dumps({"at": LONG}))]}
LONG_BODIES = {
    "content": ("chat/completions", {"messages": [user(LONG)]}),
    "tools": ("chat/completions", {**HELLO, "tools": [function(description=LONG)]}),
    "arguments": ("chat/completions", {"messages": [user("hi"), CALLED, user("more")]}),
    "prompt": ("completions", {"prompt": LONG}),
    "input": ("responses", {"input": LONG}),
    "anthropic": ("messages", {"max_tokens": 5, **HELLO, "system": LONG}),
    "count": ("messages/count_tokens", {**HELLO, "system": LONG}),
}


@pytest.mark.parametrize("name", LONG_BODIES)
def test_whatever_is_long_is_tokenized_off_the_event_loop(
    chat: ChatTokenizer, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    encode = chat.encode

    def noted(text: str) -> list[int]:
        threads.append(threading.current_thread())
        return encode(text)

    async def story() -> None:
        async with Endpoint(chat, Policy(ChatTokenizer(tmp_path), ["ok"]), 1 << 20) as endpoint:
            monkeypatch.setattr(chat, "encode", noted)
            status, _ = await post(endpoint, *LONG_BODIES[name])
        assert status == 200

    asyncio.run(story())
    assert threads
    assert threading.main_thread() not in threads


def test_an_agent_that_makes_many_calls_at_once_gets_all_answers(chat: ChatTokenizer) -> None:
    calls = 200

    async def story() -> list[Any]:
        async with Endpoint(chat, Policy(chat, ["ok"] * calls), 1 << 20) as endpoint:
            async with AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key, max_retries=0) as client:
                create = client.chat.completions.create
                asked = [create(model="policy", messages=[user(str(index))]) for index in range(calls)]
                said = await asyncio.gather(*asked, return_exceptions=True)
            assert endpoint.episode().turns == calls
            return said

    assert {type(each).__name__ for each in asyncio.run(story())} == {"ChatCompletion"}


HUGE = "1" + "0" * 400
DEEP_CALL = {"role": "assistant", "content": "", "tool_calls": [function(arguments="[" * 100_000)]}


def tools(*given: Any) -> dict[str, Any]:
    return {**HELLO, "tools": list(given)}


ODD = {
    "a tool without a name": ("chat/completions", tools({"type": "function", "function": {}}), "tools[0]: a tool of"),
    "no function": ("chat/completions", tools(function(), {"type": "function"}), "tools[1]: a tool of"),
    "a function that is a text": ("chat/completions", tools({"type": "function", "function": "look"}), "tools[0]: a"),
    "a built-in tool": ("chat/completions", tools({"type": "web_search"}), "a tool of type 'web_search'"),
    "no schema": ("chat/completions", tools(function(parameters="x")), "the parameters of look are no JSON schema"),
    "no choice": ("chat/completions", {**HELLO, "n": 0}, "n=0: expected 1"),
    "deep": ("chat/completions", b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "cannot be read"),
    "deep input": ("responses", b'{"input": "x", "metadata": ' + b"[" * 100_000 + b"]" * 100_000, "cannot be read"),
    "deep arguments": ("chat/completions", {"messages": [user("hi"), DEEP_CALL, user("")]}, "nested too deeply"),
    "a huge reward": ("reward", HUGE.encode(), "the reward in the agent's report is too large for a float"),
    "a huge metric": ("reward", f'{{"reward": 1, "metrics": {{"a": {HUGE}}}}}'.encode(), "are no numbers"),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_request_is_refused_in_one_line_before_anything_is_sampled(chat: ChatTokenizer, name: str) -> None:
    route, body, words = ODD[name]
    policy = Policy(chat, ["ok"])

    async def story() -> None:
        async with Endpoint(chat, policy, MAX_LENGTH) as endpoint:
            status, answer = await post(endpoint, route, body)
            assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
            assert words in answer["error"]["message"]

    asyncio.run(story())
    assert policy.said == []


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (DeadlineError("an inference server that may be asked", 600.0), 503, "waited 600.0 s for an inference server"),
        (ZeroDivisionError("by chance"), 500, "the call failed: ZeroDivisionError: by chance"),
    ],
)
@pytest.mark.parametrize(("route", "kind"), [("chat/completions", "server_error"), ("messages", "api_error")])
def test_a_failure_of_our_own_is_a_server_error_of_the_routes_protocol(
    chat: ChatTokenizer, error: Exception, status: int, words: str, route: str, kind: str
) -> None:
    async def fails(tokens: Any, n: int, max_tokens: int | None) -> Any:
        raise error

    async def story() -> tuple[int, Any]:
        async with Endpoint(chat, fails, MAX_LENGTH) as endpoint:
            return await post(endpoint, route, {**HELLO, "max_tokens": 5})

    code, answer = asyncio.run(story())
    assert (code, answer["error"]["type"]) == (status, kind)
    assert answer["error"]["message"].startswith(words)


def test_a_key_that_is_no_text_is_a_wrong_key(chat: ChatTokenizer) -> None:
    head = b"POST /v1/reward HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\nContent-Length: 1\r\n"

    async def story() -> bytes:
        async with Endpoint(chat, Policy(chat, []), MAX_LENGTH) as endpoint:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(endpoint.url.split(":")[2].split("/")[0]))
            writer.write(head + b"Connection: close\r\n\r\n1")
            try:
                return await reader.read()
            finally:
                writer.close()

    said = asyncio.run(asyncio.wait_for(story(), 30))
    assert said.startswith(b"HTTP/1.1 401 ")
    assert b"the key is not this episode's" in said
