"""Which sample is sent to the servers next.

Owns the order of samples and how many are in flight. Promises that the session with the fewest sequences in flight goes
next, of equals the one whose turn is longest ago (round-robin), so that a flood of one holds up nobody else; that no
sample is started while `capacity` sequences are in flight; and that those of a session that is held wait until it is
released. Pure: no I/O, no clock.

    queue.capacity = 2
    queue.add("flood", "f0", 1); queue.add("flood", "f1", 1); queue.add("flood", "f2", 1); queue.add("other", "o0", 1)
    queue.next(), queue.next(), queue.next()      # f0, o0, None: two are in flight
    queue.remove("f0")
    queue.next()                                  # f1
"""

from collections import Counter, OrderedDict


class FairQueue:
    """Samples that wait or are in flight, by their ids; the size of one is its number of sequences."""

    def __init__(self) -> None:
        self.capacity = 0
        """Sequences in flight, over all servers; the last sample that is started may exceed it."""
        self._known: dict[str, tuple[str, int]] = {}
        """Session and size of each."""
        self._waiting: OrderedDict[str, OrderedDict[str, None]] = OrderedDict()
        """By session, the one that had its turn last at the end."""
        self._running: dict[str, None] = {}
        self._in_flight: Counter[str] = Counter()
        """Sequences by session."""
        self._held: set[str] = set()
        self._counts: Counter[str] = Counter()
        """Samples by session."""

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, id: str) -> bool:
        return id in self._known

    def has_any(self, session: str) -> bool:
        """Whether a session has a sample that waits or is in flight."""
        return session in self._counts

    def has_room(self, session: str, limit: int) -> bool:
        """Whether a session may add another sample where `limit` wait: beyond it, only one that has less than an equal
        share."""
        sessions = len(self._counts) + (session not in self._counts)
        return len(self) < limit or self._counts[session] < limit // sessions

    def add(self, session: str, id: str, size: int) -> None:
        """Have a sample wait for its turn."""
        self._known[id] = session, size
        self._counts[session] += 1
        self._waiting.setdefault(session, OrderedDict())[id] = None

    def remove(self, id: str) -> None:
        """Remove a request that is done or abandoned; an unknown id changes nothing."""
        if id not in self._known:
            return
        session, size = self._known.pop(id)
        _subtract(self._counts, session, 1)
        if id in self._running:
            self._stop(id, session, size)
        else:
            self._drop_waiting(session, id)

    def hold(self, session: str) -> list[str]:
        """Have no sample of a session be in flight until `release`; those that are wait again, before its others."""
        self._held.add(session)
        stopped = [id for id in self._running if self._known[id][0] == session]
        for id in stopped:
            self._stop(id, *self._known[id])
        waiting = self._waiting.setdefault(session, OrderedDict())
        for id in reversed(stopped):
            waiting[id] = None
            waiting.move_to_end(id, last=False)
        if not waiting:
            del self._waiting[session]
        return stopped

    def release(self, session: str) -> None:
        self._held.discard(session)

    def next(self) -> str | None:
        """The sample to start now; None while there is none, or as many sequences as may be are in flight."""
        ready = [session for session in self._waiting if session not in self._held]
        if not ready or self._in_flight.total() >= self.capacity:
            return None
        session = min(ready, key=lambda name: self._in_flight[name])
        id = next(iter(self._waiting[session]))
        self._waiting.move_to_end(session)
        self._drop_waiting(session, id)
        self._running[id] = None
        self._in_flight[session] += self._known[id][1]
        return id

    def _drop_waiting(self, session: str, id: str) -> None:
        self._waiting[session].pop(id)
        if not self._waiting[session]:
            del self._waiting[session]

    def _stop(self, id: str, session: str, size: int) -> None:
        del self._running[id]
        _subtract(self._in_flight, session, size)


def _subtract(counts: Counter[str], session: str, number: int) -> None:
    """Keeps no zeros."""
    counts[session] -= number
    if not counts[session]:
        del counts[session]
