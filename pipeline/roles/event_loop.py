"""Parts of the event loop that the actor and the evaluator share: heartbeat, stop signal, files."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any

from pipeline.utils import heartbeat

REPORT_SECONDS = 1.0
"""Interval between heartbeats, and between reports."""


async def beat() -> None:
    """Beat the heartbeat while the event loop runs. Separate from the report, whose file may be slow to write."""
    while True:
        heartbeat.beat()
        await asyncio.sleep(REPORT_SECONDS)


@asynccontextmanager
async def open_in_thread(files: AbstractContextManager[Any]) -> AsyncIterator[None]:
    """Open a sample store or a journal in the block. A thread opens and closes it, since a disk may be slow."""
    await asyncio.to_thread(files.__enter__)
    try:
        yield
    finally:
        await asyncio.to_thread(files.__exit__, None, None, None)


async def work_until(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end, raising its error, or until `stop` is set, which cancels it."""
    working, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    done, running = await asyncio.wait([working, stopped], return_when=asyncio.FIRST_COMPLETED)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    for task in done:
        task.result()
