"""The one loop that asks again, and the one rule by which pauses grow.

Owns how Rollcall waits for what it can only find out by asking: with a deadline, a growing pause, and a sentence about
what is missing when it runs out, on a clock that tests replace. `pipeline.utils.fs_retry` does the same for a disk that
fails. What needs a loop of its own, since it does other work between two questions (a stream, a lock, a process that
ends, a copy between GPUs), has a `Deadline` and its `exponential_pauses` from here. Two kinds of waiting are not its
matter: loops that go on as long as their process does (an agent, the controller, whoever follows a run), and waits
inside the kernel, asyncio or a library, each of which has a time-out of its own or ends with its process.

    card = wait_for("the world of attempt 12-0", lambda: read_world(path), seconds=60)
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
    """Seconds from one try to the next, without an end: half as long again each time, from `first` to `longest`."""
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

    The pause between probes grows from `pause` to `longest_pause` seconds. `missing` describes, at the deadline, who or
    what did not appear. An exception of the probe ends the wait. The last probe begins after the deadline: a process
    that was stopped meanwhile finds what has come while it could not look.
    """
    deadline, pauses = Deadline(awaited, seconds, clock), exponential_pauses(pause, longest_pause)
    while True:
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
