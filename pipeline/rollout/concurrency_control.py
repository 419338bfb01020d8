"""How many groups are in flight, if that follows the load of the servers (`rollout.adaptive_concurrency`).

Owns the controller, and the number of slots that it sets. With too many multi-turn episodes in flight, the prefix of
one is evicted from the KV cache while the others have their turns, so every turn computes its whole conversation again:
throughput collapses, and stays so (prime-rl#3255 reports a hit rate that fell from 98 to 5 %). With too few, servers
idle. The controller is that of TCP (Jacobson 1988, doi:10.1145/52324.52356): the limit doubles until the first sign of
overload, then grows by a sixteenth, and is cut at each sign. As TCP counts round trips, it counts turns: a limit is
judged by the turns that were answered under it, however slow the servers are; and only once as few groups are in flight
as it allows, since a cut takes effect as groups end. Recovery from a collapse takes as long, so the limit stays below
the last one with a sign of overload. Must not know servers, streams or time.

    controller = ConcurrencyController(max_groups=512, start=8, group=8)
    limit = controller.update(ServerLoad(in_flight=8, answered=128, continued=64, repeated=90_000, cached=88_000))
"""

import asyncio
from dataclasses import dataclass

TURNS_SEEN = 4
"""Turns of each sample in flight, in the mean, by which a limit is judged."""
MIN_CONTINUED = 16
"""Later turns from which their hit rate means something."""
OVERLOADED_HITS = 0.8
"""Later turns repeat the turn before. Fewer hits than this fraction of the repeated tokens are a sign of overload."""
FULL = 0.9
"""The fraction of the KV cache in use by running requests from which the limit does not grow."""
DECAY = 0.995
"""The ceiling is divided by this where the limit may grow: tasks and lengths change during a run."""
BELOW_CEILING = 0.8
"""The largest limit to which it grows, relative to the ceiling: the last number of groups with a sign of overload."""
CUT, MAX_CUT, GROWTH = 0.8, 0.5, 1 / 16


@dataclass(frozen=True)
class ServerLoad:
    """The load of a period, over all servers.

    Attributes:
        in_flight: groups in flight at its end.
        answered: turns that were answered, of all samples.
        continued: those of them that continue an episode or a sample on the same server.
        repeated, cached: prompt tokens that this server computed for the turn before, and how many of these were in its
            prefix cache.
        kv_usage: fraction of the KV cache that running requests use, of the fullest server.
        preemptions: requests that a server stopped for lack of KV cache, and computes again.
    """

    in_flight: int
    answered: int = 0
    continued: int = 0
    repeated: int = 0
    cached: int = 0
    kv_usage: float = 0.0
    preemptions: int = 0


class ConcurrencyController:
    """The limit of groups in flight, between 1 and `max_groups`."""

    def __init__(self, max_groups: int, start: int, group: int = 1) -> None:
        """`group` is the number of samples of a group."""
        self.limit = min(max_groups, max(1, start))
        self._max_groups, self._group = max_groups, group
        self._ceiling: float | None = None
        self._peak, self._answered, self._continued, self._repeated, self._cached = 0, 0, 0, 0, 0

    def update(self, load: ServerLoad) -> int:
        """The limit after a period with this load."""
        if load.in_flight > self.limit:
            self._clear()
            return self.limit
        self._peak = max(self._peak, load.in_flight)
        self._answered += load.answered
        self._continued += load.continued
        self._repeated += load.repeated
        self._cached += load.cached
        if load.preemptions:
            self._cut(CUT)
        elif self._is_known():
            self._judge(load)
        return self.limit

    def _clear(self) -> None:
        self._peak, self._answered, self._continued, self._repeated, self._cached = 0, 0, 0, 0, 0

    def _is_known(self) -> bool:
        """Whether enough turns were answered under this limit. Tasks of one turn have no later ones."""
        enough = self._answered >= TURNS_SEEN * self._group * self.limit
        return enough and (not self._continued or self._continued >= MIN_CONTINUED)

    def _judge(self, load: ServerLoad) -> None:
        hit_rate = self._cached / self._repeated if self._repeated else 1.0
        if hit_rate < OVERLOADED_HITS:
            # The part of the conversations that is still in the caches is about the part that fits.
            self._cut(max(MAX_CUT, hit_rate))
        else:
            self._grow(load)

    def _grow(self, load: ServerLoad) -> None:
        self._clear()
        if load.in_flight < self.limit or load.kv_usage >= FULL:
            return
        if self._ceiling is None:
            self.limit = min(self._max_groups, 2 * self.limit)
            return
        self._ceiling /= DECAY
        highest = min(self._max_groups, int(BELOW_CEILING * self._ceiling))
        self.limit = max(self.limit, min(highest, self.limit + max(1, int(GROWTH * self.limit))))

    def _cut(self, factor: float) -> None:
        """Cut the limit, or the largest number of groups that were in flight under it."""
        used = min(self.limit, self._peak or self.limit)
        self._ceiling = float(used)
        self.limit = max(1, int(factor * used))
        self._clear()


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
