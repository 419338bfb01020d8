"""Servers that fail are left alone for a while.

Owns how long one rests after its failures, and who is asked meanwhile. A server that fails does so at once, so it looks
idle: without a rest it would draw every request until it is back.

    server = min(rested(servers), key=lambda each: each.running)
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

FIRST_PAUSE, LONGEST_PAUSE, MOST_DOUBLINGS = 0.05, 5.0, 10


def pause_after(failures: int) -> float:
    """Seconds to wait after one more failure than `failures`: doubling from the first to the longest."""
    return float(min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(failures, MOST_DOUBLINGS)))


@dataclass
class BackoffState:
    """Of one server: its `failures` in a row, and until when it rests, by the clock of the running loop."""

    failures: int = 0
    until: float = 0.0

    def record_failure(self) -> None:
        """Let it rest, longer each time; requests that fail while it rests are of the same trouble."""
        now = asyncio.get_running_loop().time()
        if now >= self.until:
            self.until = now + pause_after(self.failures)
            self.failures += 1

    def record_success(self) -> None:
        """Its earlier failures are history."""
        self.failures, self.until = 0, 0.0


@dataclass(eq=False, kw_only=True)
class HasBackoff:
    """Something that rests when it fails."""

    backoff: BackoffState = field(default_factory=BackoffState)


R = TypeVar("R", bound=HasBackoff)


def available(among: Sequence[R]) -> Sequence[R]:
    """Those that do not rest; all of them where every one does."""
    now = asyncio.get_running_loop().time()
    return [each for each in among if each.backoff.until <= now] or among
