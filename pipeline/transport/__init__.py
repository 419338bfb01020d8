"""Communication between roles: topics of records, each read once, and small values with only a current state.

| module | owns |
|---|---|
| `streams` | the protocol, and the waiting that both backends share |
| `rejections` | what becomes of entries that are no records of their reader's kind |
| `redis_streams`, `redis_scripts` | streams in Redis; the scripts that run inside it, each one atomic step |
| `redis_persistence`, `redis_repair` | the data that Redis starts from; the repair of damaged data |
| `file_streams`, `topic_segments`, `topic_cursors` | streams in files; the files of a topic; its reader's cursor |
| `async_streams` | the streams inside an event loop |
| `ending_patience` | the timeout for a backend while the attempt is ending |
| `shared_state` | the few values that the trainer posts and the actor watches |
| `sample_records`, `turn_times` | records of samples and groups; the times of turns |
| `eval_records` | records of evaluations |
| `record_wire` | the wire format of all records |
| `top_tokens` | the likeliest tokens of a teacher |
| `ledger`, `staleness` | the order and the outcomes of positions; the bound on generation ahead of training |

Owns the streams between the roles. One interface (`streams.Streams`), two backends: Redis Streams (`redis`, the
default) and files in the run directory (`files`, no Redis node). Promises:

- A record is safe when `publish` has returned: it survives its writer, its reader and a restart of the backend, and is
  delivered until it is acknowledged. Nothing unread is ever dropped. (A Redis that is killed may lose its last two
  seconds, `appendfsync everysec`. The positions in them are not done, so the next actor issues them again, or the same
  actor once Redis is back, see `Streams.generation`.)
- `publish` waits while the unacknowledged entries of the topic would exceed `streams.budget_bytes`: a slow reader slows
  its writer. A reader that has read everything always gets one more entry, so its needs may exceed the budget.
- A reader that is opened again gets all entries that it read but did not acknowledge, first and in the same order. The
  reader opened last owns the topic; an earlier one, of a replaced process that still runs, can acknowledge no more.
- A topic has one reader. On Redis it may have several writers; on files it has one.

Topics outlive an attempt. Values (`put`, `get`) belong to the attempt that wrote them, so no attempt ever sees a stale
version. Knows neither the meaning of records nor the placement of roles.

    streams = connect(context)
    reader = streams.reader("groups", Group, "preprocessor")
    for entry in reader.read(limit=16, seconds=1.0):
        prepared = prepare(entry.record)
        streams.publish("prepared", prepared, acknowledging=(reader, [entry.id]))
"""

from typing import Protocol

from pipeline.config import RunConfig, StreamsConfig
from pipeline.errors import StreamError
from pipeline.run.events import EventPoller, Events
from pipeline.run.paths import AttemptPaths
from pipeline.topology.plan import World
from pipeline.transport.async_streams import AsyncStreams
from pipeline.transport.ending_patience import ShutdownPatience
from pipeline.transport.rejections import Rejected
from pipeline.transport.streams import Depth, Entry, Reader, Streams

__all__ = ["AsyncStreams", "Depth", "Entry", "Reader", "Rejected", "Streams", "connect", "open_streams"]


class StreamsContext(Protocol):
    """The part of a role's context that `connect` needs, such as `pipeline.roles.role_context.RoleContext`."""

    @property
    def config(self) -> RunConfig: ...
    @property
    def paths(self) -> AttemptPaths: ...
    @property
    def world(self) -> World: ...


def connect(context: StreamsContext) -> Streams:
    """The streams of the context's attempt; `StreamError` when the backend does not answer."""
    cluster = context.config.cluster
    startup, grace = cluster.startup_seconds, cluster.grace_seconds
    return open_streams(context.config.streams, context.paths, context.world, startup, grace)


def open_streams(
    config: StreamsConfig, paths: AttemptPaths, world: World, startup: float = 30.0, grace: float = 0.0
) -> Streams:
    """The streams of an attempt: in Redis at the world's `redis` placement, or in the run directory.

    A Redis that is starting or loading is awaited for `startup` seconds. While Redis is unreachable, waiting ends as
    soon as the attempt has failed, so that the trainer can save a checkpoint instead. In an attempt that must end
    within `grace` seconds, `pipeline.transport.ending_patience` bounds the wait.
    """
    if config.backend == "files":
        from pipeline.transport.file_streams import FileStreams

        return FileStreams(paths, config.budget_bytes)
    servers = world.of_role("redis")
    if not servers:
        raise StreamError(f"the world of attempt {world.attempt} has no redis role; set streams.backend=files")
    from pipeline.transport.redis_streams import RedisStreams

    address, port = servers[0].address, servers[0].ports[0]
    ending = ShutdownPatience(EventPoller(Events(paths), ranks=len(world.placements)), grace)
    return RedisStreams(
        address,
        port,
        world.password,
        budget=config.budget_bytes,
        attempt=world.attempt,
        startup=startup,
        time_left=ending.time_left,
    )
