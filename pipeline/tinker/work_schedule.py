"""What the trainer works on next.

Owns which model's request is handed out, and the bodies that no trainer got yet. Promises that sessions take turns;
that a silent session's requests wait until its next heartbeat; and that a trainer is asked to forget models
that are gone. Must not know how requests come and what their results change: `pipeline.tinker.service_state`.

    schedule.remember(request, body); schedule.wake(live)
    schedule.next_work()        # that request, encoded; None while there is nothing
"""

import asyncio
import time

from pipeline.tinker.byte_lru import ByteLru
from pipeline.tinker.durable_store import Store
from pipeline.tinker.heartbeats import Heartbeats
from pipeline.tinker.model_requests import ModelEntry, Request, bodies, unload_work
from pipeline.tinker.tinker_records import Pass, Work, encode
from pipeline.tinker.turns import RoundRobin

RECENT_BYTES = 1 << 26
"""Bytes of bodies that no trainer got yet, and of results that no client got, in memory too: the limit of each."""


class WorkSchedule:
    """The order of work over all models, which it only reads; `models` is the registry's own dictionary."""

    def __init__(self, store: Store, models: dict[str, ModelEntry], heartbeats: Heartbeats) -> None:
        self._store, self._models, self._heartbeats = store, models, heartbeats
        self.news = asyncio.Event()
        """Set when a trainer may have something to do."""
        heartbeats.subscribers.append(lambda session, is_silent: self.news.set())
        self._turns = RoundRobin()
        self.unknown_models: list[str] = []
        """Models that the trainer has, and that are gone here."""
        self._bodies = ByteLru(RECENT_BYTES)

    def remember(self, request: Request, body: bytes) -> None:
        """Have a body in memory that is in the store, too."""
        self._bodies.put(request.id, body)

    def wake(self, live: ModelEntry) -> None:
        """Have a model be looked at for work."""
        self._turns.add(live.fact.session, live.fact.id)
        self.news.set()

    def discard(self, live: ModelEntry) -> None:
        """Forget a model that was dropped."""
        self._turns.discard(live.fact.session, live.fact.id)

    def next_work(self) -> bytes | None:
        """What a trainer is to do next, encoded; None while there is nothing. Sessions take turns, and their models; a
        step that waits belongs to the turn of the pass before it, since gradients between two turns have to be put
        away. A silent session's requests wait until its next heartbeat."""
        if self.unknown_models:
            return encode(unload_work(self.unknown_models.pop()))
        for id in self._turns.order():
            live = self._models[id]
            session = live.fact.session
            if self._heartbeats.is_silent(session) and not live.unloading:
                continue
            work = self._next_of(live)
            if work is not None:
                stays = isinstance(work.body, Pass) and _step_waits(live)
                self._turns.took(session, id, stays=stays)
                return encode(work)
            if live.lost or live.fact.gone or live.queue.idle:
                self._turns.discard(session, id)
        return None

    def _next_of(self, live: ModelEntry) -> Work | None:
        if live.fact.gone:
            return None
        if live.lost:
            return unload_work(live.fact.id) if live.unloading else None
        while (seq := live.queue.next(time.monotonic())) is not None:
            request = live.requests[seq]
            if not request.needs_replay:
                continue
            body = self._bodies.get(request.id) or self._store.body(request.id)
            self._bodies.drop(request.id)
            if body is None:
                live.lost = f"model {live.fact.id} is lost: request {seq} is not kept any more"
                return self._next_of(live)
            request.deliveries, request.handed = request.deliveries + 1, time.monotonic()
            return Work(request.id, live.fact.id, seq, bodies.decode(body), bool(request.answered))
        if live.unloading and live.queue.idle:
            return unload_work(live.fact.id)
        return None


def _step_waits(live: ModelEntry) -> bool:
    request = live.requests.get(live.queue.ready) if live.queue.ready is not None else None
    return request is not None and request.steps and request.needs_replay
