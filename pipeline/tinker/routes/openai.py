"""OpenAI's API over the models that can be sampled from.

A model's name is a `tinker://` path of `save_weights_for_sampler`, or the base's. A request waits for its turn
among the samples of all sessions. A request ends with its connection: nothing of it is stored, and a client that
hangs up, or stops reading its stream, ends the request on the server, or loses its turn."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any

import msgspec
from aiohttp import web

from pipeline.tinker.api_errors import ApiError, NotFoundError
from pipeline.tinker.api_keys import Owner
from pipeline.tinker.completions import (
    checked_body,
    completion_event,
    completion_json,
    error_body,
    read_part,
    sequences_of,
    wants_usage,
)
from pipeline.tinker.entities import SampledWeights
from pipeline.tinker.forwarding import CHAT, COMPLETION, Forwarder, ForwardingFailed, NoServerError
from pipeline.tinker.gateway_settings import Settings
from pipeline.tinker.routes.client_router import Router
from pipeline.tinker.sample_queue import SampleQueue
from pipeline.tinker.service_state import ModelRegistry
from pipeline.tinker.tinker_paths import stored_path
from pipeline.tinker.usage_meter import usage_of_answer

log = logging.getLogger(__name__)
PREFIXES = ("/v1/", "/oai/api/v1/")
"""The second one stands where the public service has it, below the SDK's base URL."""
MAX_OPEN = 1024
"""Requests of one owner that are worked on at once."""
LOOK_SECONDS = 0.5
"""Between two looks whether a client that waits for a whole answer is still there."""
STALL_SECONDS = 60.0
"""How long a client may read nothing of its stream."""
_TEXT_STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class OpenAiRouter(Router):
    """Errors in OpenAI's form, and when to ask again."""

    def refusal(self, error: ApiError) -> web.Response:
        headers = {}
        if isinstance(error, NoServerError):
            headers["Retry-After"] = "2"
        if isinstance(error, ForwardingFailed):
            headers["X-Should-Retry"] = "false"
        return web.json_response(error_body(str(error), error.status), status=error.status, headers=headers)


class OpenAiRoutes:
    """Chats, completions and the list of models."""

    def __init__(self, settings: Settings, registry: ModelRegistry, sampling: SampleQueue) -> None:
        self._settings, self._registry = settings, registry
        self._forwarder = Forwarder(sampling)
        self._open: dict[str, int] = {}
        """Requests by owner."""

    def add(self, router: Router) -> None:
        self._read = router.read_json
        router.add("POST", "chat/completions", self._chat)
        router.add("POST", "completions", self._complete)
        router.add("GET", "models", self._list)
        router.add("GET", "models/{model:.+}", self._get)

    async def _chat(self, owner: Owner, request: web.Request) -> web.StreamResponse:
        return await self._answer(CHAT, owner, request)

    async def _complete(self, owner: Owner, request: web.Request) -> web.StreamResponse:
        return await self._answer(COMPLETION, owner, request)

    async def _list(self, owner: Owner, request: web.Request) -> web.Response:
        paths = [path for path in self._registry.catalog.checkpoints if self._is_sampled(owner, path)]
        names = [*self._settings.all_bases, *paths] if self._settings.sampling else []
        return web.json_response({"object": "list", "data": [self._described(owner, name) for name in names]})

    async def _get(self, owner: Owner, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        self._weights(owner, name)
        return web.json_response(self._described(owner, name))

    def _described(self, owner: Owner, name: str) -> dict[str, Any]:
        checkpoint = self._registry.catalog.checkpoints.get(name)
        about: dict[str, Any] = {"id": name, "object": "model", "max_model_len": self._settings.max_length}
        if checkpoint is None:
            return about | {"created": 0, "owned_by": "base"}
        return about | {"created": int(checkpoint.created), "owned_by": owner.name, "parent": checkpoint.base}

    def _is_sampled(self, owner: Owner, path: str) -> bool:
        try:
            return bool(self._weights(owner, path).folder)
        except ApiError:
            return False

    def _weights(self, owner: Owner, model: Any) -> SampledWeights:
        """What a model of that name samples from; `NotFoundError` for one that this owner has not."""
        if not self._settings.sampling:
            raise NotFoundError("nothing samples here: this server was started without serve.sampling=true")
        if not isinstance(model, str) or not model.startswith("tinker://"):
            if model not in self._settings.all_bases:
                known = ", ".join(self._settings.all_bases)
                raise NotFoundError(
                    f"model {str(model)[:200]!r}; served: {known}, and tinker:// paths of sampler weights"
                )
            return SampledWeights(base=self._settings.base_key(model))
        checkpoint = self._registry.catalog.checkpoint(owner, model)
        if stored_path(checkpoint.path).kind != "sampler_weights":
            raise ApiError(f"{model} is for training; save_weights_for_sampler makes what can be sampled from")
        return checkpoint.sampled

    async def _answer(self, route: str, owner: Owner, request: web.Request) -> web.StreamResponse:
        body = await self._read(request)
        weights, usage = self._weights(owner, body.get("model")), wants_usage(body)
        checked = checked_body(route, body, self._settings.limits.samples)
        if self._open.get(owner.name, 0) >= MAX_OPEN:
            raise ApiError(f"{owner.name} has {MAX_OPEN} requests open, which is all it may have", 429)
        self._open[owner.name] = self._open.get(owner.name, 0) + 1
        try:
            answer = self._parts(route, weights, checked, body["model"])
            turn = self._forwarder.turn(owner.name, sequences_of(checked), weights)
            async with aclosing(self._counted(owner, turn, answer)) as parts:
                if checked.get("stream"):
                    return await _streamed(request, parts, body["model"], usage=usage)
                part = await _while_connected(request, anext(parts))
                return web.json_response(completion_json(part, body["model"]))
        finally:
            self._open[owner.name] -= 1
            if not self._open[owner.name]:
                del self._open[owner.name]

    async def _counted(
        self, owner: Owner, turn: AbstractAsyncContextManager[None], parts: AsyncGenerator[dict[str, Any], None]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The same parts, from when it is their turn; what they used is counted at the end, also of a stream whose
        client hangs up."""
        async with aclosing(parts), turn:
            usage, started = None, time.monotonic()
            try:
                async for part in parts:
                    usage = part.get("usage") or usage
                    yield part
            finally:
                if usage is not None:
                    self._registry.usage.count(owner.name, usage_of_answer(usage, time.monotonic() - started))

    async def _parts(
        self, route: str, weights: SampledWeights, checked: Mapping[str, Any], model: str
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The parts of an answer, decoded; errors name the model as the client does."""
        try:
            async with aclosing(self._forwarder.parts(route, weights, checked)) as parts:
                async for text in parts:
                    if text != b"[DONE]":
                        yield read_part(text)
        except ApiError as error:
            if weights.folder and type(error) is ApiError:
                raise ApiError(str(error).replace(weights.name, model), error.status) from None
            raise


async def _streamed(
    request: web.Request, parts: AsyncGenerator[dict[str, Any], None], model: str, *, usage: bool
) -> web.StreamResponse:
    """Server-sent events. A failure before the first event is an HTTP status; a later failure is an event."""
    first = await _while_connected(request, anext(parts))
    answer = web.StreamResponse(headers=_TEXT_STREAM)
    try:
        await answer.prepare(request)
        await _write(answer, completion_event(first, model, usage=usage))
        try:
            async for part in parts:
                await _write(answer, completion_event(part, model, usage=usage))
            await answer.write(b"data: [DONE]\n\n")
        except ApiError as error:
            await _write(answer, error_body(str(error), error.status))
        await answer.write_eof()
    except ConnectionError:
        log.info("a client hung up in the middle of a stream")
    except TimeoutError:
        log.info("a client read nothing of its stream for %g s", STALL_SECONDS)
        if request.transport is not None:
            request.transport.abort()
    return answer


async def _write(answer: web.StreamResponse, event: Mapping[str, Any] | None) -> None:
    """`TimeoutError` if the client does not read: its request has a place at the servers that others wait for."""
    if event is not None:
        async with asyncio.timeout(STALL_SECONDS):
            await answer.write(b"data: " + msgspec.json.encode(event) + b"\n\n")


async def _while_connected(request: web.Request, first: Any) -> dict[str, Any]:
    """The first part of an answer; `ApiError` 499 once its client has hung up, which nobody reads."""
    task = asyncio.ensure_future(first)
    try:
        while not (await asyncio.wait({task}, timeout=LOOK_SECONDS))[0]:
            if request.transport is None or request.transport.is_closing():
                raise ApiError("the client hung up", 499)
        answer: dict[str, Any] = task.result()
        return answer
    except StopAsyncIteration:
        raise NoServerError("the server gave no answer", 502) from None
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
