"""Limits on unauthenticated connections, and the limit of open files.

Unauthenticated connections take no more than `most` descriptors, and each is closed after `seconds` without a proof. A
new connection is always admitted; if there is no room, it replaces the oldest one. So a peer with the secret gets
through a flood, since it proves itself at once. There is no limit per address: on a shared node, outsiders and peers
have the same address.

Several limiters may share spare room: a peer that opens many connections at once then loses none before it could prove
itself, and all of them together still take a bounded number of descriptors.
"""

import asyncio
import logging
import resource
import time

log = logging.getLogger(__name__)

MAX_UNPROVED, UNPROVED_SECONDS = 256, 10.0
_LOG_SECONDS = 60.0
_inherited: int | None = None


class SpareRoom:
    """Room for unauthenticated connections beyond the limits of the limiters that share it; `free` of them are left."""

    def __init__(self, most: int) -> None:
        self.free = most


class ConnectionLimiter:
    """The unauthenticated connections of one listening socket, in one event loop."""

    def __init__(
        self, name: str, most: int = MAX_UNPROVED, seconds: float = UNPROVED_SECONDS, *, spare: SpareRoom | None = None
    ) -> None:
        self._name, self._most, self._seconds = name, most, seconds
        self._spare, self._borrowed = spare, 0
        self._waiting: dict[asyncio.WriteTransport, asyncio.TimerHandle] = {}
        self._ended, self._reported = 0, -_LOG_SECONDS

    def admit(self, transport: asyncio.WriteTransport) -> None:
        """Count a new connection. If there is no room, the oldest unauthenticated one is closed."""
        while len(self._waiting) >= self._most and not self._borrow():
            self._cut(next(iter(self._waiting)))
        loop = asyncio.get_running_loop()
        self._waiting[transport] = loop.call_later(self._seconds, self._cut, transport)

    def release(self, transport: asyncio.BaseTransport | None) -> None:
        """Stop counting a connection, because its peer has proved itself or it has ended."""
        if isinstance(transport, asyncio.WriteTransport) and (timer := self._waiting.pop(transport, None)) is not None:
            timer.cancel()
            if self._spare is not None and self._borrowed > max(0, len(self._waiting) - self._most):
                self._spare.free += 1
                self._borrowed -= 1

    def _borrow(self) -> bool:
        """Take the room of one more connection, if there is any."""
        if self._spare is None or not self._spare.free:
            return False
        self._spare.free -= 1
        self._borrowed += 1
        return True

    def _cut(self, transport: asyncio.WriteTransport) -> None:
        self.release(transport)
        transport.abort()
        self._ended += 1
        now = time.monotonic()
        if now - self._reported > _LOG_SECONDS and self._ended >= self._most:
            log.warning(
                "%s: closed %d connections that proved nothing within %g s, or made room for newer ones; limit %d",
                self._name,
                self._ended,
                self._seconds,
                self._most,
            )
            self._ended, self._reported = 0, now


def raise_open_files() -> None:
    """Raise this process's limit of open files to the hard limit. Programs that `pipeline.utils.subprocesses` starts
    with exec still get the limit of before."""
    global _inherited
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _inherited is None:
        _inherited = soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def inherited_open_files() -> int:
    """The soft limit of open files with which this process was started."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] if _inherited is None else _inherited
