"""In which order the requests of a model are done.

Owns the rule: by their numbers, however they arrive. Promises that a request is handed out once for each trainer that
comes, that what a client retries changes nothing, and that a number which never comes holds the model up for
`GAP_SECONDS` at most: numbers are lost when a client abandons a submission. Pure: no I/O, no clock.

    queue.add(3, now); queue.add(1, now)
    queue.next(now)          # 1
    queue.next(now)          # None: 2 is awaited
    queue.add(2, now)
    queue.next(now)          # 2, then 3
"""

from heapq import heappop, heappush

GAP_SECONDS = 360.0
"""The SDK gives a submission up after 300 s."""


class ModelQueue:
    """The requests of one model that are to be done, by number."""

    def __init__(self, first: int = 0) -> None:
        """`first` is the number of the first request that is awaited."""
        self.awaited = first
        self._known: set[int] = set()
        self._waiting: list[int] = []
        self._gap_since: float | None = None
        self._sure = first

    def restart(self, first: int, known: list[int]) -> None:
        """A trainer came that has everything before `first` behind it; `known` are all that are to be done from there.

        Numbers up to the highest one that was ever handed out are not waited for again, if they are not known by now.
        """
        self._sure = max(self._sure, self.awaited)
        self.awaited, self._known, self._waiting, self._gap_since = first, set(), [], None
        for number in known:
            if number >= first:
                self._known.add(number)
                heappush(self._waiting, number)

    def takes(self, number: int) -> bool:
        """Whether a new request may have this number: none after it was handed out, to this trainer or another."""
        return number >= max(self.awaited, self._sure)

    def add(self, number: int, now: float) -> None:
        """Note a request that it `takes`; a second time changes nothing."""
        if number in self._known or not self.takes(number):
            return
        self._known.add(number)
        heappush(self._waiting, number)
        self._gap_since = now if self._gap_since is None else self._gap_since

    def next(self, now: float) -> int | None:
        """The next request to do; None while there is none, or one before it is awaited."""
        if not self._waiting:
            self._gap_since = None
            return None
        first = self._waiting[0]
        if first > self.awaited and first >= self._sure:
            if self._gap_since is None:
                self._gap_since = now
            if now - self._gap_since < GAP_SECONDS:
                return None
        self._gap_since = None
        heappop(self._waiting)
        self._known.discard(first)
        self.awaited = first + 1
        return first

    def clear(self) -> None:
        """Have nothing wait: what was added and not handed out is not done."""
        self._known.clear()
        self._waiting.clear()

    @property
    def ready(self) -> int | None:
        """The number of the request that `next` would give, if it is the one that is awaited."""
        return self.awaited if self._waiting and self._waiting[0] == self.awaited else None

    @property
    def idle(self) -> bool:
        """Whether nothing waits."""
        return not self._waiting
