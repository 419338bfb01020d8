"""Which server gets the weights from which: the trainer sends them to one, and servers forward them in a tree.

Owns the tree of the servers that a trainer updates, and the newest version that each of them has begun to receive.
Promises that no server has more than `fanout` children, that the place of a server which fails or leaves is taken by
the last one, and that only the children of these two get another source. Thread-safe. Must not know transports.

    plan = RelayPlan(fanout=2)
    plan.join("a:1"), plan.join("b:1"), plan.join("c:1")
    plan.source_of("c:1")                       # "a:1"; None for "a:1": the trainer
    plan.demote("a:1", "c:1")                   # "c:1" takes its place, and "a:1" becomes the last one
"""

from threading import Condition


class RelayPlan:
    """A tree of servers by their order: that at place p has its children at `fanout` × p + 1 and the following ones."""

    def __init__(self, fanout: int) -> None:
        """`fanout` is the most children of a server; 0: the trainer sends to every server itself."""
        self.fanout, self._changed = fanout, Condition()
        self._servers: list[str] = []
        self._begun: dict[str, int] = {}

    def join(self, server: str) -> None:
        """Add a server that can receive, unless it has joined."""
        with self._changed:
            if self.fanout and server not in self._servers:
                self._servers.append(server)

    def leave(self, server: str) -> None:
        """Remove a server that failed or left."""
        with self._changed:
            self._begun.pop(server, None)
            if server in self._servers:
                self._replace(server)
            self._changed.notify_all()

    def demote(self, source: str, child: str) -> None:
        """Make a source that failed one of its children the last server; nothing if it is not the child's source any
        more."""
        with self._changed:
            if self._source_of(child) == source:
                self._replace(source)
                self._servers.append(source)
                self._changed.notify_all()

    def source_of(self, server: str) -> str | None:
        """The server that forwards the weights to this one; None: the trainer sends them."""
        with self._changed:
            return self._source_of(server)

    def note_begun(self, server: str, version: int) -> None:
        """Record that a server receives a version now, or has it."""
        with self._changed:
            self._begun[server] = version
            self._changed.notify_all()

    def note_lost(self, server: str) -> None:
        """Record that a server does not receive its version any more, and forwards none until it begins again."""
        with self._changed:
            self._begun.pop(server, None)

    def await_begun(self, source: str, server: str, version: int, seconds: float) -> bool:
        """Wait until the source of a server has begun to receive a version. False if it is not its source any more, has
        begun a later one, or has not begun within `seconds`."""

        def is_decided() -> bool:
            return self._begun.get(source, version - 1) >= version or self._source_of(server) != source

        with self._changed:
            self._changed.wait_for(is_decided, seconds)
            return self._begun.get(source) == version and self._source_of(server) == source

    def _source_of(self, server: str) -> str | None:
        if server not in self._servers or not (place := self._servers.index(server)):
            return None
        return self._servers[(place - 1) // self.fanout]

    def _replace(self, server: str) -> None:
        """Remove a server; the last one takes its place."""
        place, last = self._servers.index(server), self._servers.pop()
        if last != server:
            self._servers[place] = last
