"""The timeout of an episode, which does not run while the policy samples.

Owns the deadline of an episode. Promises that the deadline runs only while the task works: slow, missing or restarting
servers are not the task's fault. Knows neither tasks nor servers.

    own_time = PausableTimeout(600)
    episode = await own_time.limit(task.rollout(prompt, policy))       # DeadlineError after 600 s of the task's time

    with own_time.pause():                                             # in the policy
        turn = await servers.generate(...)

A process that works for the task, and calls the policy through an endpoint, uses the task's time:

    with own_time.pause():                                             # waits for a process
        ...
        with own_time.resume():                                        # the process works
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
        self._pauses = 0
        self._over = False

    async def limit(self, work: Awaitable[T]) -> T:
        """The result of `work`; `DeadlineError` once it exceeds its time. A `TimeoutError` of `work` itself passes
        through."""
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
        """Pause the deadline in the block; blocks of one episode may overlap."""
        if not self._pauses:
            self._stop()
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                self._run()

    @contextmanager
    def resume(self) -> Iterator[None]:
        """Cancel one enclosing `pause` in the block."""
        self._pauses -= 1
        if not self._pauses:
            self._run()
        try:
            yield
        finally:
            if not self._pauses:
                self._stop()
            self._pauses += 1

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
        """Whether the limit is over: a task may leave a request behind that ends later."""
        return self._over or self._timeout.expired()
