"""Abandonment of requests that crash servers.

A crash does not show which of the requests on the server caused it. A request is abandoned after `MAX_SERVER_CRASHES`
crashes. Its last try is exclusive: no other request is on its last try at that time, so a request that crashes servers
ends no innocent one. After an abandonment, all other requests reset their counters, since their crashes are explained.

    async with guard.attempt(crashes):                   # `guard`: one for all requests of a client
        …send; if the server had the request and did not answer: crashes += await is_dead(http, endpoint)…
    if crashes == MAX_SERVER_CRASHES: guard.abandon(); …ABANDONED…
    if guard.abandoned has changed since the request began: crashes = 0
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import aiohttp

MAX_SERVER_CRASHES = 3
"""Equals the default number of crashes of one server that an attempt tolerates (`recovery.inference`)."""
ABANDONED = f"{MAX_SERVER_CRASHES} servers crashed while they processed this request, so it is not retried"
HEALTH = aiohttp.ClientTimeout(total=5.0)


class PoisonRequestGuard:
    """Serializes the last tries of one client's requests, and counts the abandoned ones."""

    def __init__(self) -> None:
        self._last_try = asyncio.Lock()
        self.abandoned = 0
        """The number of abandoned requests. When it changes, all other requests reset their crash counters."""

    def abandon(self) -> None:
        """Record that a request was abandoned after it had crashed its servers."""
        self.abandoned += 1

    @asynccontextmanager
    async def attempt(self, crashes: int) -> AsyncIterator[None]:
        """Context of one try of a request with `crashes` so far. Last tries run one at a time."""
        if crashes < MAX_SERVER_CRASHES - 1:
            yield
            return
        abandoned = self.abandoned
        async with self._last_try:
            if abandoned == self.abandoned:
                yield
                return
        # Another request was abandoned during the wait and explains the crashes: this is not a last try any more.
        yield


async def is_dead(http: aiohttp.ClientSession, endpoint: str, headers: Mapping[str, str] | None = None) -> bool:
    """Whether a server that gave no answer has crashed: its port is closed, or /health reports that its engine has.

    A server that does not respond to /health in time may be busy, so it does not count. A server whose connection was
    only interrupted answers /health.
    """
    try:
        async with http.get(f"http://{endpoint}/health", headers=headers, timeout=HEALTH) as response:
            return response.status >= 500
    except TimeoutError:
        return False
    except (aiohttp.ClientError, OSError):
        return True
