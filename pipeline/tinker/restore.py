"""What the front knows when it starts.

Owns how sessions, models and their requests are read back from the store. Promises that whatever was answered is there
again, and that a trainer is asked for what has no result yet. Must not know how they change:
`pipeline.tinker.service_state`.
"""

import msgspec

from pipeline.tinker.durable_store import Store, StoredRequest
from pipeline.tinker.entities import Model, Session
from pipeline.tinker.model_requests import GONE, ModelEntry, Request, bodies, results
from pipeline.tinker.request_queue import ModelQueue


def restore_entries(kept: Store, now: float) -> tuple[dict[str, Session], dict[str, ModelEntry], dict[str, Request]]:
    """All sessions, models and requests by their ids; `now` in seconds since the epoch."""
    sessions = {id: msgspec.msgpack.decode(body, type=Session) for id, body in kept.facts("session")}
    models = {id: _model(msgspec.msgpack.decode(body, type=Model), sessions) for id, body in kept.facts("model")}
    for id, body in kept.facts("settled"):
        models[id].committed_cursor = msgspec.msgpack.decode(body, type=int)
    requests = {}
    for each in kept.requests():
        if each.model in models:  # else it is a sample
            live = models[each.model]
            live.requested = max(live.requested, each.served)
            requests[each.id] = live.requests[each.seq] = _request(live, each, kept.body(each.id), now)
    for live in models.values():
        answered = [seq for seq, request in live.requests.items() if request.answered]
        live.queue = ModelQueue(max(answered, default=-1) + 1)
        live.queue.restart(0, sorted(live.requests))
    return sessions, models, requests


def _model(fact: Model, sessions: dict[str, Session]) -> ModelEntry:
    session = sessions.get(fact.session)
    return ModelEntry(fact, ModelQueue(), unloading=fact.unloading or session is None or bool(session.ended))


def _request(live: ModelEntry, kept: StoredRequest, body: bytes | None, now: float) -> Request:
    request = Request(kept.id, kept.model, kept.seq, open=kept.open and not live.fact.gone, served=kept.served)
    if body is not None:
        request.understand(bodies.decode(body))
    request.kept.set()
    if kept.result is not None:
        small = results.decode(kept.result) if kept.result else None
        request.finish(small, now)  # a long one is read when it is asked for: it is no failure
    elif live.fact.gone:
        request.finish(GONE, now)
    return request
