"""Everything the front knows, and the rules by which it changes.

Owns sessions, models, samplers, checkpoints and requests in memory, each change of which is in the store before anybody
is answered. Promises that a request is accepted once, whatever a client retries; that a result which was given never
changes; that nobody sees what another owner's key made; and that what a trainer lost with its memory is handed out
again, in the same order, until a commit covers it, while the checkpoints that it reads stay. Must not know HTTP,
protobuf or how samples are made.

A commit may turn out to be damaged when it is needed, so requests are kept until the commit after it is durable.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from pipeline.api import names, store
from pipeline.api.errors import ApiError, Full, Missing
from pipeline.api.facts import Checkpoint, Model, Sampler, Session
from pipeline.api.keys import Owner
from pipeline.api.names import WeightsPath
from pipeline.api.order import ModelQueue
from pipeline.api.records import (
    STATEFUL,
    Adapter,
    Body,
    Create,
    Done,
    Failed,
    Load,
    Pass,
    Passed,
    Plain,
    Result,
    Save,
    Saved,
    Stepped,
    Unload,
    Work,
    encode,
)
from pipeline.api.store import Statement, Store

F = TypeVar("F", bound=Session | Model | Checkpoint | Sampler)
UNLOAD_SEQ = 1 << 40
MOST_DELIVERIES = 3
SERVED_SECONDS = 3600.0
"""How long a result is kept after a client got it: it may ask again when its connection broke."""
PASSING_KEPT = 8
"""Checkpoints without a name that each model keeps."""
_KINDS: dict[type[Any], str] = {Session: "session", Model: "model", Checkpoint: "checkpoint", Sampler: "sampler"}
_GONE = Failed("the model was unloaded, or its session has ended", "user")
_bodies = msgspec.msgpack.Decoder(Body)
_results = msgspec.msgpack.Decoder(Result)


@dataclass(eq=False)
class Request:
    """One request to a model: what it was, and what became of it.

    Attributes:
        stateful: whether doing it changes the model.
        open: its body is in the store.
        reads: the folder that doing it reads, if any.
        deliveries: how often a trainer got it and gave no answer.
        served: when a client got the result; 0 until then.
    """

    id: str
    model: str
    seq: int
    stateful: bool = False
    open: bool = True
    reads: str = ""
    result: Result | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    kept: asyncio.Event = field(default_factory=asyncio.Event)
    deliveries: int = 0
    served: float = 0.0

    def finish(self, result: Result) -> None:
        self.result = result
        self.done.set()


@dataclass(eq=False)
class Live:
    """A model's requests, by number."""

    fact: Model
    queue: ModelQueue
    requests: dict[int, Request] = field(default_factory=dict)
    cursors: tuple[int, int] = (-1, -1)
    """What the last two durable commits have behind them."""
    lost: str = ""
    unloading: bool = False
    came_back: bool = False
    """Gone, but in the commit of the trainer that is there."""


class Registry:
    """The front's memory, from the store at its start."""

    def __init__(self, kept: Store, clock: Callable[[], float] = time.time) -> None:
        self._store, self._clock = kept, clock
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, Live] = {}
        self.checkpoints: dict[str, Checkpoint] = {}
        self.samplers: dict[str, Sampler] = {}
        self.requests: dict[str, Request] = {}
        self.heard: dict[str, float] = {}
        self.news = asyncio.Event()
        """Set when a trainer may have something to do."""
        self._turn = 0
        self.on_removed: Callable[[str], None] = lambda folder: None
        self._unnamed: set[str] = set()
        """Folders of checkpoints that are gone; each stays while an open request reads it."""
        self._restore()

    # Facts

    async def open_session(self, owner: Owner) -> Session:
        session = Session(new_session_id(), owner.name, self._clock())
        await self._note(session, session.id)
        return session

    def session(self, owner: Owner, id: str) -> Session:
        """`Missing` for one that there is not, and `ApiError` 410 for one that has ended."""
        session = self.sessions.get(id)
        if session is None or session.owner != owner.name:
            raise Missing(f"no session {id!r}")
        if session.ended:
            raise ApiError(f"session {id} has ended: {session.ended}; make a new ServiceClient", 410)
        return session

    async def end_session(self, session: Session, why: str) -> None:
        """Unload its models; their checkpoints stay."""
        await self._note(msgspec.structs.replace(session, ended=why), session.id)
        for live in self.models.values():
            if live.fact.session == session.id:
                live.unloading = True
        self.news.set()

    def model(self, owner: Owner, id: str) -> Live:
        live = self.models.get(id)
        if live is None or live.fact.owner != owner.name:
            raise Missing(f"no model {id!r}")
        return live

    def checkpoint(self, owner: Owner, path: str) -> Checkpoint:
        found = self.checkpoints.get(str(names.parse_path(path)))
        if found is None or found.owner != owner.name or (found.expires and found.expires < self._clock()):
            raise Missing(f"no checkpoint {path!r}")
        return found

    def sampler(self, owner: Owner, id: str) -> Sampler:
        found = self.samplers.get(id)
        if found is None or found.owner != owner.name:
            raise Missing(f"no sampling session {id!r}")
        return found

    async def add_sampler(self, sampler: Sampler) -> None:
        await self._note(sampler, sampler.id)

    async def set_expiry(self, checkpoint: Checkpoint, expires: float | None) -> None:
        await self._note(msgspec.structs.replace(checkpoint, expires=expires), checkpoint.path)

    async def remove_checkpoint(self, checkpoint: Checkpoint) -> None:
        await self._store.keep(store.no_fact("checkpoint", checkpoint.path), _unnamed(checkpoint.folder))
        self.checkpoints.pop(checkpoint.path, None)
        self._unnamed.add(checkpoint.folder)
        await self._remove_folders()

    def stored_bytes(self, owner: str) -> int:
        return sum(each.size for each in self.checkpoints.values() if each.owner == owner)

    # Requests

    async def make_model(self, owner: Owner, session: str, number: int, base: str, body: Create | Load) -> Request:
        """The first request of a model, which makes it; a retry finds it made."""
        model = names.model_id(self.session(owner, session).id, number)
        if model not in self.models:
            own = sum(1 for live in self.models.values() if live.fact.owner == owner.name and not live.fact.gone)
            if owner.models and own >= owner.models:
                raise ApiError(f"{owner.name} has {own} models, which is all it may have; end a session of it", 403)
            fact = Model(model, session, owner.name, base, body.adapter, self._clock())
            self.models[model] = Live(fact, ModelQueue())
            return await self._accept(self.models[model], 0, body, _fact(fact, model))
        return await self._accept(self.models[model], 0, body)

    async def accept(self, live: Live, seq: int, make: Callable[[], Body]) -> Request:
        """A further request of a model. What `make` refuses fails this request alone: its number is used."""
        self.session(Owner(live.fact.owner), live.fact.session)
        if live.lost:
            raise ApiError(live.lost, 410)
        known = await self._known(live, seq)
        if known is not None:
            return known
        if live.unloading or live.fact.gone:
            raise ApiError(f"model {live.fact.id} was unloaded; make a new one", 410)
        try:
            body: Body | Failed = make()
        except ApiError as error:
            body = Failed(str(error), "user")
        return await self._accept(live, seq, body)

    async def _accept(self, live: Live, seq: int, body: Body | Failed, *also: Statement) -> Request:
        known = await self._known(live, seq)
        if known is not None:
            return known
        request = Request(names.request_id(live.fact.id, seq), live.fact.id, seq)
        live.requests[seq] = self.requests[request.id] = request
        if isinstance(body, Failed):
            written, failure = encode(Create(Adapter(0))), body
        else:
            written, failure = encode(body), None
            request.stateful, request.reads = changes_model(body), _reads(body)
            if not live.queue.takes(seq):
                failure = Failed(f"request {seq} came after later ones were done; submit it again", "user")
        try:
            result = encode(failure) if failure else None
            await self._store.keep(*also, store.request(request.id, live.fact.id, seq, written, result))
        except BaseException:
            live.requests.pop(seq, None)
            self.requests.pop(request.id, None)
            if not live.requests and not live.fact.gone and seq == 0:
                self.models.pop(live.fact.id, None)
            request.kept.set()
            raise
        live.queue.add(seq, time.monotonic())
        if failure:
            request.finish(failure)
        request.kept.set()
        self.news.set()
        return request

    async def _known(self, live: Live, seq: int) -> Request | None:
        """The request of that number, if it was accepted before; `Full` if the store did not take it just now."""
        known = live.requests.get(seq)
        if known is not None:
            await known.kept.wait()
            if live.requests.get(seq) is not known:
                raise Full("the store took nothing just now; ask again")
        return known

    def next_work(self) -> bytes | None:
        """What a trainer is to do next, encoded; None while there is nothing. Models take turns."""
        models = list(self.models.values())
        for offset in range(len(models)):
            index = (self._turn + offset) % len(models)
            work = self._next_of(models[index])
            if work is not None:
                self._turn = index + 1
                return encode(work)
        return None

    def _next_of(self, live: Live) -> Work | None:
        if live.came_back:
            live.came_back = False
            return _unload(live)
        if live.lost or live.fact.gone:
            return None
        while (seq := live.queue.next(time.monotonic())) is not None:
            request = live.requests[seq]
            if isinstance(request.result, Failed) or (request.result is not None and not request.stateful):
                continue
            body = self._store.body(request.id)
            if body is None:
                live.lost = (
                    f"model {live.fact.id} is lost: the trainer came back with an older commit than is kept here"
                )
                return None
            request.deliveries += 1
            return Work(request.id, live.fact.id, seq, _bodies.decode(body), request.result is not None)
        if live.unloading and live.queue.idle:
            return _unload(live)
        return None

    async def finish(self, done: Done) -> None:
        """Keep the result of a request, unless it has one; then its client hears of it."""
        model, _, seq = done.request.rpartition(":")
        if seq == str(UNLOAD_SEQ):
            await self._unloaded(model)
            return
        request = self.requests.get(done.request)
        if request is None or request.result is not None:
            return
        result, changes, after = self._outcome(request, done.result)
        await self._store.keep(*changes, store.result(request.id, encode(result)))
        after()
        request.finish(result)
        if changes:
            for old in self._surplus(request.model):
                await self.remove_checkpoint(old)
            await self._remove_folders()

    async def attach(self, cursors: dict[str, int]) -> None:
        """A trainer came, whose models have these requests behind them: what they lack is handed out again."""
        for live in list(self.models.values()):
            live.came_back = live.fact.gone and live.fact.id in cursors
            if live.fact.gone:
                continue
            cursor = cursors.get(live.fact.id, -1)
            later = [seq for seq in sorted(live.requests) if seq > cursor]
            live.queue.restart(cursor + 1, later)
            live.lost = ""
            for seq in later:
                await self._give_up_poison(live.requests[seq])
        self.news.set()

    async def _give_up_poison(self, request: Request) -> None:
        """A request that several trainers took and none survived is failed, lest it end all others too."""
        if request.result is None and request.deliveries >= MOST_DELIVERIES:
            error = f"the trainer ended {request.deliveries} times while it worked on this request"
            await self.finish(Done(request.id, Failed(error, "server")))

    async def committed(self, cursors: dict[str, int]) -> None:
        """A commit with these cursors is durable: drop what only earlier ones needed."""
        changes: list[Statement] = []
        for id, cursor in cursors.items():
            live = self.models.get(id)
            if live is None or cursor <= live.cursors[1]:
                continue
            live.cursors = (live.cursors[1], cursor)
            if live.cursors[0] >= 0:
                changes.append(store.settled(id, live.cursors[0]))
                for seq, request in live.requests.items():
                    request.open = request.open and (seq > live.cursors[0] or request.result is None)
        if changes:
            await self._store.keep(*changes)

    async def note_served(self, request: Request) -> None:
        if not request.served:
            request.served = self._clock()
            with contextlib.suppress(ApiError):  # then it is kept for longer
                await self._store.keep(store.served(request.id, request.served))

    async def sweep(self, silent_seconds: float) -> None:
        """End sessions that nobody was heard of for so long, and drop what nobody needs any more."""
        now = self._clock()
        for session in list(self.sessions.values()):
            if not session.ended and now - self.heard.setdefault(session.id, now) > silent_seconds:
                await self.end_session(session, f"no heartbeat for {silent_seconds:.0f} s")
        old = [each for each in self.requests.values() if _is_over(each) and now - each.served > SERVED_SECONDS]
        if old:
            await self._store.keep(*store.no_requests([each.id for each in old]))
        for request in old:
            self.requests.pop(request.id, None)
            self.models[request.model].requests.pop(request.seq, None)
        for checkpoint in list(self.checkpoints.values()):
            if checkpoint.expires is not None and checkpoint.expires < now:
                await self.remove_checkpoint(checkpoint)
        await self._remove_folders()

    # Inside

    def _is_read(self, folder: str) -> bool:
        """Whether a trainer may yet be asked to read a folder."""
        return any(
            each.reads == folder and each.open and not isinstance(each.result, Failed)
            for each in self.requests.values()
        )

    async def _remove_folders(self) -> None:
        for folder in [each for each in self._unnamed if not self._is_read(each)]:
            self.on_removed(folder)
            with contextlib.suppress(ApiError):  # then it is removed again
                await self._store.keep(store.no_fact("unnamed", folder))
                self._unnamed.discard(folder)

    def _outcome(self, request: Request, result: Result) -> tuple[Result, list[Statement], Callable[[], None]]:
        """The result as its client gets it, and what it changes: a checkpoint that was saved, and its sampler."""
        body = self._store.body(request.id) if isinstance(result, Saved) else None
        saved = None if body is None else _bodies.decode(body)
        if not isinstance(result, Saved) or not isinstance(saved, Save):
            return result, [], lambda: None
        model = self.models[request.model].fact
        order = msgspec.json.decode(saved.note, type=SaveNote)
        checkpoint = Checkpoint(
            path=order.path,
            owner=model.owner,
            base=model.base,
            adapter=model.adapter,
            folder=saved.folder,
            size=result.size,
            created=self._clock(),
            expires=None if order.ttl is None else self._clock() + order.ttl,
            metadata=order.metadata,
            passing=bool(order.sampler),
        )
        replaced = self.checkpoints.get(order.path)
        changes = [_fact(checkpoint, checkpoint.path)]
        sampler = Sampler(order.sampler, model.owner, model.base, order.path) if order.sampler else None
        if sampler:
            changes.append(_fact(sampler, sampler.id))

        dropped = replaced.folder if replaced is not None and replaced.folder != checkpoint.folder else ""
        if dropped:
            changes.append(_unnamed(dropped))

        def after() -> None:
            self.checkpoints[checkpoint.path] = checkpoint
            if sampler:
                self.samplers[sampler.id] = sampler
            if dropped:
                self._unnamed.add(dropped)

        return Saved(result.size, order.path, order.sampler), changes, after

    def _surplus(self, model: str) -> list[Checkpoint]:
        """Checkpoints without a name that newer ones of the model have replaced."""
        own = [
            each for each in self.checkpoints.values() if each.passing and names.parse_path(each.path).model == model
        ]
        return sorted(own, key=lambda each: each.created)[:-PASSING_KEPT]

    async def _unloaded(self, model: str) -> None:
        live = self.models.get(model)
        if live is None or live.fact.gone:
            return
        fact = msgspec.structs.replace(live.fact, gone=True)
        await self._store.keep(_fact(fact, fact.id))
        live.fact = fact
        for request in live.requests.values():
            request.open = False
            if request.result is None:
                request.finish(_GONE)

    async def _note(self, fact: Session | Model | Checkpoint | Sampler, key: str) -> None:
        await self._store.keep(_fact(fact, key))
        self._table(type(fact))[key] = fact

    def _table(self, kind: type[Any]) -> dict[str, Any]:
        tables: dict[type[Any], dict[str, Any]] = {
            Session: self.sessions,
            Checkpoint: self.checkpoints,
            Sampler: self.samplers,
        }
        return tables[kind]

    def _restore(self) -> None:
        for kind in (Session, Checkpoint, Sampler):
            self._table(kind).update(self._facts(kind))
        self._unnamed.update(folder for folder, _ in self._store.facts("unnamed"))
        for id, fact in self._facts(Model):
            ended = self.sessions[fact.session].ended if fact.session in self.sessions else "unknown"
            self.models[id] = Live(fact, ModelQueue(), unloading=bool(ended))
        for kept in self._store.requests():
            live = self.models.get(kept.model)
            if live is None:
                continue  # a sample
            request = Request(kept.id, kept.model, kept.seq, open=kept.body is not None, served=kept.served)
            body = self._store.body(kept.id)
            if body is not None:
                decoded = _bodies.decode(body)
                request.stateful, request.reads = changes_model(decoded), _reads(decoded)
            request.kept.set()
            if kept.result is not None:
                request.finish(_results.decode(kept.result))
            elif live.fact.gone:
                request.finish(_GONE)
            request.open = request.open and not live.fact.gone
            live.requests[kept.seq] = self.requests[kept.id] = request
        for live in self.models.values():
            answered = [seq for seq, each in live.requests.items() if each.result is not None]
            live.queue = ModelQueue(max(answered, default=-1) + 1)
            live.queue.restart(0, sorted(live.requests))

    def _facts(self, kind: type[F]) -> Iterator[tuple[str, F]]:
        for key, body in self._store.facts(_KINDS[kind]):
            yield key, msgspec.msgpack.decode(body, type=kind)


class SaveNote(msgspec.Struct, frozen=True):
    """What the front remembers of a `Save` until it is done: the client's name for it, how long it is kept (seconds),
    and the sampler that it is made for."""

    path: str
    ttl: int | None = None
    metadata: dict[str, str] | None = None
    sampler: str = ""


def save_body(path: WeightsPath, version: int, note: SaveNote) -> Save:
    """The request of a trainer to write a checkpoint."""
    return Save(path.folder(version), path.kind == "sampler_weights", msgspec.json.encode(note).decode())


def _reads(body: Body) -> str:
    return body.folder if isinstance(body, Load) else ""


def _unload(live: Live) -> Work:
    return Work(names.request_id(live.fact.id, UNLOAD_SEQ), live.fact.id, UNLOAD_SEQ, Unload())


def changes_model(body: Body) -> bool:
    return isinstance(body, STATEFUL) or (isinstance(body, Pass) and body.backward)


def new_session_id() -> str:
    import secrets

    return secrets.token_hex(16)


def _fact(fact: Session | Model | Checkpoint | Sampler, key: str) -> Statement:
    return store.fact(_KINDS[type(fact)], key, encode(fact))


def _unnamed(folder: str) -> Statement:
    return store.fact("unnamed", folder, b"")


def _is_over(request: Request) -> bool:
    return request.result is not None and bool(request.served) and not request.open


__all__ = ["Live", "Passed", "Plain", "Registry", "Request", "SaveNote", "Stepped", "save_body"]
