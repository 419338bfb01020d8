"""Requests that are cut off: by their time limit, or with a lost server. No sample starts over because it is long."""

import asyncio
from typing import Any

import pytest
from aiohttp import web

from pipeline.rollout import server_pool
from pipeline.rollout.server_client import Completion
from pipeline.rollout.server_pool import InferenceClient
from pipeline.transport.sample_records import SAMPLED_TOKENS
from pipeline.utils.poison_request import MAX_SERVER_CRASHES
from tests.fakes.scripted_server import (
    Script,
    always,
    answer,
    ask,
    choice,
    client_and,
    hangs_up,
    never_answers,
    run,
    works,
)


def test_a_sample_that_outlasts_the_time_limit_of_a_request_goes_on_with_the_tokens_it_has() -> None:
    async def story(script: Script) -> tuple[list[Completion], InferenceClient]:
        script.answers = [script.slowly, script.slowly, script.slowly, script.slowly, works]
        async with client_and(script, seconds=0.05) as client:
            return await ask(client, tokens=6), client

    (completion,), client = run(story(script := Script([])))
    assert [body["token_ids"][3:] for body in script.bodies] == [[7] * made for made in range(5)]
    assert (completion.tokens, completion.logprobs, completion.finish) == ((7,) * 6, (-0.5,) * 6, "length")
    assert client.retries == {"aborted": 4}


def test_of_the_samples_of_a_request_that_is_cut_off_only_the_unfinished_go_on() -> None:
    async def short_and_long(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        await script.interrupted[request.headers["X-Request-Id"]].wait()
        return answer(choice([2], "stop"), choice([7, 7], "abort"))

    async def story() -> list[Completion]:
        async with client_and(script, seconds=0.05) as client:
            return await ask(client, n=2)

    script = Script([short_and_long, works])
    short, long = run(story())
    assert (short.tokens, long.tokens) == ((2,), (7, 7, 7, 7))
    assert [body["token_ids"] for body in script.bodies] == [[1, 2, 3], [1, 2, 3, 7, 7]]


def test_a_lost_server_costs_a_long_sample_no_more_than_a_short_one() -> None:
    """Every second request is lost. Whatever a request loses, it is at most a piece, and what came before is kept."""

    async def story(tokens: int) -> int:
        script = Script([answer for _ in range(tokens) for answer in (hangs_up, works)])
        async with client_and(script, max_tokens_per_request=2) as client:
            (completion,) = await ask(client, tokens=tokens)
            assert (completion.tokens, completion.finish) == ((7,) * tokens, "length")
            assert client.retries.keys() == {"disconnected"}
        assert max(body["sampling_params"]["max_tokens"] for body in script.bodies) <= 2
        assert [len(body["token_ids"]) for body in script.bodies[::2]] == list(range(3, 3 + tokens, 2))
        return sum(body["sampling_params"]["max_tokens"] for body in script.bodies[::2])

    lost = {tokens: run(story(tokens)) for tokens in (2, 4)}
    assert lost[4] / 4 == lost[2] / 2


def test_the_tokens_of_a_turn_are_counted_before_it_ends() -> None:
    """The trainer waits for a slow turn as long as this number grows."""

    async def story(script: Script) -> list[float]:
        async with client_and(script, max_tokens_per_request=2) as client:
            turn = asyncio.create_task(ask(client, tokens=6))
            while len(script.bodies) < 3:
                await asyncio.sleep(0.01)
            counted = [client.numbers()[SAMPLED_TOKENS]]
            turn.cancel()
            return counted

    assert run(story(Script([works, works, never_answers]))) == [4]


def test_a_turn_that_ends_before_its_piece_does_is_asked_for_once() -> None:
    async def story(script: Script) -> list[Completion]:
        async with client_and(script, max_tokens_per_request=2) as client:
            return await ask(client)

    script = Script([always(choice([7, 2], "stop"))])
    assert [part.tokens for part in run(story(script))] == [(7, 2)]
    assert len(script.bodies) == 1


def test_a_request_on_a_server_that_leaves_is_continued_elsewhere_with_the_tokens_it_has() -> None:
    async def story() -> tuple[list[Completion], InferenceClient]:
        async with client_and(leaving, staying) as client:
            client.follow({leaving.endpoint: 5, staying.endpoint: None})
            asked = asyncio.create_task(ask(client))
            while not leaving.bodies:
                await asyncio.sleep(0.01)
            client.follow({staying.endpoint: 5})
            return await asked, client

    leaving = Script([])
    leaving.answers, staying = [leaving.slowly], Script([works])
    (completion,), client = run(story())
    assert [body["token_ids"] for body in staying.bodies] == [[1, 2, 3, 7]]
    assert (completion.tokens, completion.server) == ((7,) * 4, staying.endpoint)
    assert client.retries == {"aborted": 1}, "the server answered: nothing was lost"
    assert [name for name in client.numbers() if name.startswith("idle/")] == [f"idle/{staying.endpoint}"]


def test_a_server_that_was_never_posted_does_not_count_as_one_that_left() -> None:
    async def story() -> list[Completion]:
        async with client_and(own) as client:
            client.follow({})
            return await ask(client)

    own = Script([works])
    assert [completion.server for completion in run(story())] == [own.endpoint]


def test_servers_that_stop_under_a_request_after_they_left_do_not_count_as_its_crashes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def dead(*_: object) -> bool:
        return True

    monkeypatch.setattr(server_pool, "is_dead", dead)
    leavers, own = [Script([]) for _ in range(MAX_SERVER_CRASHES)], Script([works])
    queue = [*leavers, own]

    async def story() -> list[Completion]:
        async with client_and(*queue) as client:

            def serve_next() -> None:
                client.follow({script.endpoint: 5 if script is queue[0] else None for script in queue})

            async def leaves(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
                queue.pop(0)
                serve_next()
                return await hangs_up(request, body)

            for script in leavers:
                script.answers = [leaves]
            serve_next()
            return await ask(client)

    assert [completion.server for completion in run(story())] == [own.endpoint]
    assert all(script.bodies for script in leavers)
