"""What becomes of Redis's data that were cut off, damaged or changed."""

import os
from pathlib import Path

import pytest

from pipeline.transport import connect
from pipeline.transport.record_wire import encode_record
from pipeline.transport.redis_persistence import ONE_FILE, inherit
from pipeline.transport.sample_records import Reissue
from pipeline.utils.subprocesses import hold_port
from tests.support.servers.redis_attempts import (
    a_redis,
    left_in,
    numbers,
    redis_context,
    running_redis,
    wait_until_written,
)

pytestmark = pytest.mark.integration
with_each_redis = pytest.mark.usefixtures("each_redis")


@with_each_redis
def test_a_torn_tail_of_the_data_loses_only_the_torn_write(tmp_path: Path) -> None:
    with a_redis(tmp_path, "7-0") as (context, child):
        with connect(context) as streams:
            streams.publish_many("reissue", numbers(1))
            streams.publish_many("reissue", numbers(2))
        wait_until_written(context)
        child.kill()
        (log,) = [path for path in context.paths.redis.rglob("*") if path.name.endswith((".incr.aof", ONE_FILE))]
        os.truncate(log, log.stat().st_size - 5)
    with a_redis(tmp_path, "7-1") as (context, _), connect(context) as streams:
        assert left_in(streams) == [1]
        depth = streams.depth("reissue")
        assert depth.bytes == depth.unread_bytes == len(encode_record(numbers(1)[0]))


@with_each_redis
def test_data_that_is_damaged_in_the_middle_is_cut_there_and_redis_starts(tmp_path: Path) -> None:
    with a_redis(tmp_path, "7-0") as (context, child):
        with connect(context) as streams:
            for position in range(20):
                streams.publish_many("reissue", numbers(position))
        wait_until_written(context)
        child.kill()
    (data,) = [path for path in context.paths.redis.rglob("*") if path.name.endswith((".incr.aof", ONE_FILE))]
    written = data.read_bytes()
    middle = written.index(b"*", len(written) // 2)
    data.write_bytes(written[:middle] + b"?" + written[middle + 1 :])
    with a_redis(tmp_path, "7-1") as (context, child):
        with connect(context) as streams:
            left = left_in(streams)
        told = child.log.read_text()
    assert 0 < len(left) < 20
    assert left == list(range(len(left)))
    assert "was damaged or torn, and is cut off there" in told
    assert "issued again" in told


@with_each_redis
def test_data_beyond_repair_is_set_aside_and_redis_starts_empty(tmp_path: Path) -> None:
    junk = b"REDIS0009" + b"junk" * 20
    with hold_port() as holder:
        context = redis_context(tmp_path, "7-0", holder.getsockname()[1])
        inherit(context.paths.redis)
        (context.paths.redis / ONE_FILE).write_bytes(junk)
        with running_redis(context) as child, connect(context) as streams:
            assert left_in(streams) == []
            streams.publish_many("reissue", numbers(1))
    assert (context.paths.redis / "damaged-1" / ONE_FILE).read_bytes() == junk
    assert "beyond repair" in child.log.read_text()


@with_each_redis
def test_a_bit_that_flips_in_the_data_costs_its_record_and_changes_none(tmp_path: Path) -> None:
    with a_redis(tmp_path, "7-0") as (context, child), connect(context) as streams:
        for position in (1, 2, 3):
            streams.publish("reissue", Reissue(position=position, reason="a reason that is found"))
        wait_until_written(context)
        child.kill()
    (file,) = [path for path in context.paths.redis.rglob("*aof*") if b"that is found" in path.read_bytes()]
    data = bytearray(file.read_bytes())
    data[data.index(b"that is found")] ^= 1
    file.write_bytes(data)
    with a_redis(tmp_path, "7-1") as (again, _), connect(again) as streams:
        assert [entry.record.position for entry in streams.reader("reissue", Reissue, "test").read(9, 5)] == [2, 3]
        assert ["checksum differs" in rejected.reason for rejected in streams.rejected("reissue")] == [True]
