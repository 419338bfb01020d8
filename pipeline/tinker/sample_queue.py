"""Sampling requests, from their acceptance until their clients have the results.

Owns the accepted requests, and which of them are at the servers. Promises that an accepted request is stored and is
executed once there is a server; that sessions share the servers (`pipeline.tinker.fair_queue`); that a silent session
uses no server and loses no request: its requests wait until it returns; and that after its restart a gateway executes
only the requests that a client polls, never those of clients that are gone. Must not know HTTP routes, the training of
models, or how a server is called.
"""

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from pipeline.tinker import durable_store, tinker_paths
from pipeline.tinker.api_errors import OverLimitError
from pipeline.tinker.durable_store import Store
from pipeline.tinker.entities import SampledWeights, SamplingSession
from pipeline.tinker.fair_queue import FairQueue
from pipeline.tinker.sampler import SampleRequest, SampleServers
from pipeline.tinker.sampling_limits import Limits, checked_request, prompt_tokens
from pipeline.tinker.target_logprobs import max_sequences, read_targets
from pipeline.tinker.tinker_records import Failed, Pool, ServerFacts
from pipeline.tinker.usage_meter import UsageMeter

FETCHED_SECONDS, UNFETCHED_SECONDS = 300.0, 3600.0
"""How long samples are kept after a client got them, and if none asks."""
MAX_WAITING = 20000
"""Samples that wait or are in flight; beyond it, a session gets status 429 unless it has less than its equal share."""
CANCELLED = "its client gave this sample up"
_CLAIMING_SECONDS = 0.01


@dataclass(eq=False)
class _Job:
    request: SampleRequest
    is_stored: bool = False
    task: "asyncio.Task[bytes | Failed] | None" = None
    """Set while it is at the servers."""
    outcome: "asyncio.Future[bytes | Failed]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    ended: float = 0.0
    fetched: float = 0.0

    @property
    def session(self) -> str:
        return tinker_paths.session_of(self.request.sampler)

    @property
    def size(self) -> int:
        """Sequences that it takes at a server."""
        return max_sequences(self.request.body, len(prompt_tokens(self.request.body)))

    def is_over(self, now: float) -> bool:
        """Whether no client will ask for it again."""
        if self.fetched:
            return now - self.fetched > FETCHED_SECONDS
        return bool(self.ended) and now - self.ended > UNFETCHED_SECONDS


class SampleQueue(SampleServers):
    """All requests to sample, before the servers that there are now."""

    def __init__(self, store: Store, weights: Path, limits: Limits, most_adapters: int, usage: UsageMeter) -> None:
        super().__init__(weights, limits, most_adapters, usage)
        self._store = store
        self._pools: defaultdict[Pool, FairQueue] = defaultdict(FairQueue)
        self._per_server = limits.samples + limits.samples // 8  # so that a server has the next one when one ends
        self._jobs: dict[str, _Job] = {}
        self._turns: dict[str, asyncio.Event] = {}
        """Of requests that are not stored, by their ids in the queue; set from when one may be sent to a server."""
        self._numbers = itertools.count()

    async def start(self) -> None:
        """Know what was accepted before this process; it is done once a client asks what became of it."""
        await super().start()
        for saved in self._store.requests():
            body = self._store.body(saved.id) if saved.model == "" else None
            if body is not None:
                request = msgspec.msgpack.decode(body, type=SampleRequest)
                self._jobs[saved.id] = _Job(request, is_stored=True, ended=time.monotonic())

    async def close(self) -> None:
        for job in self._jobs.values():
            if job.task is not None:
                job.task.cancel()
        await super().close()

    def set_servers(self, facts: ServerFacts | None) -> None:
        super().set_servers(facts)
        for pool in {*self._pools, *(server.pool for server in self._servers)}:
            self._set_capacity(pool)
        self._start_next()

    def owner_of(self, id: str) -> str | None:
        """Whose sample it is; None for one that there is not."""
        job = self._jobs.get(id)
        return job.request.owner if job else None

    def open_folders(self) -> set[str]:
        """The folders of the adapters of samples whose clients have no result yet."""
        return {job.request.folder for job in self._jobs.values() if not job.fetched}

    async def accept(
        self, id: str, sampler: SamplingSession, weights: SampledWeights, seq: int, body: dict[str, Any]
    ) -> str:
        """The id of the request, which is in the store by now; `OverLimitError` with status 429 where too many wait."""
        if (known := self._jobs.get(id)) is not None:
            while not known.is_stored and self._jobs.get(id) is known:  # it is on its way into the store
                await asyncio.sleep(_CLAIMING_SECONDS)
            if self._jobs.get(id) is not known:
                raise OverLimitError("the store took nothing just now; ask again", 429)
            self._enqueue(id, known)
            return id
        self._check_room(self._queue(weights.pool), tinker_paths.session_of(sampler.id))
        request = SampleRequest(sampler.id, seq, weights.folder, body, sampler.owner, weights.whole, weights.base)
        read_targets(body, len(checked_request(body, self._limits)))
        written = msgspec.msgpack.encode(request)  # before others can wait for it: not every JSON can be written so
        job = self._jobs[id] = _Job(request)
        try:
            await self._store.keep(durable_store.request(id, "", seq, written))
        except BaseException as error:  # or a retry would wait for it to be stored
            del self._jobs[id]
            if isinstance(error, OverLimitError):
                raise OverLimitError(str(error), 429) from None
            raise
        job.is_stored = True
        self._enqueue(id, job)
        return id

    @asynccontextmanager
    async def turn(self, session: str, size: int, weights: SampledWeights) -> AsyncIterator[asyncio.Event]:
        """Have a request that is not stored wait among the samples of `weights`: the event is set once `size`
        sequences of it may be at the servers. They count as in flight until the context is left, which also drops
        a turn that has not come. `OverLimitError` with status 429 where too many wait.

            async with queue.turn("openai ada", 1, weights) as turn:
                await turn.wait()
                …                       # ask a server
        """
        pool = self._queue(weights.pool)
        self._check_room(pool, session)
        id = f"{session}:{next(self._numbers)}"
        self._turns[id] = asyncio.Event()
        pool.add(session, id, size)
        self._start_next()
        try:
            yield self._turns[id]
        finally:
            del self._turns[id]
            pool.remove(id)
            self._start_next()

    async def result(self, id: str) -> bytes | Failed:
        """The answer as protobuf, or why there is none."""
        job = self._jobs[id]
        self._enqueue(id, job)
        outcome = await asyncio.shield(job.outcome)
        job.fetched = job.fetched or time.monotonic()
        return outcome

    def cancel(self, id: str, why: str = CANCELLED) -> None:
        """Stop working on a sample that nobody waits for; the store forgets it a while later."""
        job = self._jobs[id]
        self._end(id, job, Failed(why, "user"))
        job.fetched = job.fetched or time.monotonic()

    def cancel_session(self, session: str, why: str) -> None:
        """Give up all samples of a session whose client is gone."""
        for id, job in self._jobs.items() if any(pool.has_any(session) for pool in self._pools.values()) else ():
            if job.session == session and not job.outcome.done():
                self.cancel(id, why)

    def set_silent(self, session: str, is_silent: bool) -> None:
        """Hold a silent session's samples, away from the servers, until its next heartbeat."""
        for pool in self._pools.values():
            if is_silent:
                for id in pool.hold(session):
                    self._stop(self._jobs[id])
            else:
                pool.release(session)
        self._start_next()

    async def sweep(self) -> None:
        """Forget samples that were fetched a while ago, or abandoned."""
        now = time.monotonic()
        old = {id: job for id, job in self._jobs.items() if job.is_over(now)}
        for id in old:  # before the store, or a client that polls meanwhile would queue a job that is then deleted
            del self._jobs[id]
        if old:
            try:
                await self._store.keep(*durable_store.no_requests(list(old)))
            except BaseException:
                self._jobs = old | self._jobs
                raise

    def _enqueue(self, id: str, job: _Job) -> None:
        """Have it be done, unless it is or will be."""
        pool = self._queue(job.request.weights.pool)
        if job.is_stored and not job.outcome.done() and id not in pool:
            job.ended = 0.0
            pool.add(job.session, id, job.size)
            self._start_next()

    def _queue(self, pool: Pool) -> FairQueue:
        if pool not in self._pools:
            self._set_capacity(pool)
        return self._pools[pool]

    def _set_capacity(self, pool: Pool) -> None:
        """That of its servers. A pool without servers has that of one while others are there: its samples fail."""
        count = sum(server.pool == pool for server in self._servers)
        self._pools[pool].capacity = self._per_server * max(count, bool(self._servers))

    def _check_room(self, pool: FairQueue, session: str) -> None:
        if not pool.has_room(session, MAX_WAITING):
            raise OverLimitError(f"{MAX_WAITING} samples wait", 429)

    def _start_next(self) -> None:
        for id in itertools.chain.from_iterable(iter(pool.next, None) for pool in self._pools.values()):
            if id in self._turns:
                self._turns[id].set()
                continue
            job = self._jobs[id]
            job.task = asyncio.create_task(self.answer(id, job.request), name=f"sample {id}")
            job.task.add_done_callback(partial(self._answered, id, job))

    def _answered(self, id: str, job: _Job, task: "asyncio.Task[bytes | Failed]") -> None:
        if task.cancelled() or job.task is not task:
            return  # the sample was held or abandoned
        if error := task.exception():
            job.outcome.set_exception(error)
        self._end(id, job, None if error else task.result())

    def _end(self, id: str, job: _Job, outcome: bytes | Failed | None) -> None:
        """It needs no server any more; the first outcome is the one that its client gets."""
        self._queue(job.request.weights.pool).remove(id)
        self._stop(job)
        if outcome is not None and not job.outcome.done():
            job.outcome.set_result(outcome)
        job.ended = job.ended or time.monotonic()
        self._start_next()

    def _stop(self, job: _Job) -> None:
        task, job.task = job.task, None
        if task is not None:
            task.cancel()
