"""The load of the servers' caches, as servers report it and responses show it."""

import asyncio
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web

from pipeline.rollout import cache_load
from pipeline.rollout.cache_load import CacheLoad, CacheWatch, block_size, values
from pipeline.rollout.generate_wire import ROUTE
from pipeline.rollout.server_client import PromptTokens, Server
from tests.fakes.async_server import ADDRESS, serving
from tests.fakes.scripted_server import Script, answer, ask, choice, client_and, reports, run

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


def test_the_size_of_a_block_is_among_the_labels_of_a_metric() -> None:
    assert block_size(METRICS % 3) == 16
    labels = 'hash_block_size="None",mamba_block_size="512"'
    assert block_size(f"vllm:cache_config_info{{{labels}}} 1.0") == 1, "unknown"
    labels += ',block_size="16",cache_hit_alignment_tokens="64"'
    assert block_size(f"vllm:cache_config_info{{{labels}}} 1.0") == 64
    assert block_size("") == 1
    labels += ',enable_prefix_caching="False"'
    assert block_size(f"vllm:cache_config_info{{{labels}}} 1.0") is None


def test_a_server_without_a_prefix_cache_has_no_hit_rate() -> None:
    """Its responses report that no token was cached, which is no sign of overload."""
    script = Script([reports({"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 0}})])

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text='vllm:cache_config_info{block_size="16",enable_prefix_caching="False"} 1.0')

    async def story() -> CacheLoad:
        async with serving({"/metrics": metrics, ROUTE: script.respond}) as port, client_and(script) as client:
            client.update(endpoint := f"{ADDRESS}:{port}", 5)
            await ask(client, cached_on=endpoint, cached_at=5, repeats=60)
            return await client.load()

    assert run(story()) == CacheLoad(answered=1, continued=1, repeated=0, cached=0)


def test_a_load_is_that_of_the_period_since_the_last_one() -> None:
    usage = {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 48}}
    script, total = Script([reports(usage)]), [2.0]

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text=METRICS % total[0])

    async def story() -> list[CacheLoad]:
        async with serving({"/metrics": metrics, ROUTE: script.respond}) as port, client_and(script) as client:
            client.update(endpoint := f"{ADDRESS}:{port}", 5)
            loads = [await client.load()]
            total[0] += 4
            for _ in range(2):
                await ask(client, cached_on=endpoint, cached_at=5, repeats=60)
            loads += [await client.load(), await client.load()]
            return loads

    assert run(story()) == [
        CacheLoad(kv_usage=0.5),
        CacheLoad(answered=2, continued=2, repeated=2 * (60 - 16), cached=2 * 48, kv_usage=0.5, preemptions=4),
        CacheLoad(kv_usage=0.5),
    ]


@pytest.mark.parametrize(
    ("turn", "continued"),
    [
        ({"cached_at": 5}, 1),
        ({"cached_at": 4}, 0),
        ({"cached_at": 5, "cached_on": "127.0.0.9:1"}, 0),
        ({"cached_at": 5, "cached_on": ""}, 0),
        ({"cached_at": 5, "repeats": 0}, 0),
    ],
    ids=["the same weights", "an update", "another server", "a first turn", "nothing repeated"],
)
def test_only_tokens_that_could_be_in_a_cache_count(turn: dict[str, Any], continued: int) -> None:
    script = Script([reports({"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 48}})])

    async def story() -> CacheLoad:
        async with client_and(script) as client:
            await ask(client, **{"cached_on": script.endpoint, "repeats": 60} | turn)
            return await client.load()

    assert run(story()).continued == continued


@pytest.mark.parametrize(("keeps", "continued"), [(True, 1), (False, 0)])
def test_a_piece_after_an_update_counts_if_updates_keep_the_cache(keeps: bool, continued: int) -> None:
    async def story() -> CacheLoad:
        async def aborted(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
            client.update(script.endpoint, 5)
            return answer(choice([7], "abort", version="4"))

        script = Script([aborted, reports({"prompt_tokens": 4, "prompt_tokens_details": {"cached_tokens": 0}})])
        async with client_and(script, keeps_prefixes=keeps) as client:
            client.update(script.endpoint, 4)
            await ask(client, cached_at=4)
            return await client.load()

    assert run(story()).continued == continued


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
        server.repeated += PromptTokens(samples, 11 * samples, cached * samples)

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
