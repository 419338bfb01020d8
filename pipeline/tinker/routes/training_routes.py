"""Passes and steps."""

import asyncio

from aiohttp import web

from pipeline.tinker import tinker_wire
from pipeline.tinker.api_keys import Owner
from pipeline.tinker.gateway_settings import Settings
from pipeline.tinker.json_limits import SMALL_BYTES
from pipeline.tinker.routes.body_fields import future, number, step, text
from pipeline.tinker.routes.client_router import Body, Router
from pipeline.tinker.service_state import ModelRegistry


class TrainingRoutes:
    """What changes a model."""

    def __init__(self, settings: Settings, registry: ModelRegistry) -> None:
        self._settings, self._registry = settings, registry

    def add(self, router: Router) -> None:
        self._read = router.read
        router.add("POST", "forward_backward", self._forward_backward)
        router.post("optim_step", self._optim_step)

    async def _forward_backward(self, owner: Owner, request: web.Request) -> web.Response:
        body = await self._read(request)
        if len(body) > SMALL_BYTES:  # what is counted in it takes a while
            model, seq, message = await asyncio.to_thread(tinker_wire.read_pass, body)
        else:
            model, seq, message = tinker_wire.read_pass(body)
        live = self._registry.model(owner, model)
        accepted = await self._registry.accept(
            live, seq, lambda: tinker_wire.pass_of(message, self._settings.max_length)
        )
        return web.json_response(future(accepted))

    async def _optim_step(self, owner: Owner, body: Body) -> Body:
        live = self._registry.model(owner, text(body, "model_id"))
        return future(await self._registry.accept(live, number(body, "seq_id", least=1), lambda: step(body)))
