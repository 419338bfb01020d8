"""Which weights a server has, and how it gets others.

Owns the servers' adapters and whole models. A server of adapters has the base and up to `most_adapters` of them, of
which the one that was used least recently leaves. A server of whole models has the weights of one, and loads others in
their place while it is paused. Promises that a sample's weights stay on its server until it ends, and that samples of
other weights come in turn. Must not know requests, or which server does one.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import one_line
from pipeline.tinker.entities import SampledWeights
from pipeline.tinker.tinker_records import Pool
from pipeline.utils.backoff import HasBackoff
from pipeline.utils.weights_route import LOAD

MAX_FAILED_LOADS = 3
REMOVED = "the checkpoint that this client samples from was removed"


class RequestRefused(Exception):
    """A server refuses a request that can never work."""


class ServerUnhealthy(OSError):
    """A server answers that it cannot do the request now."""


@dataclass(eq=False)
class Server(HasBackoff):
    """One server: what it works on, and its adapters, the last used one at the end; or its whole model."""

    endpoint: str
    pool: Pool = Pool()  # noqa: RUF009 (it cannot change)
    running: int = 0
    held: "OrderedDict[SampledWeights, None]" = field(default_factory=OrderedDict)
    in_use: Counter[SampledWeights] = field(default_factory=Counter)
    """How many samples are being drawn from each."""
    failed_loads: Counter[SampledWeights] = field(default_factory=Counter)
    """Of whole models, since each was last loaded."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Whoever has it may change `held`; who waits for it comes in turn."""
    unused: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when nobody samples from some weights any more."""


Post = Callable[[Server, str, Mapping[str, Any]], Awaitable[bytes]]


class ServerWeights:
    """Weights below the folder `root`, on servers that `post` asks."""

    def __init__(self, root: Path, most_adapters: int, post: Post) -> None:
        self._root, self._most, self._post = root, most_adapters, post

    @asynccontextmanager
    async def use(self, server: Server, weights: SampledWeights) -> AsyncIterator[None]:
        """While it is entered, the server has the weights. `RequestRefused` where they cannot be loaded."""
        if not weights.folder:
            yield
            return
        async with server.lock:
            if weights not in server.held:
                await self._make_room(server)
                await _to_its_end((self._load_whole if weights.whole else self._load_adapter)(server, weights))
            server.held.move_to_end(weights)
            server.in_use[weights] += 1
        try:
            yield
        finally:
            server.in_use[weights] -= 1
            if not server.in_use[weights]:
                del server.in_use[weights]
                server.unused.set()

    def directory_of(self, weights: SampledWeights) -> Path:
        """The folder of weights, as servers read it."""
        return self._root / weights.folder

    async def _make_room(self, server: Server) -> None:
        """Have the weights that were not used for longest give way; where all are in use, wait until some are not."""
        while len(server.held) >= (1 if server.pool.whole else self._most):
            oldest = next((weights for weights in server.held if weights not in server.in_use), None)
            if oldest is None:
                server.unused.clear()
                await server.unused.wait()
                continue
            if not oldest.whole:
                with suppress(RequestRefused):
                    await self._post(server, "/v1/unload_lora_adapter", {"lora_name": oldest.name})
            server.held.pop(oldest, None)

    async def _load_adapter(self, server: Server, weights: SampledWeights) -> None:
        directory = self._checked_directory(weights, "adapter_config.json")
        try:
            await self._post(server, "/v1/load_lora_adapter", {"lora_name": weights.name, "lora_path": str(directory)})
        except RequestRefused as refusal:
            if "already" not in str(refusal):
                raise
        server.held[weights] = None

    async def _load_whole(self, server: Server, weights: SampledWeights) -> None:
        """The pause ends what a client that hung up left there, and drops what is cached of other weights."""
        directory = self._checked_directory(weights, "config.json")
        await self._post(server, "/pause?mode=abort&clear_cache=true", {})
        try:
            await self._post(server, LOAD, {"folder": str(directory)})
        except ServerUnhealthy as error:
            server.failed_loads[weights] += 1
            if server.failed_loads[weights] < MAX_FAILED_LOADS:
                raise
            del server.failed_loads[weights]
            raise RequestRefused(f"the server cannot load this model: {one_line(error)}") from None
        server.failed_loads.pop(weights, None)
        await self._post(server, "/reset_prefix_cache", {})
        await self._post(server, "/resume", {})
        server.held[weights] = None

    def _checked_directory(self, weights: SampledWeights, file: str) -> Path:
        directory = self.directory_of(weights)
        if not (directory / file).is_file():
            raise RequestRefused(REMOVED)
        return directory


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Do some work that its waiter cannot cut off: a client that hangs up must not leave a server paused, or cause
    the next one to load the same weights again."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # nobody waits for it any more
        raise
