"""Which server gets the later turns of an episode."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from pipeline.rollout.server_pool import MIN_OVERLOAD, InferenceClient
from pipeline.utils import backoff
from tests.fakes.scripted_server import (
    Script,
    always,
    ask,
    choice,
    client_and,
    never_answers,
    reports,
    run,
    with_status,
    works,
)


async def started(client: InferenceClient, script: Script, samples: int) -> asyncio.Task[object]:
    """A request of `samples` that `script` has received and does not answer."""
    before = len(script.bodies)
    task = asyncio.create_task(ask(client, n=samples))
    while len(script.bodies) == before:
        await asyncio.sleep(0.001)
    return task


async def occupied(client: InferenceClient, busy: Script, others: list[Script], samples: int) -> asyncio.Task[object]:
    """`busy` with `samples` in progress, while the other servers have none."""
    for other in others:
        client.update(other.endpoint, None)
    task = await started(client, busy, samples)
    for other in others:
        client.update(other.endpoint, 5)
    return task


def test_later_turns_go_to_the_server_of_the_first() -> None:
    async def story(*scripts: Script) -> InferenceClient:
        async with client_and(*scripts) as client:
            for _ in range(4):
                (turn,) = await ask(client)
                for _ in range(5):
                    (later,) = await ask(client, cached_on=turn.server)
                    assert later.server == turn.server
            return client

    client = run(story(Script([works]), Script([works]), Script([works])))
    assert (client.returned, client.moved) == (20, 0)
    assert client.numbers()["requests/returned"] == 20


def test_a_server_with_few_samples_keeps_its_episodes_while_others_are_idle() -> None:
    async def story(busy: Script, idle: Script) -> None:
        async with client_and(busy, idle) as client:
            stuck = await occupied(client, busy, [idle], MIN_OVERLOAD - 1)
            again = asyncio.create_task(ask(client, cached_on=busy.endpoint))
            while len(busy.bodies) < 2:
                await asyncio.sleep(0.001)
            again.cancel()
            stuck.cancel()

    run(story(Script([never_answers]), idle := Script([works])))
    assert not idle.bodies


def test_an_overloaded_server_gives_its_episodes_to_the_least_loaded() -> None:
    async def story(busy: Script, *others: Script) -> InferenceClient:
        async with client_and(busy, *others) as client:
            stuck = await occupied(client, busy, list(others), 4 * MIN_OVERLOAD)
            for _ in range(6):
                (turn,) = await ask(client, cached_on=busy.endpoint)
                assert turn.server != busy.endpoint
            stuck.cancel()
            return client

    client = run(story(Script([never_answers]), Script([works]), Script([works])))
    assert (client.returned, client.moved) == (0, 6)


def test_servers_that_are_equally_loaded_keep_their_episodes() -> None:
    async def story(one: Script, two: Script) -> None:
        async with client_and(one, two) as client:
            stuck = [await occupied(client, one, [two], 64)]
            client.update(one.endpoint, None)  # cancels nothing of `two`; `one` retries its request on `two`
            await asyncio.sleep(0.05)
            client.update(one.endpoint, 5)
            stuck.append(await started(client, one, 64))
            before = len(one.bodies)
            again = asyncio.create_task(ask(client, cached_on=one.endpoint))
            while len(one.bodies) == before:
                await asyncio.sleep(0.001)
            for task in (*stuck, again):
                task.cancel()

    run(story(Script([never_answers]), Script([never_answers])))


@pytest.mark.parametrize("version", [None, 3], ids=["evicted", "too far behind"])
def test_a_server_that_may_not_be_asked_loses_its_episodes(version: int | None) -> None:
    async def story(old: Script, new: Script) -> InferenceClient:
        async with client_and(old, new, max_lag=1) as client:
            client.update(old.endpoint, version)
            await ask(client, cached_on=old.endpoint)
            await ask(client, cached_on="127.0.0.9:1")
            return client

    client = run(story(Script([works]), new := Script([works])))
    assert len(new.bodies) == client.moved == 2


def test_a_server_that_fails_loses_its_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "pause_after", lambda failures: 60.0)  # as if the machine were infinitely fast

    async def story(broken: Script, sound: Script) -> None:
        async with client_and(broken, sound) as client:
            (turn,) = await ask(client, cached_on=broken.endpoint)
            assert turn.server == sound.endpoint
            assert (await ask(client, cached_on=broken.endpoint))[0].server == sound.endpoint

    run(story(broken := Script([with_status(503)]), Script([works])))
    assert len(broken.bodies) == 1


def test_the_pieces_of_a_long_sample_stay_on_its_server() -> None:
    async def story(*scripts: Script) -> list[str]:
        async with client_and(*scripts, max_tokens_per_request=4) as client:
            samples = await asyncio.gather(*(ask(client, tokens=32) for _ in range(6)))
            assert client.returned == 6 * 7
            return [sample.server for (sample,) in samples]

    scripts = [Script([works]), Script([works])]
    servers = Counter(run(story(*scripts)))
    assert {script.endpoint: len(script.bodies) for script in scripts} == {name: 8 * n for name, n in servers.items()}


@pytest.mark.parametrize(("keeps", "salts"), [(True, ["5", "5", "6"]), (False, ["5", "6", "6"])])
def test_turns_share_cached_prefixes_under_the_version_of_the_first_one_if_updates_keep_them(
    keeps: bool, salts: list[str]
) -> None:
    async def story(script: Script) -> None:
        async with client_and(script, keeps_prefixes=keeps) as client:
            await ask(client)
            client.update(script.endpoint, 6)
            await ask(client, cached_on=script.endpoint, cached_at=5)
            await ask(client)

    script = Script([works, always(choice([7], version="6"))])
    run(story(script))
    assert [body["cache_salt"] for body in script.bodies] == salts


def test_the_hit_rate_of_a_server_is_that_of_the_prompt_tokens_it_reports() -> None:
    def usage(cached: int | None) -> dict[str, Any]:
        return {"prompt_tokens": 3, "prompt_tokens_details": None if cached is None else {"cached_tokens": cached}}

    async def story(*scripts: Script) -> list[dict[str, float]]:
        found = []
        for script in scripts:
            async with client_and(script) as client:
                await ask(client)
                await ask(client)
                numbers = client.numbers()
                found.append({name: value for name, value in numbers.items() if name.startswith("prefix_cache/")})
        return found

    reporting = Script([reports(usage(0)), reports(usage(2))])
    silent = Script([reports(usage(None)), always(choice([7]))])
    assert run(story(reporting, silent)) == [{f"prefix_cache/{reporting.endpoint}": 2 / 6}, {}]
