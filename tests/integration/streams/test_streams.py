"""What the streams promise, on both backends: the same tests on a real Redis and on a real directory."""

import threading
import time

import pytest

from pipeline.errors import StreamError
from pipeline.roles.role_context import RoleContext
from pipeline.transport import Depth, Reader, Streams
from pipeline.transport.eval_records import EvalRequest
from pipeline.transport.record_wire import encode_record
from pipeline.transport.rejections import REJECTED_BYTES, lost_group
from pipeline.transport.sample_records import Group, PreparedGroup, Reissue
from tests.support.streams import BUDGET, Open, big, collect, positions, reader_of, size, small

pytestmark = pytest.mark.integration


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
    poison = EvalRequest(id="e", policy_version=3)
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


def test_an_entry_with_a_substitute_is_delivered_as_it_until_it_is_acknowledged(
    streams: Streams, another: Open
) -> None:
    odd = Group(position=7, prompt=3, failures=(5,))  # type: ignore[arg-type]
    good = Group(position=8, prompt=4)
    streams.publish_many("groups", [odd, good, EvalRequest(id="e", policy_version=3)])
    again: Reader[Group | PreparedGroup]
    for opened in (streams, another()):
        again = opened.reader("groups", Group, "preprocessor", lost_group)
        lost, kept = again.read(9, 5)
        assert isinstance(lost.record, PreparedGroup)
        assert lost.record.group == Group(position=7, prompt=3)
        assert "Expected `str`, got `int`" in lost.record.outcome
        assert (kept.record, lost.size) == (good, len(encode_record(odd)))
    assert (streams.depth("groups").entries, streams.depth("groups").rejected) == (2, 1)
    again.acknowledge([lost.id])
    depth = streams.depth("groups")
    assert (depth.entries, depth.bytes) == (1, len(encode_record(good)))


def test_of_a_large_entry_that_is_set_aside_the_beginning_is_kept(streams: Streams) -> None:
    poison = EvalRequest(id="e" * 2 * REJECTED_BYTES, policy_version=3)
    streams.publish_many("reissue", [poison, *small(0)])
    assert positions(reader_of(streams).read(9, 5)) == [0]
    (rejected,) = streams.rejected("reissue")
    assert rejected.data == encode_record(poison)[:REJECTED_BYTES]
    depth = streams.depth("reissue")
    assert (depth.entries, depth.bytes) == (1, len(encode_record(*small(0))))


def test_poison_alone_does_not_end_a_wait_for_a_good_entry(streams: Streams, another: Open) -> None:
    streams.publish("reissue", EvalRequest(id="e", policy_version=3))
    late = threading.Timer(0.2, lambda: streams.publish_many("reissue", small(1)))
    late.start()
    assert positions(reader_of(another()).read(1, 20)) == [1]
    late.join()


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
    streams.remove("server/127.0.0.2:80")
    streams.remove("server/127.0.0.2:80")
    assert list(other.get_all("server/")) == ["server/127.0.0.3:80"]
