"""The number of groups in flight follows the servers' caches."""

import asyncio
from collections import OrderedDict
from heapq import heappop, heappush
from itertools import count

import pytest

from pipeline.rollout.concurrency_control import ConcurrencyController, ServerLoad, Slots

CACHE_TOKENS, TURNS, OPENING, GROWTH = 200_000, 8, 2000, 300
PREFILL_TOKENS_PER_SECOND, DECODE_SECONDS, TOOL_SECONDS = 20_000, 0.5, 2.0
PERIOD, SECONDS = 10.0, 1500.0
TOO_MANY = 512


class Simulation:
    """A server that computes prompts one after the other, and forgets the conversations that were used least recently.

    Attributes:
        turns, hits, prompts: turns that ended; cached tokens and prompt tokens of later turns; in this period.
    """

    def __init__(self) -> None:
        self._cache: OrderedDict[int, int] = OrderedDict()
        self._events: list[tuple[float, int, int]] = []
        self._names = count()
        self._free = 0.0
        self.running = 0
        self.turns = self.hits = self.prompts = 0

    def run(self, until: float, limit: int) -> None:
        """Simulate until then, with at most this many episodes."""
        while self._events and self._events[0][0] < until:
            now, name, turn = heappop(self._events)
            if turn:
                self.turns += 1
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
            self.hits, self.prompts = self.hits + cached, self.prompts + prompt
        self._free = max(self._free, now) + (prompt - cached) / PREFILL_TOKENS_PER_SECOND
        self._cache[name] = prompt
        while sum(self._cache.values()) > CACHE_TOKENS:
            self._cache.popitem(last=False)
        return self._free + DECODE_SECONDS + TOOL_SECONDS


def turns_per_second(controller: ConcurrencyController | int) -> tuple[float, float]:
    """Of the second half of a simulation with a controller or a fixed number; and the hit rate of later turns."""
    simulation, now = Simulation(), 0.0
    turns = hits = prompts = 0
    while now < SECONDS:
        now += PERIOD
        simulation.run(now, controller if isinstance(controller, int) else controller.limit)
        if not isinstance(controller, int):
            rate = simulation.hits / simulation.prompts if simulation.prompts else None
            controller.update(ServerLoad(simulation.running, rate))
        if now > SECONDS / 2:
            turns, hits, prompts = turns + simulation.turns, hits + simulation.hits, prompts + simulation.prompts
        simulation.turns = simulation.hits = simulation.prompts = 0
    return turns / (SECONDS / 2), hits / prompts


def test_the_controller_prevents_the_collapse_of_the_cache_and_is_near_the_best_fixed_number() -> None:
    collapsed, few_hits = turns_per_second(TOO_MANY)
    best = max(turns_per_second(number)[0] for number in (16, 32, 48, 64, 96, 128))
    adaptive, hits = turns_per_second(ConcurrencyController(TOO_MANY, start=4))
    assert few_hits < 0.1
    assert hits > 0.7
    assert adaptive > 2 * collapsed
    assert adaptive > 0.8 * best


def test_the_limit_doubles_until_the_first_overload_and_then_grows_slowly() -> None:
    controller = ConcurrencyController(most=100, start=4)
    assert [controller.update(ServerLoad(limit, 0.9)) for limit in (4, 8, 16)] == [8, 16, 32]
    assert controller.update(ServerLoad(32, 0.5)) == 25
    assert controller.update(ServerLoad(25, 0.9)) == 26
    assert controller.update(ServerLoad(26, 0.9, preemptions=1)) == 20


@pytest.mark.parametrize(
    "load",
    [ServerLoad(15, 0.9), ServerLoad(16, 0.9, kv_usage=0.95), ServerLoad(3)],
    ids=["not all slots are taken", "the cache is full", "idle"],
)
def test_the_limit_stays_where_more_groups_would_not_help(load: ServerLoad) -> None:
    assert ConcurrencyController(most=100, start=16).update(load) == 16


def test_the_limit_is_between_one_and_the_largest_number() -> None:
    controller = ConcurrencyController(most=10, start=8)
    assert controller.update(ServerLoad(8)) == 10
    for _ in range(20):
        controller.update(ServerLoad(10, preemptions=1))
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
