"""The gateway's state, and the rules by which it changes.

Owns sessions, models and their requests; each change is stored before a client gets an answer. Promises that a request
is accepted once, however often a client retries it; that a returned result never changes; that no owner sees what
another owner's key made; and that after the loss of a trainer its requests are sent again, in the same order, until a
checkpoint covers them, while the checkpoints that they read stay. Must not know HTTP, protobuf or sampling.

A checkpoint may prove damaged when it is needed, so requests are kept until the checkpoint after it is durable. The
rules of `pipeline.tinker.retention` delete old state; `pipeline.tinker.work_schedule` chooses the trainer's next
request.
"""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import msgspec

from pipeline.tinker import durable_store, tinker_paths
from pipeline.tinker.api_errors import ApiError, NotFoundError, OverLimitError
from pipeline.tinker.api_keys import Owner
from pipeline.tinker.byte_lru import ByteLru
from pipeline.tinker.checkpoint_catalog import CheckpointCatalog
from pipeline.tinker.durable_store import FAILURE_BYTES, Statement, Store
from pipeline.tinker.entities import Model, Session
from pipeline.tinker.garbage import drop_models, drop_requests, drop_sessions
from pipeline.tinker.heartbeats import Heartbeats
from pipeline.tinker.model_requests import GONE, UNLOAD_SEQ, ModelEntry, Request, bodies, results
from pipeline.tinker.request_queue import ModelQueue
from pipeline.tinker.restore import restore_entries
from pipeline.tinker.tinker_records import (
    Adapter,
    Body,
    Create,
    Failed,
    Load,
    Result,
    Save,
    SaveResult,
    WorkResult,
    encode,
)
from pipeline.tinker.usage_meter import UsageMeter
from pipeline.tinker.work_schedule import RECENT_BYTES, WorkSchedule

MAX_DELIVERIES = 3


class ModelRegistry:
    """The gateway's memory, from the store at its start."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store, self._clock = store, clock
        self.sessions, self.models, self.requests = restore_entries(store, clock())
        self._written_silent = {session for session, _ in store.facts("silent")}
        self.heartbeats = Heartbeats(clock, self._written_silent)
        self.schedule = WorkSchedule(store, self.models, self.heartbeats)
        self.on_lapsed: Callable[[str, str], None] = lambda session, why: None
        """Called with a session whose requests are abandoned because its heartbeats stopped, and with the reason."""
        self._results = ByteLru(RECENT_BYTES)
        """Results that no client has fetched yet."""
        self.catalog = CheckpointCatalog(store, clock, self._is_read)
        self.usage = UsageMeter(store, clock)

    # Sessions and models

    async def open_session(self, owner: Owner, metadata: dict[str, str] | None = None) -> Session:
        session = Session(tinker_paths.new_session_id(), owner.name, self._clock(), metadata=metadata)
        await self._note(session)
        return session

    def known_session(self, owner: Owner, id: str) -> Session:
        """`NotFoundError` for one that there is not."""
        session = self.sessions.get(id)
        if session is None or session.owner != owner.name:
            raise NotFoundError(f"no session {id!r}")
        return session

    def session(self, owner: Owner, id: str) -> Session:
        """`NotFoundError` for one that there is not, and `ApiError` 410 for one that has ended."""
        session = self.known_session(owner, id)
        if session.ended:
            raise ApiError(f"session {id} has ended: {session.ended}; make a new ServiceClient", 410)
        self.heartbeats.beat(id)
        return session

    async def end_session(self, session: Session, why: str, *, lapsed: bool = False) -> None:
        """Unload its models, after the requests that they have unless it `lapsed`; their checkpoints stay."""
        await self._note(msgspec.structs.replace(session, ended=why, ended_at=self._clock(), lapsed=lapsed))
        for live in self.models.values():
            if live.fact.session == session.id:
                live.unloading = True
                if lapsed:
                    live.queue.clear()
                self.schedule.wake(live)

    def model(self, owner: Owner, id: str) -> ModelEntry:
        live = self.models.get(id)
        if live is None or live.fact.owner != owner.name:
            raise NotFoundError(f"no model {id!r}")
        return live

    def is_being_made(self, sampler: str) -> bool:
        """Whether an open save of the session will make this sampling client."""
        session = tinker_paths.session_of(sampler)
        entries = (live for live in self.models.values() if live.fact.session == session)
        return any(save.sampler == sampler for live in entries for save in live.open_saves)

    async def unload(self, live: ModelEntry) -> None:
        """Have the trainer forget a model, after the requests that it has."""
        fact = msgspec.structs.replace(live.fact, unloading=True)
        await self._store.keep(_model_fact(fact))
        live.fact, live.unloading = fact, True
        self.schedule.wake(live)

    # Requests

    async def make_model(
        self,
        owner: Owner,
        session: str,
        number: int,
        base: str,
        body: Create | Load,
        metadata: dict[str, str] | None = None,
    ) -> Request:
        """The first request of a model, which makes it; a retry finds it made."""
        model = tinker_paths.model_id(self.session(owner, session).id, number)
        if model not in self.models:
            own = sum(1 for live in self.models.values() if live.fact.owner == owner.name and not live.fact.gone)
            if owner.models and own >= owner.models:
                raise ApiError(f"{owner.name} has {own} models, which is all it may have; end a session of it", 403)
            fact = Model(model, session, owner.name, base, body.adapter, self._clock(), metadata=metadata)
            self.models[model] = ModelEntry(fact, ModelQueue())
            return await self._accept(self.models[model], 0, body, _model_fact(fact))
        return await self._accept(self.models[model], 0, body)

    async def accept(self, live: ModelEntry, seq: int, make: Callable[[], Body]) -> Request:
        """A further request of a model. What `make` refuses fails this request alone: its number is used."""
        self.session(Owner(live.fact.owner), live.fact.session)
        if live.lost:
            raise ApiError(live.lost, 410)
        known = await self._known(live, seq)
        if known is not None:
            return known
        if live.unloading or live.fact.gone:
            raise ApiError(f"model {live.fact.id} was unloaded, or making it failed; make a new one", 410)
        try:
            body: Body | Failed = make()
        except ApiError as error:
            body = _failed(str(error), "user")
        return await self._accept(live, seq, body)

    async def _accept(self, live: ModelEntry, seq: int, body: Body | Failed, *also: Statement) -> Request:
        known = await self._known(live, seq)
        if known is not None:
            return known
        request = Request(tinker_paths.request_id(live.fact.id, seq), live.fact.id, seq)
        live.requests[seq] = self.requests[request.id] = request
        if isinstance(body, Failed):
            written, failure = encode(Create(Adapter(0))), body
        else:
            written, failure = encode(body), None
            request.understand(body)
            if not live.queue.takes(seq):
                failure = Failed(f"request {seq} came after later ones were done; submit it again", "user")
        try:
            result = encode(failure) if failure else None
            await self._store.keep(*also, durable_store.request(request.id, live.fact.id, seq, written, result))
        except BaseException:
            live.requests.pop(seq, None)
            self.requests.pop(request.id, None)
            if not live.requests and not live.fact.gone and seq == 0:
                self.models.pop(live.fact.id, None)
            request.stored.set()
            raise
        live.requested = self._clock()
        live.queue.add(seq, time.monotonic())
        if failure:
            request.finish(failure, self._clock())
        else:
            self.schedule.remember(request, written)
        request.stored.set()
        self.schedule.wake(live)
        return request

    async def _known(self, live: ModelEntry, seq: int) -> Request | None:
        """The request of that number, if it was accepted before; `OverLimitError` if the store did not take it just
        now."""
        known = live.requests.get(seq)
        if known is not None:
            await known.stored.wait()
            if live.requests.get(seq) is not known:
                raise OverLimitError("the store took nothing just now; ask again")
        return known

    def result(self, request: Request) -> Result | None:
        """What became of a request; None until it is known."""
        if request.failure is not None:
            return request.failure
        if not request.answered:
            return None
        encoded = self._results.get(request.id) or self._store.result(request.id)
        result: Result | None = None if encoded is None else results.decode(encoded)
        return result

    # Work

    async def finish(self, done: WorkResult) -> None:
        """Store the result of a request, unless it has one; then notify its client."""
        model, _, seq = done.request.rpartition(":")
        if seq == str(UNLOAD_SEQ):
            await self._unloaded(model)
            return
        request = self.requests.get(done.request)
        if request is None or request.answered:
            return
        result, changes, after = self._outcome(request, done.result)
        again = [] if request.stateful else [durable_store.no_body(request.id)]  # nobody will ever do it again
        written = encode(result)
        await self._store.keep(*changes, durable_store.result(request.id, written), *again)
        self._results.put(request.id, written)
        request.open = request.open and not again
        after()
        request.finish(result, self._clock())
        if request.failure is None:
            self.usage.count(self.models[request.model].fact.owner, request.usage())
        if request.seq == 0 and request.failure is not None:
            await self._unloaded(request.model)
        if changes:
            await self.catalog.remove_folders()

    def _outcome(self, request: Request, result: Result) -> tuple[Result, list[Statement], Callable[[], None]]:
        """The result as its client gets it, and what it changes: a checkpoint that was saved, and its sampler."""
        if isinstance(result, Failed):
            return _failed(result.error, result.category), [], lambda: None
        body = self._store.body(request.id) if isinstance(result, SaveResult) else None
        save = None if body is None else bodies.decode(body)
        if not isinstance(result, SaveResult) or not isinstance(save, Save):
            return result, [], lambda: None
        return self.catalog.put(self.models[request.model].fact, save, result.size)

    async def attach(self, cursors: dict[str, int]) -> None:
        """A trainer came, whose models have these requests behind them: what they lack is handed out again."""
        there = {id: live for id, live in self.models.items() if not live.fact.gone}
        self.schedule.unknown_models = [id for id in cursors if id not in there]
        for live in there.values():
            cursor = cursors.get(live.fact.id, -1)
            later = [] if self._is_abandoned(live) else [seq for seq in sorted(live.requests) if seq > cursor]
            live.queue.restart(cursor + 1, later)
            live.lost = ""
            if cursor < live.committed_cursor:
                live.lost = f"model {live.fact.id} is lost: the trainer has an older commit than is kept here"
            for seq in later:
                await self._fail_poison_requests(live.requests[seq])
            self.schedule.wake(live)
        self.schedule.news.set()

    def _is_abandoned(self, live: ModelEntry) -> bool:
        """Whether nobody will ask for anything that a trainer would do for a model, but to forget it."""
        session = self.sessions.get(live.fact.session)
        answered = all(request.answered for request in live.requests.values())
        return live.unloading and (answered or session is None or session.lapsed)

    async def _fail_poison_requests(self, request: Request) -> None:
        """A request that several trainers took and none survived is failed, lest it end all others too."""
        if not request.answered and request.deliveries >= MAX_DELIVERIES:
            error = f"the trainer ended {request.deliveries} times while it worked on this request"
            await self.finish(WorkResult(request.id, Failed(error, "server")))

    async def committed(self, cursors: dict[str, int]) -> None:
        """A commit with these cursors is durable: drop what only earlier ones needed."""
        changes: list[Statement] = []
        for id, cursor in cursors.items():
            live = self.models.get(id)
            if live is None or cursor <= live.cursors[1]:
                continue
            live.cursors = (live.cursors[1], cursor)
            if live.cursors[0] >= 0:
                live.committed_cursor = live.cursors[0]
                changes += [
                    durable_store.cursor_passed(id, live.committed_cursor),
                    durable_store.fact("committed_cursor", id, encode(live.committed_cursor)),
                ]
                for seq, request in live.requests.items():
                    request.open = request.open and (seq > live.committed_cursor or not request.answered)
        if changes:
            await self._store.keep(*changes)

    async def _unloaded(self, model: str) -> None:
        live = self.models.get(model)
        if live is None or live.fact.gone:
            return
        fact = msgspec.structs.replace(live.fact, gone=True)
        await self._store.keep(_model_fact(fact))
        live.fact = fact
        live.unloaded.set()
        for request in live.requests.values():
            request.open = False
            if not request.answered:
                request.finish(GONE, self._clock())

    # What is dropped

    async def note_served(self, request: Request) -> None:
        """Remember that a client got the result, though it may ask again."""
        self._results.drop(request.id)
        if not request.served:
            request.served = self._clock()
            with contextlib.suppress(ApiError):  # then it is kept for longer
                await self._store.keep(durable_store.served(request.id, request.served))

    async def look(self) -> None:
        """Note which sessions have become silent, and which are so no longer; a gateway that starts knows it."""
        self.heartbeats.look(self.sessions)
        silent = {session for session in self.sessions if self.heartbeats.is_silent(session)}
        changes = [durable_store.fact("silent", session, b"") for session in silent - self._written_silent]
        changes += [durable_store.no_fact("silent", session) for session in self._written_silent - silent]
        if changes:
            await self._store.keep(*changes)
            self._written_silent = silent

    async def sweep(self, session_seconds: float) -> None:
        """End sessions without a heartbeat for `session_seconds`, and drop records that nobody needs any more."""
        now, why = self._clock(), f"no heartbeat for {session_seconds:.0f} s"
        for session in list(self.sessions.values()):
            if self.heartbeats.seconds_silent(session.id) > session_seconds:
                if not session.ended:
                    await self.end_session(session, why, lapsed=True)
                self.on_lapsed(session.id, why)
        await drop_requests(self._store, self.requests, self.models, now)
        for id in await drop_sessions(self._store, self.sessions, self.models, self.catalog, now):
            self.heartbeats.forget(id)
        for live in await drop_models(self._store, self.models, self.sessions, self.catalog):
            self.schedule.discard(live)
        await self.catalog.remove_expired()

    def _is_read(self, folder: str) -> bool:
        """Whether a trainer may yet be asked to read a folder."""
        return any(
            request.reads == folder and request.open and request.failure is None for request in self.requests.values()
        )

    # The store

    async def _note(self, session: Session) -> None:
        await self._store.keep(durable_store.fact("session", session.id, encode(session)))
        self.sessions[session.id] = session


def _model_fact(fact: Model) -> Statement:
    return durable_store.fact("model", fact.id, encode(fact))


def _failed(error: str, category: Any) -> Failed:
    """A failure that is short enough to be kept in memory."""
    return Failed(error[: FAILURE_BYTES // 8], category)
