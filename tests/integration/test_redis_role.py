"""The redis role as an agent runs it: binary, configuration, readiness, and the data that its attempts inherit."""

import os
import resource
import signal
import socket
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from redis.exceptions import ResponseError

from pipeline.errors import ImpostorError, StreamError
from pipeline.roles import redis as role
from pipeline.roles.role_context import RoleContext
from pipeline.transport import Streams, connect, redis_streams
from pipeline.transport.record_wire import encode_record
from pipeline.transport.redis_streams import RedisStreams
from pipeline.transport.sample_records import Reissue
from pipeline.utils import mutual_auth
from pipeline.utils.connection_limits import MAX_UNPROVED
from pipeline.utils.subprocesses import hold_port
from pipeline.utils.waiting import wait_for
from tests.patience import WAIT_SECONDS
from tests.support.servers.redis_attempts import (
    ADDRESS,
    a_redis,
    copy_of,
    go_back,
    left_in,
    numbers,
    raw_client,
    redis_context,
    running_redis,
    wait_until_written,
)

pytestmark = pytest.mark.integration
with_each_redis = pytest.mark.usefixtures("each_redis")


@with_each_redis
def test_the_server_hears_nobody_who_does_not_know_the_secret(tmp_path: Path) -> None:
    with a_redis(tmp_path, "7-0") as (context, _):
        port = context.placement.ports[0]
        assert role.is_answering(ADDRESS, port, context.world.password)
        with pytest.raises(ImpostorError, match="does not know this attempt's secret"):
            role.is_answering(ADDRESS, port, "guess")
        with socket.create_connection((ADDRESS, port), timeout=5) as link:
            link.sendall(b"PING\r\n".ljust(mutual_auth.NONCE_BYTES))
            assert len(link.recv(1024)) == mutual_auth.NONCE_BYTES + mutual_auth.PROOF_BYTES
            link.sendall(b"PING\r\n".ljust(mutual_auth.PROOF_BYTES))
            assert link.recv(64) == b""


@with_each_redis
def test_the_clients_user_can_do_no_more_than_the_streams_need(tmp_path: Path) -> None:
    refused = ["MODULE LIST", "CONFIG GET dir", "DEBUG SLEEP 0", "REPLICAOF NO ONE", "SHUTDOWN NOSAVE", "FLUSHALL"]
    refused += ["ACL LIST", "KEYS *", "SAVE", "BGREWRITEAOF", "CLIENT LIST", "EVAL x 0", "GET other"]
    with a_redis(tmp_path, "7-0") as (context, _):
        with socket.create_connection((ADDRESS, context.placement.ports[0]), timeout=5) as link:
            mutual_auth.introduce(link, context.world.password, "redis")
            replies = link.makefile("rb")
            link.sendall(f"AUTH {context.world.password}\r\n".encode())
            assert replies.readline() == b"+OK\r\n"
            for command in refused:
                link.sendall(f"{command}\r\n".encode())
                assert replies.readline().startswith((b"-NOPERM", b"-ERR DEBUG command not allowed")), command
        with connect(context) as streams:
            streams.publish_many("reissue", numbers(1))
            assert left_in(streams) == [1]


@with_each_redis
def test_a_flood_of_silent_strangers_keeps_no_peer_out(tmp_path: Path) -> None:
    with a_redis(tmp_path, "7-0") as (context, _), ExitStack() as opened:
        place = (ADDRESS, context.placement.ports[0])
        with connect(context) as streams:
            for _ in range(3 * MAX_UNPROVED):
                opened.enter_context(socket.create_connection(place, timeout=5))
            streams.publish_many("reissue", numbers(1))
        assert role.is_answering(*place, context.world.password)
        with connect(context) as streams:
            assert left_in(streams) == [1]
        with raw_client(context) as client:
            assert len(client.client_list()) < 10, "a stranger's connection reached Redis"


def test_who_listens_in_its_place_is_told_no_secret(tmp_path: Path) -> None:
    heard: list[bytes] = []

    def listen() -> None:
        with stranger.accept()[0] as link:
            heard.append(link.recv(4096))
            link.sendall(b"+OK\r\n+PONG\r\n".ljust(64, b"."))
            heard.append(link.recv(4096))

    with socket.create_server((ADDRESS, 0)) as stranger, ThreadPoolExecutor(1) as pool:
        port = stranger.getsockname()[1]
        context, listening = redis_context(tmp_path, "7-0", port), pool.submit(listen)
        with pytest.raises(
            StreamError, match=rf"does not know this attempt's secret.*uid {os.getuid()} .*pid {os.getpid()}"
        ):
            connect(context)
        listening.result(30)
    assert [len(said) for said in heard] == [mutual_auth.NONCE_BYTES, 0]


def test_a_port_that_somebody_else_took_is_told_with_its_holder(tmp_path: Path) -> None:
    with socket.create_server((ADDRESS, 0)) as other:
        context = redis_context(tmp_path, "7-0", other.getsockname()[1])
        with pytest.raises(AssertionError, match=rf"which is held by uid {os.getuid()} .*pid {os.getpid()} "):
            running_redis(context).__enter__()


@with_each_redis
def test_the_server_listens_on_its_own_address_only(tmp_path: Path) -> None:
    with a_redis(tmp_path, "7-0") as (context, _), pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.9", context.placement.ports[0]), timeout=5)


@with_each_redis
def test_only_the_owner_can_read_the_secret_and_the_data(tmp_path: Path) -> None:
    with a_redis(tmp_path, "7-0") as (context, child):
        with connect(context) as streams:
            streams.publish_many("reissue", numbers(1))
        folder = context.paths.redis
        written = [path for path in [folder, *folder.rglob("*")] if stat.S_IMODE(path.stat().st_mode) & 0o077]
        command_line = Path(f"/proc/{child.pid}/cmdline").read_bytes()
    assert written == []
    assert context.world.password.encode() not in command_line


@with_each_redis
def test_the_agents_signal_ends_the_server_cleanly(tmp_path: Path) -> None:
    with a_redis(tmp_path, "7-0") as (_, child):
        assert child.stop(5) == 0


@with_each_redis
def test_the_next_attempt_goes_on_with_the_streams_of_a_server_that_was_killed(tmp_path: Path) -> None:
    with a_redis(tmp_path, "7-0") as (context, child):
        with connect(context) as streams:
            streams.publish_many("reissue", numbers(1, 2, 3))
            reader = streams.reader("reissue", Reissue, "actor")
            reader.acknowledge([entry.id for entry in reader.read(1, 5)])
            streams.put("weights", b"12")
        wait_until_written(context)
        child.kill()
    with a_redis(tmp_path, "7-1") as (context, _), connect(context) as streams:
        reader = streams.reader("reissue", Reissue, "actor")
        assert [entry.record.position for entry in reader.read(10, 5)] == [2, 3]
        assert streams.get("weights") is None
        streams.publish_many("reissue", numbers(4))
        assert [entry.record.position for entry in reader.read(10, 5)] == [4]


@with_each_redis
def test_a_zombie_of_an_earlier_attempt_cannot_touch_a_later_one(tmp_path: Path) -> None:
    with a_redis(tmp_path, "9-0") as (zombie, _), connect(zombie) as stale:
        stale.publish_many("reissue", numbers(1))
        wait_until_written(zombie)
        with a_redis(tmp_path, "10-0") as (live, _), connect(live) as streams:
            stale.publish_many("reissue", numbers(2))
            streams.publish_many("reissue", numbers(3))
            assert left_in(streams) == [1, 3]
        stale.publish_many("reissue", numbers(4))
        with a_redis(tmp_path, "10-1") as (live, _), connect(live) as streams:
            assert left_in(streams) == [1, 3]


@with_each_redis
def test_what_is_copied_while_a_zombie_writes_is_all_that_it_wrote_up_to_some_moment(tmp_path: Path) -> None:
    """Also while it rewrites its files: a copy is a beginning of its history, at worst torn at its end."""
    done, written = threading.Event(), 0

    def write_on(stale: Streams) -> None:
        nonlocal written
        while not done.is_set():
            stale.publish_many("reissue", numbers(*range(written, written + 50)))
            written += 50

    with a_redis(tmp_path, "9-0") as (zombie, _), connect(zombie) as stale, ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write_on, stale)
        try:
            wait_for("the zombie to write", lambda: written > 1000, WAIT_SECONDS)
            with raw_client(zombie) as client:
                client.bgrewriteaof()
            before = written
            with a_redis(tmp_path, "10-0") as (live, _), connect(live) as streams:
                kept = left_in(streams)
        finally:
            done.set()
        writing.result(10)
    assert len(kept) >= before - 100
    assert kept == list(range(len(kept)))


@with_each_redis
def test_a_server_killed_in_its_attempt_starts_again_with_its_data_and_its_clients_go_on(tmp_path: Path) -> None:
    with hold_port() as holder:
        context = redis_context(tmp_path, "7-0", holder.getsockname()[1])
        with running_redis(context) as child:
            streams = connect(context)
            reader = streams.reader("reissue", Reissue, "actor")
            streams.publish_many("reissue", numbers(1, 2))
            assert len(reader.read(1, 5)) == 1
            wait_until_written(context)
            child.kill()
        with running_redis(context), streams:
            streams.publish_many("reissue", numbers(3))
            assert [entry.record.position for entry in reader.read(10, 5)] == [1, 2, 3]  # 1 was not acknowledged
            assert streams.depth("reissue").unread_bytes == 0


@with_each_redis
def test_a_reader_goes_on_with_what_is_there_when_redis_lost_what_it_read_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also when the clock was set back meanwhile, so that new entries have lower ids than those that are gone."""
    with hold_port() as holder:
        context = redis_context(tmp_path, "7-0", holder.getsockname()[1])
        with running_redis(context) as child:
            streams = connect(context)
            reader = streams.reader("reissue", Reissue, "actor")
            streams.publish_many("reissue", numbers(1))
            kept = copy_of(context)
            streams.put("weights", b"12")
            with raw_client(context) as client:
                late = f"{int(client.time()[0]) + 30}000-0"
                client.xadd("rollcall:reissue", {"d": encode_record(numbers(2)[0]), "e": "0"}, id=late)
            assert [entry.record.position for entry in reader.read(10, 5)] == [1, 2]
            child.kill()
        go_back(context, kept)
        with running_redis(context), streams:
            assert streams.get("weights") == b"12"
            streams.publish_many("reissue", numbers(3, 4))
            entries = reader.read(10, 5)
            assert [entry.record.position for entry in entries] == [1, 3, 4]
            reader.acknowledge([entry.id for entry in entries])
            assert left_in(streams) == []
            assert streams.generation == 1
    assert "may have lost its last writes" in caplog.text


@with_each_redis
@pytest.mark.parametrize("forgets", ["the last opening", "every opening"])
def test_a_reader_that_was_replaced_stays_so_when_redis_forgot_who_replaced_it(tmp_path: Path, forgets: str) -> None:
    with hold_port() as holder:
        context = redis_context(tmp_path, "7-0", holder.getsockname()[1])
        with running_redis(context) as child:
            first, second, third = connect(context), connect(context), connect(context)
            third.publish_many("reissue", numbers(1, 2))
            kept = copy_of(context) if forgets == "every opening" else None
            told, untold = first.reader("reissue", Reissue, "actor"), second.reader("reissue", Reissue, "actor")
            with pytest.raises(StreamError, match="stays so"):
                told.read(1, 5)
            kept = kept or copy_of(context)
            reader = third.reader("reissue", Reissue, "actor")
            (entry,) = reader.read(1, 5)
            child.kill()
        go_back(context, kept)
        with running_redis(context), first, second, third:
            with pytest.raises(StreamError, match="stays so"):
                told.read(1, 0)
            assert len(untold.read(1, 5)) == 1, "nobody can know better yet"
            reader.acknowledge([entry.id])
            with pytest.raises(StreamError, match="stays so"):
                untold.read(1, 5)
            assert [entry.record.position for entry in reader.read(10, 5)] == [2]


@with_each_redis
def test_a_redis_whose_disk_is_full_is_waited_for_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The size of its files is bounded, which a write meets as it meets a full disk; the bound is lifted again."""
    monkeypatch.setattr(redis_streams, "_WARN_AFTER", 0.0)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # inherited: the write fails instead
    try:
        with a_redis(tmp_path, "7-0") as (context, child), connect(context) as streams:
            streams.publish_many("reissue", numbers(1))
            wait_until_written(context)
            unbounded = resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
            fill(context)
            port = context.placement.ports[0]
            assert role.is_answering(ADDRESS, port, context.world.password), "it lives, though it cannot write"
            with pytest.raises(StreamError, match=r"MISCONF .*, for \d+ s"):
                impatient(context).put("key", b"value")
            caplog.clear()
            with ThreadPoolExecutor(1) as pool:
                publishing = pool.submit(streams.publish_many, "reissue", numbers(2))
                wait_for("a line about it", lambda: "cannot write to its disk" in caplog.text, WAIT_SECONDS)
                assert not publishing.done()
                resource.prlimit(child.pid, resource.RLIMIT_FSIZE, unbounded)
                assert publishing.result(WAIT_SECONDS)
            assert "answers again" in caplog.text
            assert left_in(streams) == [1, 2]
    finally:
        signal.signal(signal.SIGXFSZ, before)


def impatient(context: RoleContext) -> Streams:
    """Streams that wait for half a second."""
    place, world = context.placement, context.world
    password, attempt = world.password, world.attempt
    return RedisStreams(place.address, place.ports[0], password, budget=1, attempt=attempt, patience=0.5, startup=0.5)


def fill(context: RoleContext) -> None:
    """Write to a Redis until it notices that its disk takes nothing."""

    def is_refused() -> bool:
        try:
            client.set("filler", b"x" * 100)
        except ResponseError as error:
            return "MISCONF" in str(error)
        return False

    with raw_client(context) as client:
        wait_for("Redis to refuse a write", is_refused, WAIT_SECONDS)
