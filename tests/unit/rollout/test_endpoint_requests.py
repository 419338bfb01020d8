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
from pipeline.rollout.agent_endpoint.episode_endpoint import Endpoint
from tests.unit.environments.test_tool_task import bytes_model
from tests.unit.rollout.test_agent_endpoint import Policy, user

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
