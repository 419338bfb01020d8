"""Samples, by the run's own servers.

Owns requests to sample: which server does each, the adapters that it has to have for it, and the form of the answer.
Promises that a request which was accepted is done, if need be by another server after this one was lost, unless servers
die of it; that a sampling client of a snapshot gets tokens of that snapshot alone, since every save has a name of its
own; and that the adapters of each server are at most `most_adapters`, of which the one that was used least recently
leaves. Must not know models' training or HTTP's front."""

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
from pipeline.tinker import durable_store
from pipeline.tinker.api_errors import ApiError, Full
from pipeline.tinker.durable_store import Store
from pipeline.tinker.entities import SamplingSession
from pipeline.tinker.generate_requests import adapter_name, request_body, written_sample
from pipeline.tinker.sampling_limits import Limits, checked_request
from pipeline.tinker.tinker_records import Facts, Failed
from pipeline.tinker.usage import UsageMeter, usage_of_sample
from pipeline.utils.authenticated_connector import ProvenConnector
from pipeline.utils.backoff import Resting, rested
from pipeline.utils.poison_request import GIVEN_UP, HEALTH, MOST_DEATHS, Suspects, is_dead

log = logging.getLogger(__name__)
REQUEST_SECONDS = 1800.0
FETCHED_SECONDS, UNFETCHED_SECONDS = 300.0, 3600.0
"""How long samples are kept after a client got them, and if none asks."""
MOST_WAITING, MOST_WRONG = 20000, 3
_PAUSES = (0.1, 0.3, 1.0, 3.0)
BACK_SECONDS = 1.0
"""Between two looks whether a server is there again."""


class Sampled(msgspec.Struct, frozen=True):
    """A request as the store keeps it."""

    sampler: str
    seq: int
    folder: str
    body: dict[str, Any]
    owner: str


@dataclass(eq=False)
class _Job:
    given: Sampled
    task: "asyncio.Task[bytes | Failed] | None" = None
    ended: float = 0.0
    fetched: float = 0.0

    def is_over(self, now: float) -> bool:
        """Whether no client will ask for it again."""
        if self.fetched:
            return now - self.fetched > FETCHED_SECONDS
        return bool(self.ended) and now - self.ended > UNFETCHED_SECONDS


@dataclass(eq=False)
class Server(Resting):
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


class Refused(Exception):
    """A server says that the request can never work."""


class Unwell(OSError):
    """A server answers that it cannot do the request now."""


class Died(Exception):
    """A server died while it worked on the request."""

    def __init__(self, endpoint: str, error: Exception) -> None:
        super().__init__(f"{endpoint} died: {one_line(error)}")
        self.endpoint = endpoint


class SampleQueue:
    """All requests to sample, and the servers that there are now."""

    def __init__(self, kept: Store, weights: Path, limits: Limits, most_adapters: int, usage: UsageMeter) -> None:
        self._store, self._weights, self._limits, self._most = kept, weights, limits, most_adapters
        self._usage = usage
        self._jobs: dict[str, _Job] = {}
        self._waiting = 0
        """Samples that are worked on, or wait for a server."""
        self._servers: list[Server] = []
        self._password = ""
        self._there, self.suspects = asyncio.Event(), Suspects()
        self._http: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Begin again with what was accepted before this process."""
        # Without a bound on connections: whether a server lives is asked beside any number of samples.
        unbounded = ProvenConnector(lambda: self._password, limit=0)
        self._http = aiohttp.ClientSession(connector=unbounded, timeout=aiohttp.ClientTimeout(total=REQUEST_SECONDS))
        for kept in self._store.requests():
            body = self._store.body(kept.id) if kept.model == "" else None
            if body is not None:
                self._begin(kept.id, msgspec.msgpack.decode(body, type=Sampled))

    async def close(self) -> None:
        for job in self._jobs.values():
            if job.task is not None:
                job.task.cancel()
        if self._http is not None:
            await self._http.close()

    def use(self, facts: Facts | None) -> None:
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

    def owner_of(self, id: str) -> str | None:
        """Whose sample it is; None for one that there is not."""
        job = self._jobs.get(id)
        return job.given.owner if job else None

    def open_folders(self) -> set[str]:
        """The folders of the adapters of samples whose clients have no result yet."""
        return {job.given.folder for job in self._jobs.values() if not job.fetched}

    async def accept(self, id: str, sampler: SamplingSession, folder: str, seq: int, body: dict[str, Any]) -> str:
        """The id of the request, which is in the store by now; `ApiError` 429 where too many wait."""
        if (known := self._jobs.get(id)) is not None:
            while known.task is None and self._jobs.get(id) is known:  # it is on its way into the store
                await asyncio.sleep(0.01)
            if self._jobs.get(id) is not known:
                raise Full("the store took nothing just now; ask again", 429)
            return id
        if self._waiting >= MOST_WAITING:
            raise Full(f"{MOST_WAITING} samples wait", 429)
        given = Sampled(sampler.id, seq, folder, body, sampler.owner)
        checked_request(body, self._limits)
        written = msgspec.msgpack.encode(given)  # before others can wait for it: not every JSON can be written so
        job = self._jobs[id] = _Job(given)
        try:
            await self._store.keep(durable_store.request(id, "", seq, written))
        except Full as error:
            del self._jobs[id]
            raise Full(str(error), 429) from None
        self._begin(id, given, job)
        return id

    async def result(self, id: str) -> bytes | Failed:
        """The answer as protobuf, or why there is none."""
        job = self._jobs[id]
        while job.task is None:
            await asyncio.sleep(0.01)
        try:
            outcome = await asyncio.shield(job.task)
        except asyncio.CancelledError:
            if not job.task.cancelled():
                raise
            return Failed("its client gave this sample up", "user")
        job.fetched = job.fetched or time.monotonic()
        return outcome

    def cancel(self, id: str) -> None:
        """Stop working on a sample that nobody waits for; the store forgets it with the next sweep."""
        job = self._jobs[id]
        if job.task is not None and not job.task.done():
            job.task.cancel()
        job.fetched = job.fetched or time.monotonic()

    async def sweep(self) -> None:
        """Forget what was fetched a while ago, or given up."""
        now = time.monotonic()
        old = [id for id, job in self._jobs.items() if job.is_over(now)]
        if old:
            await self._store.keep(*durable_store.no_requests(old))
        for id in old:
            del self._jobs[id]

    def _begin(self, id: str, given: Sampled, job: _Job | None = None) -> None:
        job = job or _Job(given)
        self._jobs[id] = job
        job.task = asyncio.create_task(self._work(id, given), name=f"sample {id}")
        self._waiting += 1
        job.task.add_done_callback(lambda _: self._ended(job))

    def _ended(self, job: _Job) -> None:
        job.ended = time.monotonic()
        self._waiting -= 1

    async def _work(self, id: str, given: Sampled) -> bytes | Failed:
        """The answer, however often servers are lost; one that makes no sense is asked for `MOST_WRONG` times."""
        failures = wrong = deaths = 0
        attempt, given_up = self._password, self.suspects.given_up
        while True:
            if (attempt, given_up) != (self._password, self.suspects.given_up):
                attempt, given_up, deaths = self._password, self.suspects.given_up, 0
            try:
                async with self.suspects.trying(deaths):
                    return await self._once(given)
            except (Refused, ApiError) as error:
                return Failed(str(error), "user")
            except (msgspec.MsgspecError, KeyError, ValueError, TypeError) as error:
                reason, wrong = one_line(error), wrong + 1
                if wrong >= MOST_WRONG:
                    log.error("%s: the servers' answers make no sense: %s", id, reason)
                    return Failed(f"the server's answer makes no sense: {reason}", "server")
            except Died as death:
                reason, deaths = str(death), deaths + 1
                if deaths >= MOST_DEATHS and await self.is_back(death.endpoint, attempt):
                    log.error("%s: %s", id, GIVEN_UP)
                    self.suspects.give_up()
                    return Failed(GIVEN_UP, "server")
            except (TimeoutError, aiohttp.ClientError, OSError) as error:
                reason = one_line(error)
            if failures in (3, 30):
                log.warning("%s is tried again: %s", id, reason)
            await asyncio.sleep(_PAUSES[min(failures, len(_PAUSES) - 1)])
            failures += 1

    async def _once(self, given: Sampled) -> bytes:
        async with self.server_with(given.folder) as server:
            body = request_body(given.body, adapter_name(given.folder), self._limits)
            started = time.monotonic()
            answer = msgspec.json.decode(await self._post(server, "/inference/v1/generate", body))
            server.rest.worked()
            written = written_sample(answer, given.body)
            self._usage.count(given.owner, usage_of_sample(body, answer, time.monotonic() - started))
            return written

    @asynccontextmanager
    async def server_with(self, folder: str) -> AsyncIterator[Server]:
        """The server that is least busy, with the adapter of a folder (empty: the base) as long as it is entered.

        Waits for a server, and for room for the adapter. A connection that fails meanwhile has the server rest, and
        raises `Died` if the server is dead; `Refused` where the adapter cannot be loaded.
        """
        await self._there.wait()
        server = min(rested(self._servers), key=lambda each: each.running, default=None)
        if server is None:
            raise OSError("the servers are gone")
        server.running += 1
        try:
            async with self._adapter(server, folder):
                yield server
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            server.rest.failed()
            if not isinstance(error, aiohttp.ClientConnectorError) and await self._is_dead(server):
                raise Died(server.endpoint, error) from None
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
            with suppress(Refused):
                await self._post(server, "/v1/unload_lora_adapter", {"lora_name": adapter_name(oldest)})
            server.adapters.pop(oldest, None)

    async def _load(self, server: Server, folder: str) -> None:
        place = self._weights / folder
        if not (place / "adapter_config.json").is_file():
            raise Refused("the checkpoint that this client samples from was removed")
        name = {"lora_name": adapter_name(folder), "lora_path": str(place)}
        try:
            await self._post(server, "/v1/load_lora_adapter", name)
        except Refused as refusal:
            if "already" not in str(refusal):
                raise
        server.adapters[folder] = None

    async def _post(self, server: Server, route: str, body: Mapping[str, Any]) -> bytes:
        async with self.asked(server, route, body) as response:
            return await response.read()

    @asynccontextmanager
    async def asked(self, server: Server, route: str, body: Mapping[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        """A server's answer, whose body is not read yet; `Refused` for what can never work, `Unwell` for an
        answer that another try may change."""
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
                raise Refused(_reason(answer))
            raise Unwell(f"{server.endpoint}{route} answered {response.status}: {answer[:200]!r}")


def _reason(answer: bytes) -> str:
    with suppress(msgspec.DecodeError, AttributeError, TypeError):
        found = msgspec.json.decode(answer)
        message = (found.get("error") or {}).get("message") or found.get("message")
        if message:
            return f"the server refuses: {message}"
    return f"the server refuses: {answer[:300]!r}"
