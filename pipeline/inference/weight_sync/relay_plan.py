"""Which server gets the weights from which: the trainer sends them to one, and servers forward them in a tree.

Owns the tree of the servers that a trainer updates, and the newest version that each of them has begun to receive.
Promises that no server has more than `fanout` children, that the last server substitutes for one that fails or leaves,
and that only the children of these two get another source. A child that its source cannot feed gets the weights from
the trainer for `REFUSED_SECONDS`, and no other server moves. Thread-safe. Must not know transports.

    plan = RelayPlan(fanout=2)
    plan.join("a:1"), plan.join("b:1"), plan.join("c:1")
    plan.source_of("c:1")                       # "a:1"; None for "a:1": the trainer
    plan.demote("a:1", "c:1")                   # "c:1" substitutes for it, and "a:1" becomes the last one
"""

from threading import Condition, Lock

from pipeline.utils.waiting import CLOCK, Clock, Deadline

REFUSED_SECONDS = 1800.0
"""How long a pair of servers is remembered. Each trial of a pair that cannot connect costs half of an update."""


class RelayPlan:
    """A tree of servers by their order: number n has its children at `fanout` × n + 1 and the following numbers."""

    def __init__(self, fanout: int, clock: Clock = CLOCK) -> None:
        """`fanout` is the most children of a server; 0: the trainer sends to every server itself."""
        self.fanout, self._lock, self._clock = fanout, Lock(), clock
        self._servers: list[str] = []
        self._numbers: dict[str, int] = {}
        self._begun: dict[str, int] = {}
        # For each child the last source that could not feed it, and when the pair is tried again.
        self._refused: dict[str, tuple[str, Deadline]] = {}
        # One for each source, so that a server wakes only the threads of its children.
        self._waits: dict[str, Condition] = {}

    def join(self, server: str) -> None:
        """Add a server that can receive, unless it has joined."""
        with self._lock:
            if self.fanout and server not in self._numbers:
                self._append(server)

    def leave(self, server: str) -> None:
        """Remove a server that failed or left, and forget whom it could not feed: it may return as another process."""
        with self._lock:
            self._begun.pop(server, None)
            pairs = self._refused.items()
            self._refused = {child: pair for child, pair in pairs if server not in (child, pair[0])}
            if server in self._numbers:
                self._remove(server)
                self._wake_all()

    def demote(self, source: str, child: str) -> None:
        """Make a source that failed one of its children the last server; nothing if it is not the child's source any
        more."""
        with self._lock:
            if self._source_of(child) == source:
                self._remove(source)
                self._append(source)
                self._wake_all()

    def refuse(self, source: str, child: str) -> None:
        """Have the trainer send to a child whose source works and cannot feed it: the two do not reach each other, or
        the child is slow."""
        with self._lock:
            again = Deadline(f"another trial of {source} and {child}", REFUSED_SECONDS, self._clock)
            self._refused[child] = source, again

    def source_of(self, server: str) -> str | None:
        """The server that forwards the weights to this one; None: the trainer sends them."""
        with self._lock:
            return self._source_of(server)

    def note_begun(self, server: str, version: int) -> None:
        """Record that a server receives a version now, or has it."""
        with self._lock:
            self._begun[server] = version
            if server in self._waits:
                self._waits[server].notify_all()

    def note_lost(self, server: str) -> None:
        """Record that a server does not receive its version any more, and forwards none until it begins again."""
        with self._lock:
            self._begun.pop(server, None)

    def await_begun(self, source: str, server: str, version: int, seconds: float) -> bool:
        """Wait until the source of a server has begun to receive a version. False if it is not its source any more, has
        begun a later one, or has not begun within `seconds`."""

        def is_decided() -> bool:
            return self._begun.get(source, version - 1) >= version or self._source_of(server) != source

        with self._lock:
            self._waits.setdefault(source, Condition(self._lock)).wait_for(is_decided, seconds)
            return self._begun.get(source) == version and self._source_of(server) == source

    def _source_of(self, server: str) -> str | None:
        number = self._numbers.get(server, 0)
        if not number:
            return None
        source = self._servers[(number - 1) // self.fanout]
        pair = self._refused.get(server)
        return None if pair and pair[0] == source and not pair[1].passed else source

    def _append(self, server: str) -> None:
        self._numbers[server] = len(self._servers)
        self._servers.append(server)

    def _remove(self, server: str) -> None:
        """Remove a server; the last one gets its number."""
        number, last = self._numbers.pop(server), self._servers.pop()
        if last != server:
            self._servers[number], self._numbers[last] = last, number

    def _wake_all(self) -> None:
        for wait in self._waits.values():
            wait.notify_all()
