"""The client's policy, against small HTTP servers that misbehave as told."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import RolloutError
from pipeline.rollouts.client import InferenceClient, _joined, _pauses
from pipeline.rollouts.server import LONGEST_PAUSE, ROUTE, Completion

T = TypeVar("T")
Answer = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


def choice(tokens: list[int], finish: str = "length", version: str = "5", index: int = 0) -> dict[str, Any]:
    return {
        "index": index,
        "finish_reason": finish,
        "token_ids": tokens,
        "weight_versions": [{"version": version, "start": 0, "end": len(tokens)}] if tokens else [],
        "logprobs": {"content": [{"token_id": token, "logprob": -0.5, "rank": 1} for token in tokens]},
    }


def answer(*choices: dict[str, Any]) -> web.Response:
    return web.json_response({"request_id": "r", "choices": list(choices)})


async def works(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return answer(*(choice([7] * body["sampling_params"]["max_tokens"]) for _ in range(body["sampling_params"]["n"])))


async def never_answers(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    await asyncio.sleep(3600)
    return web.Response()


async def hangs_up(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def with_status(status: int, body: str = "") -> Answer:
    async def respond(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=status, text=body)

    return respond


def always(*choices: dict[str, Any]) -> Answer:
    async def respond(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        return answer(*choices)

    return respond


@dataclass
class Script:
    """A server that answers by its list, and by the last of it for ever."""

    answers: list[Answer]
    endpoint: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    authorizations: list[str] = field(default_factory=list)

    async def respond(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.bodies.append(body)
        self.authorizations.append(request.headers["Authorization"])
        step = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return await step(request, body)


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[Script]:
    app = web.Application()
    app.router.add_post(ROUTE, script.respond)
    runner = web.AppRunner(app, shutdown_timeout=0.01)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    script.endpoint = f"{host}:{port}"
    try:
        yield script
    finally:
        await runner.cleanup()


@asynccontextmanager
async def client_and(*scripts: Script, **settings: Any) -> AsyncIterator[InferenceClient]:
    """A client of these servers, all at version 5."""
    async with AsyncExitStack() as stack:
        for script in scripts:
            await stack.enter_async_context(serving(script))
        endpoints = [script.endpoint for script in scripts]
        seconds = settings.pop("seconds", 5.0)
        client = await stack.enter_async_context(InferenceClient(endpoints, "s3cret", seconds, **settings))
        for endpoint in endpoints:
            client.update(endpoint, 5)
        yield client


async def ask(client: InferenceClient, n: int = 1, tokens: int = 4) -> list[Completion]:
    return await client.generate([1, 2, 3], n=n, temperature=0.7, max_tokens=tokens, stop_token_ids=[2])


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 20))


def test_a_request_says_exactly_how_to_sample_and_proves_that_it_may() -> None:
    async def story(script: Script) -> list[Completion]:
        async with client_and(script) as client:
            return await ask(client, n=2)

    script = Script([works])
    completions = run(story(script))
    assert script.authorizations == ["Bearer s3cret"]
    (body,) = script.bodies
    assert body == {
        "model": "policy",
        "token_ids": [1, 2, 3],
        "sampling_params": {
            "n": 2,
            "temperature": 0.7,
            "top_p": 1.0,
            "top_k": 0,
            "max_tokens": 4,
            "stop_token_ids": [2],
            "logprobs": 0,
            "detokenize": False,
        },
        "cache_salt": "5",
    }
    assert [completion.tokens for completion in completions] == [(7, 7, 7, 7)] * 2
    assert completions[0].logprobs == (-0.5,) * 4
    assert (completions[0].version_min, completions[0].version_max) == (5, 5)
    assert completions[0].server == script.endpoint


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (with_status(500), "status 500"),
        (with_status(503), "status 503"),
        (with_status(429), "status 429"),
        (hangs_up, "disconnected"),
        (always(choice([7], version="default")), "stale weights"),
        (always(choice([7], version="4")), "stale weights"),
        (always(choice([7]), choice([7])), "malformed answer"),
        (always({"index": 0}), "malformed answer"),
        (always(choice([7]) | {"token_ids": [8]}), "malformed answer"),
        (always(choice([7]) | {"finish_reason": "error"}), "malformed answer"),
    ],
)
def test_what_fails_for_now_is_tried_again_and_counted_by_its_reason(failure: Answer, reason: str) -> None:
    async def story() -> InferenceClient:
        async with client_and(Script([failure, failure, works])) as client:
            assert [completion.tokens for completion in await ask(client)] == [(7, 7, 7, 7)]
            return client

    assert run(story()).retries == {reason: 2}


def test_a_server_that_does_not_answer_in_time_is_given_up_for_another_try() -> None:
    async def story() -> InferenceClient:
        async with client_and(Script([never_answers, works]), seconds=0.2) as client:
            await ask(client)
            return client

    assert run(story()).retries == {"timed out": 1}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"error": {"message": "token 99 is out of vocabulary", "code": 400}}', "token 99 is out of vocabulary"),
        ('{"error": "no such thing"}', "no such thing"),
        ("plain words", "plain words"),
        ("[1]", r"\[1\]"),
    ],
)
def test_what_can_never_work_is_an_error_in_the_servers_own_words(body: str, words: str) -> None:
    async def story() -> InferenceClient:
        async with client_and(Script([with_status(400, body)])) as client:
            with pytest.raises(RolloutError, match=words):
                await ask(client)
            return client

    assert run(story()).retries == {}


@pytest.mark.parametrize("tokens", [[], [-1], [17], [1, 2, 400]])
def test_tokens_that_would_kill_a_server_are_never_sent(tokens: list[int]) -> None:
    async def story(script: Script) -> None:
        async with client_and(script, vocabulary=17) as client:
            with pytest.raises(RolloutError):
                await client.generate(tokens, n=1, temperature=1.0, max_tokens=1, stop_token_ids=[])

    script = Script([works])
    run(story(script))
    assert script.bodies == []


def test_an_aborted_sample_goes_on_where_it_stopped_and_the_others_of_its_group_are_kept() -> None:
    async def story(script: Script) -> list[Completion]:
        async with client_and(script) as client:
            return await ask(client, n=3)

    half = answer_of(choice([7, 7, 7, 7]), choice([4, 4], "abort"), choice([], "abort"))
    script = Script([half, always(choice([6], "abort", "6")), always(choice([9, 9, 9, 9], version="6")), works])
    whole, aborted, unbegun = run(story(script))
    assert whole.tokens == (7, 7, 7, 7)
    assert [len(body["token_ids"]) for body in script.bodies] == [3, 5, 3, 6]
    assert script.bodies[3]["token_ids"] == [1, 2, 3, 4, 4, 6]
    assert script.bodies[3]["sampling_params"]["max_tokens"] == 1
    assert (aborted.tokens, aborted.finish) == ((4, 4, 6, 7), "length")
    assert (aborted.version_min, aborted.version_max) == (5, 6)
    assert len(aborted.logprobs) == 4
    assert (unbegun.tokens, unbegun.version_min) == ((9, 9, 9, 9), 6)


def answer_of(*choices: dict[str, Any]) -> Answer:
    return always(*(one | {"index": index} for index, one in enumerate(choices)))


def test_a_sample_aborted_at_its_last_token_is_whole() -> None:
    async def story() -> list[Completion]:
        async with client_and(Script([always(choice([7, 7, 7, 7], "abort"))])) as client:
            return await ask(client)

    (completion,) = run(story())
    assert (completion.tokens, completion.finish) == ((7, 7, 7, 7), "length")


def test_the_least_loaded_server_is_asked() -> None:
    async def story(busy: Script, idle: Script) -> None:
        async with client_and(busy, idle) as client:
            client.update(idle.endpoint, None)
            stuck = asyncio.create_task(ask(client, n=8))
            while not busy.bodies:
                await asyncio.sleep(0.001)
            client.update(idle.endpoint, 5)
            for _ in range(5):
                await ask(client)
            stuck.cancel()

    busy, idle = Script([never_answers]), Script([works])
    run(story(busy, idle))
    assert len(idle.bodies) == 5


def test_requests_on_an_evicted_server_go_elsewhere_at_once() -> None:
    async def story(dead: Script, alive: Script) -> InferenceClient:
        async with client_and(dead, alive) as client:
            client.update(alive.endpoint, None)
            requests = [asyncio.create_task(ask(client)) for _ in range(4)]
            while len(dead.bodies) < 4:
                await asyncio.sleep(0.001)
            client.update(alive.endpoint, 5)
            client.update(dead.endpoint, None)
            await asyncio.gather(*requests)
            return client

    client = run(story(Script([never_answers]), alive := Script([works])))
    assert client.retries == {"evicted": 4}
    assert len(alive.bodies) == 4


def test_a_server_too_far_behind_the_newest_weights_is_not_asked() -> None:
    async def story(old: Script, new: Script) -> None:
        async with client_and(old, new, max_lag=1) as client:
            client.update(new.endpoint, 7)
            for _ in range(6):
                await ask(client)

    old, new = Script([works]), Script([always(choice([7] * 4, version="7"))])
    run(story(old, new))
    assert (len(old.bodies), len(new.bodies)) == (0, 6)


def test_a_server_that_fails_at_once_does_not_draw_the_requests() -> None:
    async def story(broken: Script, sound: Script) -> None:
        async with client_and(broken, sound) as client:
            await asyncio.gather(*(ask(client) for _ in range(50)))
            for _ in range(50):
                await ask(client)

    broken, sound = Script([with_status(500)]), Script([works])
    run(story(broken, sound))
    assert len(sound.bodies) == 100
    assert len(broken.bodies) < 40


def test_without_a_server_a_request_waits_until_there_is_one() -> None:
    async def story(script: Script) -> None:
        async with client_and(script) as client:
            client.update(script.endpoint, None)
            request = asyncio.create_task(ask(client))
            await asyncio.sleep(0.05)
            assert not request.done()
            assert not script.bodies
            client.update(script.endpoint, 5)
            await request

    run(story(Script([works])))


@pytest.mark.parametrize("state", ["waiting for a server", "pausing after a failure", "waiting for the answer"])
def test_a_cancelled_request_ends_at_once_wherever_it_is(state: str) -> None:
    behaviour = {"pausing after a failure": with_status(500), "waiting for the answer": never_answers}

    async def story() -> None:
        async with client_and(script := Script([behaviour.get(state, works)])) as client:
            if state == "waiting for a server":
                client.update(script.endpoint, None)
            request = asyncio.create_task(ask(client))
            while not script.bodies and state != "waiting for a server":
                await asyncio.sleep(0.001)
            await asyncio.sleep(0)
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(request, 0.5)

    run(story())


def test_numbers_tell_tokens_retries_and_how_idle_each_server_was() -> None:
    async def story(busy: Script, idle: Script) -> dict[str, float]:
        async with client_and(busy, idle) as client:
            client.update(idle.endpoint, None)
            client.numbers()
            await ask(client, n=2)
            return client.numbers()

    async def slow(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(0.05)
        return await works(request, body)

    busy, idle = Script([with_status(500), slow]), Script([works])
    numbers = run(story(busy, idle))
    assert (numbers["requests"], numbers["completion_tokens"], numbers["retries/status 500"]) == (1, 8, 1)
    assert numbers[f"idle/{idle.endpoint}"] == 1
    assert 0 <= numbers[f"idle/{busy.endpoint}"] < 1


def test_pauses_grow_to_a_limit_and_differ() -> None:
    first, second = ([next(pauses) for _ in range(2000)] for pauses in (_pauses(), _pauses()))
    assert first != second
    assert first[0] <= 0.05
    assert all(LONGEST_PAUSE / 2 <= pause <= LONGEST_PAUSE for pause in first[10:])


completions = st.builds(
    Completion,
    tokens=(tokens := st.lists(st.integers(0, 9), max_size=5).map(tuple)),
    logprobs=tokens,
    finish=st.sampled_from(["stop", "length", "abort"]),
    version_min=(version := st.integers(0, 9)),
    version_max=version,
    server=st.just("s"),
    seconds=st.floats(0, 9),
)


@given(completions, completions)
def test_two_parts_make_one_sample_that_hides_no_version(first: Completion, then: Completion) -> None:
    whole = _joined(first, then)
    assert whole.tokens == first.tokens + then.tokens
    assert whole.finish == then.finish
    assert whole.version_min <= then.version_min
    assert not first.tokens or whole.version_min <= first.version_min
    assert whole.version_max >= max(first.version_max, then.version_max)
