"""Roles that are killed at any moment: the streams lose nothing of theirs, on both backends."""

import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.roles.role_context import RoleContext
from pipeline.transport import Entry, Reader, Streams, connect
from pipeline.transport.sample_records import Reissue
from tests.support.servers.redis_attempts import an_attempt
from tests.support.servers.redis_binaries import redis_servers

pytestmark = pytest.mark.integration


@pytest.fixture(params=[*redis_servers(), "files"])
def context(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RoleContext]:
    with an_attempt(tmp_path, request.param) as context:
        yield context


@pytest.fixture
def streams(context: RoleContext) -> Iterator[Streams]:
    with connect(context) as streams:
        yield streams


def numbered(count: int) -> list[Reissue]:
    return [Reissue(position=position, reason="test") for position in range(count)]


def reader_of(streams: Streams) -> Reader[Reissue]:
    return streams.reader("reissue", Reissue, "actor")


def positions(entries: Iterable[Entry[Reissue]]) -> list[int]:
    return [entry.record.position for entry in entries]


class Process:
    """A process of `stream_roles`, which tells its progress in lines."""

    def __init__(self, what: str, context: RoleContext) -> None:
        argv = [sys.executable, "-m", "tests.support.ranks.stream_roles", what, *context.arguments()]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=10)

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: Any) -> None:
        self.kill()


def test_a_reader_killed_before_it_acknowledges_gets_its_entries_again(streams: Streams, context: RoleContext) -> None:
    streams.publish_many("reissue", numbered(4))
    with Process("read_three_settle_one", context) as victim:
        assert victim.line() == "3"
    assert positions(reader_of(streams).read(9, 5)) == [1, 2, 3]


def test_a_writer_killed_at_any_moment_leaves_every_entry_it_published_and_no_other_bytes(
    streams: Streams, context: RoleContext
) -> None:
    reader = reader_of(streams)
    got: list[int] = []
    told = 0
    for _ in range(3):
        with Process("publish_without_end", context) as victim:
            begun = len(got)
            told = max(int(victim.line()) for _ in range(20))
        got += positions(reader.read(10_000, 5))
        assert got[begun : begun + told + 1] == list(range(told + 1))
    depth = streams.depth("reissue")
    assert depth.entries == len(got)
    assert (depth.unread_bytes, depth.rejected) == (0, 0)


def test_a_role_killed_between_input_and_output_loses_nothing(streams: Streams, context: RoleContext) -> None:
    total = 200
    streams.publish_many("reissue", numbered(total))
    for _ in range(3):
        with Process("replace_without_end", context) as victim:
            for _ in range(20):
                assert victim.line()
    settled = total - streams.depth("reissue").entries
    copied = positions(list(streams.scan("copies", Reissue)))
    assert sorted(set(copied)) == list(range(len(set(copied))))
    assert 60 <= settled <= len(set(copied))
    if context.config.streams.backend == "redis":
        assert copied == list(range(settled))
