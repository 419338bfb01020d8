"""The timeout of an episode, which does not run while the policy samples.

Owns the deadline of an episode. Promises that the deadline runs only while the task works: slow, missing or restarting
servers are not the task's fault; and that work whose clean-up hangs is left after `CLEAN_UP_SECONDS`. Knows neither
tasks nor servers.

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
import logging
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from pipeline.errors import DeadlineError

T = TypeVar("T")
log = logging.getLogger(__name__)

CLEAN_UP_SECONDS = 5.0
"""Timeout of a task's clean-up after its episode is cancelled; after that nobody waits for it."""
_left_behind: set[asyncio.Task[object]] = set()
"""Episodes whose clean-up hangs; the event loop itself holds no reference to its tasks."""


class _Exited(Exception):
    """A `SystemExit` of the work, which would end the event loop if it left a task of asyncio."""


class PausableTimeout:
    """The deadline of one episode; 0 seconds: none."""

    def __init__(self, seconds: float) -> None:
        self._seconds = self._left = seconds
        self._pauses = 0
        self._over = False

    async def limit(self, work: Awaitable[T]) -> T:
        """The result of `work`; `DeadlineError` once it exceeds its time. A `TimeoutError` of `work` itself passes
        through.

        At the deadline, and when the caller is cancelled, `work` is cancelled and has `CLEAN_UP_SECONDS` to end.
        """
        running = asyncio.create_task(_without_exit(work))
        missing = ""
        try:
            async with asyncio.timeout(None) as self._timeout:
                self._run()
                await asyncio.wait([running])
        except TimeoutError:
            missing = await _end(running)
        except asyncio.CancelledError:
            await _end(running)
            raise
        finally:
            self._over = True
        if self._timeout.expired() and (missing or running.cancelled()):
            raise DeadlineError("an episode of the task", self._seconds, missing)
        try:
            return running.result()
        except _Exited as exited:
            raise SystemExit(*exited.args) from None

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


async def _without_exit(work: Awaitable[T]) -> T:
    try:
        return await work
    except SystemExit as error:
        raise _Exited(*error.args) from None


async def _end(running: "asyncio.Task[T]") -> str:
    """Cancel the work and wait for its clean-up. Returns what is missing if that hangs; else an empty text."""
    running.cancel()
    try:
        await asyncio.wait([running], timeout=CLEAN_UP_SECONDS)
    finally:  # also when the caller is cancelled a second time
        if not running.done():
            _left_behind.add(running)
        running.add_done_callback(_forget)
    if running.done():
        return ""
    log.warning("an episode is left: its clean-up did not end within %g s of its cancellation", CLEAN_UP_SECONDS)
    return f"the end of its clean-up within {CLEAN_UP_SECONDS:g} s"


def _forget(running: "asyncio.Task[T]") -> None:
    _left_behind.discard(running)
    if not running.cancelled():
        running.exception()  # marks it as retrieved: nobody else waits for it
