"""The servers that join and leave a running attempt, for the trainer's rank 0.

Owns the thread that reads the records of joined servers (`pipeline.run.joined_servers`), and the attempt's own servers
after the replacement of a node, and adds and removes them at the sender of weights. Promises that a joined server which
serves no version for `patience` seconds is forgotten, with its record, until its agent writes another one. Must not
know how weights travel.
"""

import logging
import threading
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Protocol

from pipeline.errors import RollcallError
from pipeline.run.joined_servers import JoinedServer, JoinedServers
from pipeline.utils.waiting import CLOCK, Clock, Deadline

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
"""Pause between two listings of the records, by one thread in an attempt."""


class Members(Protocol):
    """The part of `WeightSender` that changes its servers."""

    def add(self, server: str) -> bool: ...

    def remove(self, server: str) -> None: ...

    def versions(self) -> dict[str, int | None]: ...


class ServerMembership:
    """Follows the records of joined servers while its block runs."""

    def __init__(
        self,
        joined: JoinedServers,
        members: Members,
        patience: float,
        former: frozenset[str] = frozenset(),
        own: Callable[[], Collection[str]] = tuple,
        clock: Clock = CLOCK,
    ) -> None:
        """`former` are joined servers of a trainer before this one in the attempt: those without a record are removed.

        `own` returns the endpoints of the attempt's own servers, which another node may have taken over since.
        `patience` must suffice for the transfer of a version.
        """
        self._joined, self._members, self._patience, self._clock = joined, members, patience, clock
        self._own, self._placed = own, frozenset(own())
        self._known: dict[str, JoinedServer | None] = dict.fromkeys(former)
        self._silence: dict[str, Deadline] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="joined servers", daemon=True)

    def __enter__(self) -> "ServerMembership":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join(timeout=1.0)  # a look may hang on a dead file system

    def look(self) -> None:
        """Read the records once, and add or remove the servers that changed."""
        self._follow_own()
        records = self._joined.read()
        for endpoint in [known for known in self._known if known not in records]:
            self._members.remove(endpoint)
            del self._known[endpoint]
            self._silence.pop(endpoint, None)
        versions = self._members.versions()
        for endpoint, record in records.items():
            if self._known.get(endpoint) != record:
                self._join(endpoint, record)
            elif versions.get(endpoint) is not None:
                self._silence[endpoint] = self._deadline(endpoint)
            elif self._silence[endpoint].passed:
                log.warning("%s has served no weights for %g s and is forgotten", record.name, self._patience)
                self._joined.remove(record.name)

    def _follow_own(self) -> None:
        """Replace the attempt's own servers whose node was replaced. The new ones are met once they are ready."""
        placed = frozenset(self._own())
        for endpoint in self._placed - placed:
            self._members.remove(endpoint)
        for endpoint in placed - self._placed:
            self._members.add(endpoint)
        self._placed = placed

    def _join(self, endpoint: str, record: JoinedServer) -> None:
        # The sender refuses a server that it has: a restarted one, or one that has not left yet and is tried again.
        if self._members.add(endpoint):
            log.info("%s at %s joins", record.name, endpoint)
        elif self._known.get(endpoint) is None:
            return
        self._known[endpoint], self._silence[endpoint] = record, self._deadline(endpoint)

    def _deadline(self, endpoint: str) -> Deadline:
        return Deadline(f"weights on {endpoint}", self._patience, self._clock)

    def _follow(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            try:
                self.look()
            except (OSError, RollcallError) as error:  # the disk or the streams fail for a while
                log.warning("servers cannot join or leave now: %s", error)
