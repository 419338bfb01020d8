"""The load of the servers' caches, as servers report it and responses show it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web

from pipeline.environments import Episode, Policy, Prompt
from pipeline.environments.task_calls import RenderedPrompt
from pipeline.rollout import cache_load
from pipeline.rollout.cache_load import CacheLoad, CacheWatch, block_size, values
from pipeline.rollout.generate_wire import ROUTE
from pipeline.rollout.rollout_policy import Sampling
from pipeline.rollout.sample_rollout import Rollout, roll_out
from pipeline.rollout.server_client import PromptTokens, Server
from pipeline.rollout.server_pool import InferenceClient
from tests.fakes.async_server import ADDRESS, serving
from tests.fakes.inline_calls import InlineCalls
from tests.fakes.scripted_server import Script, always, answer, ask, choice, client_and, reports, run, works
from tests.unit.rollout.test_group_rollout import CHAT, VOCABULARY, Sums

METRICS = """# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="policy"} 0.5
vllm:num_preemptions_total{engine="0",model_name="policy"} %s
vllm:num_preemptions_created{engine="0",model_name="policy"} 1.7e9
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",mamba_block_size="None"} 1.0
"""


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("kv_cache_usage_perc", [0.25, 0.5]),
        ("num_preemptions_total", [3.0]),
        ("num_preemptions", []),
        ("none", []),
    ],
)
def test_a_metric_has_a_value_for_each_set_of_labels(name: str, found: list[float]) -> None:
    assert values(METRICS % 3, name) == found


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "?"])
def test_a_value_that_is_no_finite_number_is_left_out(value: str) -> None:
    assert values(METRICS % value + METRICS % 3, "num_preemptions_total") == [3.0]


def test_the_size_of_a_block_is_among_the_labels_of_a_metric() -> None:
    assert block_size(METRICS % 3) == 16
    labels = 'hash_block_size="None",mamba_block_size="512"'
    assert block_size(f"vllm:cache_config_info{{{labels}}} 1.0") == 1, "unknown"
    labels += ',block_size="16",cache_hit_alignment_tokens="64"'
    assert block_size(f"vllm:cache_config_info{{{labels}}} 1.0") == 64
    assert block_size("") == 1
    labels += ',enable_prefix_caching="False"'
    assert block_size(f"vllm:cache_config_info{{{labels}}} 1.0") is None


def turn(endpoint: str, repeats: int, prompt: int = 100) -> dict[str, Any]:
    """A later turn of that many tokens, of which the first ones are those of the turn before."""
    tokens = list(range(prompt))
    earlier = [*tokens[:repeats], 1, 1]  # the agent has replaced the end
    return {"prompt": tokens, "cached_on": endpoint, "earlier": earlier, "computed_at": 5}


def test_a_server_without_a_prefix_cache_has_no_hit_rate() -> None:
    """Its responses report that no token was cached, which is no sign of overload."""
    script = Script([reports({"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 0}})])

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text='vllm:cache_config_info{block_size="16",enable_prefix_caching="False"} 1.0')

    async def story() -> CacheLoad:
        async with (
            serving({"/metrics": metrics, ROUTE: script.respond}) as port,
            client_and(script, watches_load=True) as client,
        ):
            client.update(endpoint := f"{ADDRESS}:{port}", 5)
            await ask(client, **turn(endpoint, 60))
            return await client.load()

    assert run(story()) == CacheLoad(answered=1, continued=1, repeated=0, cached=0)


def test_a_load_is_that_of_the_period_since_the_last_one() -> None:
    usage = {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 48}}
    script, total = Script([reports(usage)]), [2.0]

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text=METRICS % total[0])

    async def story() -> list[CacheLoad]:
        async with (
            serving({"/metrics": metrics, ROUTE: script.respond}) as port,
            client_and(script, watches_load=True) as client,
        ):
            client.update(endpoint := f"{ADDRESS}:{port}", 5)
            loads = [await client.load()]
            total[0] += 4
            for _ in range(2):
                await ask(client, **turn(endpoint, 60))
            loads += [await client.load(), await client.load()]
            return loads

    assert run(story()) == [
        CacheLoad(kv_usage=0.5),
        CacheLoad(answered=2, continued=2, repeated=2 * (60 - 16), cached=2 * (60 - 16), kv_usage=0.5, preemptions=4),
        CacheLoad(kv_usage=0.5),
    ]


def test_each_request_repeats_less_by_a_block() -> None:
    """Short turns do not hide that long ones are computed again. Several samples of a request repeat its prompt
    once."""
    cached = {400: 0, 9000: 3168, 4000: 2112}

    async def respond(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        length, samples = len(body["token_ids"]), body["sampling_params"]["n"]
        usage = {"prompt_tokens": length, "prompt_tokens_details": {"cached_tokens": cached[length]}}
        choices = [choice([7], index=index) for index in range(samples)]
        return web.json_response({"request_id": "r", "choices": choices, "usage": usage})

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text='vllm:cache_config_info{block_size="1056"} 1.0')

    async def story(script: Script) -> CacheLoad:
        async with (
            serving({"/metrics": metrics, ROUTE: script.respond}) as port,
            client_and(script, watches_load=True) as client,
        ):
            client.update(endpoint := f"{ADDRESS}:{port}", 5)
            for _ in range(9):
                await ask(client, **turn(endpoint, 300, 400))
            await ask(client, **turn(endpoint, 8000, 9000))
            await ask(client, n=4, **turn(endpoint, 3900, 4000))
            return await client.load()

    repeated, found = 8000 - 1056 + 3900 - 1056, 3168 + 2112
    assert run(story(Script([respond]))) == CacheLoad(14, continued=14, repeated=repeated, cached=found)


@pytest.mark.parametrize(
    ("changed", "watches", "continued"),
    [
        ({}, True, 1),
        ({"computed_at": 4}, True, 0),
        ({"cached_at": 4}, True, 1),
        ({"cached_on": "127.0.0.9:1"}, True, 0),
        ({"cached_on": "", "earlier": (), "computed_at": None}, True, 0),
        ({"earlier": [9, 9]}, True, 0),
        ({}, False, 0),
    ],
    ids=[
        "the same weights",
        "an update",
        "an update before the last turn",
        "another server",
        "a first turn",
        "nothing repeated",
        "no adaptive concurrency",
    ],
)
def test_only_tokens_that_could_be_in_a_cache_count(changed: dict[str, Any], watches: bool, continued: int) -> None:
    script = Script([reports({"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 48}})])

    async def story() -> CacheLoad:
        async with client_and(script, watches_load=watches) as client:
            await ask(client, **turn(script.endpoint, 60) | changed)
            return await client.load()

    load = run(story())
    assert (load.continued, load.repeated, load.cached) == (continued, 59 * continued, 48 * continued)


@pytest.mark.parametrize(("keeps", "continued"), [(True, 2), (False, 1)])
def test_a_piece_after_an_update_counts_if_updates_keep_the_cache(keeps: bool, continued: int) -> None:
    """The third piece has the weights of the second."""

    async def story() -> CacheLoad:
        async def aborted(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
            client.update(script.endpoint, 5)
            return answer(choice([7], "abort", version="4"))

        last = reports({"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 0}})
        script = Script([aborted, always(choice([7], "abort")), last])
        async with client_and(script, keeps_prefixes=keeps, watches_load=True) as client:
            client.update(script.endpoint, 4)
            await ask(client)
            return await client.load()

    assert run(story()).continued == continued


@pytest.mark.parametrize(("keeps", "continued"), [(True, 4), (False, 3)])
def test_the_turns_after_an_update_count_but_the_first_if_it_resets_the_cache(keeps: bool, continued: int) -> None:
    """The servers' version, under which a turn finds the one before, is not that of the episode's first turn."""

    async def five_turns(policy: Policy) -> Episode:
        episode = Episode.begin(policy.prompt)
        for _ in range(5):
            sampled = await policy.sample(episode.tokens)
            episode = episode.append_turn(sampled, "4").append_observation([3])
        return episode

    async def story() -> CacheLoad:
        async def first(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            client.update(script.endpoint, 6)
            return answer(choice([7]))

        script = Script([first, always(choice([7], version="6"))])
        async with client_and(script, keeps_prefixes=keeps, watches_load=True) as client:
            (ended,) = await rollouts(client, five_turns)
            assert ended.episode, ended.reason
            return await client.load()

    assert run(story()).continued == continued


async def rollouts(client: InferenceClient, episode: Callable[[Policy], Awaitable[Episode]]) -> list[Rollout]:
    """One rollout of a task with this episode."""

    class Replaced(Sums):
        async def rollout(self, prompt: Prompt, policy: Policy) -> Episode:
            return await episode(policy)

    task = Replaced(None, 0)
    rendered = RenderedPrompt(task.prompt(0), "2+2=")
    return await roll_out(task, InlineCalls(task), CHAT, client, Sampling(1.0, 4, 64, 0), rendered, 1)


@pytest.mark.parametrize("foreign", [VOCABULARY, 1 << 31, 1 << 63, 1 << 70])
def test_an_agent_that_sends_a_foreign_token_is_refused(foreign: int) -> None:
    statuses = []

    async def asking(policy: Policy) -> Episode:
        async with policy.endpoint() as endpoint, aiohttp.ClientSession() as http:
            for token in (3, foreign):
                headers = {"Authorization": f"Bearer {endpoint.key}"}
                body = {"model": endpoint.model, "prompt": [1, token], "max_tokens": 1}
                async with http.post(f"{endpoint.url}/completions", json=body, headers=headers) as response:
                    statuses.append((response.status, await response.text()))
            return endpoint.episode()

    async def story() -> None:
        script = Script([works])
        async with client_and(script, watches_load=True, vocabulary=VOCABULARY) as client:
            (ended,) = await rollouts(client, asking)
            assert ended.episode, ended.reason

    run(story())
    assert [status for status, _ in statuses] == [200, 400], statuses
    assert "outside of the vocabulary" in statuses[1][1]


def test_a_server_that_leaves_and_returns_does_not_distort_the_counts_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def without_metrics(http: object, endpoint: str) -> None:
        return None

    monkeypatch.setattr(cache_load, "read_metrics", without_metrics)
    first, second = Server("a:1"), Server("b:1")
    watch, http = CacheWatch(), cast(aiohttp.ClientSession, None)

    def answered(server: Server, samples: int, cached: int) -> None:
        """Responses to prompts that repeat eleven tokens, of which so many were cached, in blocks of one."""
        server.repeated += [PromptTokens(1, 11, cached)] * samples

    async def counts(*servers: Server) -> tuple[int, int]:
        load = await watch.load(http, servers)
        return load.repeated, load.cached

    async def story() -> list[tuple[int, int]]:
        answered(first, 20, 1)
        answered(second, 10, 9)
        seen = [await counts(first, second)]
        answered(second, 50, 9)
        seen.append(await counts(second))
        again = Server("a:1")
        answered(again, 25, 2)
        answered(second, 20, 5)
        seen.append(await counts(again, second))
        return seen

    assert asyncio.run(story()) == [(300, 110), (500, 450), (450, 150)]
