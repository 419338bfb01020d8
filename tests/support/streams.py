"""Small and large records of a topic, and how tests read them."""

from collections.abc import Callable

from pipeline.transport import Entry, Reader, Streams
from pipeline.transport.record_wire import encode_record
from pipeline.transport.sample_records import Reissue

BUDGET = 1 << 16
BIG = 10_000

Open = Callable[[], Streams]


def small(*positions: int) -> list[Reissue]:
    return [Reissue(position=position, reason="test") for position in positions]


def big(*positions: int) -> list[Reissue]:
    return [Reissue(position=position, reason="x" * BIG) for position in positions]


def positions(entries: list[Entry[Reissue]]) -> list[int]:
    return [entry.record.position for entry in entries]


def reader_of(streams: Streams) -> Reader[Reissue]:
    return streams.reader("reissue", Reissue, "actor")


def collect(reader: Reader[Reissue], count: int) -> list[Entry[Reissue]]:
    """The next `count` entries, in portions of at most two."""
    entries: list[Entry[Reissue]] = []
    while len(entries) < count:
        portion = reader.read(2, 5)
        assert 1 <= len(portion) <= 2
        entries += portion
    return entries


def size(records: list[Reissue]) -> int:
    return sum(len(encode_record(record)) for record in records)
