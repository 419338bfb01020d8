"""The streams inside an event loop.

Owns the bridge from asyncio to `Streams`: every exchange with the backend runs in a small thread pool, and every wait
(for room, for an entry) sleeps in the event loop. A full topic therefore delays only the task that publishes, neither
the loop nor another task's exchange. A wait is stopped by cancelling its task. Must not know the backends.

    async with AsyncStreams(connect(context)) as streams:
        await streams.publish("groups", group)
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

from pipeline.transport.record_wire import R
from pipeline.transport.sample_records import Record
from pipeline.transport.streams import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    PUBLISH_TIMEOUT,
    Acknowledging,
    Depth,
    Entry,
    PublishAttempt,
    Reader,
    Streams,
)
from pipeline.utils.waiting import Deadline, exponential_pauses

T = TypeVar("T")


class AsyncStreams:
    """`Streams` for coroutines, with the same methods and promises. Closing it closes `streams`."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="streams")

    @property
    def generation(self) -> int:
        """See `Streams.generation`."""
        return self._streams.generation

    async def publish(
        self,
        topic: str,
        record: Record,
        *,
        acknowledging: Acknowledging | None = None,
        seconds: float = PUBLISH_TIMEOUT,
    ) -> None:
        """Append a record, waiting for room; return once it is safe. Raises as `Streams.publish_many`.

        When its task is cancelled, the record may or may not have been published.
        """
        sending = PublishAttempt(self._streams, topic, [record], acknowledging)
        deadline = Deadline(sending.awaited, seconds)
        pauses = exponential_pauses(FIRST_PAUSE, LONGEST_PAUSE)
        while not await self._call(sending.flush):
            if deadline.passed:
                raise deadline.error(sending.missing())
            # Wait in the event loop: a full topic must not occupy a thread of the pool.
            await asyncio.sleep(min(next(pauses), deadline.left))

    async def read(self, reader: Reader[R], limit: int, seconds: float) -> list[Entry[R]]:
        """The next entries of `reader`; empty if none arrive within `seconds`. One task per reader."""
        deadline = Deadline(f"an entry in {reader.topic!r}", seconds)
        pauses = exponential_pauses(FIRST_PAUSE, LONGEST_PAUSE)
        while True:
            entries = await self._call(lambda: reader.read(limit, 0))
            if entries or deadline.passed:
                return entries
            await asyncio.sleep(min(next(pauses), deadline.left))

    async def acknowledge(self, reader: Reader[R], ids: Iterable[str]) -> None:
        """See `Reader.acknowledge`."""
        await self._call(lambda: reader.acknowledge(ids))

    async def reader(self, topic: str, kind: type[R], name: str) -> Reader[R]:
        """See `Streams.reader`."""
        return await self._call(lambda: self._streams.reader(topic, kind, name))

    async def scan(self, topic: str, kind: type[R]) -> list[Entry[R]]:
        """See `Streams.scan`; returns all entries at once."""
        return await self._call(lambda: list(self._streams.scan(topic, kind)))

    async def depth(self, topic: str) -> Depth:
        """See `Streams.depth`."""
        return await self._call(lambda: self._streams.depth(topic))

    async def put(self, key: str, value: bytes) -> None:
        """See `Streams.put`."""
        await self._call(lambda: self._streams.put(key, value))

    async def get(self, key: str) -> bytes | None:
        """See `Streams.get`."""
        return await self._call(lambda: self._streams.get(key))

    async def get_all(self, prefix: str) -> Mapping[str, bytes]:
        """See `Streams.get_all`."""
        return await self._call(lambda: self._streams.get_all(prefix))

    async def get_json(self, key: str, kind: type[T]) -> T | None:
        """See `Streams.get_json`."""
        return await self._call(lambda: self._streams.get_json(key, kind))

    async def put_json(self, key: str, value: object) -> None:
        """See `Streams.put_json`."""
        await self._call(lambda: self._streams.put_json(key, value))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._call(self._streams.close)
        self._threads.shutdown(wait=False)

    async def _call(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
