"""Limits on connections whose peers have not proved who they are.

Owns how many of them there are at a time and for how long. Promises that a stranger's connections, however many, take
no more than `most` descriptors; that each ends after `seconds` without a proof; and that a new connection is always
admitted, in the place of the oldest one. So a peer that knows the secret gets through a flood, as it proves itself at
once. Addresses are not counted: on a shared node strangers and peers have the same one.
"""

import asyncio
import logging
import resource
import time

log = logging.getLogger(__name__)

MOST_UNPROVED, UNPROVED_SECONDS = 256, 10.0
_LOG_SECONDS = 60.0


class ConnectionLimiter:
    """The unproved connections of one listening socket, in one event loop."""

    def __init__(self, name: str, most: int = MOST_UNPROVED, seconds: float = UNPROVED_SECONDS) -> None:
        self._name, self._most, self._seconds = name, most, seconds
        self._waiting: dict[asyncio.WriteTransport, asyncio.TimerHandle] = {}
        self._ended, self._reported = 0, -_LOG_SECONDS

    def admit(self, transport: asyncio.WriteTransport) -> None:
        """Count a new connection; where there is no room, the oldest unproved one is cut."""
        while len(self._waiting) >= self._most:
            self._cut(next(iter(self._waiting)))
        loop = asyncio.get_running_loop()
        self._waiting[transport] = loop.call_later(self._seconds, self._cut, transport)

    def release(self, transport: asyncio.BaseTransport | None) -> None:
        """Stop counting a connection: its peer has proved who it is, or it has ended."""
        if isinstance(transport, asyncio.WriteTransport) and (timer := self._waiting.pop(transport, None)) is not None:
            timer.cancel()

    def _cut(self, transport: asyncio.WriteTransport) -> None:
        self.release(transport)
        transport.abort()
        self._ended += 1
        now = time.monotonic()
        if now - self._reported > _LOG_SECONDS and self._ended >= self._most:
            log.warning(
                "%s: closed %d connections that proved nothing within %g s, or made room for newer ones; most are %d",
                self._name,
                self._ended,
                self._seconds,
                self._most,
            )
            self._ended, self._reported = 0, now


def raise_open_files() -> None:
    """Allow this process as many open files as the system lets it have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
