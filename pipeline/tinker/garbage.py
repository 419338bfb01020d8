"""Dropping what nobody needs any more, from memory and from the store.

Owns which requests, sessions and models go together; when each may go is in `pipeline.tinker.retention`. Promises that
the store forgets them before memory does, so that a failure of the store leaves both as they were.
"""

from pipeline.tinker import durable_store, tinker_paths
from pipeline.tinker.checkpoint_catalog import CheckpointCatalog
from pipeline.tinker.durable_store import Store
from pipeline.tinker.entities import Session
from pipeline.tinker.model_requests import ModelEntry, Request
from pipeline.tinker.retention import request_is_over, session_is_over


async def drop_requests(store: Store, requests: dict[str, Request], models: dict[str, ModelEntry], now: float) -> None:
    """Requests whose results no client will fetch and that no trainer does again."""
    gone = {id for id, live in models.items() if live.fact.gone}
    old = [request for request in requests.values() if request_is_over(request, now, gone=request.model in gone)]
    if old:
        await store.keep(*durable_store.no_requests([request.id for request in old]))
    for request in old:
        requests.pop(request.id, None)
        models[request.model].requests.pop(request.seq, None)


async def drop_sessions(
    store: Store, sessions: dict[str, Session], models: dict[str, ModelEntry], catalog: CheckpointCatalog, now: float
) -> set[str]:
    """Sessions that ended a while ago, with their sampling clients, once no trainer has a model of them; their ids."""
    busy = {live.fact.session for live in models.values() if not live.fact.gone}
    old = {session.id for session in sessions.values() if session_is_over(session, now) and session.id not in busy}
    if old:
        await store.keep(*(durable_store.no_fact("session", id) for id in old))
        await catalog.drop_samplers(old)
    for id in old:
        sessions.pop(id, None)
    return old


async def drop_models(
    store: Store, models: dict[str, ModelEntry], sessions: dict[str, Session], catalog: CheckpointCatalog
) -> list[ModelEntry]:
    """Models of sessions that were dropped; one that has checkpoints stays as long as they do, to list them."""
    named = {tinker_paths.stored_path(path).model for path in catalog.checkpoints}
    old = [
        id
        for id, live in models.items()
        if live.fact.gone and not live.requests and live.fact.session not in sessions and id not in named
    ]
    if old:
        await store.keep(*(durable_store.no_fact(kind, id) for id in old for kind in ("model", "committed_cursor")))
    return [models.pop(id) for id in old]
