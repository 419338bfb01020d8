"""What the streams promise, on both backends: the same tests on a real Redis and on a real directory."""

import asyncio
import shutil
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from pipeline.errors import DeadlineError, StreamError
from pipeline.groups.records import EvalRequest, Reissue, encode_record
from pipeline.roles.context import RoleContext
from pipeline.streams import AsyncStreams, Depth, Entry, Reader, Streams, connect, open_streams
from pipeline.streams.interface import PIECE_BYTES, REJECTED_BYTES
from pipeline.system.waiting import wait_for
from tests.integration.redis_attempts import an_attempt, raw_client
from tests.integration.redis_servers import redis_servers
from tests.patience import WAIT_SECONDS

pytestmark = pytest.mark.integration

BUDGET = 1 << 16
BIG = 10_000

Open = Callable[[], Streams]


@pytest.fixture(scope="module", params=[*redis_servers(), "files"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoleContext]:
    """An attempt with a real Redis, shared by the tests of this module, or with files."""
    with an_attempt(tmp_path_factory.mktemp("run"), request.param, BUDGET) as context:
        yield context


@pytest.fixture
def context(place: RoleContext) -> RoleContext:
    """An attempt with empty streams, budget 64 KiB a topic."""
    if place.config.streams.backend == "files":
        shutil.rmtree(place.run.streams, ignore_errors=True)
        return place
    with raw_client(place) as client:
        client.flushall()
    return place


@pytest.fixture
def another(context: RoleContext) -> Iterator[Open]:
    """Opens the attempt's streams as another process would; closed after the test."""
    opened: list[Streams] = []

    def open_them() -> Streams:
        opened.append(connect(context))
        return opened[-1]

    yield open_them
    for streams in opened:
        streams.close()


@pytest.fixture
def streams(another: Open) -> Streams:
    return another()


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


def test_entries_come_in_the_order_in_which_they_were_published(streams: Streams) -> None:
    streams.publish_many("reissue", small(*range(10)))
    streams.publish("reissue", small(10)[0])
    reader = reader_of(streams)
    assert positions(reader.read(4, 5)) == [0, 1, 2, 3]
    assert positions(reader.read(100, 5)) == [4, 5, 6, 7, 8, 9, 10]


def test_a_record_arrives_as_it_was_published(streams: Streams) -> None:
    (record,) = big(3)
    streams.publish("reissue", record)
    assert reader_of(streams).read(1, 5)[0].record == record


def test_reading_an_empty_topic_returns_after_the_time_given(streams: Streams) -> None:
    reader = reader_of(streams)
    assert reader.read(1, 0) == []
    began = time.monotonic()
    assert reader.read(1, 0.2) == []
    assert 0.15 < time.monotonic() - began < 2


def test_a_waiting_reader_gets_an_entry_while_it_waits(streams: Streams, another: Open) -> None:
    reader = reader_of(another())
    late = threading.Timer(0.2, lambda: streams.publish_many("reissue", small(1)))
    late.start()
    assert positions(reader.read(1, 20)) == [1]
    late.join()


def test_a_reader_that_is_opened_again_gets_what_it_did_not_acknowledge_first_and_in_order(
    streams: Streams, another: Open
) -> None:
    streams.publish_many("reissue", small(0, 1, 2, 3, 4))
    reader = reader_of(streams)
    ids = [entry.id for entry in reader.read(4, 5)]
    reader.acknowledge([ids[2], ids[0]])
    streams.publish_many("reissue", small(5))
    again = reader_of(another())
    assert positions(collect(again, 4)) == [1, 3, 4, 5]
    assert again.read(9, 0.1) == []


def test_acknowledging_twice_changes_nothing_more(streams: Streams) -> None:
    streams.publish_many("reissue", small(0, 1))
    reader = reader_of(streams)
    ids = [entry.id for entry in reader.read(2, 5)]
    reader.acknowledge(ids[:1])
    reader.acknowledge(ids[:1])
    assert streams.depth("reissue") == Depth(entries=1, bytes=size(small(1)), unread_bytes=0, rejected=0)


def test_ids_of_a_checkpoint_can_be_acknowledged_before_anything_is_read_again(streams: Streams, another: Open) -> None:
    streams.publish_many("reissue", small(0, 1, 2))
    covered = [entry.id for entry in reader_of(streams).read(2, 5)]
    again = reader_of(another())
    again.acknowledge(covered)
    assert positions(again.read(9, 5)) == [2]
    assert streams.depth("reissue").entries == 1


def test_ids_acknowledged_before_they_are_read_again_leave_no_phantom_in_the_budget(
    streams: Streams, another: Open
) -> None:
    streams.publish_many("reissue", big(0, 1, 2, 3, 4, 5))
    ids = [entry.id for entry in reader_of(streams).read(9, 5)]
    again = reader_of(another())
    again.read(1, 5)
    again.acknowledge(ids)
    assert streams.depth("reissue") == Depth(entries=0, bytes=0, unread_bytes=0, rejected=0)
    assert streams.publish_many("reissue", big(6, 7, 8, 9, 10, 11), seconds=5)


def test_what_is_no_id_of_this_backend_is_refused(streams: Streams) -> None:
    with pytest.raises(StreamError, match="no entry id"):
        reader_of(streams).acknowledge(["nonsense"])


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


def test_acknowledged_entries_are_gone_from_memory_and_disk(streams: Streams, context: RoleContext) -> None:
    reader = reader_of(streams)
    for first in range(0, 200, 5):
        streams.publish_many("reissue", big(*range(first, first + 5)), seconds=5)
        reader.acknowledge([entry.id for entry in reader.read(5, 5)])
    assert streams.depth("reissue") == Depth(entries=0, bytes=0, unread_bytes=0, rejected=0)
    stored = context.run.streams.rglob("*.log")
    assert sum(path.stat().st_size for path in stored) <= 2 * BUDGET


def test_publishing_onwards_settles_the_input_with_it(streams: Streams) -> None:
    streams.publish_many("reissue", small(0, 1, 2))
    reader = reader_of(streams)
    for entry in reader.read(2, 5):
        streams.publish("copies", entry.record, acknowledging=(reader, [entry.id]))
    assert positions(list(streams.scan("reissue", Reissue))) == [2]
    assert positions(list(streams.scan("copies", Reissue))) == [0, 1]


def test_input_that_needs_no_output_can_be_settled_by_publishing_nothing(streams: Streams) -> None:
    streams.publish_many("reissue", small(0))
    reader = reader_of(streams)
    ids = [entry.id for entry in reader.read(1, 5)]
    assert streams.publish_many("copies", [], acknowledging=(reader, ids))
    assert streams.depth("reissue").entries == 0


def test_scanning_shows_everything_unacknowledged_and_consumes_nothing(streams: Streams, another: Open) -> None:
    streams.publish_many("reissue", small(*range(200)))
    reader = reader_of(streams)
    entries = reader.read(3, 5)
    reader.acknowledge([entries[1].id])
    left = [0, *range(2, 200)]
    assert positions(list(another().scan("reissue", Reissue))) == left
    assert positions(reader.read(500, 5)) == list(range(3, 200))
    assert list(streams.scan("nobody-wrote-this", Reissue)) == []


def test_an_entry_of_another_kind_is_set_aside_with_its_reason_and_the_rest_goes_on(
    streams: Streams, another: Open
) -> None:
    poison = EvalRequest(id="e", weights=3)
    streams.publish_many("reissue", [*small(0), poison, *small(1)])
    reader = reader_of(streams)
    assert positions(reader.read(9, 5)) == [0, 1]
    (rejected,) = streams.rejected("reissue")
    assert rejected.reason == "expected a Reissue record, found EvalRequest"
    assert rejected.data == encode_record(poison)
    depth = streams.depth("reissue")
    assert (depth.entries, depth.unread_bytes, depth.rejected) == (2, 0, 1)
    again = reader_of(another())
    assert positions(again.read(9, 5)) == [0, 1]
    assert len(streams.rejected("reissue")) == 1


def test_of_a_large_entry_that_is_set_aside_the_beginning_is_kept(streams: Streams) -> None:
    poison = EvalRequest(id="e" * 2 * REJECTED_BYTES, weights=3)
    streams.publish_many("reissue", [poison, *small(0)])
    assert positions(reader_of(streams).read(9, 5)) == [0]
    (rejected,) = streams.rejected("reissue")
    assert rejected.data == encode_record(poison)[:REJECTED_BYTES]
    depth = streams.depth("reissue")
    assert (depth.entries, depth.bytes) == (1, len(encode_record(*small(0))))


def test_poison_alone_does_not_end_a_wait_for_a_good_entry(streams: Streams, another: Open) -> None:
    streams.publish("reissue", EvalRequest(id="e", weights=3))
    late = threading.Timer(0.2, lambda: streams.publish_many("reissue", small(1)))
    late.start()
    assert positions(reader_of(another()).read(1, 20)) == [1]
    late.join()


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


def test_a_second_reader_with_another_name_is_refused(streams: Streams, another: Open) -> None:
    reader_of(streams)
    with pytest.raises(StreamError, match="actor"):
        another().reader("reissue", Reissue, "somebody")


def test_values_are_replaced_and_found_by_prefix(streams: Streams, another: Open) -> None:
    assert streams.get("weights") is None
    streams.put("weights", b"1")
    streams.put("weights", b"\x00\xff")
    streams.put_json("server/127.0.0.2:80", {"version": 4})
    streams.put_json("server/127.0.0.3:80", {"version": 5})
    other = another()
    assert other.get("weights") == b"\x00\xff"
    assert other.get_json("server/127.0.0.2:80", dict[str, int]) == {"version": 4}
    assert sorted(other.get_all("server/")) == ["server/127.0.0.2:80", "server/127.0.0.3:80"]
    assert other.get_all("nothing") == {}
    with pytest.raises(StreamError, match="is no int"):
        other.get_json("server/127.0.0.2:80", int)


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
