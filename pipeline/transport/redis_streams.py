"""Streams in Redis.

Owns every exchange with the Redis of an attempt. A topic is a Redis stream from which acknowledged entries are deleted,
so the remaining entries are exactly those that a reopened reader must get: the reader's durable position.
`redis_scripts` describes the layout. Promises that Redis's errors leave this module only as `StreamError`; that a lost
connection is retried for `patience` seconds, and so is a Redis that cannot write to its disk; that a step whose answer
was lost is not done twice; that only the reader opened last continues; that the password is sent only to a server that
has proved to know it; and that a restarted Redis, which may have lost its last writes, is noticed, because every
connection queries the id of the server's process. Then `generation` grows, values are posted again, and readers begin
again with the entries that exist.
"""

import logging
import math
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

import redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError
from redis.exceptions import ConnectionError as Disconnected
from redis.exceptions import TimeoutError as TimedOut
from redis.retry import Retry

from pipeline.errors import ImpostorError, RecordError, StreamError, one_line
from pipeline.transport import redis_scripts as scripts
from pipeline.transport.record_wire import R, Substitute, decode_or_substitute, no_substitute
from pipeline.transport.rejections import Rejected, Rejections
from pipeline.transport.streams import Acknowledging, Depth, Entry, Reader, Streams
from pipeline.utils import heartbeat
from pipeline.utils.fs_retry import FS_OUTAGE_TIMEOUT
from pipeline.utils.mutual_auth import introduce
from pipeline.utils.waiting import CLOCK, Deadline, exponential_pauses

log = logging.getLogger(__name__)

T = TypeVar("T")
Raw = tuple[bytes, dict[bytes, bytes]]

_BLOCK_SECONDS = 1.0
_SOCKET_SECONDS = 10.0
_PAGE = 64
_OUT_OF_MEMORY = "command not allowed when used memory > 'maxmemory'"
"""Part of the message in every version; before Redis 7 inside the error of a script, which has no type."""
_CANNOT_WRITE = "MISCONF"
"""Prefix of the refusal of a Redis whose disk is full or fails. Redis refuses before it executes any part of the
command or script, retries the write, and accepts commands again once it succeeds."""
_WARN_AFTER = 2.0
"""Seconds after which a wait is logged: an immediate reconnection is not worth a line."""
MORE_MEMORY = "; checkpoint more often (training.checkpoint_every), or raise streams.budget_bytes"


class RedisStreams(Streams):
    """The streams of the Redis at `address:port`; `StreamError` when it does not answer within `patience` seconds, or
    within `startup` seconds the first time, since it may have much data to load."""

    def __init__(
        self,
        address: str,
        port: int,
        password: str,
        *,
        budget: int,
        attempt: str,
        patience: float = FS_OUTAGE_TIMEOUT,
        startup: float = 30.0,
        time_left: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """`time_left` returns the seconds for which the attempt may still wait for an unreachable Redis; it is called
        before each retry."""
        self._time_left = time_left
        self._budget, self._patience = budget, patience
        self._name, self._password = f"redis at {address}:{port}", password
        self._client = redis.Redis(
            host=address,
            port=port,
            password=password,
            protocol=2,
            socket_timeout=_SOCKET_SECONDS,
            socket_connect_timeout=_SOCKET_SECONDS,
            socket_read_size=1 << 18,
            retry=Retry(NoBackoff(), 0),
            redis_connect_func=cast(Any, self._meet),
        )
        self._process, self._generation = b"", 0
        self._posted: dict[str, bytes] = {}
        self._posting = threading.RLock()  # released between retries, so that other threads can post
        self._values = f"rollcall:state:{attempt}"
        self._writer = f"rollcall:writer:{secrets.token_hex(8)}"
        self._step = 0
        self._waits = False
        self._publishing = threading.Lock()
        self._scripts = {text: self._client.register_script(text) for text in _SCRIPTS}
        self.exchange(self._client.ping, startup)

    @property
    def budget(self) -> int:
        return self._budget

    @property
    def generation(self) -> int:
        return self._generation

    def try_append(self, topic: str, payloads: Sequence[bytes], acknowledging: Acknowledging | None) -> int:
        source, ids = acknowledging or (None, ())
        reader = source if isinstance(source, RedisReader) else None
        opening = reader.opening if reader else ""
        acknowledged = [part for id in ids for part in _split(id)]
        keys = [*_keys(topic), self._writer, *_keys(source.topic if source else topic)]
        with self._publishing:
            self._step += 1
            arguments = [self._budget, self._step, opening, len(acknowledged), *acknowledged, *payloads]
            return int((reader or self).run(scripts.PUBLISH, keys, arguments))

    def reader(
        self, topic: str, kind: type[R], name: str, substitute: Substitute[R] = no_substitute
    ) -> "RedisReader[R]":
        return RedisReader(self, topic, kind, name, substitute)

    def scan(self, topic: str, kind: type[R]) -> Iterator[Entry[R]]:
        for id, fields in self._range(_keys(topic)[0]):
            try:
                yield _entry(id, fields, kind)
            except RecordError:
                continue

    def rejected(self, topic: str) -> list[Rejected]:
        entries = (fields for _, fields in self._range(_rejected(topic)))
        return [Rejected(id=f[b"id"].decode(), reason=f[b"reason"].decode(), data=f[b"d"]) for f in entries]

    def depth(self, topic: str) -> Depth:
        stream, meta = _keys(topic)

        def step() -> Any:
            pipeline = self._client.pipeline()  # a new one for each try: it is empty after a failure
            pipeline.xlen(stream)
            pipeline.hmget(meta, "held", "published", "read", "rejected")
            return pipeline.execute()

        entries, numbers = self.exchange(step)
        held, published, read, rejected = (int(number or 0) for number in numbers)
        return Depth(entries, held, max(0, published - read), rejected)

    def put(self, key: str, value: bytes) -> None:
        with self._posting:
            self._posted[key] = value
        self.exchange(lambda: self._post(key))

    def remove(self, key: str) -> None:
        with self._posting:
            self._posted.pop(key, None)  # else a new Redis would get it again
        self.exchange(lambda: self._client.hdel(self._values, key))

    def get(self, key: str) -> bytes | None:
        value: bytes | None = self.exchange(lambda: self._client.hget(self._values, key))
        return value

    def get_all(self, prefix: str) -> Mapping[str, bytes]:
        keys = sorted(key for key in self.exchange(lambda: self._client.hkeys(self._values)) if _begins(key, prefix))
        values = self.exchange(lambda: self._client.hmget(self._values, keys)) if keys else []
        return {key.decode(): value for key, value in zip(keys, values, strict=True) if value is not None}

    def close(self) -> None:
        self._client.close()

    def next_entries(self, stream: str, after: bytes, limit: int, seconds: float) -> list[Raw]:
        """Entries after the id `after`; waits in Redis for at most `seconds`."""
        block = {"block": max(1, int(1000 * seconds))} if seconds > 0 else {}
        reply = self.exchange(lambda: self._client.xread({stream: after}, count=limit, **block))
        return reply[0][1] if reply else []

    def run(self, script: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        """Run one of `redis_scripts`."""
        return self.exchange(lambda: self._scripts[script](keys, arguments))

    def exchange(self, step: Callable[[], Any], patience: float | None = None) -> Any:
        """The result of `step`, retried while Redis is unreachable or cannot write; `StreamError` for other failures.

        Each try beats the heartbeat, so a process that waits here does not count as hung.
        """
        deadline = Deadline(self._name, self._patience if patience is None else patience)
        pauses = exponential_pauses(0.02, 1.0)
        while True:
            try:
                result = step()
            except RedisError as error:
                # The end of the attempt may leave less time than the deadline.
                left = min(deadline.left, self._time_left()) if _may_pass(error) else 0.0
                if left <= 0:
                    raise self._failure(error, deadline) from error
                self._report_wait(error, deadline)
            else:
                self._report_end()
                return result
            heartbeat.beat()
            CLOCK.sleep(min(next(pauses), left))

    def _report_wait(self, error: RedisError, deadline: Deadline) -> None:
        """Log one line per outage, whichever thread notices it first."""
        if not self._waits and deadline.seconds - deadline.left >= _WARN_AFTER:
            self._waits = True
            trouble = "cannot write to its disk" if _CANNOT_WRITE in str(error) else "does not answer"
            log.warning("%s %s, waiting up to %.0f s: %s", self._name, trouble, deadline.seconds, one_line(error))

    def _report_end(self) -> None:
        if self._waits:
            self._waits = False
            log.warning("%s answers again", self._name)

    def _post(self, key: str) -> None:
        """Post the value that `put` received last, even if an earlier `put` of another thread runs later."""
        with self._posting:
            self._client.hset(self._values, key, self._posted[key])

    def _meet(self, connection: Any) -> None:
        """Called by the client on each new connection, before its first use and before the password is sent."""
        self._introduce(connection)
        connection.on_connect()
        connection.send_command("INFO", "server")
        match = re.search(rb"run_id:(\w+)", connection.read_response())
        process = match[1] if match else b""
        with self._posting:
            if process == self._process:
                return
            for key, value in self._posted.items():
                connection.send_command("HSET", self._values, key, value)
                connection.read_response()
            if self._process:
                self._generation += 1
                log.warning("%s was restarted and may have lost its last writes; continuing with its data", self._name)
            self._process = process

    def _introduce(self, connection: Any) -> None:
        try:
            introduce(connection._sock, self._password, "redis")
        except ImpostorError as error:
            raise AuthenticationError(str(error)) from error
        except OSError as error:
            raise Disconnected(f"no proof from its gate: {one_line(error)}") from error

    def _failure(self, error: RedisError, deadline: Deadline) -> StreamError:
        advice = MORE_MEMORY if _OUT_OF_MEMORY in str(error) else ""
        waited = deadline.seconds - deadline.left
        lasting = f", for {waited:.0f} s" if waited >= _WARN_AFTER and _may_pass(error) else ""
        return StreamError(f"{self._name}: {one_line(error)}{lasting}{advice}")

    def _range(self, stream: str) -> Iterator[Raw]:
        page = self._page(stream, "-")
        while page:
            yield from page
            page = self._page(stream, f"({page[-1][0].decode()}")

    def _page(self, stream: str, start: str) -> list[Raw]:
        return list(self.exchange(lambda: self._client.xrange(stream, start, "+", _PAGE)))


class RedisReader(Reader[R], Generic[R]):
    """The reader of one topic; made by `RedisStreams.reader`."""

    def __init__(self, streams: RedisStreams, topic: str, kind: type[R], name: str, substitute: Substitute[R]) -> None:
        """Take the topic over; `StreamError` when its reader has another name."""
        self.topic, self.opening, self._rejections = topic, "", Rejections(topic)
        self._streams, self._kind, self._name, self._substitute = streams, kind, name, substitute
        self._stream, self._meta = _keys(topic)
        self._refused = ""
        self._begin()

    def run(self, script: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        """Run one of `redis_scripts` as this reader. A reader that was refused once stays refused, even if Redis loses
        its state."""
        self._refuse()
        try:
            return self._streams.run(script, keys, arguments)
        except StreamError as error:
            self._refused = str(error) if scripts.REPLACED in str(error) else ""
            raise

    def _refuse(self) -> None:
        if self._refused:
            raise StreamError(self._refused)

    def _begin(self) -> None:
        """Read from the first unacknowledged entry; the first time, also take over the topic."""
        self._after, self._generation = b"0-0", self._streams.generation
        owner, opening = self.run(scripts.OPEN, [self._meta], [self._name, self.opening])
        if owner != self._name.encode():
            raise StreamError(
                f"topic {self.topic!r} is read by {owner!r}; a second reader {self._name!r} would lose entries"
            )
        self.opening = opening.decode()

    def read(self, limit: int, seconds: float) -> list[Entry[R]]:
        self._refuse()
        deadline = Deadline(f"an entry in {self.topic!r}", seconds)
        while True:
            wait = min(deadline.left, _BLOCK_SECONDS)
            raw = self._streams.next_entries(self._stream, self._after, limit, wait)
            # Redis was restarted: discard the batch, and read again from the first unacknowledged entry.
            if self._generation != self._streams.generation:
                self._begin()
                continue
            entries = self._accept(raw) if raw else []
            if entries or (deadline.passed and not raw):
                return entries

    def acknowledge(self, ids: Iterable[str]) -> None:
        parts = [part for id in ids for part in _split(id)]
        if parts:
            self.run(scripts.ACKNOWLEDGE, [self._stream, self._meta], [self.opening, *parts])

    def _accept(self, raw: list[Raw]) -> list[Entry[R]]:
        entries = []
        for id, fields in raw:
            try:
                entries.append(_entry(id, fields, self._kind, self._substitute))
            except RecordError as error:
                self._reject(id, fields, str(error))
        last, fields = raw[-1]
        # The mark is for backpressure (unread bytes) only; delivery depends on acknowledgement.
        self.run(scripts.MARK_READ, [self._meta], [self.opening, fields.get(b"e", b"0")])
        self._after = last
        return entries

    def _reject(self, id: bytes, fields: dict[bytes, bytes], reason: str) -> None:
        data = fields.get(b"d", b"")
        rejected = self._rejections.note(data, reason)
        keys = [self._stream, self._meta, _rejected(self.topic)]
        self.run(scripts.REJECT, keys, [self.opening, id, len(data), reason, rejected.data])


_SCRIPTS = (scripts.OPEN, scripts.PUBLISH, scripts.ACKNOWLEDGE, scripts.MARK_READ, scripts.REJECT)


def _may_pass(error: RedisError) -> bool:
    """Whether a retry may succeed: Redis is unreachable, or temporarily cannot write."""
    if isinstance(error, AuthenticationError):
        return False
    return isinstance(error, Disconnected | TimedOut) or _CANNOT_WRITE in str(error)


def _keys(topic: str) -> tuple[str, str]:
    return f"rollcall:{topic}", f"rollcall:{topic}:meta"


def _rejected(topic: str) -> str:
    return f"rollcall:{topic}:rejected"


def _entry(id: bytes, fields: dict[bytes, bytes], kind: type[R], substitute: Substitute[R] = no_substitute) -> Entry[R]:
    data = fields.get(b"d", b"")
    return Entry(f"{id.decode()}/{len(data)}", decode_or_substitute(data, kind, substitute), len(data))


def _split(id: str) -> tuple[str, str]:
    """Redis's id and the size in bytes of an entry's id."""
    number, slash, size = id.partition("/")
    if not slash:
        raise StreamError(f"{id!r} is no entry id of a Redis stream")
    return number, size


def _begins(key: bytes, prefix: str) -> bool:
    return key.startswith(prefix.encode())
