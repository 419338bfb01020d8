"""The streams' interface, and the waiting that both backends share.

Owns the types (`Entry`, `Depth`), the two interfaces (`Streams`, `Reader`) and the rule of backpressure: an
append that does not fit is retried after a pause, until it fits, the caller stops, or the deadline passes. A backend
supplies single exchanges that never wait for room. Must not know Redis or the layout of files.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import msgspec

from pipeline.errors import StreamError
from pipeline.transport.record_wire import R, Substitute, encode_record, no_substitute
from pipeline.transport.rejections import Rejected
from pipeline.transport.sample_records import Record
from pipeline.utils.waiting import wait_for

V = TypeVar("V")

PIECE_BYTES = 1 << 20
PUBLISH_TIMEOUT = 3600.0
FIRST_PAUSE, LONGEST_PAUSE = 0.005, 0.25


@dataclass(frozen=True, slots=True)
class Entry(Generic[R]):
    """A delivered record of `size` bytes.

    `id` identifies it for `acknowledge`, also after a restart of the reader.
    """

    id: str
    record: R
    size: int


@dataclass(frozen=True, slots=True)
class Depth:
    """The contents of a topic.

    Attributes:
        entries, bytes: entries not yet acknowledged, read or not, and their size, which `streams.budget_bytes` bounds.
        unread_bytes: size of the entries that no reader has received.
        rejected: number of entries rejected so far because they were no records of the reader's kind.
    """

    entries: int
    bytes: int
    unread_bytes: int
    rejected: int


class Reader(ABC, Generic[R]):
    """The one reader of a topic. One thread reads; other threads may acknowledge at the same time.

    The reader opened last owns the topic: an earlier one is refused, with a `StreamError`, at the next entry that it
    reads or acknowledges.

    Its position is durable: unacknowledged entries are delivered again when the reader is opened again. So acknowledge
    an entry only when its effect is safe: published onwards, or covered by a complete checkpoint.
    """

    topic: str

    @abstractmethod
    def read(self, limit: int, seconds: float) -> list[Entry[R]]:
        """The next 1 … `limit` entries in their order; empty when none came within `seconds` (0: does not wait).

        The first calls after opening return the entries that an earlier reader of the topic did not acknowledge. An
        entry that is no record of the reader's kind, and has no substitute, is rejected with a reason, see
        `Streams.rejected`, and never delivered.
        """

    @abstractmethod
    def acknowledge(self, ids: Iterable[str]) -> None:
        """Acknowledge entries for good: they are never delivered again, and their memory is freed.

        In any order, and harmless when repeated: after a restart a reader may acknowledge, before it reads, the ids
        that its last checkpoint covered.
        """


Acknowledging = tuple[Reader[Any], Sequence[str]]


class Streams(ABC):
    """Topics and values of one attempt; the package describes the promises. Threads may share it."""

    def publish(
        self,
        topic: str,
        record: Record,
        *,
        acknowledging: Acknowledging | None = None,
        seconds: float = PUBLISH_TIMEOUT,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Append a record; True once it is safe. See `publish_many`."""
        return self.publish_many(topic, [record], acknowledging=acknowledging, seconds=seconds, should_stop=should_stop)

    def publish_many(
        self,
        topic: str,
        records: Sequence[Record],
        *,
        acknowledging: Acknowledging | None = None,
        seconds: float = PUBLISH_TIMEOUT,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Append records in their order, waiting for room; True once all are safe, False if `should_stop()` came first.

        `acknowledging` names entries of a reader that these records replace: they are acknowledged together with the
        last record. On Redis that is one atomic step. On files the records become safe first, so a crash in between can
        only deliver the same input again, never lose it. When False is returned, a part of several records may be
        published and nothing is acknowledged.

        Raises `DeadlineError` when there was no room for `seconds`, `StreamError` when one record alone is above the
        budget or the backend failed.
        """
        sending = PublishAttempt(self, topic, records, acknowledging)

        def outcome() -> str | None:
            return "sent" if sending.flush() else "stopped" if should_stop() else None

        awaited, missing = sending.awaited, sending.missing
        pause, longest = FIRST_PAUSE, LONGEST_PAUSE
        return wait_for(awaited, outcome, seconds, missing=missing, pause=pause, longest_pause=longest) == "sent"

    @property
    @abstractmethod
    def budget(self) -> int:
        """The largest size of a topic's unacknowledged entries, in bytes."""

    @property
    def generation(self) -> int:
        """Number of observed restarts of the backend. Each may have lost the last writes.

        Values are posted again automatically, and readers deliver unacknowledged entries again. A publisher must itself
        check its entries: each is in the topic, acknowledged, or lost.
        """
        return 0

    @abstractmethod
    def try_append(self, topic: str, payloads: Sequence[bytes], acknowledging: Acknowledging | None) -> int:
        """Append the longest prefix of `payloads` that fits the budget; returns its length. Never waits for room.

        A topic whose reader has read everything always accepts the first payload: the entries that the reader needs
        before it can acknowledge may exceed the budget, and must not wait.

        Acknowledges only when all of them fit. Called by `publish`, which splits long lists.
        """

    @abstractmethod
    def reader(self, topic: str, kind: type[R], name: str, substitute: Substitute[R] = no_substitute) -> Reader[R]:
        """Open the topic's reader. `name` must be the same every time; another one raises `StreamError`.

        An entry that is no record of `kind` is delivered as its `substitute`, if it has one, and is acknowledged like
        any other.
        """

    @abstractmethod
    def scan(self, topic: str, kind: type[R]) -> Iterator[Entry[R]]:
        """All unacknowledged entries, oldest first, without consuming them; skips records that are no `kind`."""

    @abstractmethod
    def rejected(self, topic: str) -> list[Rejected]:
        """The latest rejected entries of the topic, oldest first."""

    @abstractmethod
    def depth(self, topic: str) -> Depth:
        """The topic's current contents; zeros for a topic without a writer."""

    @abstractmethod
    def put(self, key: str, value: bytes) -> None:
        """Replace a value of this attempt."""

    @abstractmethod
    def remove(self, key: str) -> None:
        """Remove a value of this attempt, which only the process that put it may do; nothing without one."""

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """The value last put in this attempt, or None."""

    @abstractmethod
    def get_all(self, prefix: str) -> Mapping[str, bytes]:
        """Every value of this attempt whose key begins with `prefix`."""

    @abstractmethod
    def close(self) -> None:
        """Release connections and files; published entries stay."""

    def put_json(self, key: str, value: Any) -> None:
        """`put` a plain value or a msgspec Struct as JSON."""
        self.put(key, msgspec.json.encode(value))

    def get_json(self, key: str, kind: type[V]) -> V | None:
        """The value that `put_json` wrote, or None; `StreamError` when it is no `kind`."""
        value = self.get(key)
        try:
            return None if value is None else msgspec.json.decode(value, type=kind)
        except msgspec.DecodeError as error:
            raise StreamError(f"the value of {key!r} is no {kind.__name__}: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class PublishAttempt:
    """Records on their way into a topic, in pieces of about `PIECE_BYTES`: call `flush` until it returns True."""

    def __init__(
        self, streams: Streams, topic: str, records: Iterable[Record], acknowledging: Acknowledging | None
    ) -> None:
        self._streams, self._topic, self._acknowledging = streams, topic, acknowledging
        self._left = [encode_record(record) for record in records]
        largest = max(map(len, self._left), default=0)
        if largest > streams.budget:
            raise StreamError(
                f"an entry of {largest} bytes for {topic!r} is above streams.budget_bytes={streams.budget}; raise it"
            )

    @property
    def awaited(self) -> str:
        return f"room in topic {self._topic!r} (streams.budget_bytes={self._streams.budget})"

    def missing(self) -> str:
        return f"a reader of {self._topic!r} that acknowledges what it read"

    def flush(self) -> bool:
        """Append the remaining records until the topic is full; True when all are appended."""
        while True:
            piece = self._piece()
            last = len(piece) == len(self._left)
            # Only the last piece acknowledges: the input stays until all records are safe.
            accepted = self._streams.try_append(self._topic, piece, self._acknowledging if last else None)
            del self._left[:accepted]
            if accepted < len(piece):
                return False
            if not self._left:
                return True

    def _piece(self) -> list[bytes]:
        sizes = enumerate(accumulate(map(len, self._left)), start=1)
        return self._left[: next((count for count, size in sizes if size >= PIECE_BYTES), len(self._left))]
