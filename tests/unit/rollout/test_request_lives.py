"""Requests that wait, are cancelled, or are counted."""

import asyncio
from typing import Any

import pytest
from aiohttp import web

from pipeline.rollout.server_pool import _pauses
from pipeline.utils.backoff import LONGEST_PAUSE
from tests.fakes.scripted_server import (
    Script,
    ask,
    client_and,
    never_answers,
    run,
    with_status,
    works,
)


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
    sampler_logprobs = {"pausing after a failure": with_status(500), "waiting for the answer": never_answers}

    async def story() -> None:
        async with client_and(script := Script([sampler_logprobs.get(state, works)])) as client:
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
