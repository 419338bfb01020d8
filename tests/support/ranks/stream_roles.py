"""Processes that the stream tests kill: `python -m tests.support.ranks.stream_roles <what> <context arguments>`."""

import sys
from typing import NoReturn

from pipeline.roles.role_context import RoleContext
from pipeline.transport import Streams, connect
from pipeline.transport.sample_records import Reissue


def say(word: object) -> None:
    print(word, flush=True)


def hang() -> NoReturn:
    """Wait to be killed, or for the end of the test."""
    sys.stdin.read()
    sys.exit("nobody killed this process")


def read_three_settle_one(streams: Streams) -> None:
    reader = streams.reader("reissue", Reissue, "actor")
    entries = reader.read(3, 20)
    reader.acknowledge([entries[0].id])
    say(len(entries))
    hang()


def publish_without_end(streams: Streams) -> None:
    position = 0
    while True:
        streams.publish("reissue", Reissue(position=position, reason="x" * 100), seconds=20)
        say(position)
        position += 1


def replace_without_end(streams: Streams) -> None:
    """Reads `reissue`, publishes each to `copies` and settles it: what a preprocessor does."""
    reader = streams.reader("reissue", Reissue, "preprocessor")
    while True:
        for entry in reader.read(4, 20):
            streams.publish("copies", entry.record, acknowledging=(reader, [entry.id]), seconds=20)
            say(entry.record.position)


ROLES = {role.__name__: role for role in (read_three_settle_one, publish_without_end, replace_without_end)}

if __name__ == "__main__":
    with connect(RoleContext.from_arguments(sys.argv[2:])) as opened:
        ROLES[sys.argv[1]](opened)
