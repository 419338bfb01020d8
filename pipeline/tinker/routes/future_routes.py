"""What became of a request.

A client that polls is held for `HOLD_SECONDS` at most, less than the SDK's own time-out. While no trainer is there,
the client receives the status of a pause."""

import asyncio
import contextlib

from aiohttp import web

from pipeline.tinker import tinker_wire
from pipeline.tinker.api_errors import NotFoundError
from pipeline.tinker.api_keys import Owner
from pipeline.tinker.model_requests import ModelEntry
from pipeline.tinker.routes.body_fields import text
from pipeline.tinker.routes.client_router import Body, Router
from pipeline.tinker.sample_queue import SampleQueue
from pipeline.tinker.service_state import ModelRegistry
from pipeline.tinker.tinker_paths import session_of, unload_id
from pipeline.tinker.tinker_records import Acknowledged, Failed, PassResult, Result, SaveResult, StepResult

HOLD_SECONDS = 25.0
PROTOBUF = "application/x-protobuf"


class FutureRoutes:
    """Polling, and giving up samples."""

    def __init__(self, registry: ModelRegistry, sampling: SampleQueue) -> None:
        self._registry, self._sampling = registry, sampling
        self.attached = False
        """Whether a trainer is there."""

    def add(self, router: Router) -> None:
        self._read_json = router.read_json
        router.add("POST", "retrieve_future", self._retrieve)
        router.post("cancel_future", self._cancel)

    async def _retrieve(self, owner: Owner, request: web.Request) -> web.Response:
        id = text(await self._read_json(request), "request_id")
        if self._sampling.owner_of(id) == owner.name:
            self._registry.heartbeats.beat(session_of(id))
            return await self._retrieve_sample(id)
        model = id.removesuffix(unload_id(""))
        if model != id:
            return await self._retrieve_unload(owner, model)
        pending = self._registry.requests.get(id)
        entry = self._registry.models.get(pending.model) if pending else None
        if pending is None or entry is None or entry.fact.owner != owner.name:
            raise NotFoundError(f"no request {id!r}, or its result was fetched long ago")
        self._registry.heartbeats.beat(entry.fact.session)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(pending.done.wait(), 0 if entry.lost else HOLD_SECONDS)
        result = self._registry.result(pending)
        if result is None:
            return _failure(Failed(entry.lost, "server")) if entry.lost else self._pending()
        await self._registry.note_served(pending)
        return _answer(entry, result)

    async def _retrieve_unload(self, owner: Owner, model: str) -> web.Response:
        entry = self._registry.model(owner, model)
        if not entry.unloading and not entry.fact.gone:
            raise NotFoundError(f"nobody asked to unload model {model!r}")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(entry.unloaded.wait(), HOLD_SECONDS)
            return web.json_response({"type": "unload_model", "model_id": model})
        return self._pending()

    async def _retrieve_sample(self, id: str) -> web.Response:
        with contextlib.suppress(TimeoutError):
            outcome = await asyncio.wait_for(self._sampling.result(id), HOLD_SECONDS)
            if isinstance(outcome, Failed):
                return _failure(outcome)
            return web.Response(body=outcome, content_type=PROTOBUF)
        return self._pending(servers=not self._sampling.waits_for_servers)

    def _pending(self, servers: bool = True) -> web.Response:
        if self.attached and servers:
            return web.json_response({"type": "try_again", "queue_state": "active"}, status=408)
        reason = "the trainer is not up" if not self.attached else "the servers are not up"
        state = {"queue_state": "paused_capacity", "queue_state_reason": f"{reason}; requests are kept until it is"}
        return web.json_response({"type": "try_again"} | state, status=408)

    async def _cancel(self, owner: Owner, body: Body) -> Body:
        """Give up a sample; what trains is done in any case, since later requests build on it."""
        id = text(body, "request_id")
        if self._sampling.owner_of(id) == owner.name:
            self._sampling.cancel(id)
        return {}


def _answer(entry: ModelEntry, result: Result) -> web.Response:
    if isinstance(result, Failed):
        return _failure(result)
    if isinstance(result, PassResult):
        return web.Response(body=tinker_wire.pass_message(result), content_type=PROTOBUF)
    if isinstance(result, StepResult):
        return web.json_response({"type": "optim_step", "metrics": result.metrics})
    if isinstance(result, SaveResult):
        return web.json_response(
            {"sampling_session_id": result.sampler, "path": None} if result.sampler else {"path": result.path}
        )
    assert isinstance(result, Acknowledged)
    return web.json_response({"model_id": entry.fact.id})


def _failure(failed: Failed) -> web.Response:
    return web.json_response({"error": failed.error, "category": failed.category})
