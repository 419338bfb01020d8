"""Requests of OpenAI's API, passed on to the servers that sample.

Owns the tries of one such request: which failures are tried again, and for how long. Promises that a request waits for
its turn among those of all sessions and keys; that a server which ends before the first part of an answer costs the
client nothing but time; that no part is sent twice; and that closing the generator ends the request on the server. Must
not know the fields of a request.

    async with forwarder.turn(key, sequences), aclosing(forwarder.parts(CHAT, weights, body)) as parts:
        async for part in parts: …         # `stream`: the data of each event; else the whole answer, once
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import aiohttp

from pipeline.errors import one_line
from pipeline.tinker.api_errors import ApiError
from pipeline.tinker.entities import SampledWeights
from pipeline.tinker.sample_queue import SampleQueue
from pipeline.tinker.sampler import ServerDied
from pipeline.tinker.server_weights import RequestRefused, Server, ServerUnhealthy
from pipeline.utils.poison_request import ABANDONED, MAX_SERVER_CRASHES

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HOLD_SECONDS = 60.0
"""How long a request waits for a server, and is tried again after lost connections. Clients wait longer by default."""
MAX_UNHEALTHY = 3
"""Answers of status 5xx, which may be the request's own fault."""
PAUSE_SECONDS = 0.5


class NoServerError(ApiError):
    """No server answers now; the client may ask again."""

    def __init__(self, message: str, status: int = 503) -> None:
        super().__init__(message, status)


class ForwardingFailed(ApiError):
    """Asking again would harm the servers."""

    def __init__(self, message: str, status: int = 500) -> None:
        super().__init__(message, status)


@dataclass
class _Tries:
    """What became of a request so far; `until` is the time (of `time.monotonic`) of its last try."""

    until: float
    attempt: str
    deaths: int = 0
    unwell: int = 0


class Forwarder:
    """Passes requests on to the servers of a queue of samples."""

    def __init__(self, sampling: SampleQueue) -> None:
        self._sampling = sampling

    @asynccontextmanager
    async def turn(self, key: str, sequences: int, weights: SampledWeights) -> AsyncIterator[None]:
        """A context in which a request of `sequences` may be at the servers of `weights`. All requests of a key's
        name wait as those of one session do; `NoServerError` if there is no server for `HOLD_SECONDS`."""
        async with self._sampling.turn(f"openai {key}", sequences, weights) as turn:  # no session's id has a space
            while not turn.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(HOLD_SECONDS):
                        await turn.wait()
                        break
                if self._sampling.waits_for_servers:
                    raise NoServerError("no server is there now; ask again")
            yield

    async def parts(self, route: str, weights: SampledWeights, body: Mapping[str, Any]) -> AsyncGenerator[bytes, None]:
        """The answer of a model with these weights to `body`.

        Raises `ApiError` with the server's reason for what it refuses, `NoServerError` and `ForwardingFailed`.
        """
        request = {**body, "model": weights.name}
        tries, begun = _Tries(time.monotonic() + HOLD_SECONDS, self._sampling.attempt), False
        while True:
            try:
                async with aclosing(self._one_try(route, weights, request, tries)) as parts:
                    async for part in parts:
                        begun = True
                        yield part
                return
            except RequestRefused as error:
                raise ApiError(str(error)) from None
            except ServerDied as error:
                await self._count_death(error, tries, begun=begun)
            except (TimeoutError, aiohttp.ClientError, OSError) as error:
                _count_failure(error, tries, begun=begun)
            await asyncio.sleep(PAUSE_SECONDS)

    async def _one_try(
        self, route: str, weights: SampledWeights, request: Mapping[str, Any], tries: _Tries
    ) -> AsyncGenerator[bytes, None]:
        async with self._sampling.suspects.attempt(tries.deaths), self._server(weights, tries.until) as server:
            async with self._sampling.posted(server, route, request, weights) as response:
                if not request.get("stream"):
                    yield await response.read()
                else:
                    async for event in _events(response.content):
                        yield event
            server.backoff.record_success()

    @asynccontextmanager
    async def _server(self, weights: SampledWeights, until: float) -> AsyncGenerator[Server, None]:
        """A server with the weights; `TimeoutError` where none has room for them until then."""
        async with AsyncExitStack() as held:
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                server = await held.enter_async_context(self._sampling.server_with(weights))
            yield server

    async def _count_death(self, death: ServerDied, tries: _Tries, *, begun: bool) -> None:
        """Count a server's crash; `ApiError` if the request is not tried again."""
        if begun:
            raise NoServerError("the server ended in the middle of this answer; ask again", 502)
        if tries.attempt != self._sampling.attempt:  # an attempt's end, not a request, ended its servers
            tries.attempt, tries.deaths = self._sampling.attempt, 0
        tries.deaths += 1
        if tries.deaths >= MAX_SERVER_CRASHES and await self._is_back(death, tries.attempt):
            self._sampling.suspects.abandon()
            raise ForwardingFailed(ABANDONED)
        tries.until = time.monotonic() + HOLD_SECONDS  # another server, or the same one once it was started again

    async def _is_back(self, death: ServerDied, attempt: str) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(HOLD_SECONDS):
                return await self._sampling.is_back(death.endpoint, attempt)
        raise NoServerError("the servers ended; ask again")


async def _events(content: aiohttp.StreamReader) -> AsyncGenerator[bytes, None]:
    """The data of each server-sent event; a line may be of any length."""
    line = b""
    async for chunk in content.iter_any():
        *lines, line = (line + chunk).split(b"\n")
        for full in lines:
            if full.startswith(b"data:"):
                yield full.removeprefix(b"data:").strip()


def _count_failure(error: Exception, tries: _Tries, *, begun: bool) -> None:
    """Note that a try failed; `ApiError` if there is no other."""
    if begun:
        raise NoServerError(f"the connection to the server broke in the middle of this answer: {one_line(error)}", 502)
    if isinstance(error, ServerUnhealthy):
        tries.unwell += 1
        if tries.unwell >= MAX_UNHEALTHY:
            raise NoServerError(f"the server fails at this request: {one_line(error)}", 502)
    if time.monotonic() + PAUSE_SECONDS >= tries.until:
        raise NoServerError("no server has room for this request now; ask again")
