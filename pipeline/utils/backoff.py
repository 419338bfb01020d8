"""Exponential backoff for servers that fail.

A failing server rejects requests at once, so it looks idle: without backoff the least-loaded choice would send it every
request until it recovers.

    server = min(available(servers), key=lambda server: server.running)
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

FIRST_PAUSE, LONGEST_PAUSE, MAX_DOUBLINGS = 0.05, 5.0, 10


def pause_after(failures: int) -> float:
    """Seconds to wait after a failure that follows `failures` others: doubles from `FIRST_PAUSE` to `LONGEST_PAUSE`."""
    return float(min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(failures, MAX_DOUBLINGS)))


@dataclass
class BackoffState:
    """The backoff of one server.

    Attributes:
        failures: consecutive failures.
        until: end of the current pause, on the clock of the running event loop.
    """

    failures: int = 0
    until: float = 0.0

    def record_failure(self) -> None:
        """Start the next, longer pause. Failures during a pause belong to the same outage and change nothing."""
        now = asyncio.get_running_loop().time()
        if now >= self.until:
            self.until = now + pause_after(self.failures)
            self.failures += 1

    def record_success(self) -> None:
        """Reset the failures and end the pause."""
        self.failures, self.until = 0, 0.0


@dataclass(eq=False, kw_only=True)
class HasBackoff:
    """Base class of servers with a backoff."""

    backoff: BackoffState = field(default_factory=BackoffState)


R = TypeVar("R", bound=HasBackoff)


def available(servers: Sequence[R]) -> Sequence[R]:
    """The servers outside of a pause; all servers if every one is in a pause."""
    now = asyncio.get_running_loop().time()
    return [server for server in servers if server.backoff.until <= now] or servers
