"""OpenAI's routes of the gateway wait for their turn among the samples of all keys and sessions."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from pipeline.tinker.completions import sequences_of
from pipeline.tinker.forwarding import CHAT
from pipeline.tinker.routes import openai
from tests.unit.tinker.gateway_case import ADA, BOB, Client
from tests.unit.tinker.openai_case import MESSAGES, Script, ask, whole, with_script

CAPACITY = 13
"""Sequences in flight before one server of `gateway_case`: 12, and an eighth more."""
SDK_PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}


def body_of(user: str, **given: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": user}], **given}


def users_asked(script: Script) -> list[str]:
    """Whose requests the server got, in its order."""
    return [body["messages"][0]["content"] if "messages" in body else "sdk" for _, body in script.asked]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


def flood(client: Client, number: int, **given: Any) -> "list[asyncio.Task[tuple[int, Any]]]":
    return [asyncio.create_task(ask(client, body_of("ada", **given))) for _ in range(number)]


def with_flood(tmp_path: Path, play: Callable[[Client, Script, Any], Awaitable[None]]) -> None:
    """The server works on all that it may have of Ada's 60 requests, and answers nothing yet."""

    async def start(client: Client, script: Script) -> None:
        script.gate.clear()
        asking = flood(client, 60)
        await until(lambda: len(script.asked) >= CAPACITY)
        await asyncio.sleep(0.1)
        assert users_asked(script) == ["ada"] * CAPACITY, "what a server can run at once, and no more"
        await play(client, script, asking)
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)

    with_script(tmp_path, start)


def test_a_flood_of_one_key_holds_up_neither_another_key_nor_a_session_of_the_sdk(tmp_path: Path) -> None:
    async def play(client: Client, script: Script, asking: Any) -> None:
        other = asyncio.create_task(ask(client, body_of("bob"), "tml-bob"))
        session = await client.session(BOB)
        made = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        sampler = (await client.post("create_sampling_session", made, BOB))[1]["sampling_session_id"]
        sample = {"sampling_session_id": sampler, "seq_id": 0, "num_samples": 1, "prompt": SDK_PROMPT}
        assert (await client.post("asample", sample, BOB))[0] == 200
        await asyncio.sleep(0.1)
        assert len(script.asked) == CAPACITY
        script.gate.set()
        assert (await asyncio.wait_for(other, 10))[0] == 200
        async with asyncio.timeout(10):
            assert isinstance(await client.sampling.result(f"{sampler}:0"), bytes)
        asked = users_asked(script)
        assert max(asked.index("bob"), asked.index("sdk")) < CAPACITY + 2, "the next two places are theirs"
        assert [(await asyncio.wait_for(each, 30))[0] for each in asking] == [200] * len(asking)

    with_flood(tmp_path, play)


def test_a_client_that_hangs_up_before_its_turn_is_never_asked_for(tmp_path: Path) -> None:
    async def play(client: Client, script: Script, asking: Any) -> None:
        other = asyncio.create_task(client.http.post(CHAT, json=body_of("bob"), headers=BOB))
        await until(lambda: len(client.sampling._turns) == len(asking) + 1)
        other.cancel()
        await until(lambda: len(client.sampling._turns) == len(asking))
        script.gate.set()
        await asyncio.wait(asking, timeout=30)
        assert users_asked(script) == ["ada"] * len(asking)
        assert not client.sampling._turns

    with_flood(tmp_path, play)


def test_a_place_is_free_again_when_its_client_hangs_up_or_its_request_fails(tmp_path: Path) -> None:
    async def refuse(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no"}}, status=400)

    async def play(client: Client, script: Script, asking: Any) -> None:
        asking[0].cancel()
        await until(lambda: len(script.asked) == CAPACITY + 1)
        script.answers = [refuse] * 30
        script.gate.set()
        statuses = [(await asyncio.wait_for(each, 30))[0] for each in asking[1:]]
        assert sorted(set(statuses)) == [200, 400]

    with_flood(tmp_path, play)


def test_a_request_takes_as_many_places_as_it_has_sequences(tmp_path: Path) -> None:
    assert [sequences_of(body) for body in ({"prompt": "a"}, {"prompt": [1, 2]}, {"messages": MESSAGES})] == [1] * 3
    assert [sequences_of({"prompt": prompt, "n": 3}) for prompt in (["a", "b"], [[1], [2]])] == [6, 6]

    async def play(client: Client, script: Script) -> None:
        script.gate.clear()
        asking = flood(client, 4, n=7)
        await until(lambda: len(script.asked) == 2)
        await asyncio.sleep(0.1)
        assert len(script.asked) == 2, "the second one goes above the capacity; no third one starts"
        script.gate.set()
        assert [(await asyncio.wait_for(each, 10))[0] for each in asking] == [200] * 4

    with_script(tmp_path, play)


def test_a_client_that_reads_nothing_of_its_stream_loses_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai, "STALL_SECONDS", 0.2)

    async def endless(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        event = {"choices": [{"index": 0, "delta": {"content": "x" * 100_000}}]}
        while True:
            await answer.write(b"data: " + openai.msgspec.json.encode(event) + b"\n\n")

    async def play(client: Client, script: Script) -> None:
        script.answers = [endless] * CAPACITY
        streams = [await client.http.post(CHAT, json=body_of("ada", stream=True), headers=ADA) for _ in range(CAPACITY)]
        script.answers = [whole]
        assert (await asyncio.wait_for(ask(client, body_of("bob"), "tml-bob"), 20))[0] == 200
        for stream in streams:
            stream.close()

    with_script(tmp_path, play)
