"""Servers that die of what they are asked.

Owns when a request is given up because servers died under it. One that kills its server looks like all others that ran
there, so nobody is blamed for a death or two. Promises that a request is given up only after `MAX_SERVER_CRASHES`, at
the last of which no other request was on its last try: so one that kills servers takes no other on its last try with
it, and ends. Then the deaths are explained: all others begin to count anew.

    async with suspects.trying(deaths):                  # `suspects`: one for all requests of a client
        …ask a server; if it had the request and gave no answer: deaths += await is_dead(http, endpoint)…
    if deaths == MAX_SERVER_CRASHES: suspects.give_up(); …ABANDONED…
    if suspects.given_up has changed since the request began: deaths = 0
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import aiohttp

MAX_SERVER_CRASHES = 3
"""As many as an attempt bears of one server, by default: `inference.restarts`."""
ABANDONED = f"{MAX_SERVER_CRASHES} servers died while they worked on this request, which is not asked for again"
HEALTH = aiohttp.ClientTimeout(total=5.0)


class PoisonRequestGuard:
    """The requests of one client under which servers died."""

    def __init__(self) -> None:
        self._last_try = asyncio.Lock()
        self.given_up = 0
        """Requests that were: whoever counted deaths before that counts anew."""

    def abandon(self) -> None:
        """A request killed its servers, and is asked no more."""
        self.given_up += 1

    @asynccontextmanager
    async def attempt(self, deaths: int) -> AsyncIterator[None]:
        """To be entered for each try of a request; requests with one death left are tried one at a time."""
        if deaths < MAX_SERVER_CRASHES - 1:
            yield
            return
        given_up = self.given_up
        async with self._last_try:
            if given_up == self.given_up:
                yield
                return
        yield


async def is_dead(http: aiohttp.ClientSession, endpoint: str, headers: Mapping[str, str] | None = None) -> bool:
    """Whether a server that gave no answer has died: its port is closed, or it says that its engine is gone. One that
    says nothing may be busy, and one whose connection was cut answers here."""
    try:
        async with http.get(f"http://{endpoint}/health", headers=headers, timeout=HEALTH) as response:
            return response.status >= 500
    except TimeoutError:
        return False
    except (aiohttp.ClientError, OSError):
        return True
