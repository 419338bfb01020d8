"""The board: the few values that the trainer posts and the actor watches.

Owns their names and types in the streams' state. Promises that a reader sees one posted value or none, never a mixture,
and none of an earlier attempt. Knows nothing of how they are used: see `pipeline.transport.staleness` and
`pipeline.transport.ledger`.

The trainer, in this order:

    board.post_ledger(ledger.snapshot())            # at once when it starts; after each commit, BEFORE it acknowledges
    board.post_server(server, version or None)      # whenever a server becomes current, or is not any more
    board.post_progress(version, ledger.settled)    # after its first publish; whenever it stepped or set groups aside

The actor waits for the ledger, for a bounded time, then for progress and a server, for as long as the first weights
take. When it starts it reads `groups`, then `prepared`, then the ledger: an entry that moved on meanwhile is in the
next.
"""

import msgspec

from pipeline.transport import Streams

LEDGER = "ledger"
PROGRESS = "progress"
SERVERS = "servers/"


class TrainerProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Where the trainer is: its weight version (RL steps done) and how many positions it has settled in all."""

    version: int
    done: int


class ServerState(msgspec.Struct, frozen=True, kw_only=True):
    """Which weights a server serves; None while it must not be used."""

    version: int | None


class SharedState:
    """The board of one attempt. Threads may share it."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def post_ledger(self, snapshot: bytes) -> None:
        """Replace the committed ledger, as `Ledger.snapshot` wrote it."""
        self._streams.put(LEDGER, snapshot)

    def post_progress(self, version: int, done: int) -> None:
        """Replace the trainer's progress."""
        self._streams.put_json(PROGRESS, TrainerProgress(version=version, done=done))

    def post_server(self, server: str, version: int | None) -> None:
        """Say which weights `server` (`host:port`) serves, or None: not to be used."""
        self._streams.put_json(SERVERS + server, ServerState(version=version))

    def ledger(self) -> bytes | None:
        """The last posted ledger."""
        return self._streams.get(LEDGER)

    def progress(self) -> TrainerProgress | None:
        """The trainer's progress; None before its first weights are published."""
        return self._streams.get_json(PROGRESS, TrainerProgress)

    def servers(self) -> dict[str, int | None]:
        """Every server that was posted and its weight version."""
        posted = self._streams.get_all(SERVERS)
        return {
            key.removeprefix(SERVERS): msgspec.json.decode(value, type=ServerState).version
            for key, value in posted.items()
        }
