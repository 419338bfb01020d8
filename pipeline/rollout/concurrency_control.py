"""How many groups are in flight, if that follows the load of the servers (`rollout.adaptive_concurrency`).

Owns the controller, and the number of slots that it sets. With too many multi-turn episodes in flight, the prefix of
one is evicted from the KV cache while the others have their turns, so every turn computes its whole conversation again:
throughput collapses, and stays so (prime-rl#3255 reports a hit rate that fell from 98 to 5 %). With too few, servers
idle. The controller is that of TCP (Jacobson 1988, doi:10.1145/52324.52356): it doubles the limit until the first sign
of overload, then adds a sixteenth in each period without one, and cuts the limit by a fifth in each period with one.
Must not know servers, streams or time.

    controller = ConcurrencyController(most=512, start=8)
    limit = controller.update(ServerLoad(in_flight=8, hit_rate=0.97, kv_usage=0.4, preemptions=0))
"""

import asyncio
from dataclasses import dataclass

OVERLOADED_HITS = 0.8
"""A hit rate of later turns below this fraction of the best one is a sign of overload."""
FULL = 0.9
"""The fraction of the KV cache in use by running requests from which the limit does not grow."""
FORGOTTEN = 0.99
"""The best hit rate is multiplied by this in each period: tasks and lengths change during a run."""
CUT, GROWTH = 0.8, 1 / 16


@dataclass(frozen=True)
class ServerLoad:
    """The load of a period.

    Attributes:
        in_flight: groups in flight at its end.
        hit_rate: fraction of the prompt tokens of later turns that were in a prefix cache; None after too few turns.
        kv_usage: fraction of the KV cache that running requests use, of the fullest server.
        preemptions: requests that a server stopped for lack of KV cache, and computes again.
    """

    in_flight: int
    hit_rate: float | None = None
    kv_usage: float = 0.0
    preemptions: int = 0


class ConcurrencyController:
    """The limit of groups in flight, between 1 and `most`."""

    def __init__(self, most: int, start: int) -> None:
        self.limit = min(most, max(1, start))
        self._most, self._best, self._doubles = most, 0.0, True

    def update(self, load: ServerLoad) -> int:
        """The limit after a period with this load."""
        if self._is_overloaded(load):
            self._doubles = False
            self.limit = max(1, int(CUT * min(self.limit, load.in_flight)))
        elif load.in_flight >= self.limit and load.kv_usage < FULL:
            growth = self.limit if self._doubles else max(1, int(GROWTH * self.limit))
            self.limit = min(self._most, self.limit + growth)
        return self.limit

    def _is_overloaded(self, load: ServerLoad) -> bool:
        self._best = max(FORGOTTEN * self._best, load.hit_rate or 0.0)
        evicted = load.hit_rate is not None and load.hit_rate < OVERLOADED_HITS * self._best
        return evicted or load.preemptions > 0


class Slots:
    """A semaphore whose number of slots may change; used by one event loop.

    await slots.acquire()
    slots.set_limit(8)      # those beyond it that are taken stay so until they are released
    slots.release()
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._taken = limit, 0
        self._changed = asyncio.Event()

    @property
    def limit(self) -> int:
        return self._limit

    async def acquire(self) -> None:
        while self._taken >= self._limit:
            self._changed.clear()
            await self._changed.wait()
        self._taken += 1

    def release(self) -> None:
        self._taken -= 1
        self._changed.set()

    def set_limit(self, limit: int) -> None:
        self._limit = limit
        self._changed.set()
