"""The streams' interface, and the waiting that both backends share.

Owns the words (`Entry`, `Depth`, `Rejected`), the two interfaces (`Streams`, `Reader`) and the rule of backpressure: an
offer that does not fit is made again after a pause, until it fits, the caller stops, or the deadline passes. A backend
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
from pipeline.transport.sample_records import R, Record, encode_record
from pipeline.utils.waiting import wait_for

V = TypeVar("V")

PIECE_BYTES = 1 << 20
PUBLISH_TIMEOUT = 3600.0
FIRST_PAUSE, LONGEST_PAUSE = 0.005, 0.25


@dataclass(frozen=True, slots=True)
class Entry(Generic[R]):
    """A record as it was delivered, of `size` bytes.

    `id` names it to `acknowledge`, also after a restart of the reader.
    """

    id: str
    record: R
    size: int


@dataclass(frozen=True, slots=True)
class Depth:
    """What a topic holds.

    Attributes:
        entries, bytes: entries not yet acknowledged, read or not, and their size, which `streams.budget_bytes` bounds.
        unread_bytes: the part that no reader got so far.
        rejected: entries set aside so far because they were no records of the reader's kind.
    """

    entries: int
    bytes: int
    unread_bytes: int
    rejected: int


REJECTED_BYTES = 4096
"""What is kept of an entry that is set aside: enough to see what it is."""


class Rejected(msgspec.Struct, frozen=True, kw_only=True):
    """An entry that was set aside: its id, why, and its first `REJECTED_BYTES`."""

    id: str
    reason: str
    data: bytes


class Reader(ABC, Generic[R]):
    """The one reader of a topic. One thread reads; others may acknowledge meanwhile.

    Who opened it last is the reader: an earlier one is refused, with a `StreamError`, at the next entry that it reads
    or acknowledges.

    Its position is durable: what `acknowledge` has not named comes again when the reader is opened again. So
    acknowledge an entry when its effect is itself safe: published onwards, or covered by a committed checkpoint.
    """

    topic: str

    @abstractmethod
    def read(self, limit: int, seconds: float) -> list[Entry[R]]:
        """The next 1 … `limit` entries in their order; empty when none came within `seconds` (0: does not wait).

        The first calls after opening return what an earlier reader of the topic did not acknowledge. An entry that is
        no record of the reader's kind is set aside with its reason, see `Streams.rejected`, and never delivered.
        """

    @abstractmethod
    def acknowledge(self, ids: Iterable[str]) -> None:
        """Settle entries for good: they never come again and their memory is freed.

        In any order, and harmless when repeated: after a restart a reader may acknowledge, before it reads, the ids
        that its last checkpoint covered.
        """


Acknowledging = tuple[Reader[Any], Sequence[str]]


class Streams(ABC):
    """Topics and values of one attempt; see the package for what is promised. Threads may share it."""

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
        """Most bytes of one topic that are not acknowledged."""

    @property
    def generation(self) -> int:
        """How often the backend was found restarted, and may have lost what was written to it last.

        Values are posted again by themselves, and readers deliver again what is not acknowledged. What was published is
        for its publisher to look after: it is there, was acknowledged, or is lost.
        """
        return 0

    @abstractmethod
    def try_append(self, topic: str, payloads: Sequence[bytes], acknowledging: Acknowledging | None) -> int:
        """Append as many payloads, from the first, as fit the budget now; their number. Never waits for room.

        Into a topic whose reader has read everything the first always fits: what the reader needs before it can
        acknowledge may be more than the budget, and must not wait for that.

        Acknowledges only when all of them fit. Called by `publish`, which splits long lists.
        """

    @abstractmethod
    def reader(self, topic: str, kind: type[R], name: str) -> Reader[R]:
        """Open the topic's reader. `name` must be the same every time; another one raises `StreamError`."""

    @abstractmethod
    def scan(self, topic: str, kind: type[R]) -> Iterator[Entry[R]]:
        """All entries not yet acknowledged, oldest first, without consuming them; skips what is no `kind`."""

    @abstractmethod
    def rejected(self, topic: str) -> list[Rejected]:
        """The latest entries of the topic that were set aside, oldest first."""

    @abstractmethod
    def depth(self, topic: str) -> Depth:
        """What the topic holds now; zeros for a topic that nobody wrote."""

    @abstractmethod
    def put(self, key: str, value: bytes) -> None:
        """Replace a value of this attempt."""

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """The value last put in this attempt, or None."""

    @abstractmethod
    def get_all(self, prefix: str) -> Mapping[str, bytes]:
        """Every value of this attempt whose key begins with `prefix`."""

    @abstractmethod
    def close(self) -> None:
        """Release connections and files; what was published stays."""

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
    """Records on their way into a topic, in pieces of about `PIECE_BYTES`: `push` until it says True."""

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
        """Offer what is left until the topic is full; True when everything is in."""
        while True:
            piece = self._piece()
            last = len(piece) == len(self._left)
            accepted = self._streams.try_append(self._topic, piece, self._acknowledging if last else None)
            del self._left[:accepted]
            if accepted < len(piece):
                return False
            if not self._left:
                return True

    def _piece(self) -> list[bytes]:
        sizes = enumerate(accumulate(map(len, self._left)), start=1)
        return self._left[: next((count for count, size in sizes if size >= PIECE_BYTES), len(self._left))]
