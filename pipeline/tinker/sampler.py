"""The run's own servers, which sample.

Owns which server does a request, the adapters that it has to have for it, and the form of the answer. Promises that a
request is done, if need be by another server after this one was lost, unless servers die of it; that a sampling client
of a snapshot gets tokens of that snapshot alone, since every save has a name of its own; and that the adapters of each
server are at most `most_adapters`, of which the one that was used least recently leaves. Must not know models'
training, HTTP's front, or which request is next: `pipeline.tinker.sample_queue`."""

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from pipeline.errors import one_line
from pipeline.tinker.api_errors import ApiError
from pipeline.tinker.generate_requests import adapter_name, request_body, sample_json
from pipeline.tinker.sampling_limits import Limits
from pipeline.tinker.tinker_records import Failed, ServerFacts
from pipeline.tinker.usage import UsageMeter, usage_of_sample
from pipeline.utils.authenticated_connector import AuthenticatedConnector
from pipeline.utils.backoff import HasBackoff, available
from pipeline.utils.poison_request import ABANDONED, HEALTH, MAX_SERVER_CRASHES, PoisonRequestGuard, is_dead

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


@dataclass(eq=False)
class Server(HasBackoff):
    """One server: what it works on, and its adapters, the last used one at the end."""

    endpoint: str
    running: int = 0
    adapters: "OrderedDict[str, None]" = field(default_factory=OrderedDict)
    in_use: Counter[str] = field(default_factory=Counter)
    """How many samples are being drawn from each adapter."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Whoever has it may change `adapters`; who waits for it comes in turn."""
    unused: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when nobody samples from some adapter any more."""


class RequestRefused(Exception):
    """A server says that the request can never work."""


class ServerUnhealthy(OSError):
    """A server answers that it cannot do the request now."""


class ServerDied(Exception):
    """A server died while it worked on the request."""

    def __init__(self, endpoint: str, error: Exception) -> None:
        super().__init__(f"{endpoint} died: {one_line(error)}")
        self.endpoint = endpoint


class SampleServers:
    """The servers that there are now, and what each works on."""

    def __init__(self, weights: Path, limits: Limits, most_adapters: int, usage: UsageMeter) -> None:
        self._weights, self._limits, self._most, self._usage = weights, limits, most_adapters, usage
        self._servers: list[Server] = []
        self._password = ""
        self._there, self.suspects = asyncio.Event(), PoisonRequestGuard()
        self._http: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Open the connections."""
        # Without a bound on connections: whether a server lives is asked beside any number of samples.
        unbounded = AuthenticatedConnector(lambda: self._password, limit=0)
        self._http = aiohttp.ClientSession(connector=unbounded, timeout=aiohttp.ClientTimeout(total=REQUEST_SECONDS))

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    def set_servers(self, facts: ServerFacts | None) -> None:
        """Ask these servers from now on; None: there are none."""
        known = {server.endpoint for server in self._servers}
        wanted = set(facts.servers) if facts else set()
        if facts is not None and (wanted != known or facts.password != self._password):
            self._servers = [Server(endpoint) for endpoint in facts.servers]
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

    async def answer(self, id: str, given: SampleRequest) -> bytes | Failed:
        """The answer, however often servers are lost; one that makes no sense is asked for `MAX_WRONG` times."""
        failures = wrong = deaths = 0
        attempt, given_up = self._password, self.suspects.given_up
        while True:
            if (attempt, given_up) != (self._password, self.suspects.given_up):
                attempt, given_up, deaths = self._password, self.suspects.given_up, 0
            try:
                async with self.suspects.attempt(deaths):
                    return await self._once(given)
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

    async def _once(self, given: SampleRequest) -> bytes:
        async with self.server_with(given.folder) as server:
            body = request_body(given.body, adapter_name(given.folder), self._limits)
            started = time.monotonic()
            answer = msgspec.json.decode(await self._post(server, "/inference/v1/generate", body))
            server.backoff.record_success()
            written = sample_json(answer, given.body)
            self._usage.count(given.owner, usage_of_sample(body, answer, time.monotonic() - started))
            return written

    @asynccontextmanager
    async def server_with(self, folder: str) -> AsyncIterator[Server]:
        """The server that is least busy, with the adapter of a folder (empty: the base) as long as it is entered.

        Waits for a server, and for room for the adapter. A connection that fails meanwhile has the server rest, and
        raises `ServerDied` if the server is dead; `RequestRefused` where the adapter cannot be loaded.
        """
        await self._there.wait()
        server = min(available(self._servers), key=lambda each: each.running, default=None)
        if server is None:
            raise OSError("the servers are gone")
        server.running += 1
        try:
            async with self._adapter(server, folder):
                yield server
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            server.backoff.record_failure()
            if not isinstance(error, aiohttp.ClientConnectorError) and await self._is_dead(server):
                raise ServerDied(server.endpoint, error) from None
            raise
        finally:
            server.running -= 1

    async def is_back(self, endpoint: str, attempt: str) -> bool:
        """Wait until a server that died is there again. False once another attempt has come: the servers of the one
        before ended with it, perhaps one after another, and of no request."""
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

    @asynccontextmanager
    async def _adapter(self, server: Server, folder: str) -> AsyncIterator[None]:
        """While it is entered, the server has the adapter; without a folder none is needed."""
        if not folder:
            yield
            return
        async with server.lock:
            if folder not in server.adapters:
                await self._make_room(server)
                await self._load(server, folder)
            server.adapters.move_to_end(folder)
            server.in_use[folder] += 1
        try:
            yield
        finally:
            server.in_use[folder] -= 1
            if not server.in_use[folder]:
                del server.in_use[folder]
                server.unused.set()

    async def _make_room(self, server: Server) -> None:
        """Have the adapters that were not used for longest give way; where all are in use, wait until one is not."""
        while len(server.adapters) >= self._most:
            oldest = next((each for each in server.adapters if each not in server.in_use), None)
            if oldest is None:
                server.unused.clear()
                await server.unused.wait()
                continue
            with suppress(RequestRefused):
                await self._post(server, "/v1/unload_lora_adapter", {"lora_name": adapter_name(oldest)})
            server.adapters.pop(oldest, None)

    async def _load(self, server: Server, folder: str) -> None:
        place = self._weights / folder
        if not (place / "adapter_config.json").is_file():
            raise RequestRefused("the checkpoint that this client samples from was removed")
        name = {"lora_name": adapter_name(folder), "lora_path": str(place)}
        try:
            await self._post(server, "/v1/load_lora_adapter", name)
        except RequestRefused as refusal:
            if "already" not in str(refusal):
                raise
        server.adapters[folder] = None

    async def _post(self, server: Server, route: str, body: Mapping[str, Any]) -> bytes:
        async with self.asked(server, route, body) as response:
            return await response.read()

    @asynccontextmanager
    async def asked(self, server: Server, route: str, body: Mapping[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        """A server's answer, whose body is not read yet; `RequestRefused` for what can never work, `ServerUnhealthy`
        for an answer that another try may change."""
        assert self._http is not None
        url = f"http://{server.endpoint}{route}"
        async with self._http.post(url, json=body, headers=self._authorization) as response:
            if response.status == 200:
                yield response
                return
            answer = await response.read()
            if response.status == 404 and route.endswith(("generate", "completions")):
                server.adapters.clear()  # it was started anew
                raise OSError(f"{server.endpoint} does not know the adapter")
            if 400 <= response.status < 500 and response.status not in (408, 409, 429):
                raise RequestRefused(_reason(answer))
            raise ServerUnhealthy(f"{server.endpoint}{route} answered {response.status}: {answer[:200]!r}")


def _reason(answer: bytes) -> str:
    with suppress(msgspec.DecodeError, AttributeError, TypeError):
        found = msgspec.json.decode(answer)
        message = (found.get("error") or {}).get("message") or found.get("message")
        if message:
            return f"the server refuses: {message}"
    return f"the server refuses: {answer[:300]!r}"
