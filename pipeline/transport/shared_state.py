"""The board: the few values that the trainer posts and the actor watches.

Owns their names and types in the streams' state. Promises that a reader gets one posted value or none, never a mixture,
and none of an earlier attempt. Knows nothing of their use: see `pipeline.transport.staleness` and
`pipeline.transport.ledger`.

The trainer, in this order:

    board.post_ledger(ledger.snapshot())             # at its start; after each checkpoint, BEFORE it acknowledges
    board.post_server(server, version or None)       # whenever a server becomes current, or stops being current
    board.remove_server(server)                      # when a server leaves: no new request, running ones move away
    board.post_progress(version, ledger.done_count)  # after its first publish, each step and each discarded group

The actor waits for the ledger, for a bounded time, then for progress and a server until the first weights arrive. At
its start it reads `groups`, then `prepared`, then the ledger, in the direction in which entries move: an entry that
moves during the reads appears in the next one.
"""

import msgspec

from pipeline.transport import Streams

LEDGER = "ledger"
PROGRESS = "progress"
SERVERS = "servers/"


class TrainerProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer's position: its policy version (RL steps done), and its total number of done positions."""

    version: int
    done: int


class ServerState(msgspec.Struct, frozen=True, kw_only=True):
    """The policy version that a server serves; None while it must not be used."""

    version: int | None


class SharedState:
    """The board of one attempt. Threads may share it."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def post_ledger(self, snapshot: bytes) -> None:
        """Replace the saved ledger, as `Ledger.snapshot` wrote it."""
        self._streams.put(LEDGER, snapshot)

    def post_progress(self, version: int, done: int) -> None:
        """Replace the trainer's progress."""
        self._streams.put_json(PROGRESS, TrainerProgress(version=version, done=done))

    def post_server(self, server: str, version: int | None) -> None:
        """Post the policy version that `server` (`host:port`) serves, or None if it must not be used."""
        self._streams.put_json(SERVERS + server, ServerState(version=version))

    def remove_server(self, server: str) -> None:
        """Remove a server that leaves the attempt. Its running requests are continued on other servers."""
        self._streams.remove(SERVERS + server)

    def ledger(self) -> bytes | None:
        """The last posted ledger."""
        return self._streams.get(LEDGER)

    def progress(self) -> TrainerProgress | None:
        """The trainer's progress; None before its first weights are published."""
        return self._streams.get_json(PROGRESS, TrainerProgress)

    def servers(self) -> dict[str, int | None]:
        """The policy version of every posted server."""
        posted = self._streams.get_all(SERVERS)
        return {
            key.removeprefix(SERVERS): msgspec.json.decode(value, type=ServerState).version
            for key, value in posted.items()
        }
