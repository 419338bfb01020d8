"""The gateway's state at its start, read from the store.

Owns the conversion of stored facts and requests to sessions, models and open requests. Promises that every answered
request is present, and that the trainer gets the requests without a result. Must not know how this state changes
(`pipeline.tinker.service_state`).
"""

import msgspec

from pipeline.tinker.durable_store import Store, StoredRequest
from pipeline.tinker.entities import Model, Session
from pipeline.tinker.model_requests import GONE, ModelEntry, Request, bodies, results
from pipeline.tinker.request_queue import ModelQueue


def restore_entries(store: Store, now: float) -> tuple[dict[str, Session], dict[str, ModelEntry], dict[str, Request]]:
    """All sessions, models and requests by their ids; `now` in seconds since the epoch."""
    sessions = {id: msgspec.msgpack.decode(body, type=Session) for id, body in store.facts("session")}
    models = {id: _model(msgspec.msgpack.decode(body, type=Model), sessions) for id, body in store.facts("model")}
    for id, body in store.facts("committed_cursor"):
        models[id].committed_cursor = msgspec.msgpack.decode(body, type=int)
    requests = {}
    for saved in store.requests():
        if saved.model in models:  # else it is a sample
            entry = models[saved.model]
            entry.requested = max(entry.requested, saved.served)
            requests[saved.id] = entry.requests[saved.seq] = _request(entry, saved, store.body(saved.id), now)
    for entry in models.values():
        answered = [seq for seq, request in entry.requests.items() if request.answered]
        entry.queue = ModelQueue(max(answered, default=-1) + 1)
        entry.queue.restart(0, sorted(entry.requests))
    return sessions, models, requests


def _model(fact: Model, sessions: dict[str, Session]) -> ModelEntry:
    session = sessions.get(fact.session)
    return ModelEntry(fact, ModelQueue(), unloading=fact.unloading or session is None or bool(session.ended))


def _request(entry: ModelEntry, saved: StoredRequest, body: bytes | None, now: float) -> Request:
    request = Request(saved.id, saved.model, saved.seq, open=saved.open and not entry.fact.gone, served=saved.served)
    if body is not None:
        request.understand(bodies.decode(body))
    request.stored.set()
    if saved.result is not None:
        small = results.decode(saved.result) if saved.result else None
        request.finish(small, now)  # a long one is read when it is asked for: it is no failure
    elif entry.fact.gone:
        request.finish(GONE, now)
    return request
