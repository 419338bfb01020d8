"""How many drafted tokens servers accepted, out of their metrics."""

import asyncio
from collections.abc import Sequence

import aiohttp
import pytest

from pipeline.rollout.draft_acceptance import ACCEPTED, DRAFTED, AcceptanceRate, DraftCounts, counts_in
from tests.fakes.http_server import HttpServer, Request

TEXT = """# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.
vllm:spec_decode_num_draft_tokens_total{engine="0"} 30.0
vllm:spec_decode_num_draft_tokens_total{engine="1"} 10.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 6.0
vllm:spec_decode_num_accepted_tokens_total{engine="1"} 4.0
"""


def text(drafted: int, accepted: int) -> str:
    name = "vllm:spec_decode_num_{}_tokens_total"
    return f"{name.format('draft')} {drafted}\n{name.format('accepted')} {accepted}\n"


class Drafting(HttpServer):
    """Metrics with counts; None: it does not answer."""

    counts: tuple[int, int] | None = (0, 0)

    def respond(self, request: Request) -> tuple[int, bytes]:
        if request.route != "/metrics" or self.counts is None:
            return 503, b""
        return 200, text(*self.counts).encode()


def readings(steps: Sequence[Sequence[tuple[int, int] | None]]) -> list[dict[str, float]]:
    """The actor's numbers after each step, in which each server has these counts; shorter steps have fewer servers."""
    servers = [Drafting(f"127.0.0.{index + 2}") for index in range(len(steps[0]))]

    async def story() -> list[dict[str, float]]:
        counts, seen = DraftCounts(), []
        async with aiohttp.ClientSession() as http:
            for step in steps:
                for server, each in zip(servers, step, strict=False):
                    server.counts = each
                await counts.read(http, [server.endpoint for server in servers[: len(step)]])
                seen.append(counts.numbers())
        return seen

    for server in servers:
        server.__enter__()
    try:
        return asyncio.run(story())
    finally:
        for server in servers:
            server.__exit__(None, None, None)


def rates(steps: Sequence[Sequence[tuple[int, int] | None]]) -> list[float | None]:
    rate = AcceptanceRate()
    return [rate.take(numbers) for numbers in readings(steps)]


def test_the_counts_are_those_of_all_engines() -> None:
    assert counts_in(TEXT) == (40, 10)
    assert counts_in("# nothing was drafted yet") == (0, 0)
    assert counts_in(text(8, 9)) == (8, 8), "accepted while the first was read"


def test_the_fraction_is_that_of_the_period_and_not_since_the_servers_start() -> None:
    # 1000 of 1000 were accepted before counting began.
    assert rates([[(1000, 1000)], [(1040, 1010)], [(1040, 1010)], [(1060, 1020)]]) == [None, 0.25, None, 0.5]


def test_busy_servers_weigh_more_than_idle_ones() -> None:
    assert rates([[(0, 0), (0, 0)], [(90, 0), (10, 10)]])[-1] == 0.1


@pytest.mark.parametrize("again", [(8, 2), (32, 8), (15, 15)], ids=["fewer", "fewer accepted", "more accepted"])
def test_a_server_that_restarts_counts_from_zero(again: tuple[int, int]) -> None:
    seen = rates([[(0, 0)], [(12, 9)], [None], [again], [(again[0] + 10, again[1])]])
    assert seen == [None, 0.75, None, again[1] / again[0], 0.0]


def test_what_a_server_drafted_while_it_did_not_answer_is_counted_with_its_next_answer() -> None:
    assert rates([[(0, 0)], [(10, 5)], [None], [(30, 10)]]) == [None, 0.5, None, 0.25]


def test_the_counts_of_a_server_that_left_stay_and_one_that_returns_begins_anew() -> None:
    seen = readings([[(0, 0), (0, 0)], [(10, 1), (10, 9)], [(20, 2)], [(20, 2), (4, 4)], [(20, 2), (6, 5)]])
    assert [numbers.get(DRAFTED, 0) for numbers in seen] == [0, 20, 30, 30, 32]
    assert [numbers.get(ACCEPTED, 0) for numbers in seen] == [0, 10, 11, 11, 12]


def test_an_actor_that_restarts_counts_from_zero() -> None:
    rate = AcceptanceRate()
    assert rate.take({DRAFTED: 100, ACCEPTED: 20}) == 0.2
    assert rate.take({}) is None, "its first reading"
    assert rate.take({DRAFTED: 10, ACCEPTED: 8}) == 0.8
    assert rate.take({DRAFTED: 20, ACCEPTED: 8}) == 0.0
