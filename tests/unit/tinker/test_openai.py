"""OpenAI's routes of the gateway: which models there are, what is asked of servers, and what becomes of failures."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from pipeline.tinker import forwarding
from pipeline.tinker.api_errors import ApiError
from pipeline.tinker.completions import checked_body, wants_usage
from pipeline.tinker.forwarding import CHAT, COMPLETION
from pipeline.utils.poison_request import ABANDONED, MAX_SERVER_CRASHES
from tests.unit.tinker.gateway_case import ADA, BOB, Client
from tests.unit.tinker.openai_case import MESSAGES, USAGE, Script, ask, dead, events, torn, with_script


def test_a_path_of_its_owner_is_a_model_and_nobody_elses(tmp_path: Path) -> None:
    async def play(client: Client, script: Script) -> None:
        path = await client.adapter()
        for prefix in ("/v1", "/oai/api/v1"):
            for key, expected in ((ADA, {"tiny", path}), (BOB, {"tiny"})):
                async with client.http.get(f"{prefix}/models", headers=key) as answer:
                    assert {each["id"] for each in (await answer.json())["data"]} == expected
        async with client.http.get(f"/v1/models/{path.replace('/', '%2F')}", headers=ADA) as answer:
            assert (answer.status, (await answer.json())["id"]) == (200, path)
        status, answer_body = await ask(client, {"model": path, "messages": MESSAGES, "user": "me"})
        assert (status, answer_body["model"]) == (200, path)
        (_, loaded), (_, asked) = script.asked
        assert asked == {"model": loaded["lora_name"], "messages": MESSAGES}
        status, refused = await ask(client, {"model": path, "messages": MESSAGES}, "tml-bob")
        assert (status, refused["error"]["code"]) == (404, "model_not_found")
        status, refused = await ask(client, {"model": "tiny", "messages": MESSAGES}, "tml-nobody")
        assert (status, refused["error"]["code"]) == (401, "invalid_api_key")
        assert len(script.asked) == 2, "what is refused reaches no server"

    with_script(tmp_path, play)


def test_a_stream_names_the_model_and_ends_with_the_usage_for_who_asks(tmp_path: Path) -> None:
    async def play(client: Client, script: Script) -> None:
        plain = await events(client, {"model": "tiny", "messages": MESSAGES})
        *parts, done = plain
        assert [part["choices"][0]["delta"]["content"] for part in parts] == ["1", "2" * 200_000]
        assert done == "[DONE]"
        assert all("usage" not in part and part["model"] == "tiny" for part in parts)
        options = {"stream_options": {"include_usage": True}}
        *parts, last, done = await events(client, {"model": "tiny", "messages": MESSAGES, **options})
        assert (last["choices"], last["usage"]) == ([], USAGE)
        assert all("usage" not in part for part in parts)

    with_script(tmp_path, play)


def test_a_server_that_fails_before_the_first_part_is_asked_again(tmp_path: Path) -> None:
    async def play(client: Client, script: Script) -> None:
        script.answers = [dead]
        assert (await ask(client, {"model": "tiny", "messages": MESSAGES}))[0] == 200
        script.answers = [dead]
        assert (await events(client, {"model": "tiny", "messages": MESSAGES}))[-1] == "[DONE]"
        script.answers = [torn]
        first, error = await events(client, {"model": "tiny", "messages": MESSAGES})
        assert first["choices"][0]["delta"]["content"] == "1"
        assert "in the middle of this answer" in error["error"]["message"]
        assert not script.answers, "what was begun is not asked again"

    with_script(tmp_path, play)


def test_a_request_that_kills_servers_is_given_up_and_the_client_does_not_retry(tmp_path: Path) -> None:
    async def play(client: Client, script: Script) -> None:
        async def kill(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            script.health = 503
            asyncio.get_running_loop().call_later(0.2, setattr, script, "health", 200)
            return await dead(request, body)

        script.answers = [kill] * (MAX_SERVER_CRASHES + 1)
        body = {"model": "tiny", "messages": MESSAGES}
        async with client.http.post(CHAT, json=body, headers=ADA) as answer:
            assert (answer.status, answer.headers["X-Should-Retry"]) == (500, "false")
            assert (await answer.json())["error"]["message"] == ABANDONED
        assert len(script.answers) == 1

    with_script(tmp_path, play)


def test_errors_of_servers_are_told_and_their_trouble_is_not_tried_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(client: Client, script: Script) -> None:
        async def refuse(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            error = {"message": f"{body['model']} wants a --tool-call-parser"}
            return web.json_response({"error": error}, status=400)

        async def fail(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            return web.Response(status=500)

        path = await client.adapter()
        script.answers = [refuse]
        status, refused = await ask(client, {"model": path, "messages": MESSAGES, "tools": [{}], "stream": True})
        assert (status, refused["error"]["type"]) == (400, "invalid_request_error")
        assert refused["error"]["message"] == f"the server refuses: {path} wants a --tool-call-parser"
        script.answers = [fail] * (forwarding.MAX_UNHEALTHY + 1)
        assert (await ask(client, {"model": path, "messages": MESSAGES}))[0] == 502
        assert len(script.answers) == 1
        monkeypatch.setattr(forwarding, "HOLD_SECONDS", 0.1)
        client.sampling.set_servers(None)
        async with client.http.post(CHAT, json={"model": "tiny", "messages": MESSAGES}, headers=ADA) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (503, "2")

    with_script(tmp_path, play)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_ends_its_request(tmp_path: Path, stream: bool) -> None:
    async def play(client: Client, script: Script) -> None:
        script.answers = [script.hang]
        body = {"model": "tiny", "messages": MESSAGES, "stream": stream}
        asking = asyncio.create_task(client.http.post(CHAT, json=body, headers=ADA))
        async with asyncio.timeout(10):
            while not script.asked:
                await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.wait_for(script.let_go.wait(), 10)

    with_script(tmp_path, play)


def test_no_owner_has_more_requests_open_than_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.tinker.routes.openai.MAX_OPEN", 1)

    async def play(client: Client, script: Script) -> None:
        script.answers = [script.hang]
        body = {"model": "tiny", "messages": MESSAGES}
        asking = asyncio.create_task(client.http.post(CHAT, json=body, headers=ADA))
        async with asyncio.timeout(10):
            while not script.asked:
                await asyncio.sleep(0.01)
        assert (await ask(client, body))[0] == 429
        assert (await ask(client, body, "tml-bob"))[0] == 200, "another owner has requests of its own"
        asking.cancel()
        await asyncio.wait_for(script.let_go.wait(), 10)
        async with asyncio.timeout(10):
            while (await ask(client, body))[0] == 429:
                await asyncio.sleep(0.05)

    with_script(tmp_path, play)


IMAGE = [{"type": "image_url", "image_url": {"url": "http://inside/"}}]


@pytest.mark.parametrize(
    ("route", "body", "says"),
    [
        (CHAT, {"messages": [{"role": "user", "content": IMAGE}]}, "only text is served"),
        (CHAT, {"messages": [{"role": "user", "content": {"type": "text"}}]}, "expected a text, or a list of parts"),
        (CHAT, {"messages": ["1+1"]}, "expected an object"),
        (CHAT, {"messages": []}, "expected a list of messages"),
        (CHAT, {"messages": MESSAGES, "chat_template": "{{ 1 }}"}, "chat_template is not served"),
        (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"chat_template": "x"}}, "without chat_template"),
        (CHAT, {"messages": MESSAGES, "priority": -1}, "priority is not served"),
        (CHAT, {"messages": MESSAGES, "n": 257}, "n=257; expected 1 to 256"),
        (CHAT, {"messages": MESSAGES, "stream": "yes"}, "stream='yes'; expected true or false"),
        (CHAT, {"messages": MESSAGES, "stop_token_ids": [-1]}, "expected a list of token ids"),
        (COMPLETION, {"prompt_embeds": "AAAA"}, "prompt_embeds is not served"),
        (COMPLETION, {"prompt": ""}, "none may be empty"),
        (COMPLETION, {"prompt": [1, -1]}, "none may be empty"),
        (COMPLETION, {"prompt": [[1], []]}, "none may be empty"),
        (COMPLETION, {"prompt": ["a"] * 129, "n": 2}, "256 completions at most"),
    ],
)
def test_what_no_server_is_asked_is_refused_by_its_name(route: str, body: dict[str, Any], says: str) -> None:
    with pytest.raises(ApiError, match=says):
        checked_body(route, body, 256)


def test_every_form_of_a_prompt_is_served() -> None:
    for prompt in ("a", ["a", "b"], [1, 2], [[1], [2, 3]]):
        assert checked_body(COMPLETION, {"prompt": prompt, "echo": True, "logprobs": 0}, 256)["prompt"] == prompt
    with pytest.raises(ApiError, match="include_usage alone"):
        wants_usage({"stream": True, "stream_options": {"include_obfuscation": True}})
