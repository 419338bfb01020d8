"""How many drafted tokens servers accepted, out of their metrics."""

import asyncio

import aiohttp

from pipeline.rollout.draft_acceptance import DraftAcceptance
from tests.fakes.http_server import HttpServer, Request

TEXT = """# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.
vllm:spec_decode_num_draft_tokens_total{engine="0"} 30.0
vllm:spec_decode_num_draft_tokens_total{engine="1"} 10.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 6.0
vllm:spec_decode_num_accepted_tokens_total{engine="1"} 4.0
"""


class Drafting(HttpServer):
    text = TEXT

    def respond(self, request: Request) -> tuple[int, bytes]:
        return (200, self.text.encode()) if request.route == "/metrics" else (404, b"")


def test_the_accepted_fraction_is_that_of_all_engines_since_the_servers_start() -> None:
    async def story(endpoint: str, silent: str) -> list[dict[str, float]]:
        acceptance, seen = DraftAcceptance(), []
        async with aiohttp.ClientSession() as http:
            for Drafting.text in (TEXT, "", TEXT.replace(" 6.0", " 16.0")):
                await acceptance.read(http, [endpoint, silent])
                seen.append(dict(acceptance.fractions))
        return seen

    with Drafting("127.0.0.2") as server:
        # The second one reports no drafts, so its last number stays; nobody listens on the other endpoint.
        assert asyncio.run(story(server.endpoint, "127.0.0.2:1")) == [
            {server.endpoint: 0.25},
            {server.endpoint: 0.25},
            {server.endpoint: 0.5},
        ]


def test_a_server_that_has_left_counts_no_longer() -> None:
    async def scenario(stays: str, leaves: str) -> list[set[str]]:
        acceptance, seen = DraftAcceptance(), []
        async with aiohttp.ClientSession() as http:
            for endpoints in ([stays, leaves], [stays]):
                await acceptance.read(http, endpoints)
                seen.append({*acceptance.fractions})
        return seen

    Drafting.text = TEXT
    with Drafting("127.0.0.2") as first, Drafting("127.0.0.3") as second:
        before, after = asyncio.run(scenario(first.endpoint, second.endpoint))
    assert before == {first.endpoint, second.endpoint}
    assert after == {first.endpoint}
