"""Sampling on the run's servers.

Owns the choice of a server for a request, and the conversion of its answer. Promises that a request is executed, if
necessary by another server after the loss of one, unless it crashes servers; and that a sampling client of a snapshot
gets tokens of that snapshot alone, since every save has a separate name. Must not know the training of models, HTTP
routes, which request is next (`pipeline.tinker.sample_queue`), or how a server gets weights
(`pipeline.tinker.server_weights`).
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from pipeline.errors import one_line
from pipeline.tinker.api_errors import ApiError
from pipeline.tinker.entities import SampledWeights
from pipeline.tinker.generate_requests import request_body, sample_json, score_body, score_of
from pipeline.tinker.sampling_limits import Limits
from pipeline.tinker.server_weights import RequestRefused, Server, ServerUnhealthy, ServerWeights
from pipeline.tinker.target_logprobs import MAX_PARALLEL_SCORES, Cell, Targets, read_targets
from pipeline.tinker.tinker_records import Failed, Pool, ServerFacts
from pipeline.tinker.usage_meter import UsageMeter, usage_of_sample
from pipeline.utils.authenticated_connector import AuthenticatedConnector
from pipeline.utils.backoff import available
from pipeline.utils.poison_request import ABANDONED, HEALTH, MAX_SERVER_CRASHES, PoisonRequestGuard, is_dead
from pipeline.utils.weights_route import HEADER

log = logging.getLogger(__name__)
REQUEST_SECONDS = 1800.0
MAX_WRONG = 3
_PAUSES = (0.1, 0.3, 1.0, 3.0)
BACK_SECONDS = 1.0
"""Between two looks whether a server is there again."""


class SampleRequest(msgspec.Struct, frozen=True):
    """A request as the store keeps it."""

    sampler: str
    seq: int
    folder: str
    body: dict[str, Any]
    owner: str
    whole: bool = False
    base: str = ""

    @property
    def weights(self) -> SampledWeights:
        return SampledWeights(self.folder, self.whole, self.base)


class ServerDied(Exception):
    """A server crashed while it worked on the request."""

    def __init__(self, endpoint: str, error: Exception) -> None:
        super().__init__(f"{endpoint} exited: {one_line(error)}")
        self.endpoint = endpoint


class SampleServers:
    """The servers that there are now, and what each works on."""

    def __init__(self, weights: Path, limits: Limits, most_adapters: int, usage: UsageMeter) -> None:
        self._weights = ServerWeights(weights, most_adapters, self._post)
        self._limits, self._usage = limits, usage
        self._servers: list[Server] = []
        self._password = ""
        self._there, self.suspects = asyncio.Event(), PoisonRequestGuard()
        self._http: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Open the connections."""
        # Without a bound on connections: health checks run next to any number of samples.
        unbounded = AuthenticatedConnector(lambda: self._password, limit=0)
        self._http = aiohttp.ClientSession(connector=unbounded, timeout=aiohttp.ClientTimeout(total=REQUEST_SECONDS))

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    def set_servers(self, facts: ServerFacts | None) -> None:
        """Ask these servers from now on; None: there are none."""
        known = {(server.endpoint, server.pool) for server in self._servers}
        pools = chain(facts.pools, repeat(Pool())) if facts else ()
        pairs = list(zip(facts.servers, pools, strict=False)) if facts else []
        if facts is not None and (set(pairs) != known or facts.password != self._password):
            self._servers = [Server(endpoint, pool) for endpoint, pool in pairs]
            self._password = facts.password
        elif facts is None:
            self._servers = []
        self._there.set() if self._servers else self._there.clear()

    @property
    def attempt(self) -> str:
        """Another text for each attempt whose servers came."""
        return self._password

    @property
    def waits_for_servers(self) -> bool:
        return not self._servers

    async def answer(self, id: str, request: SampleRequest) -> bytes | Failed:
        """The answer, however often servers are lost; one that makes no sense is asked for `MAX_WRONG` times."""
        failures = wrong = deaths = 0
        attempt, abandoned = self._password, self.suspects.abandoned
        while True:
            if (attempt, abandoned) != (self._password, self.suspects.abandoned):
                attempt, abandoned, deaths = self._password, self.suspects.abandoned, 0
            try:
                async with self.suspects.attempt(deaths):
                    return await self._once(request)
            except (RequestRefused, ApiError) as error:
                return Failed(str(error), "user")
            except (msgspec.MsgspecError, KeyError, ValueError, TypeError) as error:
                reason, wrong = one_line(error), wrong + 1
                if wrong >= MAX_WRONG:
                    log.error("%s: the servers' answers make no sense: %s", id, reason)
                    return Failed(f"the server's answer makes no sense: {reason}", "server")
            except ServerDied as death:
                reason, deaths = str(death), deaths + 1
                if deaths >= MAX_SERVER_CRASHES and await self.is_back(death.endpoint, attempt):
                    log.error("%s: %s", id, ABANDONED)
                    self.suspects.abandon()
                    return Failed(ABANDONED, "server")
            except (TimeoutError, aiohttp.ClientError, OSError) as error:
                reason = one_line(error)
            if failures in (3, 30):
                log.warning("%s is tried again: %s", id, reason)
            await asyncio.sleep(_PAUSES[min(failures, len(_PAUSES) - 1)])
            failures += 1

    async def _once(self, request: SampleRequest) -> bytes:
        async with self.server_with(request.weights) as server:
            body = request_body(request.body, request.weights.name, self._limits)
            started = time.monotonic()
            answer = msgspec.json.decode(await self._generate(server, request.weights, body))
            server.backoff.record_success()
            written = sample_json(answer, request.body, await self._scores(server, request, body["token_ids"]))
            self._usage.count(request.owner, usage_of_sample(body, answer, time.monotonic() - started))
            return written

    async def _scores(self, server: Server, request: SampleRequest, tokens: list[int]) -> dict[Cell, float]:
        """The log-probabilities of the tokens that a request names; several prompts at a time."""
        targets = read_targets(request.body, len(tokens))
        left, scores = iter(targets.cells if targets else ()), dict[Cell, float]()

        async def score() -> None:
            for cell in left:
                prompt = Targets.prompt(tokens, cell)
                body = score_body(prompt, request.weights.name)
                answer = msgspec.json.decode(await self._generate(server, request.weights, body))
                scores[cell] = score_of(answer, prompt)

        scoring = [asyncio.create_task(score()) for _ in range(MAX_PARALLEL_SCORES if targets else 0)]
        try:
            await asyncio.gather(*scoring)
        finally:
            for task in scoring:
                task.cancel()
        return scores

    @asynccontextmanager
    async def server_with(self, weights: SampledWeights) -> AsyncIterator[Server]:
        """The server that is least busy, with these weights as long as it is entered.

        Waits for a server, and for room for the weights. A connection that fails meanwhile has the server rest, and
        raises `ServerDied` if the server is dead; `RequestRefused` where the weights cannot be loaded.
        """
        await self._there.wait()
        apt = [server for server in self._servers if server.pool == weights.pool]
        if self._servers and not apt:
            raise RequestRefused(no_server(weights.pool))
        load = self._limits.samples if weights.whole else 0  # others' samples wait while a model is loaded
        server = min(
            available(apt), key=lambda server: server.running + (0 if weights in server.held else load), default=None
        )
        if server is None:
            raise OSError("the servers are gone")
        server.running += 1
        try:
            async with self._weights.use(server, weights):
                yield server
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            server.backoff.record_failure()
            if not isinstance(error, aiohttp.ClientConnectorError) and await self._is_dead(server):
                raise ServerDied(server.endpoint, error) from None
            raise
        finally:
            server.running -= 1

    async def is_back(self, endpoint: str, attempt: str) -> bool:
        """Wait until a crashed server answers again. False once another attempt has come: the servers of the previous
        attempt ended with it, perhaps one after another, and no request crashed them."""
        assert self._http is not None
        headers = self._authorization
        while self._password == attempt:
            with suppress(TimeoutError, aiohttp.ClientError, OSError):
                url = f"http://{endpoint}/v1/models"
                async with self._http.get(url, headers=headers, timeout=HEALTH) as response:
                    if response.status == 200:
                        return True
            await asyncio.sleep(BACK_SECONDS)
        return False

    async def _is_dead(self, server: Server) -> bool:
        assert self._http is not None
        return await is_dead(self._http, server.endpoint, self._authorization)

    @property
    def _authorization(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._password}"}

    async def _generate(self, server: Server, weights: SampledWeights, body: Mapping[str, Any]) -> bytes:
        async with self.posted(server, "/inference/v1/generate", body, weights) as response:
            return await response.read()

    async def _post(self, server: Server, route: str, body: Mapping[str, Any]) -> bytes:
        async with self.posted(server, route, body) as response:
            return await response.read()

    @asynccontextmanager
    async def posted(
        self, server: Server, route: str, body: Mapping[str, Any], weights: SampledWeights | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A server's answer, whose body is not read yet, and which is of these weights; `RequestRefused` for what can
        never work, `ServerUnhealthy` for an answer that another try may change."""
        assert self._http is not None
        url, headers = f"http://{server.endpoint}{route}", self._authorization
        if weights is not None and weights.whole:
            headers[HEADER] = str(self._weights.directory_of(weights))
        async with self._http.post(url, json=body, headers=headers) as response:
            if response.status == 200:
                yield response
                return
            answer = await response.read()
            if response.status == 404 and route.endswith(("generate", "completions")):
                server.held.clear()  # it was started again
                raise OSError(f"{server.endpoint} does not have the weights")
            if 400 <= response.status < 500 and response.status not in (408, 409, 429):
                raise RequestRefused(_reason(answer))
            raise ServerUnhealthy(f"{server.endpoint}{route} answered {response.status}: {answer[:200]!r}")


def no_server(pool: Pool) -> str:
    """Why samples of a pool fail that has no servers."""
    models = f"whole models of {pool.base!r}" if pool.base else "whole models"
    what = models if pool.whole else f"{pool.base!r} and its adapters" if pool.base else "the run's base"
    key = "serve.whole_servers, which is for the run's base" if pool.whole else "serve.base_servers"
    return f"no server here samples from {what} ({key})"


def _reason(answer: bytes) -> str:
    with suppress(msgspec.DecodeError, AttributeError, TypeError):
        error = msgspec.json.decode(answer)
        message = (error.get("error") or {}).get("message") or error.get("message")
        if message:
            return f"the server refuses: {message}"
    return f"the server refuses: {answer[:300]!r}"
