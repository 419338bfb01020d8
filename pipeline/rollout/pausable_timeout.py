"""The time that a task takes for itself.

Owns the deadline of an episode. Promises that it runs only while the task works, and not while the policy is asked:
that servers are slow, gone, or being restarted is not the task's doing. Knows neither.

    own_time = PausableTimeout(600)
    episode = await own_time.limit(task.rollout(prompt, policy))       # DeadlineError after 600 s of its own

    with own_time.paused():                                            # in the policy
        turn = await servers.generate(...)

A process that works for the task, and asks the policy through an endpoint, uses the task's own time:

    with own_time.paused():                                            # waits for a process
        ...
        with own_time.resumed():                                       # has it, and lets it work
            ...
"""

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from pipeline.errors import DeadlineError

T = TypeVar("T")


class PausableTimeout:
    """The deadline of one episode; 0 seconds: none."""

    def __init__(self, seconds: float) -> None:
        self._seconds = self._left = seconds
        self._asked = 0
        self._over = False

    async def limit(self, work: Awaitable[T]) -> T:
        """The result of `work`; `DeadlineError` once it took more than its seconds. Its own `TimeoutError` stays."""
        try:
            async with asyncio.timeout(None) as self._timeout:
                self._run()
                return await work
        except TimeoutError:
            if self._timeout.expired():
                raise DeadlineError("an episode of the task", self._seconds) from None
            raise
        finally:
            self._over = True

    @contextmanager
    def pause(self) -> Iterator[None]:
        """The deadline stands still in the block; blocks of one episode may overlap."""
        if not self._asked:
            self._stop()
        self._asked += 1
        try:
            yield
        finally:
            self._asked -= 1
            if not self._asked:
                self._run()

    @contextmanager
    def resume(self) -> Iterator[None]:
        """Within a block of `paused`: that one does not count in this block."""
        self._asked -= 1
        if not self._asked:
            self._run()
        try:
            yield
        finally:
            if not self._asked:
                self._stop()
            self._asked += 1

    def _run(self) -> None:
        if self._seconds and not self._ended:
            self._timeout.reschedule(asyncio.get_running_loop().time() + self._left)

    def _stop(self) -> None:
        end = None if self._ended else self._timeout.when()
        if end is not None:
            self._left = end - asyncio.get_running_loop().time()
            self._timeout.reschedule(None)

    @property
    def _ended(self) -> bool:
        """Whether there is nothing to limit any more: a task may leave a request behind that ends later."""
        return self._over or self._timeout.expired()
