"""The order in which positions are issued.

Owns the order: first the missing positions of the past (lost with an actor, or refused by the trainer), then new ones.
Pure: it knows neither prompts nor time.

Invariant: a position is pending, or issued, or not yet reached by `_next`. `outstanding` counts positions that are
issued and not yet marked done by the trainer, which `pipeline.transport.staleness` bounds.
"""

import heapq
from collections.abc import Container, Iterable


class IssueQueue:
    """Hands out positions, the smallest first."""

    def __init__(self, missing: Iterable[int], first_new: int) -> None:
        """`missing` positions below `first_new` are issued first, see `Ledger.unissued`."""
        self._pending = sorted(set(missing))
        self._next = first_new

    def again(self, position: int) -> bool:
        """Issue a position again; False when it is already pending."""
        if position >= self._next or position in self._pending:
            return False
        heapq.heappush(self._pending, position)
        return True

    def lost(self, missing: Iterable[int], first_new: int, held: Container[int]) -> int:
        """Issue lost positions again: `missing`, and all positions issued from `first_new` on, except the `held` ones.

        Returns the number of positions added.
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
        """The number of positions issued and not yet done, where `done` is the trainer's total; never negative."""
        return max(0, self._next - len(self._pending) - done)
