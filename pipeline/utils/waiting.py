"""Deadlines, the polling loop `wait_for`, and the growth of pauses between polls.

A wait has a deadline, growing pauses, a message about the missing thing at the deadline, and a clock that tests
replace. `pipeline.utils.fs_retry` retries failing disks with the same parts. Loops that do other work between two polls
(a stream, a lock, the end of a process, a copy between GPUs) use `Deadline` and `exponential_pauses` directly.

Out of scope: main loops that live as long as their process, and blocking calls of the kernel, asyncio or a library,
which have their own timeout or end with their process.

    world = wait_for("the world of attempt 12-0", lambda: read_world(path), seconds=60)
"""

import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from pipeline.errors import DeadlineError

T = TypeVar("T")


class Clock:
    """Monotonic seconds and sleep; replaced by a fake in tests."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


CLOCK = Clock()


@dataclass
class Deadline:
    """A point in time by which `awaited` must have happened."""

    awaited: str
    seconds: float
    clock: Clock = CLOCK

    def __post_init__(self) -> None:
        self._end = self.clock.now() + self.seconds

    @property
    def left(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._end - self.clock.now())

    @property
    def passed(self) -> bool:
        return self.left == 0.0

    def error(self, missing: str = "") -> DeadlineError:
        return DeadlineError(self.awaited, self.seconds, missing)


def exponential_pauses(first: float, longest: float) -> Iterator[float]:
    """An endless sequence of pauses in seconds, growing by a factor of 1.5 from `first` to `longest`."""
    pause = first
    while True:
        yield pause
        pause = min(pause * 1.5, longest)


def wait_for(
    awaited: str,
    probe: Callable[[], T | None],
    seconds: float,
    *,
    missing: Callable[[], str] = lambda: "",
    pause: float = 0.02,
    longest_pause: float = 0.5,
    clock: Clock = CLOCK,
) -> T:
    """The first value of `probe()` that is neither None nor False; `DeadlineError` after `seconds`.

    The pause between probes grows from `pause` to `longest_pause` seconds. `missing` describes, at the deadline, what
    did not appear. An exception of the probe ends the wait.
    """
    deadline, pauses = Deadline(awaited, seconds, clock), exponential_pauses(pause, longest_pause)
    while True:
        # The last probe starts after the deadline: a process that was suspended still sees results from meanwhile.
        last = deadline.passed
        value = probe()
        if value is not None and value is not False:
            return value
        if last:
            raise deadline.error(missing())
        clock.sleep(min(next(pauses), deadline.left))


async def run_within(awaited: str, work: Awaitable[T], seconds: float) -> T:
    """The result of `work`; `DeadlineError` after `seconds`. A `TimeoutError` of the work itself stays one."""
    import asyncio

    try:
        async with asyncio.timeout(seconds) as limit:
            return await work
    except TimeoutError:
        if limit.expired():
            raise DeadlineError(awaited, seconds) from None
        raise
