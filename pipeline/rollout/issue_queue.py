"""Which position is issued next.

Owns the order of issue: first what is missing among the positions of the past (lost with an actor, or refused by the
trainer), then new ones. Pure: it knows neither prompts nor time.

Invariant: a position is pending, or issued, or not yet reached by `next`. `outstanding` counts those issued and not yet
settled by the trainer, which is what `pipeline.transport.staleness` bounds.
"""

import heapq
from collections.abc import Container, Iterable


class IssueQueue:
    """Hands out positions, the smallest first."""

    def __init__(self, missing: Iterable[int], first_new: int) -> None:
        """`missing` positions below `first_new` go first, see `Ledger.unissued`."""
        self._pending = sorted(set(missing))
        self._next = first_new

    def again(self, position: int) -> bool:
        """Issue a position once more; False when it waits for its turn already."""
        if position >= self._next or position in self._pending:
            return False
        heapq.heappush(self._pending, position)
        return True

    def lost(self, missing: Iterable[int], first_new: int, held: Container[int]) -> int:
        """Issue once more what went missing: `missing`, and all that was issued from `first_new` on, less the `held`.

        Returns how many they are.
        """
        gone = [position for position in (*missing, *range(first_new, self._next)) if position not in held]
        return sum(map(self.again, gone))

    def take(self) -> int:
        """The next position to issue."""
        if self._pending:
            return heapq.heappop(self._pending)
        self._next += 1
        return self._next - 1

    def outstanding(self, done: int) -> int:
        """Positions issued and not settled, when the trainer has settled `settled` in all; never negative."""
        return max(0, self._next - len(self._pending) - done)
