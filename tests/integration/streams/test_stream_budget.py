"""What bounds a topic: a writer waits for room, gives up at its deadline, and settles its input with its output."""

import asyncio
import threading

import pytest

from pipeline.errors import DeadlineError, StreamError
from pipeline.roles.role_context import RoleContext
from pipeline.transport import AsyncStreams, Depth, Entry, Streams, open_streams
from pipeline.transport.record_wire import encode_record
from pipeline.transport.sample_records import Reissue
from pipeline.transport.streams import PIECE_BYTES
from pipeline.utils.waiting import wait_for
from tests.patience import WAIT_SECONDS
from tests.support.streams import BIG, BUDGET, Open, big, positions, reader_of, size, small

pytestmark = pytest.mark.integration


def test_a_full_topic_holds_its_writer_until_the_reader_reads(streams: Streams, another: Open) -> None:
    total = 30
    reader = reader_of(another())
    writer = threading.Thread(target=streams.publish_many, args=("reissue", big(*range(total))))
    writer.start()
    wait_for("the topic to fill", lambda: streams.depth("reissue").entries == BUDGET // BIG, WAIT_SECONDS)
    assert streams.depth("reissue").unread_bytes <= BUDGET
    got: list[int] = []
    while len(got) < total:
        assert streams.depth("reissue").unread_bytes <= BUDGET
        entries = reader.read(2, 20)
        assert entries, f"only {got} of {total} arrived"
        reader.acknowledge([entry.id for entry in entries])
        got += positions(entries)
    writer.join(20)
    assert not writer.is_alive()
    assert got == list(range(total))


def test_what_was_read_but_not_acknowledged_holds_the_writer_too(streams: Streams) -> None:
    """But for one entry: the reader has read everything, and may need one more."""
    reader = reader_of(streams)
    streams.publish_many("reissue", big(*range(6)), seconds=5)
    ids = [entry.id for entry in reader.read(9, 5)]
    with pytest.raises(DeadlineError, match="that acknowledges what it read"):
        streams.publish_many("reissue", big(6, 7), seconds=0.2)
    assert positions(reader.read(9, 5)) == [6]
    reader.acknowledge(ids)
    streams.publish_many("reissue", big(7, 8), seconds=5)
    assert positions(reader.read(9, 5)) == [7, 8]


def test_a_reader_that_needs_more_than_the_budget_gets_it_one_by_one(streams: Streams) -> None:
    reader = reader_of(streams)
    for position in range(15):
        assert streams.publish("reissue", big(position)[0], seconds=5)
        assert positions(reader.read(5, 5)) == [position]
    assert streams.depth("reissue").bytes > 2 * BUDGET


def test_a_writer_gives_up_at_its_deadline_and_says_what_is_missing(streams: Streams) -> None:
    with pytest.raises(DeadlineError, match=r"room in topic 'reissue'.*missing: a reader of 'reissue'"):
        streams.publish_many("reissue", big(*range(10)), seconds=0.2)
    assert positions(reader_of(streams).read(99, 5)) == [0, 1, 2, 3, 4, 5]


def test_a_writer_that_is_asked_to_stop_returns_false_and_acknowledges_nothing(streams: Streams) -> None:
    streams.publish_many("copies", small(0))
    source = streams.reader("copies", Reissue, "preprocessor")
    ids = [entry.id for entry in source.read(1, 5)]
    asked = threading.Event()
    asker = threading.Timer(0.2, asked.set)
    asker.start()
    full = big(*range(10))
    assert not streams.publish_many("reissue", full, acknowledging=(source, ids), should_stop=asked.is_set, seconds=20)
    assert streams.depth("copies").entries == 1
    asker.join()


def test_a_list_longer_than_one_exchange_settles_its_input_only_with_its_last_record(
    streams: Streams, context: RoleContext
) -> None:
    streams.publish_many("copies", small(0))
    source = streams.reader("copies", Reissue, "preprocessor")
    ids = [entry.id for entry in source.read(1, 5)]
    roomy = context.config.streams.model_copy(update={"budget_bytes": 3 * PIECE_BYTES})
    half_pieces = [Reissue(position=position, reason="x" * (PIECE_BYTES // 2)) for position in range(8)]
    with open_streams(roomy, context.paths, context.world) as wide:
        full = wide.publish_many("reissue", half_pieces, acknowledging=(source, ids), should_stop=lambda: True)
        assert not full
        assert streams.depth("copies").entries == 1
        reader = reader_of(wide)
        entries = reader.read(9, 5)
        assert positions(entries) == [0, 1, 2, 3, 4]
        reader.acknowledge([entry.id for entry in entries])
        assert wide.publish_many("reissue", half_pieces[5:], acknowledging=(source, ids), seconds=5)
        assert positions(reader.read(9, 5)) == [5, 6, 7]
    assert streams.depth("copies").entries == 0


def test_an_entry_above_the_budget_is_an_error_and_not_a_wait(streams: Streams) -> None:
    with pytest.raises(StreamError, match=r"above streams\.budget_bytes=65536"):
        streams.publish("reissue", Reissue(position=1, reason="x" * BUDGET), seconds=5)


def test_an_entry_as_large_as_the_budget_passes(streams: Streams) -> None:
    (empty,) = (Reissue(position=1, reason="x" * 1000),)
    filled = Reissue(position=1, reason="x" * (1000 + BUDGET - len(encode_record(empty))))
    assert len(encode_record(filled)) == BUDGET
    reader = reader_of(streams)
    for _ in range(2):
        assert streams.publish("reissue", filled, seconds=5)
        assert reader.read(1, 5)[0].record == filled


def test_depth_tells_entries_their_bytes_and_what_is_unread(streams: Streams) -> None:
    assert streams.depth("reissue") == Depth(entries=0, bytes=0, unread_bytes=0, rejected=0)
    records = [*small(0), *big(1), *small(2)]
    streams.publish_many("reissue", records)
    assert streams.depth("reissue") == Depth(3, size(records), size(records), 0)
    reader = reader_of(streams)
    (first,) = reader.read(1, 5)
    assert streams.depth("reissue") == Depth(3, size(records), size(records[1:]), 0)
    reader.acknowledge([first.id])
    assert streams.depth("reissue") == Depth(2, size(records[1:]), size(records[1:]), 0)


def test_coroutines_publish_and_read_while_a_full_topic_holds_one_of_them(streams: Streams, another: Open) -> None:
    async def story() -> tuple[bool, list[Entry[Reissue]], bytes | None]:
        async with AsyncStreams(another()) as shared:
            for record in big(*range(6)):
                await shared.publish("reissue", record)
            held = [asyncio.create_task(shared.publish("reissue", record, seconds=20)) for record in big(*range(6, 12))]
            await shared.publish("copies", small(1)[0])
            await shared.put("weights", b"3")
            copies = await shared.read(await shared.reader("copies", Reissue, "p"), 1, 5)
            was_held = not any(task.done() for task in held)
            reader = await shared.reader("reissue", Reissue, "actor")
            while not all(task.done() for task in held):
                await shared.read(reader, 2, 5)
            await asyncio.gather(*held)
            return was_held, copies, await shared.get("weights")

    was_held, copies, weights = asyncio.run(story())
    assert was_held
    assert positions(copies) == [1]
    assert weights == b"3"
    assert sorted(positions(list(streams.scan("reissue", Reissue)))) == list(range(12))


def test_a_coroutine_that_waits_for_room_ends_at_its_deadline(another: Open) -> None:
    async def story() -> None:
        async with AsyncStreams(another()) as shared:
            for record in big(*range(7)):
                await shared.publish("reissue", record, seconds=0.2)

    with pytest.raises(DeadlineError, match="room in topic 'reissue'"):
        asyncio.run(story())
