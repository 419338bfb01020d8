"""The number of groups in flight follows the servers' caches."""

import asyncio
import math
from collections import OrderedDict
from heapq import heappop, heappush
from itertools import count
from typing import Any

import pytest

from pipeline.rollout.concurrency_control import (
    MIN_CONTINUED,
    TURNS_SEEN,
    ConcurrencyController,
    ServerLoad,
    Slots,
)

CACHE_TOKENS, TURNS, OPENING, GROWTH = 200_000, 8, 2000, 300
PREFILL_TOKENS_PER_SECOND, DECODE_SECONDS, TOOL_SECONDS = 20_000, 0.5, 2.0
PERIOD, SECONDS = 5.0, 1500.0
TOO_MANY = 512


class Simulation:
    """A server that computes prompts one after the other, and forgets the conversations that were used least recently.

    Attributes:
        turns, later, hits, repeated: turns that were answered, and the later ones of an episode among them; cached
            tokens of the latter, and those that the turn before has computed; in this period.
    """

    def __init__(self, speed: float = 1.0) -> None:
        self._prefill = speed * PREFILL_TOKENS_PER_SECOND
        self._cache: OrderedDict[int, int] = OrderedDict()
        self._events: list[tuple[float, int, int]] = []
        self._names = count()
        self._free = 0.0
        self.running = 0
        self.begin_period()

    def begin_period(self) -> None:
        self.turns = self.later = self.hits = self.repeated = 0

    def run(self, until: float, limit: int) -> None:
        """Simulate until then, with at most this many episodes."""
        while self._events and self._events[0][0] < until:
            now, name, turn = heappop(self._events)
            if turn:
                self.turns += 1
                self.later += turn > 1
            if turn == TURNS:
                self._cache.pop(name, None)
                self.running -= 1
                self._begin(now, limit)
            else:
                heappush(self._events, (self._answered(now, name, turn), name, turn + 1))
        self._begin(until, limit)

    def _begin(self, now: float, limit: int) -> None:
        while self.running < limit:
            self.running += 1
            heappush(self._events, (now, next(self._names), 0))

    def _answered(self, now: float, name: int, turn: int) -> float:
        """When a turn that is asked for now is answered, and its tool has run."""
        prompt = OPENING + turn * GROWTH
        cached = self._cache.pop(name, 0)
        if turn:
            self.hits, self.repeated = self.hits + cached, self.repeated + prompt - GROWTH
        self._free = max(self._free, now) + (prompt - cached) / self._prefill
        self._cache[name] = prompt
        while sum(self._cache.values()) > CACHE_TOKENS:
            self._cache.popitem(last=False)
        return self._free + DECODE_SECONDS + TOOL_SECONDS


def turns_per_second(
    controller: ConcurrencyController | int, speed: float = 1.0, seconds: float = SECONDS, group: int = 1
) -> tuple[float, float]:
    """Of the second half of a simulation with a controller or a fixed number of groups, of `group` episodes each; and
    the fraction of repeated tokens that later turns found in the cache."""
    simulation, now = Simulation(speed), 0.0
    turns = hits = repeated = 0
    while now < seconds:
        now += PERIOD
        simulation.run(now, group * (controller if isinstance(controller, int) else controller.limit))
        if not isinstance(controller, int):
            counts = simulation.turns, simulation.later, simulation.repeated, simulation.hits
            controller.update(ServerLoad(math.ceil(simulation.running / group), *counts))
        if now > seconds / 2:
            turns, hits = turns + simulation.turns, hits + simulation.hits
            repeated += simulation.repeated
        simulation.begin_period()
    return turns / (seconds / 2), hits / repeated


def known(limit: int, hit_rate: float = 0.9, **others: Any) -> ServerLoad:
    """A period in which enough turns were answered to judge a limit that is used in full."""
    repeated = 1000 * (turns := max(MIN_CONTINUED, TURNS_SEEN * limit))
    return ServerLoad(limit, turns, turns, repeated, int(hit_rate * repeated), **others)


def test_the_controller_prevents_the_collapse_of_the_cache_and_is_near_the_best_fixed_number() -> None:
    collapsed, few_hits = turns_per_second(TOO_MANY)
    best = max(turns_per_second(number)[0] for number in (16, 32, 48, 64, 96, 128))
    adaptive, hits = turns_per_second(ConcurrencyController(TOO_MANY, start=4))
    assert few_hits < 0.1
    assert hits > 0.9
    assert adaptive > 2 * collapsed
    assert adaptive > 0.8 * best


def test_a_slow_server_does_not_collapse_before_its_hit_rate_is_known() -> None:
    """A period of it has a tenth of the turns that are in flight."""
    slow = {"speed": 1 / 20, "seconds": 12_000.0}
    collapsed, _ = turns_per_second(64, **slow)
    adaptive, hits = turns_per_second(ConcurrencyController(TOO_MANY, start=4), **slow)
    assert hits > 0.9
    assert adaptive > 0.8 * max(turns_per_second(number, **slow)[0] for number in (8, 16, 32, 48))
    assert adaptive > 2 * collapsed


def test_a_run_that_begins_overloaded_descends_first() -> None:
    """Eight groups of sixteen episodes are more than twice what the cache has room for."""
    collapsed, _ = turns_per_second(8, group=16)
    adaptive, hits = turns_per_second(ConcurrencyController(TOO_MANY, start=8, group=16), group=16)
    assert hits > 0.9
    assert adaptive > 1.5 * collapsed


def test_the_first_hit_rate_is_a_sign_of_overload_too() -> None:
    """Whatever the first limit, all repeated tokens could have been in the cache."""
    controller = ConcurrencyController(max_groups=100, start=8)
    assert [controller.update(known(limit, 0.6)) for limit in (8, 4)] == [4, 2]


def test_turns_that_repeat_less_than_a_block_have_no_hit_rate() -> None:
    turns = TURNS_SEEN * 8
    assert ConcurrencyController(max_groups=100, start=8).update(ServerLoad(8, turns, turns, repeated=0)) == 16


def test_the_limit_recovers_from_a_sign_of_overload_in_a_moment_with_few_groups() -> None:
    controller = ConcurrencyController(max_groups=100, start=64)
    controller.update(ServerLoad(60))
    assert controller.update(ServerLoad(0, preemptions=1)) == 48
    controller = ConcurrencyController(max_groups=100, start=8)
    assert controller.update(ServerLoad(0, preemptions=1)) == 6
    assert controller.update(ServerLoad(1, preemptions=1)) == 1
    for _ in range(3000):
        controller.update(known(controller.limit))
    assert controller.limit > 50


def test_the_limit_doubles_until_the_first_overload_and_then_grows_slowly() -> None:
    controller = ConcurrencyController(max_groups=100, start=4)
    assert [controller.update(known(limit)) for limit in (4, 8, 16)] == [8, 16, 32]
    assert controller.update(known(32, 0.7)) == 22, "by the part of the repeated tokens that is left"
    assert controller.update(known(22)) == 23
    assert controller.update(known(23, preemptions=1)) == 18
    assert controller.update(known(18)) == 18, "four fifths of the last limit with a sign of overload"
    assert controller.update(known(18, 0.1)) == 9, "a half at most"


def test_a_limit_is_judged_by_the_turns_that_were_answered_under_it() -> None:
    controller = ConcurrencyController(max_groups=100, start=16, group=2)
    few = ServerLoad(16, answered=30, continued=20, repeated=20_000, cached=18_000)
    assert [controller.update(few) for _ in range(5)] == [16] * 4 + [32], "128 turns of 32 samples"
    assert controller.update(few) == 32, "only half of the groups that it allows have begun"
    assert [controller.update(ServerLoad(32, 30, 20, 20_000, 2_000)) for _ in range(8)] == [32] * 7 + [16]
    assert [controller.update(known(20, 0.0)) for _ in range(5)] == [16] * 5, "more groups than that are still at work"
    assert ConcurrencyController(100, 16).update(ServerLoad(16, 500, MIN_CONTINUED - 1, 1000, 0)) == 16


def test_tasks_of_one_turn_have_no_hit_rate_and_may_have_more_groups() -> None:
    assert ConcurrencyController(max_groups=100, start=16, group=8).update(ServerLoad(16, answered=4 * 8 * 16)) == 32


@pytest.mark.parametrize(
    "load",
    [ServerLoad(15, 500), ServerLoad(16, 500, kv_usage=0.95), ServerLoad(3)],
    ids=["not all slots are taken", "the cache is full", "idle"],
)
def test_the_limit_stays_where_more_groups_would_not_help(load: ServerLoad) -> None:
    assert ConcurrencyController(max_groups=100, start=16).update(load) == 16


def test_the_limit_is_between_one_and_the_largest_number() -> None:
    controller = ConcurrencyController(max_groups=10, start=8)
    assert controller.update(known(8)) == 10
    for _ in range(20):
        controller.update(ServerLoad(controller.limit, preemptions=1))
    assert controller.limit == 1


def test_slots_that_are_taken_stay_so_when_their_number_falls() -> None:
    async def story() -> list[int]:
        slots, inside, most = Slots(4), 0, []

        async def work() -> None:
            nonlocal inside
            await slots.acquire()
            inside += 1
            most.append(inside)
            await asyncio.sleep(0.01)
            inside -= 1
            slots.release()

        first = [asyncio.create_task(work()) for _ in range(4)]
        await asyncio.sleep(0)
        slots.set_limit(1)
        await asyncio.gather(*first, *(work() for _ in range(3)))
        slots.set_limit(3)
        await asyncio.gather(*(work() for _ in range(3)))
        return most

    assert asyncio.run(story()) == [1, 2, 3, 4, 1, 1, 1, 1, 2, 3]
